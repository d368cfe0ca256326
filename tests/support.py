"""How the tests run rag.py: in this process, against a mock server of their own."""

from __future__ import annotations

import io
import json
import os
import sys
import tempfile
import unittest
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import rag
from mock_server.scenarios import SCENARIOS, Scenario
from mock_server.server import KEY, MockServer

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Result:
    """What a run of rag.py leaves behind."""

    status: int
    stdout: str
    stderr: str

    @property
    def document(self) -> Any:
        """The one JSON document on stdout."""
        return json.loads(self.stdout)


class Terminal(io.TextIOWrapper):
    def isatty(self) -> bool:
        return True


def run_rag(
    *argv: str, environ: Mapping[str, str], stream: type[io.TextIOWrapper] = io.TextIOWrapper
) -> Result:
    """rag.main(argv) with nothing but `environ` in the environment, its two streams captured."""
    # A run that fails does not wait for requests under way: their sockets are the collector's.
    warnings.filterwarnings("ignore", "unclosed <socket", ResourceWarning)
    # A folder without certificates: reading the real ones takes longer than the rest of a run.
    environ = {"SSL_CERT_DIR": str(ROOT), **environ}
    out, err = stream(captured()), stream(captured())
    with mock.patch.dict(os.environ, environ, clear=True):
        with mock.patch.object(sys, "stdout", out), mock.patch.object(sys, "stderr", err):
            try:
                status = rag.main(argv)
            except SystemExit as end:  # how argparse ends after --help
                status = end.code if isinstance(end.code, int) else 0
    return Result(status, *map(content, (out, err)))


def captured() -> Any:
    """A file for a stream: rag.py writes to its descriptor, whatever stands before it."""
    return tempfile.TemporaryFile()


def content(stream: Any) -> str:
    """All that was written to a stream, which is closed then."""
    with stream:
        stream.flush()
        stream.buffer.seek(0)
        return str(stream.buffer.read(), "utf-8")


class RagTestCase(unittest.TestCase):
    """A test case with a folder of its own and, once it asks for one, a mock server of its own."""

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def file(self, name: str, content: Any) -> str:
        """The path of a new file: bytes and text as they are, anything else as JSON."""
        data = content if isinstance(content, (bytes, str)) else json.dumps(content)
        path = self.folder / name
        path.write_bytes(data if isinstance(data, bytes) else data.encode("utf-8"))
        return str(path)

    def serve(self, *own: Scenario, key: str = KEY) -> MockServer:
        """A running mock server, with these scenarios beside those of the table."""
        server = MockServer(scenarios={**SCENARIOS, **{each.name: each for each in own}}, key=key)
        server.__enter__()
        self.addCleanup(server.__exit__)
        return server

    def assert_failure(self, result: Result, status: int, line: str) -> None:
        """The run failed with exactly this line, and published nothing."""
        self.assertEqual((result.status, result.stdout), (status, ""), result.stderr)
        self.assertEqual(result.stderr, f"{line}\n")

    def assert_one_line(self, result: Result, status: int, *words: str) -> None:
        """The run failed with one line of at most 500 characters that has these words in it."""
        self.assertEqual((result.status, result.stdout), (status, ""), result.stderr)
        self.assertRegex(result.stderr, r"\A[^\n]{1,499}\n\Z")
        for word in words:
            self.assertIn(word, result.stderr)


def paths(server: MockServer) -> list[str]:
    """The endpoints that were asked, in order; one entry for a run of embedding requests."""
    asked = ["/" + entry.path.split("/v1/")[-1] for entry in server.request_log.entries]
    return [path for i, path in enumerate(asked) if path != "/embeddings" or path not in asked[:i]]


def bodies(server: MockServer, path: str) -> list[Any]:
    """The bodies of the requests to an endpoint, in order."""
    return [entry.body for entry in server.request_log.entries if entry.path.endswith(f"/v1{path}")]
