"""The command line: serve the mock, run a command against it, check a client, list scenarios."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import io
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any, NoReturn

from mock_server.check import (
    Judged,
    NotStarted,
    as_json,
    check,
    chosen,
    command_client,
    counts,
    explained,
    reference,
    row,
    without_services,
)
from mock_server.contract import CONTRACT
from mock_server.scenarios import SCENARIOS, TABLE, Scenario
from mock_server.server import MockServer, printable

DESCRIPTION = "A local mock of an OpenAI-compatible service, for testing clients. It has no model."


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    options = parser().parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a client may print any character
    if options.action == "scenarios":
        print(listing(), flush=True)
        return 0
    if options.action == "run":
        return run(options)
    if options.action == "check":
        return check_command(options)
    return serve(options.port, options.shell)


def parser() -> argparse.ArgumentParser:
    """The options of all actions."""
    top = argparse.ArgumentParser(prog="python -m mock_server", description=DESCRIPTION)
    port_help = "port on 127.0.0.1 (default: {})"
    top.add_argument("--port", type=int, default=8765, help=port_help.format(8765))
    top.add_argument(
        "--shell",
        choices=("bash", "powershell"),
        default="bash",
        help="the shell for which the settings are printed",
    )
    actions = top.add_subparsers(
        dest="action", metavar="ACTION", help="without one: serve until Ctrl-C"
    )
    command = actions.add_parser(
        "run",
        help="start a mock and run a command against it",
        description="Start a mock, run a command with the five API_* variables set for it, and "
        "exit with the command's exit status. Your own API_*, OPENAI_* and proxy variables are "
        "hidden from the command; to set one, put env NAME=VALUE before it.",
    )
    command.add_argument("--port", type=int, default=0, help=port_help.format("a free one"))
    command.add_argument(
        "--scenario", type=scenario_name, default="plain", metavar="NAME", help="default: plain"
    )
    command.add_argument("--no-rerank", action="store_true", help="set no rerank model")
    command.add_argument("command", nargs="+", metavar="COMMAND", help="put -- before it")
    judged = actions.add_parser(
        "check",
        help="judge whether a client keeps the contract",
        description="Run a command once in each scenario, and judge what it sends, what it prints "
        "and how it ends. The plain scenarios always run. The table shows the scenarios that did "
        "not pass. Exit status: 0 if none failed, else 1.",
        epilog=f"THE CONTRACT FOR CLIENTS\n\n{CONTRACT}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    groups = list(dict.fromkeys(scenario.group for scenario in TABLE))
    several: dict[str, Any] = {"action": "append", "default": []}
    for option, what, more in (
        ("--scenario", "only this scenario", {"type": scenario_name, "metavar": "NAME"}),
        ("--group", "only this group", {"choices": groups}),
        ("--without", "all but this group", {"choices": groups}),
    ):
        judged.add_argument(option, help=f"{what} (repeatable)", **several, **more)
    judged.add_argument(
        "--jobs", type=jobs, default=1, metavar="N", help="runs at the same time (default: 1)"
    )
    judged.add_argument("--verbose", action="store_true", help="show the scenarios that passed too")
    judged.add_argument("--json", action="store_true", help="one JSON document on stdout")
    judged.add_argument("command", nargs="+", metavar="COMMAND", help="put -- before it")
    actions.add_parser(
        "scenarios", help="list the scenarios, and what a correct client does in each"
    )
    return top


def scenario_name(text: str) -> str:
    """The name of a scenario, for argparse."""
    if text not in SCENARIOS:
        near = difflib.get_close_matches(text, SCENARIOS, n=3, cutoff=0.5)
        hint = f"similar names: {', '.join(near)}; " if near else ""
        reason = f"there is no such scenario; {hint}`python -m mock_server scenarios` lists them"
        raise argparse.ArgumentTypeError(reason)
    return text


def jobs(text: str) -> int:
    """A number of jobs, for argparse."""
    if not text.isdecimal() or not 1 <= int(text) <= 64:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to 64")
    return int(text)


def tell(line: str) -> None:
    """Print a line of the server on stderr. A full or closed stderr is ignored."""
    with contextlib.suppress(OSError):
        if sys.stderr:
            sys.stderr.write(f"mock: {printable(line)}\n")  # one write: other threads write too
            sys.stderr.flush()


def serve(port: int, shell: str) -> int:
    """Print the settings for a client, and serve until Ctrl-C."""
    server = bound(port)
    if server is None:
        return 2
    form = '$env:{} = "{}"' if shell == "powershell" else "export {}={}"
    for name, value in server.environment().items():
        print(form.format(name, value), flush=True)
    with server, contextlib.suppress(KeyboardInterrupt):
        threading.Event().wait()
    return 0


def bound(port: int) -> MockServer | None:
    """A server on this port, or None, with a line on stderr, if the port cannot be used."""
    try:
        return MockServer(port, tell)
    except (OSError, OverflowError) as error:
        reason = f"port {port} cannot be used: {error}; choose another with --port"
        print(f"mock_server: {reason}", file=sys.stderr)
        return None


def run(options: argparse.Namespace) -> int:
    """Run a command against a mock, and return the command's exit status."""
    unstarted = bound(options.port)
    if unstarted is None:
        return 2
    with unstarted as server:
        rerank = SCENARIOS[options.scenario].rerank and not options.no_rerank
        settings = server.environment(options.scenario, rerank)
        environ = {**without_services(os.environ), **settings}
        try:
            process = subprocess.Popen(list(options.command), env=environ)
        except OSError as error:
            return not_started(options.command, error.strerror)
        while True:
            try:
                status = process.wait()
                break
            except KeyboardInterrupt:  # the command gets the signal too, and may go on
                continue
            except SystemExit:  # from another signal, which the command does not get
                process.terminate()
                raise
    return status if status >= 0 else 128 - status


