"""Run rag.py in this process, against a mock server of its own."""

from __future__ import annotations

import contextlib
import io
import json
import os
import tempfile
import unittest
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import rag
from mock_server.scenarios import SCENARIOS, Change, Scenario
from mock_server.server import KEY, MockServer

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Result:
    """The exit status and the output of a run of rag.py."""

    status: int
    stdout: str
    stderr: str

    @property
    def document(self) -> Any:
        """The one JSON document on stdout."""
        return json.loads(self.stdout)


class Terminal(io.TextIOWrapper):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def run_rag(
    *argv: str, environ: Mapping[str, str], stream: type[io.TextIOWrapper] = io.TextIOWrapper
) -> Result:
    """Run rag.main(argv) with these environment variables only, and capture both streams."""
    # A run that fails does not wait for requests under way, and leaves their sockets open.
    warnings.filterwarnings("ignore", "unclosed <socket", ResourceWarning)
    # A folder without certificates: reading the real ones takes longer than the rest of a run.
    environ = {"SSL_CERT_DIR": str(ROOT), **environ}
    # ASCII, as in a locale without UTF-8: rag.py sets the encoding by itself.
    out, err = (stream(io.BytesIO(), encoding="ascii", newline="") for _ in range(2))
    with mock.patch.dict(os.environ, environ, clear=True):
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                status = rag.main(argv)
            except SystemExit as end:  # raised by argparse after --help
                status = int(end.code or 0)
    return Result(status, text_of(out), text_of(err))


def text_of(stream: io.TextIOWrapper) -> str:
    """Return all that was written to a stream over a BytesIO."""
    stream.flush()
    return bytes(getattr(stream.buffer, "getvalue")()).decode()  # noqa: B009


class RagTestCase(unittest.TestCase):
    """A test case with a folder of its own, and with mock servers of its own."""

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def file(self, name: str, content: Any) -> str:
        """Return the path of a new file: bytes and text as they are, anything else as JSON."""
        data = content if isinstance(content, (bytes, str)) else json.dumps(content)
        path = self.folder / name
        path.write_bytes(data if isinstance(data, bytes) else data.encode("utf-8"))
        return str(path)

    def serve(self, *own: Scenario, key: str = KEY) -> MockServer:
        """Return a running mock server, with these scenarios beside those of the table."""
        server = MockServer(scenarios={**SCENARIOS, **{each.name: each for each in own}}, key=key)
        server.__enter__()
        self.addCleanup(server.__exit__)
        return server

    def assert_failure(self, result: Result, status: int, line: str) -> None:
        """The run failed with exactly this line, and published nothing."""
        self.assertEqual((result.status, result.stdout), (status, ""), result.stderr)
        self.assertEqual(result.stderr, f"{line}\n")

    def assert_one_line(self, result: Result, status: int, *words: str) -> None:
        """The run failed with one line of at most 500 characters that contains these words."""
        self.assertEqual((result.status, result.stdout), (status, ""), result.stderr)
        self.assertRegex(result.stderr, r"\A[^\n]{1,499}\n\Z")
        for word in words:
            self.assertIn(word, result.stderr)


def own(path: str, change: Change) -> Scenario:
    """Return a scenario with the name "own", which changes the replies of one endpoint."""
    return Scenario("own", "own", "a reply of this test", "", path, change)


def paths(server: MockServer) -> list[str]:
    """Return the endpoints that were asked, in order; one entry for all embedding requests."""
    asked = ["/" + entry.path.split("/v1/")[-1] for entry in server.request_log.entries]
    return [path for i, path in enumerate(asked) if path != "/embeddings" or path not in asked[:i]]


def bodies(server: MockServer, path: str) -> list[Any]:
    """Return the bodies of the requests to an endpoint, in order."""
    return [entry.body for entry in server.request_log.entries if entry.path.endswith(f"/v1{path}")]
