"""The one way to a server: what reaches it, what is said of a failure, what is never shown."""

from __future__ import annotations

import json
import os
import socket
import sys
import unittest
import urllib.parse
from typing import Any
from unittest import mock

import openai

import rag
from mock_server.scenarios import ANSWERS, CHAT, EMBEDDINGS, REFUSES, Reply, Scenario
from mock_server.server import KEY
from tests.support import RagTestCase, bodies, paths, run_rag

QUESTION = "When is the library open on Saturday?"
TEXT = "On Saturday the library is open from 10:15 to 14:45."


class TestMessages(RagTestCase):
    def said(self, body: Any, status: int = 500, **headers: str) -> str:
        """The stderr of a run whose first request gets this reply."""
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        reply = Reply(status, body, names)
        server = self.serve(
            Scenario("own", "own", "an error", REFUSES, EMBEDDINGS, lambda *_: reply)
        )
        result = run_rag(environ=server.environment("own"))
        self.assert_one_line(result, 1, "rag.py: embeddings: http://127.0.0.1:")
        self.assertEqual(paths(server), ["/embeddings"])
        return result.stderr

    def test_the_message_of_every_dialect_of_error_is_found(self) -> None:
        for body in (
            {"error": {"message": "out of luck", "type": "x", "param": None, "code": 500}},
            {"object": "error", "message": "out of luck", "code": 400},
            {"error": "out of luck", "error_type": "Backend"},
            {"detail": "out of luck"},
            {"code": 20042, "message": "out of luck", "data": None},
            [{"error": {"message": "out of luck"}}],
            b"out of luck",
        ):
            with self.subTest(body=body):
                self.assertIn('it said "out of luck"', self.said(body, 503))
        detail = [{"loc": ["body", "input"], "msg": "too long"}, {"msg": "x"}]
        line = self.said({"detail": detail}, 422)
        self.assertIn('"msg": "too long"', line)
        self.assertIn('"msg": "x"', line)

    def test_an_error_object_with_status_200_is_reported_as_what_it_is(self) -> None:
        for body in (
            {"error": {"message": "no credit"}},
            {"object": "error", "message": "no credit"},
            {"error": "no credit"},
        ):
            self.assertIn('answered 200 with an error: "no credit"', self.said(body, 200))

    def test_what_a_server_writes_is_made_printable_and_shortened(self) -> None:
        line = self.said({"error": {"message": "bad\n\x1b[2J\u202eword\x00 " + "x" * 500}}, 503)
        self.assertIn('it said "bad \\u001b[2J\\u202eword\\u0000 xxx', line)
        self.assertIn('x…"', line)
        shown = line.partition('it said "')[2].rstrip('"\n')
        self.assertEqual((len(shown), shown.count("x")), (200, 169))

    def test_a_key_in_what_a_server_writes_is_blotted_out(self) -> None:
        line = self.said({"error": {"message": f"wrong key {KEY} given"}}, 401)
        self.assertIn('it said "wrong key [key] given"', line)
        self.assertNotIn(KEY, line)

    def test_nothing_is_shown_of_what_repeats_the_question_or_a_record(self) -> None:
        for echo in (
            QUESTION,
            f"input: {TEXT}",
            TEXT[5:29],
            TEXT.replace(" ", "\n  "),
            TEXT.replace(" ", "\\n"),
            TEXT.upper(),
            TEXT.replace(" ", '\\" '),
            urllib.parse.quote(TEXT),
            "".join(f"&#{ord(char)};" for char in TEXT),
            TEXT.replace(" ", "<br>"),
            "".join(f"\\x{ord(char):02x}" for char in TEXT),
            "Closed days",
            "自行车",
            json.dumps("自行车可以停在北门旁边的车棚里，最多停放六个小时。"),
        ):
            with self.subTest(echo=echo):
                line = self.said({"error": {"message": f"cannot read {echo}"}}, 400)
                self.assertIn("it said (not shown: it repeats the question or a record)", line)
                self.assertNotIn("cannot read", line)
        self.assertIn(TEXT[5:20], self.said({"error": {"message": TEXT[5:20]}}, 400))

    def test_a_key_in_another_spelling_is_not_shown(self) -> None:
        for spelling in (
            KEY.upper(),
            urllib.parse.quote(KEY).replace("m", "%6D"),
            KEY.replace("-", "&#45;"),
            "".join(f"\\u{ord(char):04x}" for char in KEY),
            KEY.replace("-", " -\n"),
        ):
            with self.subTest(spelling=spelling):
                line = self.said({"error": {"message": f"bad key {spelling}"}}, 401)
                self.assertIn("it said (not shown: it holds the key)", line)

    def test_what_the_sdk_itself_cannot_read_is_one_line(self) -> None:
        for headers in (
            {"Content_Type": "text/plain; charset=hex"},
            {"Content_Type": "text/plain; charset=undefined"},
        ):
            line = self.said(b"upstream failed", 400, **headers)
            self.assertIn("/embeddings ", line)

    def test_a_cookie_is_not_kept(self) -> None:
        def change(good: Any, request: Any) -> Reply:
            return Reply(200, good, {"Set-Cookie": "a=b; Max-Age=" + "9" * 400})

        server = self.serve(Scenario("own", "own", "a cookie", ANSWERS, EMBEDDINGS, change))
        result = run_rag(environ=server.environment("own"))
        self.assertEqual((result.status, result.stderr), (0, ""))
        self.assertNotIn("cookie", server.request_log.entries[1].headers)

    def test_no_piece_of_a_key_is_shown_wherever_a_text_is_cut(self) -> None:
        padding = " " * (2000 - len(KEY) + 1)
        line = self.said({"error": {"message": f"{padding}{KEY}"}}, 401)
        self.assertNotIn(KEY[:6], line)
        server = self.serve()
        for argv, variable, value in (
            ([f"{'x' * 440}{KEY}", "y"], "RAG_SOURCES", "3"),
            ([], "API_TIMEOUT", "x" * 25 + KEY),
            ([], "API_EMBEDDING_ENCODING", KEY * 2),
        ):
            environ = {**server.environment(), variable: value}
            self.assertNotIn(KEY[:6], run_rag(*argv, environ=environ).stderr)

    def test_the_request_id_and_the_wait_are_shown(self) -> None:
        line = self.said({"error": "busy"}, 429, Retry_After="7", X_Request_Id="req-1")
        advice = "too many requests, or no credit left; API_RETRIES lets the SDK ask again"
        self.assertIn(f'{advice}; retry-after: "7"; x-request-id: "req-1"; it said "busy"', line)

    def test_a_redirect_is_named_with_its_target_and_not_followed(self) -> None:
        for target in ("https://elsewhere.example/v1/embeddings", "/v2/embeddings"):
            line = self.said(b"", 308, Location=target)
            advice = "answered 308; a redirect, which is not followed; look at API_BASE_URL"
            self.assertIn(f'{advice}; location: "{target}"', line)

    def test_an_error_without_a_body_says_nothing_of_it(self) -> None:
        for body in (b"", b" \n"):
            self.assertNotIn("it said", self.said(body, 503))

    def test_the_address_that_fails_and_the_variables_of_its_stage_are_named(self) -> None:
        server = self.serve()
        environ = {
            **server.environment(),
            "API_RERANK_BASE_URL": server.base_url("http-404-rerank"),
            "API_RERANK_KEY": KEY,
        }
        line = run_rag(environ=environ).stderr
        self.assertIn(f"{server.base_url('http-404-rerank')}/rerank answered 404; ", line)
        self.assertIn("look at API_RERANK_BASE_URL", line)

    def test_an_error_at_the_chat_says_nothing_of_batches(self) -> None:
        server = self.serve()
        line = run_rag(environ=server.environment("http-500-answer")).stderr
        self.assertIn("rag.py: answer: ", line)
        self.assertNotIn("API_EMBEDDING_BATCH", line)


