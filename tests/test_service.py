"""Requests and failures: what reaches a server, what a message says, what it never shows."""

from __future__ import annotations

import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import unittest
from collections.abc import Mapping
from typing import Any
from unittest import mock

import openai

import rag
from mock_server.endpoints import ENDPOINTS
from mock_server.scenarios import CHAT, EMBEDDINGS, RERANK, Reply, message
from mock_server.server import KEY, MockServer
from tests.support import RagTestCase, Result, bodies, own, paths, run_rag

PAGE = b"<!DOCTYPE html>\n<html><title>\n Sign in </title>"
BETWEEN = "it may come from a proxy or login page in between"
SENT = "sent with API_EMBEDDING_MODEL=mock-embedding, API_EMBEDDING_BATCH=32"


class ServiceTestCase(RagTestCase):
    def run_with(self, reply: Any, path: str = EMBEDDINGS, **environ: str) -> Result:
        """Return the result of a run in which an endpoint gives this reply."""
        reply = reply if isinstance(reply, Reply) else Reply(500, reply)
        server = self.serve(own(path, lambda *_: reply))
        result = run_rag(environ={**server.environment("own"), **environ})
        self.assertEqual(paths(server)[-1], path)
        return result

    def said(self, reply: Any, path: str = EMBEDDINGS, **environ: str) -> str:
        """Return the message of such a run, which fails."""
        result = self.run_with(reply, path, **environ)
        stage = {EMBEDDINGS: "embeddings", RERANK: "rerank", CHAT: "answer"}[path]
        self.assert_one_line(result, 1, f"rag.py: {stage}: http://127.0.0.1:", f"/own/v1{path}")
        return result.stderr


class TestServerMessages(ServiceTestCase):
    def test_the_message_is_found_in_every_form_of_error(self) -> None:
        bodies: tuple[Any, ...] = (
            {"error": {"message": "out of luck", "type": "x", "param": None, "code": 500}},
            {"object": "error", "message": "out of luck", "code": 400},
            {"error": "out of luck", "error_type": "Backend"},
            {"error": {"detail": "out of luck"}},
            {"detail": "out of luck"},
            {"code": 20042, "message": "out of luck", "data": None},
            {"error": None, "message": "out of luck"},
            {"error": True, "message": "out of luck"},
            {"error": 500, "message": "out of luck"},
            b" out of\nluck ",
        )
        for body in bodies:
            with self.subTest(body=body):
                self.assertIn(' answered 500: "out of luck"; ', self.said(body))

    def test_a_body_without_a_message_is_shown_itself(self) -> None:
        bodies: tuple[Any, ...] = (
            {"detail": [{"loc": ["body", "input"], "msg": "too long"}]},
            [{"error": {"message": "too long"}}],
        )
        for body in bodies:
            with self.subTest(body=body):
                self.assertIn("too long", self.said(body))

    def test_a_page_is_named_with_its_title(self) -> None:
        for body, title in (
            (PAGE, "Sign in"),
            (b"<html>\n<HEAD><title lang='en'>Sign in</title>", "Sign in"),
            (b"<!-- x --><title>Sign in</title>", "Sign in"),
            (b"<body>secret text", ""),
        ):
            with self.subTest(body=body):
                line = self.said(Reply(500, body))
                self.assertRegex(line, f" page.*{title}")
                self.assertNotIn("secret text", line)

    def test_a_200_of_another_form_shows_what_it_says(self) -> None:
        bodies: tuple[tuple[Any, str], ...] = (
            ({"error": {"message": "no credit"}}, "no credit"),
            ({"error": "no credit", "data": []}, "no credit"),
            ({"message": "no route"}, "no route"),
            ({}, "{}"),
        )
        for body, text in bodies:
            for path in (EMBEDDINGS, RERANK, CHAT):
                with self.subTest(body=body, path=path):
                    line = self.said(Reply(200, body), path)
                    self.assertIn(f' answered 200 without a result: "{text}"', line)

    def test_a_200_that_is_no_object_and_no_list_is_named_by_its_kind(self) -> None:
        bodies: tuple[tuple[Any, str], ...] = ((None, "null"), (7, "a number"), ("x", "a string"))
        for body, kind in bodies:
            for path in (EMBEDDINGS, RERANK, CHAT):
                with self.subTest(body=body, path=path):
                    result = self.run_with(Reply(200, body), path)
                    self.assert_one_line(result, 1, f" is {kind}, not ")

    def test_a_200_that_is_not_json_is_named(self) -> None:
        not_json = "the reply is not JSON: Expecting value: line 1 column 1 (char 0)"
        for body, reason in (
            (b"", not_json),
            (b"upstream timed out", not_json),
            (b"data: {}\n", f"{not_json}; it is an event stream"),
            (b"event: error\n", f"{not_json}; it is an event stream"),
            (b'{"\xe9": 1}', "'utf-8' codec can't decode byte 0xe9 in position 2"),
            (b'{"data": [NaN]}', "the reply is not JSON: it holds NaN"),
        ):
            with self.subTest(body=body):
                self.assertIn(f"/embeddings: {reason}", self.said(Reply(200, body)))

    def test_a_message_is_made_printable_and_cut(self) -> None:
        line = self.said({"error": "bad\n\x1b[2J\u202eword\x00 " + "x" * 500})
        text = line.partition(' answered 500: "')[2].partition('…"; ')[0]
        self.assertTrue(text.startswith("bad \\u001b[2J\\u202eword\\u0000 xxx"))
        self.assertEqual(len(text), 199)

    def test_a_long_message_leaves_the_facts_whole(self) -> None:
        options = '{"truncate": "END", "user": "abcdefghi"}'
        with mock.patch.dict("mock_server.endpoints.ENDPOINTS", with_options("truncate", "user")):
            line = self.said({"error": "x" * 500}, API_EMBEDDING_OPTIONS=options)
        self.assertRegex(line, r'longest "[\w-]+" \(\d+ bytes\)$')


