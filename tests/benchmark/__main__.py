"""CPU, time and memory of rag.py beside those of a plain script for the same job.

    python -m tests.benchmark             some minutes: the figures, and whether limits are met
    python -m tests.benchmark --quick     under a minute: fewer runs, no 10,000 records in plain.py
    python -m tests.benchmark --json      one JSON document instead of tables; units in its names

The plain script (tests/plain.py) and rag.py answer a question from 12, 1,000 and 10,000 records: in
whole processes with this Python, one after the other, in turns, so that whatever else the machine
does burdens all of them. The service (tests/benchmark_server.py) is a process of its own, and its
CPU does not count. Ratios tell something; seconds are those of this machine on this day.
"""

from __future__ import annotations

import argparse
import datetime
import http.client
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from tests.benchmark_inside import Ranking, Stage
from tests.benchmark_server import Counts

from mock_server.check import without_services

ROOT = Path(__file__).resolve().parent.parent
QUESTION = "When is the library open on Saturday?"
BATCH = "128"

# {client: (script, its own variables)}; CACHE stands for a file that has every vector.
CACHE = "CACHE"
CLIENTS: dict[str, tuple[str, dict[str, str]]] = {
    "plain": ("tests/plain.py", {}),
    "float": ("rag.py", {"API_EMBEDDING_ENCODING": "float"}),
    "base64": ("rag.py", {"API_EMBEDDING_ENCODING": "base64"}),
    "cache": ("rag.py", {"API_EMBEDDING_ENCODING": "base64", "RAG_CACHE": CACHE}),
}


class Failed(Exception):
    """A run that did not end well, in one line."""


# ---- what is measured: plain data ----------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """Rounds in which each of the clients runs once, one after the other."""

    records: int
    clients: tuple[str, ...]
    rounds: int


@dataclass(frozen=True)
class Plan:
    work: tuple[Work, ...]
    stages: tuple[tuple[int, str], ...]  # (records, client)
    rankings: tuple[int, ...]  # numbers of vectors


EVERYONE = tuple(CLIENTS)
STAGES = ((1_000, "float"), (1_000, "base64"), (10_000, "base64"), (10_000, "cache"))
FULL = Plan(
    (Work(12, EVERYONE, 15), Work(1_000, EVERYONE, 5), Work(10_000, EVERYONE, 2)),
    STAGES,
    (1_000, 10_000, 100_000),
)
QUICK = Plan(
    (Work(12, EVERYONE, 3), Work(1_000, EVERYONE, 2), Work(10_000, ("base64", "cache"), 1)),
    STAGES[2:],
    (1_000, 10_000),
)


@dataclass(frozen=True)
class Process:
    """A process that has ended: what it printed, and what it took."""

    stdout: str
    cpu_seconds: float  # user and system
    seconds: float
    peak_bytes: int
    started: float  # time.time()
    ended: float


@dataclass(frozen=True)
class Sample:
    """One run of a client."""

    cpu_seconds: float
    seconds: float
    peak_bytes: int
    counts: Counts


@dataclass(frozen=True)
class Row:
    """Medians over the runs of a client. `cpu_ratios`: to the plain script, a number a round."""

    records: int
    client: str
    runs: int
    cpu_seconds: float
    seconds: float
    peak_bytes: float
    requests: float
    inputs: float
    sent_bytes: float
    received_bytes: float
    cpu_ratio: float | None
    cpu_ratios: tuple[float, ...]


@dataclass(frozen=True)
class StagesOfRun:
    records: int
    client: str
    stages: tuple[Stage, ...]


@dataclass(frozen=True)
class Limit:
    """A promise: a figure of a row is at most so much. `unit` stands behind both numbers."""

    work: str
    records: int
    client: str
    figure: str
    at_most: float
    unit: str = ""


@dataclass(frozen=True)
class Verdict:
    """A limit and what was measured; both None if it was not measured in this run."""

    work: str
    limit: float
    measured: float | None
    met: bool | None
    unit: str


RATIO = "of the plain script's CPU"
LIMITS = (
    Limit("cold run, 12 records, float", 12, "float", "cpu_ratio", 0.75, RATIO),
    Limit("1,000 records, float", 1_000, "float", "cpu_ratio", 0.28, RATIO),
    Limit("1,000 records, base64", 1_000, "base64", "cpu_ratio", 0.18, RATIO),
    Limit("10,000 records, base64", 10_000, "base64", "cpu_ratio", 0.06, RATIO),
    Limit("10,000 records, base64", 10_000, "base64", "peak_bytes", 150e6, "MB at the peak"),
    Limit("10,000 records, full cache", 10_000, "cache", "inputs", 1, "embedding inputs"),
    Limit("10,000 records, full cache", 10_000, "cache", "cpu_seconds", 1.3, "s of CPU"),
)
RANKING_LIMIT = 35.0  # microseconds a vector
# A time that grew by the square would be 10 or 100 times as long; the rest is caches and noise.
LINEAR_LIMIT = 1.3  # microseconds a vector among most, to those among fewest


