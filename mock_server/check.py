"""The conformance check: run a client once in each scenario, and judge what it does."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import tempfile
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import IO, Any

from mock_server.scenarios import ANSWERS, CHAT, ORDER, SCENARIOS, TABLE, Scenario
from mock_server.server import MockServer, printable
from mock_server.verdict import FAULT, Ended, Finding, found, judge, verdict, with_key

SECONDS = 20.0  # the contract's limit for one run
MAX_OUTPUT = 16 * 2**20
LOOPBACK = "127.0.0.1,localhost,::1"
Client = Callable[[Mapping[str, str]], Ended]


class NotStarted(Exception):
    """A command that cannot be started, with the reason."""


@dataclass(frozen=True)
class Judged:
    """The result of one scenario. `passed_stages` are the endpoints that the client got past."""

    scenario: Scenario
    requests: list[str]
    exit_status: int | None
    findings: list[Finding]
    passed_stages: frozenset[str] = frozenset()

    @property
    def verdict(self) -> str:
        return verdict(self.findings)

    def shown(self) -> dict[str, Any]:
        """The result as JSON data."""
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


def chosen(
    names: Sequence[str] = (), groups: Sequence[str] = (), without: Sequence[str] = ()
) -> list[Scenario]:
    """The scenarios of these names and groups, or all, less the groups of `without`.

    The plain runs to which they are compared are always among them. They are in table order.
    """
    wanted = [
        scenario
        for scenario in TABLE
        if scenario.name in names or scenario.group in groups or (not names and not groups)
        if scenario.group not in without
    ]
    references = {reference(scenario).name for scenario in wanted}
    return [each for each in TABLE if each in wanted or each.name in references]


def reference(scenario: Scenario) -> Scenario:
    """The plain scenario with the same stages."""
    return SCENARIOS["plain" if scenario.rerank else "plain-no-rerank"]


def check(client: Client, scenarios: Sequence[Scenario], jobs: int = 1) -> Iterator[Judged]:
    """Yield the result of each scenario in order; `jobs` run at the same time.

    The plain runs must come first, as `chosen` has it. If the first run makes no request, no other
    run is started.
    """
    # Unlike the documented key and models, so that a client must read them from its environment.
    mock = MockServer(key=secrets.token_urlsafe(), suffix="-of-the-check")
    pool = ThreadPoolExecutor(jobs)  # without `with`, which waits for all runs after Ctrl-C
    plain: dict[str, Judged] = {}
    with mock as server:
        try:
            for i, scenario in enumerate(scenarios):
                if scenario != reference(scenario):
                    break
                plain[scenario.name] = run_once(client, server, scenario)
                yield plain[scenario.name]
                if i == 0 and not plain[scenario.name].requests:
                    return
            others = scenarios[len(plain) :]
            results = pool.map(lambda scenario: run_once(client, server, scenario), others)
            for judged in results:
                yield compared(judged, plain[reference(judged.scenario).name])
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def run_once(client: Client, server: MockServer, scenario: Scenario) -> Judged:
    """Run the client in a scenario, and judge it by itself."""
    run = secrets.token_urlsafe()  # nobody else can send requests to this run
    environ = {**server.environment(scenario.name, scenario.rerank, run), **scenario.settings}
    ended = client(environ)
    entries, dropped = server.request_log.of(run)
    server.request_log.clear(run)
    requests = [entry.endpoint for entry in with_key(entries)]
    findings = judge(scenario, entries, dropped, ended, server.key)
    return Judged(scenario, requests, ended.status, findings, passed_stages(requests, ended))


def passed_stages(requests: Sequence[str], ended: Ended) -> frozenset[str]:
    """The endpoints whose replies the client accepted: it sent a later request, or published."""
    sent = [ORDER.index(path) for path in requests if path in ORDER]
    passed = set(ORDER[: max(sent, default=0)])
    if CHAT in requests and ended.status == 0 and ended.stdout.strip():
        passed.add(CHAT)
    return frozenset(passed)


def compared(judged: Judged, plain: Judged) -> Judged:
    """The result, or "not judged" if the client does not get past this stage in the plain run.

    Such a client stops because of something else than the scenario's reply, so a refusal or an
    abstention proves nothing. Faults that the plain run does not have are kept.
    """
    scenario = judged.scenario
    if scenario.expected == ANSWERS or scenario.path in plain.passed_stages:
        return judged
    known = {finding.code for finding in plain.findings}
    own = [each for each in judged.findings if each.severity == FAULT and each.code not in known]
    came = f"the plain run ended at or before {scenario.path}"
    return replace(judged, findings=own or [found(scenario, "not-reached", came)])


# ---- the command ---------------------------------------------------------------------------------


def without_services(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without variables for real services, and without proxies."""
    kept = {
        name: value
        for name, value in environ.items()
        if not name.upper().startswith(("API_", "OPENAI_")) and not name.upper().endswith("_PROXY")
    }
    return {**kept, "NO_PROXY": LOOPBACK, "no_proxy": LOOPBACK}


