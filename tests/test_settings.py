"""Settings: what each variable takes, and the message about a bad value."""

from __future__ import annotations

import unittest
from dataclasses import fields

import rag
from tests.support import RagTestCase, run_rag

GOOD = {
    "API_BASE_URL": "http://127.0.0.1:9/v1",
    "API_KEY": "secret-key-0001",
    "API_MODEL": "m",
    "API_EMBEDDING_MODEL": "e",
}
FORM = " must be an http(s) URL: a host, no user, query, fragment"
BAD_URLS = (
    ("api.example.com/v1", FORM),
    ("ftp://api.example.com/v1", FORM),
    ("http:///v1", FORM),
    ("http://user@host/v1", FORM),
    ("http://user:hunter22@host/v1", FORM),
    ("http://host/v1?key=1", FORM),
    ("http://host/v1#top", FORM),
    ("http://host/v 1", FORM),
    (" http://host/v1", FORM),
    ("http://host/v1\n", FORM),
    ("http:\\\\host\\v1", FORM),
    ("https://:443/v1", FORM),
    ("http://host:port/v1", ": Port could not be cast to integer value as 'port'"),
    ("http://[::1/v1", ": Invalid IPv6 URL"),
    ("http://127.0.0.1:65536/v1", ": Port out of range 0-65535"),
    ("http://127.0.0.1:0/v1", ": there is no port 0"),
)


