"""The request log: the requests that the server received."""

from __future__ import annotations

import re
import threading
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

MAX_ENTRIES, MAX_BYTES = 10_000, 64 * 2**20
RUN = r"(?:/run/(?P<run>[A-Za-z0-9_-]{1,64}))?"
ADDRESS = re.compile(RUN + r"(?:/scenario/(?P<scenario>[^/]+))?/v1(?P<path>/.+)")


@dataclass
class Entry:
    """A request. The API key is in none of its fields.

    `headers` are the names of its headers; `body` is plain data, or text if it was not JSON.
    `refused` is the reason why the mock answered with an error, where that is not the scenario's
    error. `status` is 0 until the reply is ready.
    """

    method: str
    path: str
    scenario: str
    authorization: str
    run: str = ""
    headers: list[str] = field(default_factory=list)
    body: Any = None
    key_in_body: bool = False
    key_elsewhere: bool = False
    size: int = 0
    status: int = 0
    refused: str = ""

    @property
    def endpoint(self) -> str:
        """The path below the base URL: /embeddings, for example."""
        address = ADDRESS.fullmatch(self.path)
        return address["path"] if address else self.path

    @property
    def address(self) -> str:
        """The path without the id of the run."""
        return self.path.removeprefix(f"/run/{self.run}") if self.run else self.path

    def shown(self) -> dict[str, Any]:
        """The request as JSON data."""
        return {name: value for name, value in vars(self).items() if name != "run"}


@dataclass
class RequestLog:
    """The newest requests of all runs, in the order in which they arrived.

    `dropped` counts the older ones of each run. A request without a run has the run "".
    """

    entries: deque[Entry] = field(default_factory=deque)
    dropped: Counter[str] = field(default_factory=Counter)
    size: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, entry: Entry) -> None:
        """Append a request, and drop the oldest ones if there are too many."""
        with self.lock:
            self.entries.append(entry)
            self.size += entry.size
            while len(self.entries) > MAX_ENTRIES or self.size > MAX_BYTES:
                oldest = self.entries.popleft()
                self.size -= oldest.size
                self.dropped[oldest.run] += 1

    def of(self, run: str) -> tuple[list[Entry], int]:
        """The requests of a run, and how many older ones were dropped."""
        with self.lock:
            return [entry for entry in self.entries if entry.run == run], self.dropped[run]

    def clear(self, run: str) -> None:
        """Remove the requests of a run."""
        with self.lock:
            self.entries = deque(entry for entry in self.entries if entry.run != run)
            self.size = sum(entry.size for entry in self.entries)
            del self.dropped[run]

    def shown(self, run: str) -> dict[str, Any]:
        """The requests of a run as JSON data."""
        entries, dropped = self.of(run)
        return {"requests": [entry.shown() for entry in entries], "dropped": dropped}
