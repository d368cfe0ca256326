"""Print the microseconds of CPU that rag.rank() takes a vector.

python -m tests.benchmark.ranking COUNT
"""

from __future__ import annotations

import sys
import time

import rag
from tests.benchmark.server import vector


def microseconds(count: int) -> float:
    """Return the least CPU time a vector of some repeats. At most 1,000 vectors are distinct."""
    records = [{"id": str(i), "text": "t"} for i in range(count)]
    distinct = [vector(str(i)) for i in range(min(count, 1000))]
    vectors = [distinct[i % len(distinct)] for i in range(count)]
    seconds = []
    for _ in range(max(3, 20_000 // count)):
        started = time.process_time()
        rag.rank(vector("question"), vectors, records, 20)
        seconds.append(time.process_time() - started)
    return min(seconds) / count * 1e6


if __name__ == "__main__":
    print(microseconds(int(sys.argv[1])))
