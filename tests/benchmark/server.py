"""The service of the benchmark: vectors of 1,536 numbers that take it little CPU time.

    python -m tests.benchmark.server     prints its port, and serves until its stdin is closed

A vector is 16 pieces of 96 numbers, each piece of length 1/4, so that the vector has length 1. The
digest of a text selects 16 of 256 pieces, which are written out once, as text and in base64.

/v1 serves correct replies. /401/v1 refuses the key. /429/v1 refuses the batch with "Notice 5000".
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.server
import json
import math
import os
import random
import socketserver
import sys
import threading
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

DIMENSIONS, PARTS, KINDS = 1536, 16, 256
PART = DIMENSIONS // PARTS  # 384 bytes of float32: a multiple of 3, so base64 of it has no padding


@dataclass(frozen=True)
class Piece:
    """96 numbers as float32 of this machine, as JSON text, and in base64."""

    raw: bytes
    text: bytes
    base64: bytes


@cache
def pieces() -> list[Piece]:
    """Return the 256 pieces, which are the same in every run."""
    return [piece(random.Random(seed)) for seed in range(KINDS)]


def piece(numbers: random.Random) -> Piece:
    drawn = [numbers.gauss(0, 1) for _ in range(PART)]
    scale = math.sqrt(PARTS) * math.hypot(*drawn)
    values = array("f", [number / scale for number in drawn])
    text = ",".join(f"{value:.9g}" for value in values)  # what float32 needs, and services send
    return Piece(values.tobytes(), text.encode(), base64.b64encode(values.tobytes()))


def chosen(text: str) -> list[Piece]:
    """Return the 16 pieces of the vector of a text."""
    everything = pieces()
    return [everything[byte] for byte in hashlib.sha256(text.encode()).digest()[:PARTS]]


def vector(text: str) -> array[float]:
    """Return the vector of a text, 1,536 numbers, as rag.py holds it."""
    return array("f", b"".join(each.raw for each in chosen(text)))


def embeddings(request: Mapping[str, Any]) -> bytes:
    """Return the reply: a row for each input, in their order, with numbers or base64."""
    in_base64 = request.get("encoding_format") == "base64"
    rows = [
        b'{"object":"embedding","index":%d,"embedding":%b}' % (index, encoded(text, in_base64))
        for index, text in enumerate(request["input"])
    ]
    used = sum(len(text) for text in request["input"]) // 4
    end = {"model": request["model"], "usage": {"prompt_tokens": used, "total_tokens": used}}
    rest = json.dumps(end).encode().removeprefix(b"{")
    return b'{"object":"list","data":[%b],%b' % (b",".join(rows), rest)


def encoded(text: str, in_base64: bool) -> bytes:
    if in_base64:
        return b'"%b"' % b"".join(each.base64 for each in chosen(text))
    return b"[%b]" % b",".join(each.text for each in chosen(text))


def chat(request: Mapping[str, Any]) -> bytes:
    """Return the reply: an answer that cites the first source of the last user message."""
    users = [each["content"] for each in request["messages"] if each["role"] == "user"]
    source = json.loads(users[-1])["sources"][0]
    content = json.dumps({"answer": source["text"], "source_ids": [source["id"]]})
    message = {"role": "assistant", "content": content}
    reply = {
        "id": "chatcmpl-benchmark",
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": request["model"],
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120},
    }
    return json.dumps(reply).encode()


class BenchmarkServer(http.server.ThreadingHTTPServer):
    """The service on a free port of 127.0.0.1. `inputs` counts the texts that it embedded."""

    def __init__(self) -> None:
        self.inputs = 0
        self.lock = threading.Lock()
        pieces()
        super().__init__(("127.0.0.1", 0), Handler)

    def server_bind(self) -> None:
        # HTTPServer would look up the name of the host here, which can wait for a name server.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = "127.0.0.1", self.server_address[1]

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def __enter__(self) -> BenchmarkServer:
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()
        self.server_close()


class Handler(http.server.BaseHTTPRequestHandler):
    server: BenchmarkServer
    protocol_version = "HTTP/1.1"  # keeps connections open
    disable_nagle_algorithm = True
    wbufsize = -1  # head and body of a small reply in one packet

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        scenario = self.path.partition("/v1/")[0]
        if self.path.endswith("/chat/completions"):
            self.send(200, chat(request))
            return
        later = any(text.startswith("Notice 5000") for text in request["input"])
        if scenario == "/401" or (scenario == "/429" and later):
            self.send(int(scenario[1:]), b'{"error": {"message": "refused"}}')
            return
        with self.server.lock:
            self.server.inputs += len(request["input"])
        self.send(200, embeddings(request))

    def do_GET(self) -> None:
        """Send the number of texts that were embedded, whatever the path."""
        self.send(200, str(self.server.inputs).encode())

    def send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()

    def log_message(self, format: str, *args: object) -> None:
        """Write no log."""


def main() -> None:
    with BenchmarkServer() as server, contextlib.suppress(KeyboardInterrupt):
        print(server.server_port, flush=True)
        sys.stdin.read()
    os._exit(0)  # connections that clients left open have threads of their own


if __name__ == "__main__":
    main()
