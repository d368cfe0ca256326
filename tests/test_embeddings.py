"""Embeddings: what is sent and when, and which replies are accepted."""

from __future__ import annotations

import base64
import math
import sqlite3
import struct
import threading
import unittest
from array import array
from collections.abc import Sequence
from typing import Any
from unittest import mock

import rag
from mock_server.scenarios import ANSWERS, EMBEDDINGS, REFUSES, Reply, Scenario, last_row
from mock_server.server import MockServer
from tests.support import RagTestCase, Result, bodies, run_rag


def reply(*rows: Any) -> dict[str, Any]:
    return {"object": "list", "data": list(rows)}


def row(index: Any, *numbers: Any) -> dict[str, Any]:
    return {"index": index, "embedding": list(numbers)}


def packed(*numbers: float) -> str:
    return base64.b64encode(struct.pack(f"<{len(numbers)}f", *numbers)).decode()


def encoded(text: str) -> dict[str, Any]:
    return {"index": 1, "embedding": text}


class TestCheckEmbeddings(unittest.TestCase):
    def test_vectors_are_bound_by_index_and_scaled_to_length_1(self) -> None:
        found = rag.check_embeddings(reply(row(1, 0, 5), row(0, 3.0, 4.0)), 2, "float")
        self.assertEqual(found, [array("f", [0.6, 0.8]), array("f", [0.0, 1.0])])

    def test_an_index_that_is_absent_or_null_is_0(self) -> None:
        for first in ({"embedding": [1.0]}, {"index": None, "embedding": [1.0]}):
            found = rag.check_embeddings(reply(row(1, -1.0), first), 2, "float")
            self.assertEqual(found, [array("f", [1.0]), array("f", [-1.0])])
            self.assertEqual(rag.check_embeddings(reply(first), 1, "float"), found[:1])

    def test_numbers_of_any_size_are_scaled(self) -> None:
        for numbers in ((1e-320, 0), (1e300, 1e300), (10**300, 0.5), (-7, 24), (1 + 2e-6, 0)):
            (vector,) = rag.check_embeddings(reply(row(0, *numbers)), 1, "float")
            self.assertAlmostEqual(math.hypot(*vector), 1, places=6)

    def test_base64_is_little_endian_float32_and_a_list_is_accepted_in_its_place(self) -> None:
        rows = ({"index": 0, "embedding": packed(0.0, -2.5)}, row(1, 0, -1))
        first, second = rag.check_embeddings(reply(*rows), 2, "base64")
        self.assertEqual((first, second), (array("f", [0.0, -1.0]), array("f", [0.0, -1.0])))

    def test_replies_that_are_refused(self) -> None:
        good = row(0, 1.0, 0.0)
        all_zero = (
            "result 1 has index 0, as an earlier one; with API_EMBEDDING_BATCH=1 index 0 is right"
        )
        repeated, one = (
            "result {} has index {}, as an earlier one",
            "the embedding with index {}: it {}",
        )
        none_of = "result 1 has index {}, not one of 0 to 1"
        numbers = "the embedding with index 1: not all are numbers"
        length = "the embedding with index 1: it is empty, all zeros, or not finite"
        for replied, expected in (
            ([good, good], "the reply is a list, not an object"),
            ({}, "the list of results is null, not a list"),
            ({"data": "rows"}, "the list of results is a string, not a list"),
            (reply(good), "1 vectors for 2 inputs"),
            (reply(good, row(1, 1.0), good), repeated.format(2, 0)),
            (reply(good, 7), "result 1 is a number, not an object"),
            (reply(good, good), all_zero),
            (reply(good, {"embedding": [1.0, 0.0]}), all_zero),
            (reply(row(1, 1.0), row(1, 1.0)), repeated.format(1, 1)),
            (reply(good, row("1", 1.0, 0.0)), none_of.format('"1"')),
            (reply(good, row(True, 1.0, 0.0)), none_of.format("true")),
            (reply(good, row(1.0, 1.0, 0.0)), none_of.format("1.0")),
            (reply(good, row(-1, 1.0, 0.0)), none_of.format("-1")),
            (reply(good, row(2, 1.0, 0.0)), none_of.format("2")),
            (reply(good, row(10**30, 1.0)), none_of.format("1" + 18 * "0" + "…")),
            (reply(good, {"index": 1}), one.format(1, "is null, not a list")),
            (
                reply(good, encoded(packed(1, 0))),
                one.format(1, "is a string, not a list"),
            ),
            (reply(good, row(1, [1.0, 0.0])), numbers),
            (reply(good, row(1, 1.0, True)), numbers),
            (reply(good, row(1, 1.0, None)), numbers),
            (reply(good, row(1, 1.0, "0")), numbers),
            (reply(good, row(1)), length),
            (reply(good, row(1, 0, 0.0)), length),
            (reply(good, row(1, 1.0, math.nan)), length),
            (reply(good, row(1, 1.0, -math.inf)), length),
            (reply(good, row(1, 1.7e308, 1.7e308)), length),
            (reply(good, row(1, 1.0)), one.format(1, "has 1 numbers, not 2")),
        ):
            with self.subTest(replied=replied):
                with self.assertRaises(rag.RagError) as caught:
                    rag.check_embeddings(replied, 2, "float")
                self.assertEqual(str(caught.exception), expected)

    def test_vectors_that_are_refused_with_a_reason_from_python(self) -> None:
        for encoding, second in (
            ("float", row(1, 10**400, 1.0)),
            ("base64", encoded("=====")),
            ("base64", encoded(packed(1)[:-4])),
            ("base64", encoded(packed(1, 0) + "\n")),
            ("base64", encoded("ю" * 8)),
            ("base64", encoded("")),
            ("base64", encoded(packed(math.nan, 0))),
            ("base64", {"index": 1, "embedding": {}}),
        ):
            with self.subTest(second=second):
                with self.assertRaisesRegex(rag.RagError, "^the embedding with index 1: "):
                    rag.check_embeddings(reply(row(0, 1.0, 0.0), second), 2, encoding)

    def test_a_later_batch_has_vectors_of_the_length_of_the_first(self) -> None:
        with self.assertRaises(rag.RagError) as caught:
            rag.check_embeddings(reply(row(0, 1.0)), 1, "float", 2)
        self.assertEqual(
            str(caught.exception), "the embedding with index 0: it has 1 numbers, not 2"
        )


