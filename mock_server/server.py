"""The HTTP server: from an address to a reply, with the request log and the rules of safety.

It is safe to run on a developer's machine: it listens on 127.0.0.1, refuses requests that a web
page may have sent (another Host, any Origin), and neither stores nor prints an API key.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import re
import socket
import socketserver
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from http import HTTPStatus
from typing import Any

from mock_server import endpoints, models
from mock_server.endpoints import Refused, error_body
from mock_server.request_log import ADDRESS, RUN, Entry, RequestLog
from mock_server.scenarios import SCENARIOS, Reply, Scenario
from mock_server.verdict import report

KEY = models.KEY
MAX_BODY = 32 * 2**20
MAX_CONNECTIONS = 256
CONTROLS = (
    "GET /_mock/scenarios, GET and DELETE /_mock/requests and GET /_mock/report, for the requests "
    "of a run with /run/ID before; or POST below /v1"
)
CONTROL = re.compile(RUN + r"/_mock/(?P<thing>[a-z]+)")


class MockServer(socketserver.ThreadingMixIn, http.server.HTTPServer):
    """The service on 127.0.0.1; port 0 means a free port. `tell` gets a line for each request."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = MAX_CONNECTIONS
    # On Windows SO_REUSEADDR would allow two servers on one port.
    allow_reuse_address = os.name != "nt"
    allow_reuse_port = False

    def __init__(
        self,
        port: int = 0,
        tell: Callable[[str], None] = lambda line: None,
        scenarios: Mapping[str, Scenario] = SCENARIOS,
        key: str = KEY,
        suffix: str = "",
    ) -> None:
        self.request_log = RequestLog()
        self.scenarios = scenarios
        self.key = key
        self.suffix = suffix  # appended to the name of each model
        self.tell = tell
        self.places = threading.Semaphore(MAX_CONNECTIONS)
        super().__init__(("127.0.0.1", port), Handler)

    def server_bind(self) -> None:
        # HTTPServer looks up the name of the host here, which can wait for a name server.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = "127.0.0.1", self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        self.places.acquire()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        super().shutdown_request(request)
        self.places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report an error of the mock itself. A client that disconnects is not reported."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            self.tell(f"internal error: {error!r}")

    def base_url(self, scenario: str = "plain", run: str = "") -> str:
        """The address of a scenario, for the requests of a run."""
        path = f"/run/{run}" if run else ""
        path += "" if scenario == "plain" else f"/scenario/{scenario}"
        return f"http://127.0.0.1:{self.server_port}{path}/v1"

    def environment(
        self, scenario: str = "plain", rerank: bool = True, run: str = ""
    ) -> dict[str, str]:
        """The variables that send the requests of a client to this server."""
        return {
            "API_BASE_URL": self.base_url(scenario, run),
            "API_KEY": self.key,
            "API_MODEL": models.CHAT_MODEL + self.suffix,
            "API_EMBEDDING_MODEL": models.EMBEDDING_MODEL + self.suffix,
            "API_RERANK_MODEL": models.RERANK_MODEL + self.suffix if rerank else "",
        }

    def __enter__(self) -> MockServer:
        threading.Thread(
            target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        ).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()
        self.server_close()


