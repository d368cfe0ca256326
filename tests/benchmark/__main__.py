"""Compare the CPU time and memory of rag.py with those of a plain script for the same job.

    python -m tests.benchmark             about five minutes on a quiet machine
    python -m tests.benchmark --quick     about one minute: fewer rounds and records
    python -m tests.benchmark --json      one JSON document

Each run is a whole process, and the runs of a round follow each other, so that other work on the
machine affects all of them alike. The service (tests/benchmark/server.py) is a process of its own,
whose CPU time does not count. A ratio is that of CPU times in the same round; the table shows the
median of the rounds. Seconds are those of this machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median

from mock_server.check import without_services

ROOT = Path(__file__).resolve().parent.parent.parent
QUESTION = "When is the library open on Saturday?"
CACHE = "CACHE"  # stands for a file that holds every vector


class Failed(Exception):
    """A run that ended with another exit status than it should."""


@dataclass(frozen=True)
class Client:
    """A program to run: its script, its environment variables, its exit status."""

    script: str = "rag.py"
    environ: Mapping[str, str] | None = None
    path: str = "/v1"
    status: int = 0


PACKED = {"API_EMBEDDING_ENCODING": "base64"}
CLIENTS = {
    "plain": Client("tests/benchmark/plain.py"),
    "float": Client(),
    "base64": Client(environ=PACKED),
    "cache": Client(environ={**PACKED, "RAG_CACHE": CACHE}),
    "status 401": Client(environ=PACKED, path="/401/v1", status=1),
    "status 429 later": Client(environ=PACKED, path="/429/v1", status=1),
}


@dataclass(frozen=True)
class Sample:
    """What one process took, and how many texts the service embedded for it."""

    cpu_seconds: float
    peak_mb: float
    inputs: int


@dataclass(frozen=True)
class Row:
    """A figure of a client, at most so much. Without a client it is the ranking alone."""

    work: str
    records: int
    characters: int
    client: str
    figure: str
    limit: float
    compared: str = ""  # for a ratio: the client whose CPU time is 1


RATIO, OWN = "CPU, of the plain script's", "CPU, of the run that succeeds"
ROWS = (
    Row("cold run, float", 12, 250, "float", RATIO, 0.70, "plain"),
    Row("float", 1_000, 250, "float", RATIO, 0.24, "plain"),
    Row("base64", 1_000, 250, "base64", RATIO, 0.16, "plain"),
    Row("base64", 10_000, 250, "base64", RATIO, 0.05, "plain"),
    Row("base64", 10_000, 250, "base64", "peak MB", 140),
    Row("full cache", 10_000, 250, "cache", "inputs", 1),
    Row("full cache", 10_000, 250, "cache", "CPU seconds", 1.1),
    Row("status 401", 10_000, 1_500, "status 401", OWN, 1, "base64"),
    Row("status 429 in a later batch", 10_000, 1_500, "status 429 later", OWN, 1, "base64"),
    Row("ranking", 1_000, 0, "", "µs a vector", 35),
    Row("ranking", 100_000, 0, "", "µs a vector", 35),
)
ROUNDS = {12: 15, 1_000: 5, 10_000: 2}


def figure(row: Row, samples: Mapping[str, Sequence[Sample]]) -> float:
    """Return the figure of a row from {client: its runs, in the order of the rounds}."""
    runs = samples[row.client]
    if row.compared:
        pairs = zip(runs, samples[row.compared])
        return median(own.cpu_seconds / other.cpu_seconds for own, other in pairs)
    names = {"peak MB": "peak_mb", "inputs": "inputs", "CPU seconds": "cpu_seconds"}
    return float(median(getattr(run, names[row.figure]) for run in runs))


def run(arguments: Sequence[str], environ: Mapping[str, str], status: int) -> tuple[str, Sample]:
    """Return what a process of this Python prints, and what it took. Raise Failed."""
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        process = subprocess.Popen(
            [sys.executable, *arguments], env=environ, cwd=ROOT, stdout=stdout, stderr=stderr
        )
        # Linux adds to a child's peak what its parent held at the fork. So this process stays
        # small: it neither imports the SDK nor makes a vector.
        _, ended, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(ended)  # Popen need not wait for it
        for stream in (stdout, stderr):
            stream.seek(0)
        if process.returncode != status:
            said = stderr.read().decode(errors="replace").strip().split("\n")[-1]
            ending = f"ended with status {process.returncode}: {said}"
            raise Failed(f"{' '.join(arguments)} {ending}")
        unit = 1e6 if sys.platform == "darwin" else 1e3  # bytes or kibibytes
        cpu = usage.ru_utime + usage.ru_stime
        return stdout.read().decode(), Sample(cpu, usage.ru_maxrss / unit, 0)


@contextlib.contextmanager
def service() -> Iterator[str]:
    """Run the service in a process of its own. Yield its address."""
    command = [sys.executable, "-m", "tests.benchmark.server"]
    # It ends when its stdin does: after this block, or if this process is killed.
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}"


def inputs(address: str) -> int:
    """Return how many texts the service has embedded so far."""
    with urllib.request.urlopen(f"{address}/inputs") as reply:
        return int(reply.read())


def knowledge(records: int, characters: int, folder: Path) -> str:
    """Return the path of a file with so many records, which are the same in every run."""
    path = folder / f"{records}-{characters}.json"
    if not path.exists():
        words = QUESTION.lower().rstrip("?").split() + "shelf volume garden notice hall".split()
        draw = random.Random(records)
        texts = [" ".join(draw.choices(words, k=characters // 6)) for _ in range(records)]
        entries = [
            {"id": f"record-{i}", "title": f"Notice {i}", "text": f"Number {i}: {text}."}
            for i, text in enumerate(texts)
        ]
        path.write_text(json.dumps(entries), encoding="utf-8")
    return str(path)


def measured(name: str, work: tuple[int, int], address: str, folder: Path) -> Sample:
    """Return what one run of a client takes, with the records that `work` counts."""
    client, file = CLIENTS[name], knowledge(*work, folder)
    own = {key: value for key, value in without_services(os.environ).items() if key[:4] != "RAG_"}
    environ = {
        **own,
        "API_BASE_URL": f"{address}{client.path}",
        "API_KEY": "benchmark-key",
        "API_MODEL": "benchmark-chat",
        "API_EMBEDDING_MODEL": "benchmark-embedding",
        "API_EMBEDDING_BATCH": "128",
        "RAG_KNOWLEDGE": file,
        **(client.environ or {}),
    }
    if environ.get("RAG_CACHE") == CACHE:
        environ["RAG_CACHE"] = f"{file}.cache"
    before = inputs(address)
    _, sample = run([client.script, QUESTION], environ, client.status)
    return Sample(sample.cpu_seconds, sample.peak_mb, inputs(address) - before)


def figures(rows: Sequence[Row], rounds: Mapping[int, int]) -> list[float]:
    """Return the figure of each row."""
    found: dict[Row, float] = {}
    with service() as address, tempfile.TemporaryDirectory() as name:
        for records, characters in dict.fromkeys((row.records, row.characters) for row in rows):
            group = [row for row in rows if (row.records, row.characters) == (records, characters)]
            clients = {client for row in group for client in (row.client, row.compared) if client}
            order = [client for client in CLIENTS if client in clients]
            samples: dict[str, list[Sample]] = {client: [] for client in order}
            # One round before the first one fills the cache, and compiles the SDK.
            for number in range(1 + rounds[min(records, 10_000)] if order else 0):
                tell(f"{records:,} records of {characters:,} characters: round {number}")
                for client in order if number else {"cache", "float"} & clients:
                    sample = measured(client, (records, characters), address, Path(name))
                    samples[client] += [sample] if number else []
            for row in group:
                if row.client:
                    found[row] = figure(row, samples)
                else:
                    tell(f"ranking {records:,} vectors")
                    arguments = ["-m", "tests.benchmark.ranking", str(records)]
                    found[row] = float(run(arguments, os.environ, 0)[0])
    return [found[row] for row in rows]


def as_text(rows: Sequence[Row], values: Sequence[float], machine: str) -> str:
    """Return the table that people read."""
    lines = [machine, "", f"{'records':>8}  {'work':<28}{'measured':>9}{'limit':>7}  figure"]
    for row, value in zip(rows, values):
        number = f"{value:.3f}" if value < 2 else f"{value:.1f}"
        over = "  OVER" if value > row.limit else ""
        lines.append(
            f"{row.records:>8,}  {row.work:<28}{number:>9}{row.limit:>7g}  {row.figure}{over}"
        )
    return "\n".join(lines)


def tell(line: str) -> None:
    """Write a line of progress to stderr."""
    print(f"benchmark: {line}", file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 if all was measured, 1 if a run failed, 2 if this system cannot measure."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmark", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--quick", action="store_true", help="fewer rounds, at most 1,000 records")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args(argv)
    if not hasattr(os, "wait4"):
        tell("this system has no os.wait4(), which returns the CPU time of a process")
        return 2
    rows = [row for row in ROWS if row.records <= 1_000] if options.quick else ROWS
    rounds = dict.fromkeys(ROUNDS, 2) if options.quick else ROUNDS
    load = os.getloadavg()[0]
    try:
        values = figures(rows, rounds)
    except Failed as error:
        tell(str(error))
        return 1
    machine = (
        f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs, load {load:.1f}, "
        f"Python {platform.python_version()}, openai {version('openai')}"
    )
    document = [{**asdict(row), "measured": value} for row, value in zip(rows, values)]
    whole = {"machine": machine, "rows": document}
    print(json.dumps(whole) if options.json else as_text(rows, values, machine))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
