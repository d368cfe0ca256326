"""The command line: serve the mock, run a command against it, or list its scenarios."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence

from mock_server.scenarios import SCENARIOS, TABLE
from mock_server.server import MockServer, printable

LOOPBACK = "127.0.0.1,localhost,::1"
DESCRIPTION = "A local mock of an OpenAI-compatible service: it tests requests, not answers."


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: of the command that was run; 2 for a usage error."""
    options = parser().parse_args(argv)
    if options.action == "scenarios":
        print(listing(), flush=True)
        return 0
    if options.action == "run":
        return run(options.command, options.scenario, not options.no_rerank)
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


def tell(line: str) -> None:
    print(f"mock: {printable(line)}", file=sys.stderr, flush=True)


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
        environ.update(NO_PROXY=LOOPBACK, no_proxy=LOOPBACK)
        try:
            process = subprocess.Popen(list(command), env=environ)
        except OSError as error:
            print(
                f"mock_server: cannot run {printable(command[0])}: {error.strerror}",
                file=sys.stderr,
            )
            return 127
        while True:
            try:
                status = process.wait()
                break
            except KeyboardInterrupt:  # the command gets the same signal, and decides
                continue
    return status if status >= 0 else 128 - status


def without_services(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without what could send anything to a real service."""
    return {
        name: value
        for name, value in environ.items()
        if not name.upper().startswith(("API_", "OPENAI_")) and not name.upper().endswith("_PROXY")
    }


def listing() -> str:
    """The table of scenarios, aligned."""
    wide = (
        max(len(scenario.name) for scenario in TABLE),
        max(len(scenario.does) for scenario in TABLE),
    )
    lines = [f"{'SCENARIO':<{wide[0]}}  {'A CORRECT CLIENT':<{wide[1]}}  SERVES"]
    lines += [f"{each.name:<{wide[0]}}  {each.does:<{wide[1]}}  {each.serves}" for each in TABLE]
    return "\n".join(lines)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # one more, while the first is being obeyed
        sys.exit(130)
    except BrokenPipeError:  # the reader of the listing has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
