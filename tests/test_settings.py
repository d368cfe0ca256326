"""Settings: what each variable takes, and what is said of one that is wrong."""

from __future__ import annotations

import unittest
from dataclasses import MISSING, FrozenInstanceError, fields

import rag
from tests.support import RagTestCase, run_rag

GOOD = {
    "API_BASE_URL": "http://127.0.0.1:9/v1",
    "API_KEY": "secret-key-0001",
    "API_MODEL": "m",
    "API_EMBEDDING_MODEL": "e",
}
OPTIONS = "API_CHAT_OPTIONS"


class TestReadSettings(unittest.TestCase):
    def reason(self, **changes: str) -> str:
        with self.assertRaises(rag.RagError) as caught:
            rag.read_settings({**GOOD, **changes})
        return str(caught.exception)

    def test_the_four_required_variables_are_enough_and_the_others_have_their_defaults(
        self,
    ) -> None:
        settings = rag.read_settings(GOOD)
        for row in fields(settings):
            if row.default is not MISSING:
                self.assertEqual(getattr(settings, row.name), row.default)
        self.assertEqual((settings.base_url, settings.key), (GOOD["API_BASE_URL"], GOOD["API_KEY"]))

    def test_settings_are_frozen(self) -> None:
        with self.assertRaises(FrozenInstanceError):
            setattr(rag.read_settings(GOOD), "key", "other")  # noqa: B010

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
        for variable, text, name, value in (
            (
                "API_BASE_URL",
                "https://api.example.com/v1",
                "base_url",
                "https://api.example.com/v1",
            ),
            ("API_BASE_URL", "http://[::1]:8080/v1/", "base_url", "http://[::1]:8080/v1/"),
            ("API_BASE_URL", "http://bücher.example", "base_url", "http://bücher.example"),
            ("API_BASE_URL", "http://a:65535/v1", "base_url", "http://a:65535/v1"),
            ("API_BASE_URL", "http://a:080/v1", "base_url", "http://a:080/v1"),
            ("API_KEY", "sk-~!x", "key", "sk-~!x"),
            ("API_MODEL", "org/model name:7b", "model", "org/model name:7b"),
            ("API_RERANK_MODEL", "  ", "rerank_model", ""),
            ("API_TIMEOUT", "2.5", "timeout", 2.5),
            ("API_RETRIES", "10", "retries", 10),
            ("API_EMBEDDING_BATCH", "1", "batch", 1),
            ("API_EMBEDDING_ENCODING", "base64", "encoding", "base64"),
            ("API_RESPONSE_FORMAT", "json_schema", "response_format", "json_schema"),
            (OPTIONS, '{"temperature": 0}', "chat_options", '{"temperature": 0}'),
            ("API_QUERY_PREFIX", "query: ", "query_prefix", "query: "),
            ("API_QUERY_PREFIX", " ", "query_prefix", " "),
            ("API_DOCUMENT_PREFIX", "two\nlines", "document_prefix", "two\nlines"),
            ("RAG_MIN_SIMILARITY", "-0.25", "min_similarity", -0.25),
            ("RAG_CANDIDATES", "1000", "candidates", 1000),
        ):
            with self.subTest(variable=variable, text=text):
                self.assertEqual(getattr(rag.read_settings({**GOOD, variable: text}), name), value)

    def test_a_bad_value_is_named_with_what_is_allowed(self) -> None:
        url = "an http(s) address with a host, and without user, password, query or fragment"
        key = "printable ASCII without white space (a server without keys takes any word)"
        for variable, text, allowed in (
            *(("API_BASE_URL", text, url) for text in BAD_ADDRESSES),
            *(
                ("API_KEY", text, key)
                for text in ("two words", "ключ-0001", "secret-key-0001\n", "a\x00b")
            ),
            ("API_MODEL", " m", 'text without white space around it; found " m"'),
            ("API_MODEL", "m\n", 'text without white space around it; found "m\\n"'),
            ("API_MODEL", "m\udcff", 'text without white space around it; found "m\\udcff"'),
            ("API_TIMEOUT", "0", 'a number from 0.1 to 86400; found "0"'),
            ("API_TIMEOUT", "nan", 'a number from 0.1 to 86400; found "nan"'),
            ("API_TIMEOUT", "soon", 'a number from 0.1 to 86400; found "soon"'),
            ("API_RETRIES", "-1", 'a whole number from 0 to 10; found "-1"'),
            ("API_RETRIES", "1.5", 'a whole number from 0 to 10; found "1.5"'),
            ("API_EMBEDDING_BATCH", "2049", 'a whole number from 1 to 2048; found "2049"'),
            (
                "API_EMBEDDING_BATCH",
                "9" * 5000,
                f'a whole number from 1 to 2048; found "{"9" * 39}…"',
            ),
            ("API_EMBEDDING_ENCODING", "Float", 'float or base64; found "Float"'),
            ("API_RESPONSE_FORMAT", "json", 'none, json_object or json_schema; found "json"'),
            ("API_QUERY_PREFIX", "\udcff", 'text; found "\\udcff"'),
            ("RAG_SOURCES", "0", 'a whole number from 1 to 100; found "0"'),
            ("RAG_MIN_SIMILARITY", "1.01", 'a number from -1 to 1; found "1.01"'),
        ):
            with self.subTest(variable=variable, text=text[:50]):
                self.assertEqual(self.reason(**{variable: text}), f"{variable} must be {allowed}")

    def test_chat_options_are_an_object_that_sets_nothing_of_ours(self) -> None:
        form = 'a JSON object, such as {"temperature": 0}'
        for text in ("[1]", "temperature=0"):
            expected = f'{OPTIONS} must be {form}; found "{text}"'
            self.assertEqual(self.reason(API_CHAT_OPTIONS=text), expected)
        self.assertEqual(
            self.reason(API_CHAT_OPTIONS='{"n": 2, "model": "x", "top_p": 1}'),
            f"{OPTIONS} may not hold model, n",
        )
        self.assertEqual(
            self.reason(API_CHAT_OPTIONS='{"a": 1, "a": 2}'), f"{OPTIONS}: a repeated key"
        )
        self.assertIn(f"{OPTIONS}: not JSON", self.reason(API_CHAT_OPTIONS="{temperature: 0}"))

    def test_a_second_server_needs_both_its_address_and_its_key(self) -> None:
        for name in ("API_EMBEDDING", "API_RERANK"):
            expected = f"{name}_BASE_URL and {name}_KEY go together: no key goes to another server"
            self.assertEqual(self.reason(**{f"{name}_BASE_URL": "http://127.0.0.1:9/v1"}), expected)
            self.assertEqual(self.reason(**{f"{name}_KEY": "secret-key-0002"}), expected)


