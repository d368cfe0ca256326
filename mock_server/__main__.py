"""The command line: serve the mock, run a command against it, check one, or list the scenarios."""

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
from typing import NoReturn

from mock_server.check import (
    NotStarted,
    as_json,
    check,
    command_client,
    explained,
    row,
    summary,
    without_services,
)
from mock_server.contract import CONTRACT
from mock_server.scenarios import SCENARIOS, TABLE, Scenario
from mock_server.server import MockServer, printable

DESCRIPTION = "A local mock of an OpenAI-compatible service: it tests requests, not answers."


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: of the command that was run; 2 for a usage error."""
    options = parser().parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a client may print any character
    if options.action == "scenarios":
        print(listing(), flush=True)
        return 0
    if options.action == "run":
        return run(options.command, options.scenario, not options.no_rerank)
    if options.action == "check":
        return check_command(
            options.command, chosen(options.scenario, options.group), options.jobs, options.json
        )
    return serve(options.port, options.shell)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m mock_server", description=DESCRIPTION)
    top.add_argument("--port", type=int, default=8765, help="port on 127.0.0.1 (default: 8765)")
    top.add_argument(
        "--shell",
        choices=("bash", "powershell"),
        default="bash",
        help="how the settings are printed",
    )
    actions = top.add_subparsers(
        dest="action", metavar="ACTION", help="without one: serve until Ctrl-C"
    )
    command = actions.add_parser(
        "run",
        help="run a command against a mock of its own",
        description="Runs a command with the five API_* variables set for a mock on a free port. "
        "It gets none of your API_*, OPENAI_* and proxy variables; to set one, put "
        "env NAME=VALUE before the command.",
    )
    command.add_argument(
        "--scenario", type=scenario_name, default="plain", metavar="NAME", help="default: plain"
    )
    command.add_argument("--no-rerank", action="store_true", help="set no rerank model")
    command.add_argument("command", nargs="+", metavar="COMMAND", help="put -- before it")
    judged = actions.add_parser(
        "check",
        help="judge whether a client keeps the contract",
        description="Runs a command once for every scenario, and judges what it sends, what it "
        "prints and how it ends. Exit status: 0 if nothing failed, 1 if something did.",
        epilog=f"THE CONTRACT FOR CLIENTS\n\n{CONTRACT}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    groups = list(dict.fromkeys(scenario.group for scenario in TABLE))
    judged.add_argument(
        "--scenario", type=scenario_name, action="append", metavar="NAME", help="may be repeated"
    )
    judged.add_argument("--group", choices=groups, action="append", help="may be repeated")
    judged.add_argument(
        "--jobs", type=jobs, default=1, metavar="N", help="runs at the same time (default: 1)"
    )
    judged.add_argument("--json", action="store_true", help="one JSON document on stdout")
    judged.add_argument("command", nargs="+", metavar="COMMAND", help="put -- before it")
    actions.add_parser(
        "scenarios", help="list what the mock can serve, and what a correct client does"
    )
    return top


def scenario_name(text: str) -> str:
    if text not in SCENARIOS:
        near = difflib.get_close_matches(text, SCENARIOS, n=3, cutoff=0.5)
        hint = f"near it: {', '.join(near)}; " if near else ""
        reason = f"no scenario has this name; {hint}`python -m mock_server scenarios` lists them"
        raise argparse.ArgumentTypeError(reason)
    return text


def jobs(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 64:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to 64")
    return int(text)


def tell(line: str) -> None:
    with contextlib.suppress(OSError):  # a stream that is full or closed is no fault of the client
        if sys.stderr:
            sys.stderr.write(f"mock: {printable(line)}\n")  # at once: other threads write too
            sys.stderr.flush()


def serve(port: int, shell: str) -> int:
    """Serves until Ctrl-C, after printing the settings that send a client here."""
    try:
        server = MockServer(port, tell)
    except (OSError, OverflowError) as error:
        print(
            f"mock_server: port {port} cannot be used: {error}; choose another with --port",
            file=sys.stderr,
        )
        return 2
    form = '$env:{} = "{}"' if shell == "powershell" else "export {}={}"
    for name, value in server.environment().items():
        print(form.format(name, value), flush=True)
    with server, contextlib.suppress(KeyboardInterrupt):
        threading.Event().wait()
    return 0


def run(command: Sequence[str], scenario: str, rerank: bool) -> int:
    """The command's exit status, after running it against a mock on a free port."""
    with MockServer(0, tell) as server:
        rerank = rerank and SCENARIOS[scenario].rerank
        environ = {**without_services(os.environ), **server.environment(scenario, rerank)}
        try:
            process = subprocess.Popen(list(command), env=environ)
        except OSError as error:
            return not_started(command, error.strerror)
        while True:
            try:
                status = process.wait()
                break
            except KeyboardInterrupt:  # the command gets the same signal, and decides
                continue
            except SystemExit:  # another signal, which it does not get
                process.terminate()
                raise
    return status if status >= 0 else 128 - status