class Handler(http.server.BaseHTTPRequestHandler):
    server: MockServer
    protocol_version = default_request_version = "HTTP/1.1"  # no reply without a status line
    timeout = 10  # seconds to wait for a client that sends nothing
    disable_nagle_algorithm = True
    wbufsize = -1  # buffered: else each header would be a packet of its own

    def do_POST(self) -> None:
        self.serve(self.exchange)

    def do_GET(self) -> None:
        self.serve(self.control if "/_mock" in self.path else self.exchange)

    do_DELETE = do_PUT = do_PATCH = do_GET

    def serve(self, answer: Callable[[bytes], Reply]) -> None:
        """Read the request and send the answer. After an error the connection is closed."""
        try:
            reply = answer(self.read_body())
        except Refused as error:
            self.close_connection = True
            self.send(Reply(error.status, error_body(error.message, error.param)))
            self.drain()
        else:
            self.send(reply)

    def exchange(self, data: bytes) -> Reply:
        """Add a request to the request log, and return the reply to it."""
        self.path = self.path.replace(self.server.key, "[key]")
        address = ADDRESS.fullmatch(self.path)
        bearer = self.headers.get("Authorization", "")
        good, key = bearer == f"Bearer {self.server.key}", self.server.key.encode()
        entry = Entry(
            method=self.command,
            path=self.path,
            scenario=(address["scenario"] or "") if address else "",
            authorization="missing" if not bearer else "right" if good else "wrong",
            run=(address["run"] or "") if address else "",
            headers=sorted(name.lower() for name in self.headers),
            body=logged(data.replace(key, b"[key]")),
            key_in_body=key in data,
            key_elsewhere="[key]" in self.path or self.key_in_headers(),
            size=len(data),
        )
        self.server.request_log.add(entry)
        try:
            reply = self.reply(address, entry, data)
        except Refused as error:
            entry.refused = error.message.replace(self.server.key, "[key]")
            reply = Reply(error.status, error_body(error.message, error.param))
        entry.status = reply.status
        line = f"{self.command} {printable(entry.path)} {reply.status}  {sizes(entry)}"
        self.server.tell(line.rstrip())
        return reply

    def key_in_headers(self) -> bool:
        """Whether the key is in another header than Authorization."""
        others = [value for name, value in self.headers.items() if name.lower() != "authorization"]
        return any(self.server.key in value for value in others)

    def reply(self, address: re.Match[str] | None, entry: Entry, data: bytes) -> Reply:
        """The scenario's reply to a good request. Raise Refused for any other request."""
        if self.requestline.split()[1].startswith("//"):  # http.server removes one of them
            raise Refused(404, "the path begins with two slashes; join address and path with one")
        if address is None or address["path"] not in endpoints.ENDPOINTS:
            paths = ", ".join(endpoints.ENDPOINTS)
            raise Refused(
                404,
                "unknown path; POST goes to /v1, /scenario/NAME/v1 or /run/ID/scenario/NAME/v1, "
                f"followed by one of {paths}",
            )
        if entry.scenario and entry.scenario not in self.server.scenarios:
            raise Refused(404, "unknown scenario; `python -m mock_server scenarios` lists them")
        if entry.method != "POST":
            raise Refused(405, f"the method is {entry.method}; this path is for POST")
        if entry.authorization != "right":
            raise Refused(
                401, f"{entry.authorization} API key; send Authorization: Bearer KEY", None
            )
        path, request = address["path"], endpoints.parse(data)
        endpoints.check(path, request, self.server.suffix)
        good = endpoints.REPLIES[path](request)
        reply = self.server.scenarios[entry.scenario or "plain"].reply(path, good, request)
        places = {
            "{port}": str(self.server.server_port),
            "{run}": f"/run/{entry.run}" if entry.run else "",
        }
        for mark, value in places.items():
            headers = {name: text.replace(mark, value) for name, text in reply.headers.items()}
            reply = replace(reply, headers=headers)
        if reply.status == 401:
            reply = replace(reply, body=reply.data().replace(b"{key}", self.server.key.encode()))
        return reply

    def handle_expect_100(self) -> bool:
        """Send 100 Continue now, because the client waits for it before it sends the body."""
        super().handle_expect_100()
        self.wfile.flush()
        return True

    def drain(self) -> None:
        """Read the rest of a refused request: closing earlier could destroy the reply."""
        left = 2 * MAX_BODY
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            self.connection.settimeout(2)
            while left > 0 and (part := self.connection.recv(65536)):
                left -= len(part)

    def read_body(self) -> bytes:
        """The whole request body. Raise Refused if the request is unsafe or cannot be read."""
        self.check_origin()
        lengths, codings = (
            self.headers.get_all("Content-Length", []),
            self.headers.get_all("Transfer-Encoding", []),
        )
        if len(lengths) + len(codings) > 1:
            raise Refused(400, "more than one of Content-Length and Transfer-Encoding")
        if codings:
            if codings[0].strip().lower() != "chunked":
                raise Refused(501, "the only Transfer-Encoding that is read is chunked")
            return self.read_chunks()
        if not lengths and self.command != "POST":
            return b""
        if not lengths:
            raise Refused(411, "Content-Length is missing")
        if not re.fullmatch(r"[0-9]{1,15}[ \t]*", lengths[0]):
            raise Refused(400, "Content-Length is not a number")
        if int(lengths[0]) > MAX_BODY:
            raise Refused(413, f"the body is larger than {MAX_BODY} bytes")
        data = self.rfile.read(int(lengths[0]))
        if len(data) < int(lengths[0]):
            raise Refused(400, "the body is shorter than its Content-Length")
        return data

    def read_chunks(self) -> bytes:
        """The body of a request with Transfer-Encoding: chunked."""
        parts: list[bytes] = []
        total = 0
        while True:
            size = re.fullmatch(
                rb"([0-9a-fA-F]{1,8})[ \t]*(;[^\r\n]*)?\r?\n", self.rfile.readline(1024)
            )
            if not size:
                raise Refused(400, "a chunk has no size")
            length = int(size[1], 16)
            total += length
            if total > MAX_BODY:
                raise Refused(413, f"the body is larger than {MAX_BODY} bytes")
            if not length:
                break
            parts.append(self.rfile.read(length))
            if len(parts[-1]) < length or self.rfile.readline(3) not in (b"\r\n", b"\n"):
                raise Refused(400, "a chunk does not have its size")
        while (line := self.rfile.readline(1024)) not in (b"\r\n", b"\n"):
            if not line.endswith(b"\n"):
                raise Refused(400, "a line after the chunks is too long, or cut off")
        return b"".join(parts)

    def check_origin(self) -> None:
        """Raise Refused for a request that a web page may have sent (also by DNS rebinding)."""
        hosts = [
            f"{host}:{self.server.server_port}" for host in ("127.0.0.1", "localhost", "[::1]")
        ]
        if self.headers.get_all("Host", []) not in [[host] for host in hosts]:
            raise Refused(
                403, f"the Host header must be {hosts[0]}, or localhost or [::1] with that port"
            )
        if "Origin" in self.headers:
            raise Refused(
                403, "requests with an Origin header are refused: web pages may not use this mock"
            )

    def control(self, data: bytes) -> Reply:
        """The reply for an address below /_mock or /run/ID/_mock. A request body is ignored."""
        address = CONTROL.fullmatch(self.path)
        run = (address["run"] or "") if address else ""
        log = self.server.request_log
        match (self.command, address and address["thing"]):
            case ("GET", "scenarios"):
                value: Any = [scenario.shown() for scenario in self.server.scenarios.values()]
            case ("GET", "requests"):
                value = log.shown(run)
            case ("DELETE", "requests"):
                log.clear(run)
                value = log.shown(run)
            case ("GET", "report"):
                value = report(self.server.scenarios, *log.of(run))
            case _:
                raise Refused(404, f"unknown path for {self.command}; there are {CONTROLS}")
        return Reply(200, f"{json.dumps(value)}\n".encode())

    def send(self, reply: Reply) -> None:
        """Write the reply. Some scenarios write less than Content-Length says, or nothing."""
        body = reply.data()
        if reply.ending != "whole":
            self.close_connection = True
            if reply.ending == "silence":
                self.connection.settimeout(60)  # longer than a client may run
                with contextlib.suppress(OSError):
                    self.rfile.read(1)  # returns when the client disconnects
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        self.send_response(reply.status)
        headers = {
            "Content-Type": "application/json",
            "X-Request-Id": "mock-request",
            **reply.headers,
        }
        headers["X-Mock-Server"] = "deterministic mock, no model"
        headers["Content-Length"] = str(len(body) + reply.missing_bytes)
        if self.close_connection or reply.missing_bytes:
            self.close_connection = True
            headers["Connection"] = "close"
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Send the error for a request that http.server cannot parse; its own form is HTML."""
        self.close_connection = True
        self.send(Reply(int(code), error_body(message or HTTPStatus(code).phrase)))
        self.drain()

    def log_message(self, format: str, *args: object) -> None:
        """Do nothing, because `tell` gets a line for each request."""

    def version_string(self) -> str:
        return "mock_server"


def logged(data: bytes) -> Any:
    """A body for the request log: plain data, or printable text if it is not JSON."""
    try:
        return models.plain_data(data.decode("utf-8"))
    except ValueError:
        return printable(data.decode("utf-8", "backslashreplace"))


def printable(text: str) -> str:
    """`text` with unprintable characters escaped, so that it cannot control a terminal."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def sizes(entry: Entry) -> str:
    """The sizes of a request; "" for one that the mock refused."""
    if entry.refused:
        return ""
    request = entry.body
    match entry.endpoint:
        case "/embeddings":
            return f"inputs: {len(models.inputs_of(request))}"
        case "/rerank":
            return f"documents: {len(models.documents_of(request))}"
        case _:
            sources = models.sources_of(request)
            return f"messages: {len(request['messages'])}, sources: {len(sources)}"