class TestReadSettings(unittest.TestCase):
    def reason(self, **changes: str) -> str:
        with self.assertRaises(rag.RagError) as caught:
            rag.read_settings({**GOOD, **changes})
        return str(caught.exception)

    def test_all_missing_variables_are_named_at_once_with_the_way_to_run_without_an_account(
        self,
    ) -> None:
        with self.assertRaises(rag.RagError) as caught:
            rag.read_settings({"API_KEY": "   ", "API_MODEL": "m"})
        self.assertEqual(
            str(caught.exception),
            "not set: API_BASE_URL, API_KEY, API_EMBEDDING_MODEL (see --help); "
            "`python -m mock_server run -- python rag.py` runs without an account",
        )

    def test_good_values_are_taken(self) -> None:
        for variable, text, value in (
            ("API_BASE_URL", "https://api.example.com/v1", "https://api.example.com/v1"),
            ("API_BASE_URL", "HTTP://[::1]:8080/v1/", "HTTP://[::1]:8080/v1/"),
            ("API_BASE_URL", "http://bücher.example", "http://bücher.example"),
            ("API_BASE_URL", "http://a:65535/v1", "http://a:65535/v1"),
            ("API_KEY", "sk-~!\"'x", "sk-~!\"'x"),
            ("API_MODEL", "org/model name:7b", "org/model name:7b"),
            ("API_RERANK_MODEL", "  ", None),
            ("API_TIMEOUT", "2.5", 2.5),
            ("API_RETRIES", "10", 10),
            ("API_EMBEDDING_BATCH", "1", 1),
            ("API_EMBEDDING_PARALLEL", "8", 8),
            ("API_EMBEDDING_ENCODING", "base64", "base64"),
            ("API_RESPONSE_FORMAT", "json_schema", "json_schema"),
            ("API_CHAT_OPTIONS", ' {"temperature": 0}\n', {"temperature": 0}),
            ("API_EMBEDDING_OPTIONS", '{"dimensions": 512}', {"dimensions": 512}),
            ("API_HEADERS", '{"x-api_key": "a \\"b\\" ~"}', {"x-api_key": 'a "b" ~'}),
            ("API_QUERY_PREFIX", "query: ", "query: "),
            ("API_QUERY_PREFIX", " ", " "),
            ("API_DOCUMENT_PREFIX", "two\nlines", "two\nlines"),
            ("RAG_CANDIDATES", "1000", 1000),
            ("RAG_MIN_SIMILARITY", "-0.25", -0.25),
            ("RAG_MIN_SIMILARITY", "", None),
        ):
            with self.subTest(variable=variable, text=text):
                settings = rag.read_settings({**GOOD, variable: text})
                self.assertEqual(getattr(settings, variable), value)

    def test_a_bad_value_is_named_with_what_is_allowed(self) -> None:
        for variable, text, allowed in (
            ("API_MODEL", " m", 'text without white space around it; found " m"'),
            ("API_MODEL", "m\n", 'text without white space around it; found "m\\n"'),
            ("API_TIMEOUT", "0", 'a number from 0.1 to 86400; found "0"'),
            ("API_TIMEOUT", "nan", 'a number from 0.1 to 86400; found "nan"'),
            ("API_TIMEOUT", "soon", 'a number from 0.1 to 86400; found "soon"'),
            ("API_RETRIES", "-1", 'a whole number from 0 to 10; found "-1"'),
            ("API_RETRIES", "1.5", 'a whole number from 0 to 10; found "1.5"'),
            ("API_RETRIES", "9" * 5000, f'a whole number from 0 to 10; found "{"9" * 39}…"'),
            ("API_EMBEDDING_BATCH", "2049", 'a whole number from 1 to 2048; found "2049"'),
            ("API_EMBEDDING_PARALLEL", "9", 'a whole number from 1 to 8; found "9"'),
            ("API_EMBEDDING_ENCODING", "Float", 'float or base64; found "Float"'),
            ("API_RESPONSE_FORMAT", "json", 'none, json_object or json_schema; found "json"'),
            ("API_CHAT_OPTIONS", "[1]", 'a JSON object, such as {"temperature": 0}; found "[1]"'),
            ("RAG_SOURCES", "0", 'a whole number from 1 to 100; found "0"'),
            ("RAG_ATTEMPTS", "11", 'a whole number from 1 to 10; found "11"'),
            ("RAG_QUOTES", "yes", 'a whole number from 0 to 1; found "yes"'),
            ("RAG_MIN_SIMILARITY", "1.01", 'a number from -1 to 1; found "1.01"'),
        ):
            with self.subTest(variable=variable, text=text[:50]):
                self.assertEqual(self.reason(**{variable: text}), f"{variable} must be {allowed}")

    def test_a_url_is_absolute_http_with_a_host_and_a_port_and_no_more(self) -> None:
        for variable in ("API_BASE_URL", "API_EMBEDDING_BASE_URL", "API_RERANK_BASE_URL"):
            for url, reason in BAD_URLS:
                with self.subTest(variable=variable, url=url):
                    self.assertEqual(self.reason(**{variable: url}), f"{variable}{reason}")

    def test_a_key_is_printable_ascii_without_white_space_or_quotation_marks_around_it(
        self,
    ) -> None:
        for key in ('"secret-key"', "'secret-key'", "two words", "ключ-0001", "secret\n", "a\x7f"):
            with self.subTest(key=key):
                allowed = "must be printable ASCII without spaces, not in quotation marks"
                self.assertEqual(self.reason(API_KEY=key), f"API_KEY {allowed}")

    def test_options_hold_nothing_that_rag_py_sets_itself(self) -> None:
        for variable, names in (
            ("API_CHAT_OPTIONS", ("model", "messages", "n", "stream", "tools", "response_format")),
            ("API_EMBEDDING_OPTIONS", ("model", "input", "encoding_format")),
        ):
            for name in names:
                with self.subTest(variable=variable, name=name):
                    reason = self.reason(**{variable: f'{{"top_p": 1, "{name}": 2}}'})
                    self.assertRegex(reason, f'\\A{variable}\\b.* "{name}" is not allowed')
        self.assertIn('"a" is repeated', self.reason(API_CHAT_OPTIONS='{"a": 1, "a": 2}'))
        self.assertIn("is not JSON", self.reason(API_CHAT_OPTIONS="{temperature: 0}"))

    def test_headers_are_tokens_and_printable_ascii_and_never_those_of_the_client(self) -> None:
        for header in (
            '"authorization": "a"',
            '"Host": "a"',
            '"CONTENT-LENGTH": "1"',
            '"Content-Type": "a"',
            '"Transfer-Encoding": "chunked"',
            '"Connection": "close"',
            '"X Y": "a"',
            '"": "a"',
            '"X:": "a"',
            '"X: Y": "b"',
            '"Ü": "a"',
            '"X\\n": "a"',
            '"X": "é"',
            '"X": 1',
            '"X": null',
            '"X": ""',
            '"X": " a"',
            '"X": "a "',
            '"X": "a\\r\\nY: b"',
            '"X": "a\\tb"',
        ):
            with self.subTest(header=header):
                self.assertIn("API_HEADERS", self.reason(API_HEADERS=f"{{{header}}}"))

    def test_a_second_server_needs_both_its_url_and_its_key(self) -> None:
        for name in ("API_EMBEDDING", "API_RERANK"):
            expected = (
                f"set both {name}_BASE_URL and {name}_KEY, or neither: "
                "no key is sent to another server"
            )
            self.assertEqual(self.reason(**{f"{name}_BASE_URL": "http://127.0.0.1:9/v1"}), expected)
            self.assertEqual(self.reason(**{f"{name}_KEY": "secret-key-0002"}), expected)


