"""The conformance check: starts a command once for every scenario, and judges what it does."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import IO, Any

from mock_server.scenarios import Scenario
from mock_server.server import MockServer, printable
from mock_server.verdict import FAULT, Ended, Finding, judge, verdict

SECONDS = 20.0  # for one run: the contract's limit
MAX_OUTPUT = 16 * 2**20
LOOPBACK = "127.0.0.1,localhost,::1"
Client = Callable[[Mapping[str, str]], Ended]


class NotStarted(Exception):
    """A command that cannot be started, and why."""


@dataclass(frozen=True)
class Judged:
    """What is said of one scenario."""

    scenario: Scenario
    requests: list[str]
    exit_status: int | None
    findings: list[Finding]

    @property
    def verdict(self) -> str:
        return verdict(self.findings)

    def shown(self) -> dict[str, Any]:
        return {
            "name": self.scenario.name,
            "group": self.scenario.group,
            "serves": self.scenario.serves,
            "expected": self.scenario.does,
            "verdict": self.verdict,
            "requests": self.requests,
            "exit_status": self.exit_status,
            "findings": [asdict(finding) for finding in self.findings],
        }


def check(client: Client, scenarios: Sequence[Scenario], jobs: int = 1) -> Iterator[Judged]:
    """The scenarios, judged in their order, `jobs` at a time.

    If the first run makes no request, no other is started: the client does not know the contract.
    """
    # Another key and other models than those that are documented: they come from the environment.
    mock = MockServer(key="key-of-the-check", suffix="-of-the-check")
    pool = ThreadPoolExecutor(jobs)  # without `with`, which would wait for runs that are to stop
    with mock as server:
        try:
            first = run_once(client, server, scenarios[0], "check-0")
            yield first
            if not first.requests:
                return
            yield from pool.map(
                lambda i: run_once(client, server, scenarios[i], f"check-{i}"),
                range(1, len(scenarios)),
            )
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def run_once(client: Client, server: MockServer, scenario: Scenario, run: str) -> Judged:
    environ = {**server.environment(scenario.name, scenario.rerank, run), **scenario.settings}
    ended = client(environ)
    entries, dropped = server.request_log.of(run)
    server.request_log.clear(run)
    requests = [entry.endpoint for entry in entries]
    findings = judge(scenario, entries, dropped, ended, server.key)
    return Judged(scenario, requests, ended.status, findings)


# ---- the command ---------------------------------------------------------------------------------


def without_services(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without what could send anything to a real service, loopback unproxied."""
    kept = {
        name: value
        for name, value in environ.items()
        if not name.upper().startswith(("API_", "OPENAI_")) and not name.upper().endswith("_PROXY")
    }
    return {**kept, "NO_PROXY": LOOPBACK, "no_proxy": LOOPBACK}


def command_client(
    command: Sequence[str], stop: threading.Event, seconds: float = SECONDS
) -> Client:
    """A client that is a command, killed if it does not end in time, or once `stop` is set."""
    base = {
        name: value
        for name, value in without_services(os.environ).items()
        if not name.startswith("RAG_")
    }
    return lambda environ: execute(command, {**base, **environ}, stop, seconds)


def execute(
    command: Sequence[str], environ: Mapping[str, str], stop: threading.Event, seconds: float
) -> Ended:
    """How the command ended. Raises NotStarted.

    Its output goes to files: a pipe would stay open as long as any process that it left behind.
    """
    deadline = time.monotonic() + seconds
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            process = subprocess.Popen(
                list(command),
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        except OSError as error:
            raise NotStarted(error.strerror) from None
        killed = False
        try:
            while process.poll() is None and not killed:
                large = any(os.fstat(file.fileno()).st_size > MAX_OUTPUT for file in (out, err))
                killed = stop.wait(0.01) or large or time.monotonic() > deadline
        finally:  # after Ctrl-C too, which does not reach the command in its own session
            kill(process)
            status = process.wait()
        return Ended(None if killed else status, content(out), content(err))


def kill(process: subprocess.Popen[bytes]) -> None:
    """Ends a process and, where there are process groups, all that it started."""
    if os.name == "nt":
        process.kill()
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def content(file: IO[bytes]) -> bytes:
    file.seek(0)
    return file.read(MAX_OUTPUT)


# ---- what is shown -------------------------------------------------------------------------------


def row(judged: Judged, wide: tuple[int, int]) -> str:
    """A line of the table."""
    codes = " ".join(finding.code for finding in judged.findings)
    name, does = judged.scenario.name, judged.scenario.does
    return f"{name:<{wide[0]}}  {does:<{wide[1]}}  {judged.verdict}  {codes}".rstrip()


def summary(results: Sequence[Judged]) -> str:
    counts = Counter(judged.verdict for judged in results)
    return ", ".join(f"{counts[name]} {name}" for name in ("passed", "failed", "not judged"))


def explained(results: Sequence[Judged]) -> Iterator[str]:
    """Each kind of finding once, in full, with the other scenarios in which it was made."""
    kinds: dict[tuple[str, str], list[tuple[Scenario, Finding]]] = {}
    for judged in results:
        for finding in judged.findings:
            # Requests are refused for many reasons, which stand behind the address.
            reason = finding.came.partition(": ")[2] if finding.code == "request-refused" else ""
            kinds.setdefault((finding.code, reason), []).append((judged.scenario, finding))
    faults_first = sorted(kinds.items(), key=lambda kind: kind[1][0][1].severity != FAULT)
    for (code, _), found in faults_first:
        first = found[0][1]
        served = [f"{scenario.name}: {scenario.serves}" for scenario, _ in found[:4]]
        more = [f"{len(found) - 4} more, which --json lists"] if len(found) > 4 else []
        parts = [
            ("in", served[0]),
            ("expected", first.expected),
            ("came", first.came),
            ("nearest", first.nearest),
            ("advice", first.advice),
            *(("also in", line) for line in [*served[1:], *more]),
        ]
        yield f"{code} ({first.severity}): {first.title}"
        yield from (f"  {name:<8}  {printable(text)}" for name, text in parts if text)


def as_json(command: Sequence[str], results: Sequence[Judged]) -> dict[str, Any]:
    counts = Counter(judged.verdict for judged in results)
    return {
        "command": list(command),
        "passed": counts["passed"],
        "failed": counts["failed"],
        "not_judged": counts["not judged"],
        "scenarios": [judged.shown() for judged in results],
    }