class TestShortKeys(RagTestCase):
    def test_what_holds_a_key_too_short_to_blot_out_is_not_shown(self) -> None:
        reply = Reply(401, {"error": "the key none is wrong"})
        own = Scenario("own", "own", "an error", REFUSES, EMBEDDINGS, lambda *_: reply)
        line = run_rag(environ=self.serve(own, key="none").environment("own")).stderr
        self.assertIn("it said (not shown: it holds the key)", line)

    def test_a_key_that_is_the_name_of_a_stage_blots_out_no_stage(self) -> None:
        own = Scenario("own", "own", "status 503", REFUSES, EMBEDDINGS, lambda *_: Reply(503, b""))
        line = run_rag(environ=self.serve(own, key="embeddings").environment("own")).stderr
        self.assertTrue(line.startswith("rag.py: embeddings: http://127.0.0.1:"))

    def test_an_id_that_is_the_key_is_blotted_out(self) -> None:
        content = json.dumps({"answer": "x", "source_ids": [KEY]})
        reply = {"choices": [{"finish_reason": "stop", "message": {"content": content}}]}
        server = self.serve(
            Scenario("own", "own", "the key as an id", REFUSES, CHAT, lambda *_: reply)
        )
        result = run_rag("--explain", environ=server.environment("own"))
        self.assertIn('source_ids[0] is "[key]"', result.stderr)
        self.assertNotIn(KEY, result.stderr)