@dataclass(frozen=True)
class Report:
    date: str
    machine: dict[str, Any]
    rows: tuple[Row, ...]
    stages: tuple[StagesOfRun, ...]
    rankings: tuple[Ranking, ...]
    limits: tuple[Verdict, ...]


# ---- figures: samples -> rows, rows -> verdicts --------------------------------------------------


def rows_of(work: Work, samples: Mapping[str, Sequence[Sample]]) -> list[Row]:
    """A row a client. Ratios are taken within a round, whose runs had the same burden."""
    plain = samples.get("plain", ())
    return [row_of(work.records, client, samples[client], plain) for client in work.clients]


def row_of(records: int, client: str, runs: Sequence[Sample], plain: Sequence[Sample]) -> Row:
    # zip() ends with the shorter: there is no ratio where the plain script did not run.
    ratios = tuple(own.cpu_seconds / other.cpu_seconds for own, other in zip(runs, plain))
    return Row(
        records=records,
        client=client,
        runs=len(runs),
        cpu_seconds=median(each.cpu_seconds for each in runs),
        seconds=median(each.seconds for each in runs),
        peak_bytes=median(each.peak_bytes for each in runs),
        requests=median(each.counts.requests for each in runs),
        inputs=median(each.counts.inputs for each in runs),
        sent_bytes=median(each.counts.sent_bytes for each in runs),
        received_bytes=median(each.counts.received_bytes for each in runs),
        cpu_ratio=median(ratios) if ratios else None,
        cpu_ratios=ratios,
    )


def verdicts(rows: Sequence[Row], rankings: Sequence[Ranking]) -> list[Verdict]:
    """Each limit beside what was measured."""
    known = {(row.records, row.client): row for row in rows}
    found = []
    for limit in LIMITS:
        row = known.get((limit.records, limit.client))
        measured = None if row is None else getattr(row, limit.figure)
        found.append(verdict(limit.work, limit.at_most, measured, limit.unit))
    slowest = max((each.microseconds for each in rankings), default=None)
    found.append(verdict("ranking", RANKING_LIMIT, slowest, "µs a vector, at the slowest"))
    growth, work = None, "ranking, linear"
    if len(rankings) > 1:
        growth = rankings[-1].microseconds / rankings[0].microseconds
        work += f": {rankings[-1].vectors:,} to {rankings[0].vectors:,} vectors"
    found.append(verdict(work, LINEAR_LIMIT, growth, "times the µs a vector"))
    return found


def verdict(work: str, limit: float, measured: float | None, unit: str) -> Verdict:
    return Verdict(work, limit, measured, None if measured is None else measured <= limit, unit)


def stages_of(process: Process) -> tuple[Stage, ...]:
    """The stages that a process told of, and what they leave: its start, its end, the rest."""
    told = json.loads(process.stdout.splitlines()[-1])
    start, end = Stage(**told["start"]), told["end"]
    inner = [Stage(**each) for each in told["stages"]]
    begin = replace(start, seconds=start.seconds - process.started)
    last = Stage("exit", process.ended - end["at"], process.cpu_seconds - end["cpu"])
    most = [begin, *inner, last]
    rest = Stage(
        "the rest",
        process.seconds - sum(each.seconds for each in most),
        process.cpu_seconds - sum(each.cpu_seconds for each in most),
    )
    return (begin, *inner, rest, last)


# ---- processes -----------------------------------------------------------------------------------


def run(arguments: Sequence[str], environ: Mapping[str, str]) -> Process:
    """A process of this Python, ended with status 0. Raises Failed if the status is another."""
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        started, clock = time.time(), time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, *arguments], env=environ, cwd=ROOT, stdout=stdout, stderr=stderr
        )
        # Linux counts into a child's peak what its parent held at the fork: this process stays
        # small, and neither loads the SDK nor makes a vector.
        _, status, usage = os.wait4(process.pid, 0)
        seconds, ended = time.perf_counter() - clock, time.time()
        process.returncode = os.waitstatus_to_exitcode(status)  # so that Popen waits for it no more
        for stream in (stdout, stderr):
            stream.seek(0)
        if process.returncode:
            lines = stderr.read().decode(errors="replace").splitlines() or ["nothing on stderr"]
            end = f"ended with status {process.returncode}: {lines[-1]}"
            raise Failed(f"{' '.join(arguments)}: {end}")
        text = stdout.read().decode()
    unit = 1 if sys.platform == "darwin" else 1024
    cpu = usage.ru_utime + usage.ru_stime
    return Process(text, cpu, seconds, usage.ru_maxrss * unit, started, ended)