QUESTION = "What holds shelf 0?"
TEXTS = [f"Shelf {i} holds the volume {i * i}." for i in range(8)]
RECORDS = [{"id": f"r{i}", "text": text} for i, text in enumerate(TEXTS)]
NO_MORE: dict[str, str] = {}
PAIRS = {"API_EMBEDDING_BATCH": "1", "API_EMBEDDING_PARALLEL": "2"}


class TestEmbed(RagTestCase):
    def run_with(
        self,
        server: MockServer,
        scenario: str = "plain",
        environ: rag.StringMap = NO_MORE,
        records: Sequence[rag.Record] = RECORDS,
    ) -> tuple[Result, list[Any]]:
        """Return a run with these records, and its embedding requests."""
        result = run_rag(
            *(QUESTION, "--knowledge", self.file("k.json", records)),
            environ={**server.environment(scenario), **environ},
        )
        return result, bodies(server, EMBEDDINGS)

    def test_inputs_go_in_batches_the_question_first_and_equal_texts_once(self) -> None:
        twin = {**RECORDS[0], "id": "twin"}
        settings = {"API_EMBEDDING_BATCH": "3"}
        _, sent = self.run_with(self.serve(), environ=settings, records=[*RECORDS, twin])
        batches = [[QUESTION, *TEXTS[:2]], TEXTS[2:5], TEXTS[5:8]]
        self.assertEqual([sent[0]["input"], *sorted(each["input"] for each in sent[1:])], batches)

    def test_the_body_is_model_input_and_encoding_format_and_nothing_else(self) -> None:
        for encoding in ("float", "base64"):
            settings = {"API_EMBEDDING_ENCODING": encoding}
            _, sent = self.run_with(self.serve(), environ=settings)
            body = {"model": "mock-embedding", "input": [QUESTION, *TEXTS]}
            self.assertEqual(sent, [{**body, "encoding_format": encoding}])

    def test_prefixes_go_before_question_and_passages_and_nowhere_else(self) -> None:
        server = self.serve()
        prefixes = {"API_QUERY_PREFIX": "query: ", "API_DOCUMENT_PREFIX": " passage:"}
        record = {"id": "a", "title": "Tower", "text": "41 metres high."}
        _, (body,) = self.run_with(server, environ=prefixes, records=[record])
        passage = "Tower\n41 metres high."
        self.assertEqual(body["input"], [f"query: {QUESTION}", f" passage:{passage}"])
        (asked,) = bodies(server, "/rerank")
        self.assertEqual((asked["query"], asked["documents"]), (QUESTION, [passage]))
        self.assertNotIn("passage:", str(bodies(server, "/chat/completions")))

    def test_a_program_gets_the_vectors_of_its_texts_in_their_order(self) -> None:
        server = self.serve()
        environ = {**server.environment(), "API_QUERY_PREFIX": "q", "API_DOCUMENT_PREFIX": "d"}
        with rag.open_run(rag.read_settings(environ)) as run:
            first, second, third = rag.embed_texts(["one", "two", "one"], run)
            self.assertEqual(rag.embed_texts([], run), [])
        self.assertEqual([body["input"] for body in bodies(server, EMBEDDINGS)], [["one", "two"]])
        self.assertEqual(first, third)
        self.assertNotEqual(first, second)

    def test_a_group_of_requests_is_sent_after_the_group_before_it(self) -> None:
        together = threading.Barrier(2)  # broken, if two requests are not under way at once

        def change(good: Any, request: Any) -> Any:
            if request["input"] != [QUESTION]:
                together.wait(timeout=10)
            return good

        server = self.serve(Scenario("pairs", "own", "own", ANSWERS, EMBEDDINGS, change))
        result, sent = self.run_with(server, "pairs", PAIRS)
        self.assertEqual(result.status, 0, result.stderr)
        inputs = [body["input"][0] for body in sent]
        groups = [inputs[:1], *(sorted(inputs[i : i + 2]) for i in range(1, 9, 2))]
        self.assertEqual(groups, [[QUESTION], TEXTS[:2], TEXTS[2:4], TEXTS[4:6], TEXTS[6:]])

    def test_no_request_follows_a_failed_one(self) -> None:
        short = last_row(embedding=[1.0])
        for changed, words in (
            (short, "embeddings: the embedding with index 0: it has 1 numbers, not 256"),
            (lambda good, request: Reply(429, b'{"error": "slower"}'), 'answered 429: "slower"'),
        ):
            together = threading.Barrier(2)  # the other request of the group is good

            def change(
                good: Any, request: Any, changed: Any = changed, together: Any = together
            ) -> Any:
                if request["input"] == [QUESTION]:
                    return good
                together.wait(timeout=10)
                return changed(good, request) if request["input"] == [TEXTS[0]] else good

            server = self.serve(Scenario("late", "own", "own", REFUSES, EMBEDDINGS, change))
            result, sent = self.run_with(server, "late", PAIRS)
            self.assert_one_line(result, 1, words)
            self.assertEqual(len(sent), 3)

    def test_a_failure_does_not_wait_for_requests_under_way(self) -> None:
        together, ended = threading.Barrier(2), threading.Event()
        replied: list[str] = []

        def change(good: Any, request: Any) -> Any:
            if request["input"] == [QUESTION]:
                return good
            together.wait(timeout=10)
            if request["input"] == [TEXTS[0]]:
                return Reply(429, b"")
            ended.wait(timeout=10)
            replied.extend(request["input"])
            return good

        server = self.serve(Scenario("slow", "own", "own", REFUSES, EMBEDDINGS, change))
        self.addCleanup(ended.set)
        result, _ = self.run_with(server, "slow", PAIRS)
        self.assertEqual((result.status, replied), (1, []))

    def test_no_request_follows_a_failed_one_while_the_cache_is_locked(self) -> None:
        path = str(self.folder / "cache.db")
        server = self.serve()
        self.run_with(server, environ={"RAG_CACHE": path}, records=RECORDS[:1])
        lock = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        self.addCleanup(lock.close)

        def change(good: Any, request: Any) -> Any:
            if request["input"] == [TEXTS[1]]:
                lock.execute("BEGIN IMMEDIATE")  # from now on nothing can be written
            return Reply(429, b"") if request["input"] == [TEXTS[2]] else good

        server = self.serve(Scenario("locked", "own", "own", REFUSES, EMBEDDINGS, change))
        connect = sqlite3.connect

        def impatient(path: str, **options: Any) -> Any:
            return connect(path, **{**options, "timeout": 0.2})

        with mock.patch.object(sqlite3, "connect", impatient):
            result, sent = self.run_with(server, "locked", {**PAIRS, "RAG_CACHE": path})
        self.assertEqual(result.status, 1)
        self.assertEqual(len(sent), 3)

    def test_a_refused_request_names_the_settings_and_the_longest_record(self) -> None:
        server = self.serve()
        long = {"id": "long", "text": "PRIVÉ " * 40}
        options = {"API_EMBEDDING_OPTIONS": '{"dimensions": 3}'}
        result, _ = self.run_with(server, "http-400", options, [*RECORDS, long])
        facts = (
            "API_EMBEDDING_MODEL=mock-embedding, API_EMBEDDING_BATCH=32, "
            'API_EMBEDDING_OPTIONS={"dimensions": 3}, '
        )
        longest = '10 texts, longest "long" (280 bytes)'
        self.assert_one_line(result, 1, facts, longest)
        self.assertNotIn("PRIV", result.stderr)