class TestConnections(RagTestCase):
    def refused(self, **environ: str) -> str:
        given = {"API_KEY": "secret-key-0001", "API_MODEL": "m", "API_EMBEDDING_MODEL": "e"}
        result = run_rag(environ={"API_BASE_URL": "http://127.0.0.1:9/v1", **given, **environ})
        self.assert_one_line(result, 2 if "settings" in result.stderr else 1, "rag.py: ")
        return result.stderr

    def test_a_port_where_nobody_listens(self) -> None:
        with socket.socket() as taken:  # bound, and not listening
            taken.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
            line = self.refused(API_BASE_URL=url)
        self.assertIn(
            f"embeddings: the connection to {url}/embeddings failed; look at API_BASE_URL; ", line
        )

    def test_a_host_that_does_not_resolve(self) -> None:
        failure = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        with mock.patch("socket.getaddrinfo", side_effect=failure):
            line = run_rag(
                environ={**self.serve().environment(), "API_BASE_URL": "https://no.invalid/v1"}
            ).stderr
        self.assertIn(
            "the connection to https://no.invalid/v1/embeddings failed; look at API_BASE_URL", line
        )
        self.assertIn("Name or service not known", line)

    def test_a_broken_proxy_variable_is_named_without_its_value(self) -> None:
        for variable in ("ALL_PROXY", "http_proxy", "HTTPS_PROXY"):
            line = self.refused(**{variable: "gopher://user:hunter22@127.0.0.1:9"})
            self.assertIn(
                "settings: ValueError while making the HTTP client; look at API_BASE_URL", line
            )
            self.assertIn(variable, line)
            self.assertNotIn("hunter22", line)

    def test_an_address_of_which_no_client_can_be_made_is_a_settings_error(self) -> None:
        for url in ("http://[:::1]/v1", "http://[1.2.3.4]/v1", f"http://{'ü' * 63}/v1"):
            line = self.refused(API_BASE_URL=url)
            self.assertIn("InvalidURL while making the HTTP client; look at API_BASE_URL", line)

    def test_a_broken_tls_file_is_named(self) -> None:
        line = self.refused(SSL_CERT_FILE="/nowhere/ca.pem")
        self.assertIn("settings: ", line)
        self.assertIn("FileNotFoundError while making the HTTP client; look at API_BASE_URL ", line)
        self.assertIn(" SSL_CERT_FILE", line)
        self.assertNotIn("nowhere", line)

    def test_the_failure_of_a_proxy_tells_of_the_proxy(self) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            proxy = f"http://user:hunter22@127.0.0.1:{taken.getsockname()[1]}"
            result = run_rag(environ={**self.serve().environment(), "HTTP_PROXY": proxy})
        warning, line, _ = result.stderr.split("\n")
        self.assertEqual(
            warning,
            "rag.py: warning: plain http in API_BASE_URL: key and records can be read on the way",
        )
        self.assertIn("look at API_BASE_URL and the proxy variables", line)
        self.assertNotIn("hunter22", result.stderr)

    def test_a_missing_package_is_one_line(self) -> None:
        with mock.patch.dict("sys.modules", {"openai": None}):
            result = run_rag(environ=self.serve().environment())
        self.assert_one_line(result, 2, "rag.py: settings: cannot import openai (import of openai ")
        self.assertIn("; run `python -m pip install -U openai`\n", result.stderr)

    def test_a_package_that_fails_as_it_is_imported_is_one_line(self) -> None:
        self.file("openai.py", "raise RuntimeError('it does not fit pydantic')")
        modules = {name: module for name, module in sys.modules.items() if "openai" not in name}
        with mock.patch.dict("sys.modules", modules, clear=True):
            with mock.patch.object(sys, "path", [str(self.folder), *sys.path]):
                result = run_rag(environ=self.serve().environment())
        self.assert_one_line(result, 2, "cannot import openai (it does not fit pydantic); run")


class TestCost(RagTestCase):
    def test_a_server_that_is_not_asked_gets_no_client_and_no_warning(self) -> None:
        unused = {"API_RERANK_BASE_URL": "http://[:::1]/v1", "API_RERANK_KEY": "k"}
        result = run_rag(environ={**self.serve().environment(rerank=False), **unused})
        self.assertEqual((result.status, result.stderr), (0, ""))

    def test_the_clients_are_closed_whatever_happens(self) -> None:
        server = self.serve()
        for scenario in ("plain", "http-503"):
            really = openai.OpenAI.close
            with mock.patch.object(
                openai.OpenAI, "close", autospec=True, side_effect=really
            ) as close:
                run_rag(environ=server.environment(scenario))
            self.assertTrue(close.called)

    def test_a_request_that_succeeds_looks_at_no_private_text(self) -> None:
        with mock.patch.object(rag, "quoted", side_effect=AssertionError("looked")):
            self.assertEqual(run_rag(environ=self.serve().environment()).status, 0)