@contextmanager
def service() -> Iterator[str]:
    """The address of a service in a process of its own."""
    command = [sys.executable, "-m", "tests.benchmark_server"]
    # It ends when its stdin does: with this block, or if this process is killed.
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        port = process.stdout.readline().strip()
        if not port:
            raise Failed("the service did not start")
        yield f"http://127.0.0.1:{port}"


def counted(address: str) -> Counts:
    """What the service was asked for so far."""
    connection = http.client.HTTPConnection(address.removeprefix("http://"))
    try:
        connection.request("GET", "/counts")
        return Counts(**json.load(connection.getresponse()))
    finally:
        connection.close()


def knowledge(records: int, folder: Path) -> Path:
    """The file with so many records, of about 250 bytes each: the same in every run."""
    path = folder / f"{records}.json"
    if not path.exists():
        words = QUESTION.lower().rstrip("?").split() + "shelf volume garden notice hall".split()
        draw = random.Random(records)
        entries = [
            {
                "id": f"record-{i}",
                "title": f"Notice {i}",
                "text": f"Number {i}: {' '.join(draw.choices(words, k=40))}.",
            }
            for i in range(records)
        ]
        path.write_text(json.dumps(entries), encoding="utf-8")
    return path


def environment(client: str, records: int, address: str, folder: Path) -> dict[str, str]:
    """The variables of a client, with none of the caller's that could change a run."""
    callers = without_services(os.environ)
    own = {name: value for name, value in callers.items() if not name.startswith("RAG_")}
    cache = str(folder / f"{records}.db")
    given = {name: value.replace(CACHE, cache) for name, value in CLIENTS[client][1].items()}
    return {
        **own,
        "API_BASE_URL": f"{address}/v1",
        "API_KEY": "no-key-is-checked",
        "API_MODEL": "benchmark-chat",
        "API_EMBEDDING_MODEL": "benchmark-embedding",
        "API_EMBEDDING_BATCH": BATCH,
        "RAG_KNOWLEDGE": str(knowledge(records, folder)),
        **given,
    }


def answer(client: str, records: int, address: str, folder: Path) -> tuple[str, Sample]:
    """What a client prints, and what its run takes."""
    before, script = counted(address), CLIENTS[client][0]
    process = run([script, QUESTION], environment(client, records, address, folder))
    counts = counted(address) - before
    sample = Sample(process.cpu_seconds, process.seconds, process.peak_bytes, counts)
    return process.stdout, sample


def compare(work: Work, address: str, folder: Path, tell: Callable[[str], None]) -> list[Row]:
    """The rows of all clients, which take turns. The cache is filled before."""
    samples: dict[str, list[Sample]] = {client: [] for client in work.clients}
    if "cache" in work.clients:
        tell(f"{work.records:,} records: filling the cache")
        answer("cache", work.records, address, folder)
    for number in range(1, work.rounds + 1):
        for client in work.clients:
            tell(f"{work.records:,} records: round {number} of {work.rounds}, {client}")
            samples[client].append(answer(client, work.records, address, folder)[1])
    return rows_of(work, samples)


def stages(records: int, client: str, address: str, folder: Path) -> StagesOfRun:
    arguments = ["-m", "tests.benchmark_inside", "stages", QUESTION]
    process = run(arguments, environment(client, records, address, folder))
    return StagesOfRun(records, client, stages_of(process))


def ranking(vectors: int) -> Ranking:
    process = run(["-m", "tests.benchmark_inside", "ranking", str(vectors)], os.environ)
    return replace(Ranking(**json.loads(process.stdout)), peak_bytes=process.peak_bytes)


def measure(plan: Plan, tell: Callable[[str], None]) -> Report:
    machine = {**machine_class(), "load_before": round(os.getloadavg()[0], 1)}
    rows: list[Row] = []
    runs = []
    with service() as address, tempfile.TemporaryDirectory() as name:
        tell("warming up")
        for client in ("plain", "float"):  # the first run compiles the SDK
            answer(client, 1, address, Path(name))
        for work in plan.work:
            rows += compare(work, address, Path(name), tell)
        for records, client in plan.stages:
            tell(f"{records:,} records: stages of a run, {client}")
            runs.append(stages(records, client, address, Path(name)))
    rankings = []
    for vectors in plan.rankings:
        tell(f"ranking {vectors:,} vectors")
        rankings.append(ranking(vectors))
    machine["load_after"] = round(os.getloadavg()[0], 1)
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="minutes")
    limits = tuple(verdicts(rows, rankings))
    return Report(date, machine, tuple(rows), tuple(runs), tuple(rankings), limits)