class TestSecrets(ServiceTestCase):
    def test_a_key_and_a_header_value_are_redacted_in_what_a_server_writes(self) -> None:
        value = 'header "value"'
        for secret in (KEY, value):
            headers = {"API_HEADERS": json.dumps({"X-Team": value})}
            self.assertIn('"bad [secret]!"', self.said({"error": f"bad {secret}!"}, **headers))
            line = self.said({"detail": [f"bad {secret}!"]}, **headers)
            self.assertIn('bad [secret]!"', line)

    def test_a_secret_is_redacted_however_the_json_escapes_it(self) -> None:
        for value in ("Basic abc/defghi==", "two  spaces in it"):
            headers = {"API_HEADERS": json.dumps({"X-Team": value})}
            for written in (value, value.replace("/", "\\/"), f"\\u{ord(value[0]):04x}{value[1:]}"):
                with self.subTest(written=written):
                    body = f'{{"error": "bad {written}!"}}'.encode()
                    self.assertIn('"bad [secret]!"', self.said(Reply(500, body), **headers))

    def test_no_part_of_a_key_is_shown_wherever_a_text_is_cut(self) -> None:
        line = self.said({"error": f"{'x' * (200 - len(KEY) // 2)}{KEY}"})
        self.assertNotIn(KEY[:6], line)
        for argv, variable, value in (
            ([f"{'x' * 440}{KEY}", "y"], "RAG_SOURCES", "3"),
            ([], "API_TIMEOUT", "x" * 25 + KEY),
            ([], "API_EMBEDDING_ENCODING", KEY * 2),
        ):
            environ = {**self.serve().environment(), variable: value}
            self.assertNotIn(KEY[:6], run_rag(*argv, environ=environ).stderr)

    def test_each_key_is_redacted_and_a_word_of_less_than_8_characters_is_no_secret(self) -> None:
        keys = {"API_RERANK_BASE_URL": "http://127.0.0.1:9", "API_RERANK_KEY": "key-of-rerank"}
        line = self.said({"error": "none, key-of-rerank, 12345678"}, **keys, API_TIMEOUT="12345")
        self.assertIn('"none, [secret], 12345678"', line)
        for key, shown in (("key-of-7", "[secret]"), ("key-of7", "key-of7")):
            reply = Reply(500, f"bad {key}".encode())
            server = self.serve(own(EMBEDDINGS, lambda *_, reply=reply: reply), key=key)
            line = run_rag(environ=server.environment("own")).stderr
            self.assertIn(f' answered 500: "bad {shown}"; ', line)

    def test_an_id_that_is_the_key_is_redacted(self) -> None:
        content = json.dumps({"answer": "x", "source_ids": [KEY]})
        server = self.serve(own(CHAT, message(content=content)))
        result = run_rag("--explain", environ=server.environment("own"))
        self.assertIn('"[secret]" is not the id of a source', result.stderr)
        self.assertNotIn(KEY, result.stderr)

    def test_a_program_whose_keys_are_in_no_variable_sees_none_in_an_error(self) -> None:
        server = self.serve(own(EMBEDDINGS, lambda *_: Reply(401, {"error": f"bad {KEY}"})))
        settings = rag.read_settings(server.environment("own"))
        with rag.open_run(settings) as run, self.assertRaises(rag.RagError) as caught:
            rag.embed_texts(["text"], run)
        self.assertNotIn(KEY, str(caught.exception))