def not_started(command: Sequence[str], reason: object) -> int:
    """Report a command that cannot be started."""
    print(f"mock_server: cannot run {printable(command[0])}: {reason}", file=sys.stderr)
    return 127


def check_command(options: argparse.Namespace) -> int:
    """Judge a client and print the report. The exit status is 1 if it failed in a scenario."""
    scenarios = chosen(options.scenario, options.group, options.without)
    columns = widths(scenarios)
    results: list[Judged] = []
    shown: list[Judged] = []
    stop = threading.Event()
    try:
        for judged in check(command_client(options.command, stop), scenarios, options.jobs):
            results.append(judged)
            if options.verbose or judged.verdict != "passed":
                shown.append(judged)
                if not options.json:
                    print("\n".join(table(judged, columns, len(shown) == 1)), flush=True)
    except NotStarted as error:
        return not_started(options.command, error)
    finally:
        stop.set()  # after Ctrl-C: the commands that still run are killed
    if options.json:
        document = as_json(options.command, results)
        print(json.dumps(document, ensure_ascii=True, indent=2), flush=True)
    else:
        blank = [""] if shown else []
        print("\n".join([*blank, *conclusion(results, options)]), flush=True)
    return 1 if any(each.verdict == "failed" for each in results) else 0


def table(judged: Judged, columns: tuple[int, int], first: bool) -> list[str]:
    """The lines of the table for a scenario, with the head of the table if it is the first."""
    lines = [row(judged, columns)]
    if first:
        name, does = columns
        lines.insert(0, f"{'SCENARIO':<{name}}  {'A CORRECT CLIENT':<{does}}  VERDICT")
    if judged.verdict == "failed" and judged.scenario == reference(judged.scenario):
        lines.insert(0, f"The client fails in the scenario {judged.scenario.name}: fix this first.")
    return lines


def conclusion(results: Sequence[Judged], options: argparse.Namespace) -> list[str]:
    """The lines after the table: the findings, how to run one scenario again, and the counts."""
    lines = [*explained(results), ""] if any(each.findings for each in results) else []
    failed = [each.scenario.name for each in results if each.verdict == "failed"]
    if failed:
        again = f"check --scenario {failed[0]} -- {shlex.join(options.command)}"
        lines.append(f"To see one alone: python -m mock_server {again}")
    total = ", ".join(f"{count} {name}" for name, count in counts(results).items())
    if results and not results[0].requests:
        total += " (the first run sent no request, so no other was started)"
    elif options.without:
        total += f" (without {', '.join(options.without)})"
    return [*lines, total]


def widths(scenarios: Sequence[Scenario]) -> tuple[int, int]:
    """The widths of the columns for the names and for what a correct client does."""
    names = [len(scenario.name) for scenario in scenarios]
    ends = [len(scenario.does) for scenario in scenarios]
    return max([8, *names]), max([16, *ends])


def listing() -> str:
    """The table of scenarios as text."""
    name, does = widths(TABLE)
    lines = [f"{'SCENARIO':<{name}}  {'A CORRECT CLIENT':<{does}}  SERVES"]
    lines += [f"{each.name:<{name}}  {each.does:<{does}}  {each.serves}" for each in TABLE]
    return "\n".join(lines)


def end(number: int, frame: object) -> NoReturn:
    sys.exit(128 + number)


if __name__ == "__main__":
    for name in ("SIGTERM", "SIGHUP"):  # so that a command which was started is ended too
        number = getattr(signal, name, None)
        if number and signal.getsignal(number) is signal.SIG_DFL:  # not under nohup
            signal.signal(number, end)
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # a second signal, while the first is handled
        sys.exit(130)
    except OSError as error:  # stdout is full, or its reader has closed it
        if not isinstance(error, BrokenPipeError):
            print(f"mock_server: {error.strerror}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