def command_client(
    command: Sequence[str], stop: threading.Event, seconds: float = SECONDS
) -> Client:
    """The command as a client. It is killed after `seconds`, or when `stop` is set."""
    base = {
        name: value
        for name, value in without_services(os.environ).items()
        if not name.startswith("RAG_")
    }
    return lambda environ: execute(command, {**base, **environ}, stop, seconds)


def execute(
    command: Sequence[str], environ: Mapping[str, str], stop: threading.Event, seconds: float
) -> Ended:
    """Run the command and return how it ended. Raise NotStarted if it cannot be started.

    Its output goes to files, because a pipe stays open as long as any child process of it. Its
    child processes are killed when it ends.
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
        finally:  # also after Ctrl-C, which does not reach a command in another session
            kill(process)
            status = process.wait()
        return Ended(None if killed else status, content(out), content(err))


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and, on systems with process groups, its child processes."""
    if os.name == "nt":
        process.kill()
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def content(file: IO[bytes]) -> bytes:
    """What was written to a file."""
    file.seek(0)
    return file.read(MAX_OUTPUT)


# ---- the report ----------------------------------------------------------------------------------


def row(judged: Judged, widths: tuple[int, int]) -> str:
    """A line of the table."""
    codes = " ".join(finding.code for finding in judged.findings)
    name, does = judged.scenario.name, judged.scenario.does
    return f"{name:<{widths[0]}}  {does:<{widths[1]}}  {judged.verdict}  {codes}".rstrip()


def counts(results: Sequence[Judged]) -> dict[str, int]:
    """How many scenarios passed, failed, were not judged, and were left out."""
    verdicts = Counter(judged.verdict for judged in results)
    verdicts["left out"] = len(TABLE) - len(results)
    return {name: verdicts[name] for name in ("passed", "failed", "not judged", "left out")}


def explained(results: Sequence[Judged]) -> Iterator[str]:
    """The lines that explain the findings: each kind once, with all its scenarios."""
    kinds: dict[tuple[str, str], list[tuple[Scenario, Finding]]] = {}
    for judged in results:
        for finding in judged.findings:
            # Requests are refused for many reasons; the reason follows the address.
            reason = finding.came.partition(": ")[2] if finding.code == "request-refused" else ""
            kinds.setdefault((finding.code, reason), []).append((judged.scenario, finding))
    faults_first = sorted(kinds.values(), key=lambda kind: kind[0][1].severity != FAULT)
    for kind in faults_first:
        first = kind[0][1]
        served = [f"{scenario.name}: {scenario.serves}" for scenario, _ in kind]
        if first.severity != FAULT:
            names = ", ".join(scenario.name for scenario, _ in kind)
            served = textwrap.wrap(names, 88, break_on_hyphens=False)
        parts = [
            ("in", served[0]),
            *(("", line) for line in served[1:]),
            ("expected", first.expected),
            ("came", first.came),
            ("nearest", first.nearest),
            ("advice", first.advice),
        ]
        yield f"{first.code} ({first.severity}): {first.title}"
        yield from (f"  {name:<8}  {printable(text)}" for name, text in parts if text)


def as_json(command: Sequence[str], results: Sequence[Judged]) -> dict[str, Any]:
    """The report as JSON data."""
    numbers = {name.replace(" ", "_"): count for name, count in counts(results).items()}
    return {
        "command": list(command),
        **numbers,
        "scenarios": [judged.shown() for judged in results],
    }