class TestAdvice(ServiceTestCase):
    def test_a_status_that_says_what_to_check_gets_that_advice(self) -> None:
        proxy = {"HTTPS_PROXY": "http://user:hunter22@127.0.0.1:9"}
        none: dict[str, str] = {}
        rows: tuple[tuple[int, bytes, Mapping[str, str], str], ...] = (
            (301, b"", none, "redirects are not followed"),
            (308, b"", none, "redirects are not followed"),
            (401, b"", none, "check API_KEY"),
            (403, b"", none, "check API_KEY, and whether it may use the model"),
            (404, b"", none, "check API_BASE_URL (most end in /v1) and the model"),
            (407, b"", none, BETWEEN),
            (429, b"", none, "too many requests, or no credit left; with API_RETRIES the SDK asks"),
            (503, b"", none, "the server is overloaded or still loading; with API_RETRIES the"),
            (200, PAGE, none, BETWEEN),
            (401, PAGE, none, BETWEEN),
            (403, PAGE, none, BETWEEN),
            (502, b"", proxy, BETWEEN),
            (503, b"", proxy, BETWEEN),
            (504, b"", {"all_proxy": "", **proxy}, BETWEEN),
            (401, b"", proxy, "check API_KEY"),
            (400, b"", none, SENT),
            (413, b"", none, SENT),
            (422, b"", none, SENT),
            (500, b"", none, SENT),
            (502, b"", none, SENT),
            (504, b"", none, SENT),
            (201, b'{"data": []}', none, SENT),
        )
        for status, body, environ, advice in rows:
            with self.subTest(status=status, body=body, environ=environ):
                line = self.said(Reply(status, body), **environ)
                self.assertIn(f" answered {status}: ", line)
                self.assertIn(f"; {advice}", line)
                self.assertEqual("API_KEY" in line, "API_KEY" in advice)
                if advice == BETWEEN and environ:
                    self.assertIn("HTTPS_PROXY", line)
                self.assertNotIn("hunter22", line)

    def test_the_server_is_named_by_its_variable(self) -> None:
        for path, variable in (
            (EMBEDDINGS, "API_EMBEDDING_KEY"),
            (RERANK, "API_RERANK_KEY"),
            (CHAT, "API_KEY"),
        ):
            with self.subTest(path=path):
                server = self.serve(own(path, lambda *_: Reply(401, b"")))
                environ = dict(server.environment("own"))
                for name in ("API_EMBEDDING", "API_RERANK"):
                    environ |= {f"{name}_BASE_URL": environ["API_BASE_URL"], f"{name}_KEY": KEY}
                line = run_rag(environ=environ).stderr
                self.assertIn(f"; check {variable}, and whether", line)

    def test_a_refusal_names_the_settings_that_shaped_the_request(self) -> None:
        for path, facts in (
            (EMBEDDINGS, "API_EMBEDDING_MODEL=mock-embedding, API_EMBEDDING_BATCH=32, 20 texts"),
            (RERANK, "API_RERANK_MODEL=mock-rerank, RAG_CANDIDATES=20, 19 texts, longest"),
            (CHAT, "API_MODEL=mock-chat, API_RESPONSE_FORMAT=none, RAG_SOURCES=3"),
        ):
            with self.subTest(path=path):
                self.assertIn(f"; sent with {facts}", self.said(b"", path))
        line = self.said(b"", CHAT, API_CHAT_OPTIONS='{"seed": 1}')
        self.assertRegex(line, 'API_CHAT_OPTIONS={"seed": 1}, RAG_SOURCES=3$')
        line = self.said(b"", CHAT, API_CHAT_OPTIONS=json.dumps({"user": "x" * 60}))
        self.assertRegex(line, "API_CHAT_OPTIONS={.user.: .x{29}…, RAG_SOURCES=3$")
        line = self.said(b"", API_EMBEDDING_OPTIONS='{"dimensions": 5}')
        self.assertRegex(line, "API_EMBEDDING_OPTIONS={.dimensions.: 5}, 20 texts")

    def test_the_longest_text_is_named_with_its_id_and_its_size_in_bytes(self) -> None:
        records = [{"id": "ascii", "text": "x" * 100}, {"id": "wide", "text": "自行车" * 20}]
        path = self.file("k.json", records)
        server = self.serve(own(EMBEDDINGS, lambda *_: Reply(500, b"")))
        for question, prefix, longest in (
            ("Why?", "", '"wide" (180 bytes)'),
            ("Why?", "ab", '"wide" (182 bytes)'),
            ("y" * 200 + "?", "", '"the question" (201 bytes)'),
        ):
            environ = {**server.environment("own"), "API_DOCUMENT_PREFIX": prefix}
            line = run_rag(question, "--knowledge", path, environ=environ).stderr
            self.assertIn(f"3 texts, longest {longest}", line)