BAD_ADDRESSES = (
    "api.example.com/v1",
    "ftp://api.example.com/v1",
    "http://",
    "http:///v1",
    "http://user@host/v1",
    "http://user:password@host/v1",
    "http://host/v1?key=1",
    "http://host/v1#top",
    "http://host/v1?",
    "http://host/v 1",
    " http://host/v1",
    "http://host/v1\n",
    "http:\\\\host\\v1",
    "http://host:port/v1",
    "http://[::1/v1",
    "http://a]/v1",
    "https://:443/v1",
    "http://127.0.0.1:65536/v1",
    "http://127.0.0.1:98927/v1",
    "http://127.0.0.1:0/v1",
    "http://a..b/v1",
    f"http://{'a' * 64}.example/v1",
)


class TestSettingsStage(RagTestCase):
    def test_a_setting_that_is_wrong_ends_the_run_with_status_2_and_never_shows_a_key(self) -> None:
        secret = "pass word-0001"
        result = run_rag("Why?", environ={**GOOD, "API_KEY": secret})
        self.assert_one_line(result, 2, "rag.py: settings: API_KEY must be printable ASCII")
        self.assertNotIn(secret, result.stderr)

    def test_no_password_of_an_address_is_shown(self) -> None:
        result = run_rag("Why?", environ={**GOOD, "API_BASE_URL": "http://me:hunter22@host/v1"})
        self.assert_one_line(result, 2, "rag.py: settings: API_BASE_URL must be an http(s) address")
        self.assertNotIn("hunter22", result.stderr)

    def test_help_lists_every_variable_with_its_form_and_default_and_every_exit_status(
        self,
    ) -> None:
        result = run_rag("--help", environ={})
        self.assertEqual((result.status, result.stderr), (0, ""))
        for row in fields(rag.Settings):
            self.assertIn(
                f"  {row.metadata['variable']:<24}{row.metadata['meaning']} (", result.stdout
            )
        self.assertIn("  API_KEY                 its key (required)\n", result.stdout)
        self.assertIn(
            "  API_RERANK_KEY          its key: set both or neither (optional)\n", result.stdout
        )
        self.assertIn("inputs in one embedding request (default: 32)\n", result.stdout)
        self.assertIn(f"{'':28}a whole number from 1 to 2048\n", result.stdout)
        self.assertIn("asks again (default: 0)\n", result.stdout)
        self.assertTrue(result.stdout.isascii())
        for status in ("0  published", "1  a stage failed", "2  usage", "130  Ctrl-C"):
            self.assertIn(status, result.stdout)
