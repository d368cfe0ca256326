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
    """A request: of its headers the names, of its body plain data, or text if it was no JSON.

    Keys are in neither. `refused` is why the mock itself answered with an error.
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

    def shown(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "run"}


@dataclass
class RequestLog:
    """The newest requests of all runs in the order in which they arrived.

    `dropped` counts the older ones, by their run. Requests without a run have the run "".
    """

    entries: deque[Entry] = field(default_factory=deque)
    dropped: Counter[str] = field(default_factory=Counter)
    size: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, entry: Entry) -> None:
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
        with self.lock:
            self.entries = deque(entry for entry in self.entries if entry.run != run)
            self.size = sum(entry.size for entry in self.entries)
            del self.dropped[run]

    def shown(self, run: str) -> dict[str, Any]:
        entries, dropped = self.of(run)
        return {"requests": [entry.shown() for entry in entries], "dropped": dropped}