def not_started(command: Sequence[str], reason: object) -> int:
    print(f"mock_server: cannot run {printable(command[0])}: {reason}", file=sys.stderr)
    return 127


def chosen(names: Sequence[str] | None, groups: Sequence[str] | None) -> list[Scenario]:
    """The scenarios of these names and groups, in the order of the table; all without any."""
    everything = not names and not groups
    return [
        scenario
        for scenario in TABLE
        if everything or scenario.name in (names or ()) or scenario.group in (groups or ())
    ]


def check_command(
    command: Sequence[str], scenarios: Sequence[Scenario], jobs: int, as_data: bool
) -> int:
    """1 if the command failed in a scenario, else 0. The table grows as the runs end."""
    stop = threading.Event()
    wide = widths(scenarios)
    results = []
    if not as_data:
        print(f"{'SCENARIO':<{wide[0]}}  {'A CORRECT CLIENT':<{wide[1]}}  VERDICT", flush=True)
    try:
        for judged in check(command_client(command, stop), scenarios, jobs):
            results.append(judged)
            if not as_data:
                print(row(judged, wide), flush=True)
    except NotStarted as error:
        return not_started(command, error)
    finally:
        stop.set()  # Ctrl-C: whatever still runs is killed
    if as_data:
        print(json.dumps(as_json(command, results), ensure_ascii=True, indent=2), flush=True)
    else:
        lines = ["", *explained(results), ""] if any(each.findings for each in results) else [""]
        failed = [each.scenario for each in results if each.verdict == "failed"]
        if failed:
            again = f"check --scenario {failed[0].name} -- {shlex.join(command)}"
            lines += [f"To see one alone: python -m mock_server {again}"]
        unrun = len(scenarios) - len(results)
        rest = f", {unrun} not run: the first sent no request" if unrun else ""
        print("\n".join([*lines, summary(results) + rest]), flush=True)
    return 1 if any(each.verdict == "failed" for each in results) else 0


def widths(scenarios: Sequence[Scenario]) -> tuple[int, int]:
    """How wide the columns of names, and of what a correct client does, must be."""
    names = [len(scenario.name) for scenario in scenarios]
    ends = [len(scenario.does) for scenario in scenarios]
    return max([8, *names]), max([16, *ends])


def listing() -> str:
    """The table of scenarios, aligned."""
    wide = widths(TABLE)
    lines = [f"{'SCENARIO':<{wide[0]}}  {'A CORRECT CLIENT':<{wide[1]}}  SERVES"]
    lines += [f"{each.name:<{wide[0]}}  {each.does:<{wide[1]}}  {each.serves}" for each in TABLE]
    return "\n".join(lines)


def end(number: int, frame: object) -> NoReturn:
    sys.exit(128 + number)


if __name__ == "__main__":
    for name in ("SIGTERM", "SIGHUP"):  # so that a command which was started is ended too
        number = getattr(signal, name, None)
        if number and signal.getsignal(number) is signal.SIG_DFL:  # nohup stays nohup
            signal.signal(number, end)
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # one more, while the first is being obeyed
        sys.exit(130)
    except OSError as error:  # stdout is full; or closed, whose reader needs no word
        if not isinstance(error, BrokenPipeError):
            print(f"mock_server: {error.strerror}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