def machine_class() -> dict[str, Any]:
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "openai": version("openai"),
    }


# ---- what people read ----------------------------------------------------------------------------


def aligned(rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """Lines of columns: the first `left` to the left, the others to the right."""
    wide = [max(map(len, column)) for column in zip(*rows)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(wide[i]) if i < left else cell.rjust(wide[i]) for i, cell in enumerate(row)
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def row_cells(row: Row) -> list[str]:
    ratio = "" if row.cpu_ratio is None else f"{row.cpu_ratio:.3f}"
    spread = f"{min(row.cpu_ratios):.3f}-{max(row.cpu_ratios):.3f}" if row.cpu_ratios else ""
    return [
        f"{row.records:,}",
        row.client,
        f"{row.runs}",
        f"{row.cpu_seconds:.2f}",
        ratio,
        "" if row.client == "plain" else spread,
        f"{row.seconds:.2f}",
        f"{row.peak_bytes / 1e6:.0f}",
        f"{row.requests:.0f}",
        f"{row.inputs:,.0f}",
        f"{row.sent_bytes / 1e6:.3f}",
        f"{row.received_bytes / 1e6:.3f}",
    ]


def row_lines(rows: Sequence[Row]) -> list[str]:
    head = "records,client,runs,CPU s,ratio,least-most,wall s,peak MB,requests,inputs"
    return aligned([[*head.split(","), "MB sent", "MB received"], *map(row_cells, rows)], 2)


def stage_lines(runs: Sequence[StagesOfRun]) -> list[str]:
    """A line a stage, a column a run."""
    head = ["stage", *(f"{each.records:,} {each.client}" for each in runs)]
    columns = [
        [f"{s.seconds * 1e3:.0f} / {s.cpu_seconds * 1e3:.0f}" for s in r.stages] for r in runs
    ]
    names = [stage.name for stage in runs[0].stages] if runs else []
    return aligned([head, *([name, *cells] for name, *cells in zip(names, *columns))], 1)


def ranking_lines(rankings: Sequence[Ranking]) -> list[str]:
    cells = [
        [
            f"{each.vectors:,}",
            f"{each.microseconds:.1f}",
            f"{each.peak_bytes / 1e6:.0f}",
            "all" if each.distinct == each.vectors else f"{each.distinct:,}, shared: little memory",
        ]
        for each in rankings
    ]
    return aligned([["vectors", "CPU µs a vector", "peak MB", "distinct"], *cells], 0)


def limit_lines(limits: Sequence[Verdict]) -> list[str]:
    cells = []
    for each in limits:
        scale = 1e-6 if each.unit.startswith("MB") else 1
        measured = "" if each.measured is None else f"{each.measured * scale:.4g}"
        met = {True: "yes", False: "NO", None: "not measured"}[each.met]
        cells.append([each.work, met, f"{each.limit * scale:g}", measured, f" {each.unit}"])
    widest = max((len(row[-1]) for row in cells), default=0)
    cells = [[*row[:-1], row[-1].ljust(widest)] for row in cells]
    return aligned([["limit", "met", "at most", "measured", " ".ljust(widest)], *cells], 2)


def text_of(report: Report) -> str:
    machine = report.machine
    load = f"load {machine['load_before']} before and {machine['load_after']} after"
    versions = f"Python {machine['python']}, openai {machine['openai']}"
    lines = [
        f"{report.date}, {machine['system']}, {machine['cpus']} CPUs, {versions}, {load}",
        "",
        f"Medians of whole processes that took turns; batch {BATCH}, 1,536 numbers a vector. The",
        "ratio is that of CPU to the plain script in the same round. MB are 10^6 bytes; those sent",
        "and received are of bodies. cache: rag.py with a full RAG_CACHE.",
        "",
        *row_lines(report.rows),
        "",
        "The stages of one run of rag.py, in milliseconds of wall / CPU",
        "",
        *stage_lines(report.stages),
        "",
        "Ranking alone, through rag.rank()",
        "",
        *ranking_lines(report.rankings),
        "",
        *limit_lines(report.limits),
    ]
    return "\n".join(lines)


def json_of(report: Report) -> str:
    return json.dumps(asdict(report), indent=2)


def tell(line: str) -> None:
    print(f"benchmark: {line}", file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """0, whatever the figures; 1 if a run failed; 2 if nothing can be measured here."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmark", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--quick", action="store_true", help="fewer runs")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    options = parser.parse_args(argv)
    if not hasattr(os, "wait4"):
        tell("this system has no os.wait4(), which tells what a process took: nothing is measured")
        return 2
    try:
        report = measure(QUICK if options.quick else FULL, tell)
    except Failed as error:
        tell(str(error))
        return 1
    print(json_of(report) if options.json else text_of(report))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