class TestEnvironment(RagTestCase):
    def test_variables_of_the_sdk_change_nothing_and_show_nothing(self) -> None:
        server = self.serve()
        foreign = {
            "OPENAI_ORG_ID": "org-FOREIGN",
            "OPENAI_PROJECT_ID": "proj-FOREIGN",
            "OPENAI_CUSTOM_HEADERS": "Authorization: Bearer FOREIGN\nX-Foreign: FOREIGN",
            "OPENAI_API_KEY": "sk-FOREIGN",
            "OPENAI_BASE_URL": "http://127.0.0.1:9/FOREIGN",
            "OPENAI_LOG": "debug",
        }
        result = run_rag(environ={**server.environment(), **foreign})
        self.assertEqual((result.status, result.stderr), (0, ""))
        for entry in server.request_log.entries:
            self.assertEqual(entry.authorization, "right")
            for name in ("x-foreign", "openai-organization", "openai-project"):
                self.assertNotIn(name, entry.headers)
        self.assertEqual(paths(server), ["/embeddings", "/rerank", "/chat/completions"])

    def test_importing_rag_changes_no_variable(self) -> None:
        with mock.patch.dict(os.environ, {"OPENAI_LOG": "debug"}):
            rag.read_settings({**self.serve().environment()})
            self.assertEqual(os.environ["OPENAI_LOG"], "debug")

    def test_the_sdk_asks_again_only_as_often_as_it_is_told(self) -> None:
        for retries, requests in (("0", 1), ("2", 3)):
            server = self.serve()
            environ = {**server.environment("http-503"), "API_RETRIES": retries}
            with mock.patch("time.sleep"):
                self.assertEqual(run_rag(environ=environ).status, 1)
            self.assertEqual(len(server.request_log.entries), requests)


class TestThreeServers(RagTestCase):
    def test_each_server_gets_its_own_key_and_its_own_stage_and_nothing_else(self) -> None:
        chat, embeddings, rerank = (self.serve(key=f"key-of-{name}") for name in "cer")
        environ = {
            **chat.environment(),
            "API_EMBEDDING_BASE_URL": embeddings.base_url(),
            "API_EMBEDDING_KEY": embeddings.key,
            "API_RERANK_BASE_URL": rerank.base_url(),
            "API_RERANK_KEY": rerank.key,
        }
        result = run_rag(environ=environ)
        self.assertEqual((result.status, result.stderr), (0, ""))
        for server, path in (
            (embeddings, "/embeddings"),
            (rerank, "/rerank"),
            (chat, "/chat/completions"),
        ):
            self.assertEqual(paths(server), [path])
            sent = [entry.authorization for entry in server.request_log.entries]
            self.assertEqual(sent, ["right"])
        # A record that is no source is in no request to the chat server.
        self.assertIn("atlas of canals", json.dumps(bodies(embeddings, "/embeddings")))
        self.assertNotIn("atlas of canals", json.dumps(bodies(chat, "/chat/completions")))


class TestPlainHttp(unittest.TestCase):
    def test_an_address_is_exposed_if_plain_http_leaves_the_machine(self) -> None:
        for url, environ, expected in (
            ("http://127.0.0.1:1/v1", {}, False),
            ("http://127.9.9.9/v1", {}, False),
            ("http://localhost:1/v1", {}, False),
            ("http://[::1]:1/v1", {}, False),
            ("https://api.example.com/v1", {}, False),
            ("https://api.example.com/v1", {"HTTPS_PROXY": "http://p:1"}, False),
            ("http://api.example.com/v1", {}, True),
            ("http://127.0.0.1.example.com/v1", {}, True),
            ("http://192.168.1.5/v1", {}, True),
            ("http://127.0.0.1:1/v1", {"HTTP_PROXY": "http://p:1"}, True),
            ("http://127.0.0.1:1/v1", {"ALL_PROXY": "http://p:1"}, True),
            ("http://127.0.0.1:1/v1", {"HTTPS_PROXY": "http://p:1"}, False),
            ("http://127.0.0.1:1/v1", {"HTTP_PROXY": "http://p:1", "NO_PROXY": "127.0.0.1"}, False),
        ):
            with (
                self.subTest(url=url, environ=environ),
                mock.patch.dict(os.environ, environ, clear=True),
            ):
                self.assertEqual(rag.in_the_clear(url), expected)