class TestConnections(ServiceTestCase):
    def lost(self, **environ: str) -> str:
        """Return the stderr of a run that gets no reply."""
        given = {"API_KEY": "secret-key-0001", "API_MODEL": "m", "API_EMBEDDING_MODEL": "e"}
        result = run_rag(environ={**given, **environ})
        url = environ["API_BASE_URL"]
        self.assert_one_line(result, 1, f"rag.py: embeddings: {url}/embeddings: no reply: ")
        self.assertNotIn("hunter22", result.stderr)
        return result.stderr

    def closed_port(self) -> str:
        """Return an address where nobody listens."""
        taken = socket.socket()  # bound, and not listening
        self.addCleanup(taken.close)
        taken.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{taken.getsockname()[1]}"

    def test_a_port_where_nobody_listens(self) -> None:
        line = self.lost(API_BASE_URL=f"http://{self.closed_port()}/v1")
        self.assertRegex(line, r'ConnectError ".*refused"; sent with ')

    def test_a_host_that_does_not_resolve(self) -> None:
        failure = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        with mock.patch("socket.getaddrinfo", side_effect=failure):
            line = self.lost(API_BASE_URL="https://no.invalid/v1")
        self.assertIn('Name or service not known"; sent with ', line)

    def test_the_failure_of_a_proxy_names_the_variable_and_not_its_value(self) -> None:
        proxy = f"http://user:hunter22@{self.closed_port()}"
        line = self.lost(API_BASE_URL="http://api.example/v1", HTTP_PROXY=proxy)
        self.assertRegex(line, "; sent through HTTP_PROXY with ")

    def test_the_refusal_of_a_proxy_is_not_taken_for_one_of_the_service(self) -> None:
        for status in (403, 404, 407, 502, 503):
            with self.subTest(status=status):
                listener = socket.create_server(("127.0.0.1", 0))
                self.addCleanup(listener.close)
                threading.Thread(target=refuse_tunnel, args=(listener, status)).start()
                proxy = f"http://127.0.0.1:{listener.getsockname()[1]}"
                line = self.lost(API_BASE_URL="https://api.example/v1", HTTPS_PROXY=proxy)
                self.assertIn(str(status), line)
                self.assertIn("HTTPS_PROXY", line)
                self.assertNotRegex(line, " key|redirect|overloaded")

    def test_a_server_that_does_not_answer_in_time_names_the_limit(self) -> None:
        line = self.said(Reply(ending="silence"), API_TIMEOUT="0.1")
        self.assertRegex(line, r"no reply: \w*Timeout .*; API_TIMEOUT is the limit")

    def test_a_connection_that_breaks_says_nothing_of_the_key(self) -> None:
        for reply in (
            Reply(ending="hang-up"),
            Reply(200, b"x" * 401, missing_bytes=100),
            Reply(200, b"x" * 300, missing_bytes=100),
            Reply(200, b"x" * 429, {"Content-Encoding": "gzip"}),
            Reply(400, b"x", {"Content-Type": "text/plain; charset=hex"}),
        ):
            with self.subTest(reply=reply):
                line = self.said(reply)
                self.assertRegex(line, r'no reply: \w+Error ".*"; sent with ')

    @unittest.skipUnless(shutil.which("openssl"), "needs openssl to make a certificate")
    def test_a_certificate_that_is_not_trusted_names_the_variable_that_makes_it_so(self) -> None:
        key, certificate = str(self.folder / "key.pem"), str(self.folder / "certificate.pem")
        make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
        names = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
        files = ["-keyout", key, "-out", certificate]
        subprocess.run([*make.split(), *names, *files], check=True, capture_output=True)
        server = MockServer()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        server.socket = context.wrap_socket(server.socket, server_side=True)
        self.addCleanup(server.__exit__)
        environ = server.__enter__().environment()
        environ["API_BASE_URL"] = environ["API_BASE_URL"].replace("http:", "https:")
        line = self.lost(**environ)
        self.assertRegex(line, "; SSL_CERT_FILE names a file of further certificates to trust;")
        self.assertEqual(run_rag(environ={**environ, "SSL_CERT_FILE": certificate}).status, 0)

    @unittest.skipIf(os.name == "nt", "needs an environment of bytes")
    def test_a_setting_that_cannot_be_encoded_is_one_line_of_its_stage(self) -> None:
        for variable, stage in (("API_EMBEDDING_MODEL", "embeddings"), ("API_MODEL", "answer")):
            result = run_rag(environ={**self.serve().environment(), variable: "m\udcff"})
            words = (f"rag.py: {stage}: ", "'utf-8' codec", f"{variable}=m\\udcff")
            self.assert_one_line(result, 1, *words)

    def test_https_to_a_server_of_plain_http_names_the_base_url(self) -> None:
        url = self.serve().base_url().replace("http:", "https:")
        self.assertIn("; sent with ", self.lost(API_BASE_URL=url))


