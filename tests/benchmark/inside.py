"""What `tests.benchmark` measures from inside rag.py, each in a process of its own.

    python -m tests.benchmark_inside stages QUESTION     a run of rag.py, and its stages
    python -m tests.benchmark_inside ranking COUNT       how long ranking takes a vector

The last line on stdout is the JSON of what was measured. What only one of the two needs is imported
where it is needed: it would count as the start of the other.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import time
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

RAG = Path(__file__).resolve().parent.parent / "rag.py"
# The functions whose calls are the stages of a run: {name in rag.py: stage}.
FUNCTIONS = {
    "read_knowledge": "knowledge read",
    "connect": "client made",
    "embed": "embedding",
    "rank": "ranking",
    "ask": "asking",
}
SHARED = 1000  # distinct vectors, where memory is too short for all


@dataclass(frozen=True)
class Stage:
    """Seconds of a stage: by the clock, and of CPU in all threads."""

    name: str
    seconds: float
    cpu_seconds: float


@dataclass(frozen=True)
class Ranking:
    """Microseconds of CPU that rag.rank() takes a vector; `distinct` vectors were in memory."""

    vectors: int
    distinct: int
    microseconds: float
    peak_bytes: int = 0


# ---- the stages of one run -----------------------------------------------------------------------


@contextlib.contextmanager
def timed(name: str, stages: list[Stage]) -> Iterator[None]:
    """Adds a stage to the list: what happens inside."""
    clock, cpu = time.perf_counter(), time.process_time()
    yield
    stages.append(Stage(name, time.perf_counter() - clock, time.process_time() - cpu))


@contextlib.contextmanager
def watched(rag: types.ModuleType, stages: list[Stage]) -> Iterator[None]:
    """Inside, each call of FUNCTIONS adds a stage to the list."""

    def watch(function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with timed(name, stages):
                return function(*args)

        return call

    unwatched = {each: getattr(rag, each) for each in FUNCTIONS}
    for each in FUNCTIONS:
        setattr(rag, each, watch(unwatched[each], FUNCTIONS[each]))
    try:
        yield
    finally:
        vars(rag).update(unwatched)


def stages_of_a_run(argv: Sequence[str]) -> int:
    """The exit status of a run of rag.py, which ends here as it does under `__main__`.

    The seconds of the `start` that is printed are the time of day: the parent knows the rest."""
    start = Stage("Python started", time.time(), time.process_time())
    stages: list[Stage] = []
    with timed("rag.py compiled", stages):  # as a script is in every run
        rag = types.ModuleType("rag")
        rag.__file__, sys.modules["rag"] = str(RAG), rag
        exec(compile(RAG.read_bytes(), RAG, "exec"), rag.__dict__)
    gc.disable()
    with timed("SDK imported", stages):
        import openai  # noqa: F401
    with watched(rag, stages):
        status: int = rag.main(argv)
    end = {"at": time.time(), "cpu": time.process_time()}
    told = {"start": asdict(start), "stages": [asdict(each) for each in stages], "end": end}
    print(json.dumps(told), flush=True)
    return status


# ---- ranking -------------------------------------------------------------------------------------


def free_bytes() -> int:
    """Memory that nobody uses; 256 MiB where the system does not tell."""
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return 2**28


def ranking(count: int, distinct: int, repeats: int) -> Ranking:
    """The median of some repeats, with `count` records, of which some may share a vector."""
    import statistics

    from tests.benchmark_server import vector

    import rag

    url = "http://127.0.0.1:9/v1"  # nothing is sent there
    settings = rag.Settings(base_url=url, key="k", model="m", embedding_model="e")
    run = rag.Run(settings, {}, dict, rag.silent, rag.silent, None)
    records = [{"id": str(i), "text": "t"} for i in range(count)]
    some = [vector(str(i)) for i in range(distinct)]
    vectors = [vector("question"), *(some[i % distinct] for i in range(count))]
    seconds = []
    for _ in range(repeats):
        started = time.process_time()
        rag.rank(vectors, records, run)
        seconds.append(time.process_time() - started)
    return Ranking(count, distinct, statistics.median(seconds) / count * 1e6)


def main(argv: Sequence[str]) -> int:
    if argv[0] == "stages":
        return stages_of_a_run(argv[1:])
    from tests.benchmark_server import DIMENSIONS

    count = int(argv[1])
    enough = free_bytes() > 2 * 4 * DIMENSIONS * count
    gc.disable()
    measured = ranking(count, count if enough else min(count, SHARED), max(3, 20_000 // count))
    print(json.dumps(asdict(measured)), flush=True)
    return 0


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))