class TestSettingsStage(RagTestCase):
    def test_a_bad_value_ends_the_run_with_status_2_and_no_secret_is_shown(self) -> None:
        for variable, value in (
            ("API_KEY", "pass word-0001"),
            ("API_BASE_URL", "http://me:word-0001@host/v1"),
            ("API_HEADERS", '{"X-A": "word-0001\\u00e9"}'),
            ("API_HEADERS", '"X-A: word-0001"'),
        ):
            with self.subTest(variable=variable):
                result = run_rag("Why?", environ={**GOOD, variable: value})
                self.assert_one_line(result, 2, f"rag.py: settings: {variable}")
                self.assertNotIn("word-0001", result.stderr)

    def test_a_url_that_the_http_client_refuses_is_named(self) -> None:
        for url in ("http://[:::1]/v1", "http://a\x7f/v1", f"http://{'ü' * 63}/v1"):
            with self.subTest(url=url):
                result = run_rag("Why?", environ={**GOOD, "API_BASE_URL": url})
                self.assert_one_line(result, 2, "rag.py: settings: ", "API_BASE_URL")

    def test_a_misspelled_variable_is_named_before_anything_else(self) -> None:
        environ = {"API_KEYS": "k", "RAG_SOURCE": "2", "api_model": "m", "APP_KEY": "k"}
        unlike = {"RAG_TOP_K": "3", "API_TOKEN": "t", "RAG_": "x"}
        result = run_rag("Why?", environ={**GOOD, "API_KEY": "", **environ, **unlike})
        self.assertEqual(result.status, 2)
        *warnings, failure, end = result.stderr.split("\n")
        self.assertEqual(
            warnings,
            [
                "rag.py: warning: API_KEYS is no setting; API_KEY is one",
                "rag.py: warning: RAG_SOURCE is no setting; RAG_SOURCES is one",
            ],
        )
        self.assertIn("rag.py: settings: not set: API_KEY ", failure)

    def test_help_lists_every_variable_with_its_form_and_default_and_every_exit_status(
        self,
    ) -> None:
        result = run_rag("--help", environ={})
        self.assertEqual((result.status, result.stderr), (0, ""))
        for row in fields(rag.Settings):
            self.assertIn(f"  {row.name:<24}{row.metadata['meaning']} (", result.stdout)
        for line in (
            "  API_KEY                 its key; any word if it needs none (required)\n",
            "  API_RERANK_KEY          its key (optional)\n",
            "inputs in one embedding request (default: 32)\n",
            f"{'':28}a whole number from 1 to 2048\n",
            "  0  published",
            "  1  a stage failed",
            "  2  usage",
            "  130  Ctrl-C",
        ):
            self.assertIn(line, result.stdout)