def refuse_tunnel(listener: socket.socket, status: int) -> None:
    """Answer one CONNECT request with a status, as a proxy that does not allow it."""
    connection, _ = listener.accept()
    with connection:
        connection.recv(65536)
        connection.sendall(f"HTTP/1.1 {status} Refused\r\nContent-Length: 0\r\n\r\n".encode())


class TestClient(ServiceTestCase):
    def refused(self, *words: str, **environ: str) -> None:
        result = run_rag(environ={**self.serve().environment(), **environ})
        self.assert_one_line(result, 2, "rag.py: settings: ", *words)
        self.assertNotIn("hunter22", result.stderr)

    def test_a_variable_of_which_no_client_can_be_made_is_named_without_its_value(self) -> None:
        for variable, value in (
            ("ALL_PROXY", "gopher://user:hunter22@127.0.0.1:9"),
            ("http_proxy", "http://user:hunter22@[::1"),
            ("SSL_CERT_FILE", "/nowhere/hunter22.pem"),
            ("SSL_CERT_FILE", __file__),
        ):
            with self.subTest(variable=variable, value=value):
                self.refused("HTTP client: ", variable, **{variable: value})

    def test_a_missing_or_broken_package_is_one_line_that_says_what_to_run(self) -> None:
        command = "; run `python -m pip install -U openai`"
        with mock.patch.dict("sys.modules", {"openai": None}):
            self.refused("cannot import openai: ", command)
        self.file("openai.py", "raise RuntimeError('it does not fit pydantic')")
        modules = {name: module for name, module in sys.modules.items() if "openai" not in name}
        with mock.patch.dict("sys.modules", modules, clear=True):
            with mock.patch.object(sys, "path", [str(self.folder), *sys.path]):
                self.refused("cannot import openai: it does not fit pydantic", command)

    def test_the_client_is_closed_whatever_happens(self) -> None:
        server = self.serve()
        for scenario in ("plain", "http-503"):
            close = mock.patch.object(openai.OpenAI, "close", autospec=True)
            with self.subTest(scenario=scenario), close as closed:
                run_rag(environ=server.environment(scenario))
                closed.assert_called_once()


