"""Run a recipe in this process, with a mock server and a real Chroma."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from unittest import mock

import rag
from tests.support import ROOT, Result, text_of


def run_recipe(document: Callable[[], str], *argv: str, environ: Mapping[str, str]) -> Result:
    """Run a recipe with nothing but `environ` in the environment, and capture its two streams."""
    # The agent's connections end with its process, and here with the garbage of a later run.
    warnings.filterwarnings("ignore", "unclosed", ResourceWarning)
    # A folder without certificates: reading the real ones takes longer than the rest of a run.
    environ = {"SSL_CERT_DIR": str(ROOT), **environ}
    out, err = (io.TextIOWrapper(io.BytesIO()) for _ in range(2))
    with (
        mock.patch.dict(os.environ, environ, clear=True),
        mock.patch.object(sys, "argv", ["recipe", *argv]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        status = rag.run_command("recipe", document)
    return Result(status, text_of(out), text_of(err))


class Chroma:
    """A Chroma server on a free port of 127.0.0.1, which keeps its data in a folder."""

    def __init__(self, folder: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        command = shutil.which("chroma", path=os.path.dirname(sys.executable)) or "chroma"
        self.process = subprocess.Popen(
            [command, "run", "--path", folder, "--host", "127.0.0.1", "--port", str(port)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8",
        )  # fmt: skip
        log = self.process.stdout
        assert log is not None
        lines = []
        while "listening on address" not in (line := log.readline()):
            lines.append(line)
            assert line, f"Chroma did not start: {''.join(lines)}"
        # A pipe that nobody reads would block the server once it is full.
        self.reader = threading.Thread(target=log.read, daemon=True)
        self.reader.start()

    def stop(self) -> None:
        """End the server, and wait until it has ended."""
        self.process.kill()
        self.process.wait()
        self.reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()