class TestRequests(ServiceTestCase):
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

    def test_a_program_keeps_its_variables(self) -> None:
        server = self.serve()
        with mock.patch.dict(os.environ, {"OPENAI_LOG": "info"}):
            with rag.open_run(rag.read_settings(server.environment())):
                self.assertEqual(os.environ["OPENAI_LOG"], "info")

    def test_the_sdk_asks_again_only_as_often_as_it_is_told(self) -> None:
        for retries, requests in (("0", 1), ("2", 3)):
            server = self.serve()
            environ = {**server.environment("http-503"), "API_RETRIES": retries}
            with mock.patch("time.sleep"):
                self.assertEqual(run_rag(environ=environ).status, 1)
            self.assertEqual(len(server.request_log.entries), requests)

    def test_a_redirect_is_not_followed(self) -> None:
        for name in ("redirect-same-host", "redirect-other-host", "redirect-to-get"):
            with self.subTest(name=name):
                server = self.serve()
                self.assertEqual(run_rag(environ=server.environment(name)).status, 1)
                self.assertEqual(len(server.request_log.entries), 1)

    def test_each_server_gets_its_own_key_and_its_own_stage_and_nothing_else(self) -> None:
        chat, embeddings, rerank = (self.serve(key=f"key-of-{name}") for name in "cer")
        environ = {
            **chat.environment(),
            "API_EMBEDDING_BASE_URL": embeddings.base_url(),
            "API_EMBEDDING_KEY": embeddings.key,
            "API_RERANK_BASE_URL": rerank.base_url(),
            "API_RERANK_KEY": rerank.key,
            "API_HEADERS": '{"X-Team": "a"}',
        }
        self.assertEqual(run_rag(environ=environ).status, 0)
        for server, path in ((embeddings, EMBEDDINGS), (rerank, RERANK), (chat, CHAT)):
            self.assertEqual(paths(server), [path])
            (entry,) = server.request_log.entries
            self.assertEqual(entry.authorization, "right")
            self.assertEqual("x-team" in entry.headers, server is chat)
        # A record that is no source is in no request to the chat server.
        self.assertIn("atlas of canals", json.dumps(bodies(embeddings, EMBEDDINGS)))
        self.assertNotIn("atlas of canals", json.dumps(bodies(chat, CHAT)))

    def test_further_headers_go_to_the_scheme_host_and_port_of_the_first_base_url_only(
        self,
    ) -> None:
        server = self.serve()
        port = server.server_port
        for url, same in (
            ("", True),
            (f"http://127.0.0.1:{port}/v1/", True),
            (f"HTTP://127.0.0.1:{port}/run/other/v1", True),
            (f"http://localhost:{port}/v1", False),
        ):
            with self.subTest(url=url):
                server.request_log.clear("")
                # The mock's log tells of the key in a header, and of no other value.
                environ = {**server.environment(), "API_HEADERS": json.dumps({"X-Team": KEY})}
                if url:
                    environ |= {"API_RERANK_BASE_URL": url, "API_RERANK_KEY": KEY}
                self.assertEqual(run_rag(environ=environ).status, 0)
                entries = server.request_log.of("")[0] + server.request_log.of("other")[0]
                for entry in entries:
                    sent = same or "/rerank" not in entry.path
                    self.assertEqual("x-team" in entry.headers, sent)
                    self.assertEqual(entry.key_elsewhere, sent)
                server.request_log.clear("other")

    def test_options_are_added_to_the_requests_of_their_endpoint(self) -> None:
        server = self.serve()
        optional = mock.patch.dict("mock_server.endpoints.ENDPOINTS", with_options("user"))
        embedding, chat = '{"user": "one"}', '{"user": "two", "seed": 7}'
        environ = {"API_EMBEDDING_OPTIONS": embedding, "API_CHAT_OPTIONS": chat}
        with optional:
            run_rag(environ={**server.environment(), "API_EMBEDDING_BATCH": "10", **environ})
        self.assertEqual([body["user"] for body in bodies(server, EMBEDDINGS)], ["one", "one"])
        self.assertNotIn("user", bodies(server, RERANK)[0])
        (body,) = bodies(server, CHAT)
        self.assertEqual((body["user"], body["seed"]), ("two", 7))

    def test_batches_go_as_many_at_a_time_as_is_set_and_the_first_alone(self) -> None:
        for parallel in (1, 3, 8):
            with self.subTest(parallel=parallel):
                arrived, everybody = [0], threading.Condition()

                def change(
                    good: Any,
                    request: Any,
                    count: list[int] = arrived,
                    all_here: threading.Condition = everybody,
                    wanted: int = 1 + parallel,
                ) -> Any:
                    """Reply to the first batch; fail when as many as expected are there."""
                    with all_here:
                        count[0] += 1
                        all_here.notify_all()
                        if count[0] == 1:
                            return good
                        all_here.wait_for(lambda: count[0] >= wanted, 20)
                    return Reply(500, b"")

                server = self.serve(own(EMBEDDINGS, change))
                environ = {"API_EMBEDDING_PARALLEL": str(parallel), "API_EMBEDDING_BATCH": "1"}
                result = run_rag(environ={**server.environment("own"), **environ})
                self.assertEqual((result.status, arrived), (1, [1 + parallel]))


def with_options(*names: str) -> dict[str, Any]:
    """Return the mock's row for /embeddings with these optional fields too."""
    model, required, optional, check = ENDPOINTS[EMBEDDINGS]
    return {EMBEDDINGS: (model, required, (*optional, *names), check)}
