"""Embeddings: what is sent, and which replies are taken."""

from __future__ import annotations

import base64
import math
import struct
import unittest
from array import array
from typing import Any

import rag
from mock_server.scenarios import EMBEDDINGS, REFUSES, Scenario, last_row
from tests.support import RagTestCase, bodies, paths, run_rag


def reply(*rows: Any) -> dict[str, Any]:
    return {"object": "list", "data": list(rows)}


def row(index: Any, *numbers: Any) -> dict[str, Any]:
    return {"index": index, "embedding": list(numbers)}


def packed(*numbers: float) -> str:
    return base64.b64encode(struct.pack(f"<{len(numbers)}f", *numbers)).decode()


class TestCheckEmbeddings(unittest.TestCase):
    def test_vectors_are_bound_by_index_and_scaled_to_length_1(self) -> None:
        found = rag.check_embeddings(reply(row(1, 0, 5), row(0, 3.0, 4.0)), 2, "float")
        self.assertEqual(found, [array("f", [0.6, 0.8]), array("f", [0.0, 1.0])])

    def test_a_missing_or_null_index_is_0_once(self) -> None:
        for first in ({"embedding": [1.0]}, {"index": None, "embedding": [1.0]}):
            found = rag.check_embeddings(reply(row(1, -1.0), first), 2, "float")
            self.assertEqual(found, [array("f", [1.0]), array("f", [-1.0])])
        with self.assertRaises(rag.RagError) as caught:
            rag.check_embeddings(reply(row(0, 1.0), {"embedding": [1.0]}), 2, "float")
        self.assertEqual(str(caught.exception), "data[1] has the index 0, for the second time")

    def test_a_vector_of_length_1_within_a_millionth_is_left_as_it_is(self) -> None:
        near, far = 1 + 0.9e-6, 1 + 2e-6
        found = rag.check_embeddings(reply(row(0, near, 0.0), row(1, far, 0.0)), 2, "float")
        self.assertEqual(found, [array("f", [near, 0.0]), array("f", [1.0, 0.0])])
        self.assertNotEqual(found[0], found[1])

    def test_numbers_of_any_size_are_scaled_if_their_length_is_a_number(self) -> None:
        for numbers in ((1e-320, 0), (1e300, 1e300), (10**300, 0.5), (-7, 24)):
            (vector,) = rag.check_embeddings(reply(row(0, *numbers)), 1, "float")
            self.assertAlmostEqual(math.hypot(*vector), 1, places=6)

    def test_base64_is_little_endian_float32_and_numbers_are_taken_in_its_place(self) -> None:
        rows = ({"index": 0, "embedding": packed(0.0, -2.5)}, row(1, 0, -1))
        first, second = rag.check_embeddings(reply(*rows), 2, "base64")
        self.assertEqual((first, second), (array("f", [0.0, -1.0]), array("f", [0.0, -1.0])))

    def test_the_length_of_an_earlier_batch_holds(self) -> None:
        rag.check_embeddings(reply(row(0, 1.0, 0.0)), 1, "float", 2)
        with self.assertRaises(rag.RagError) as caught:
            rag.check_embeddings(reply(row(0, 1.0)), 1, "float", 2)
        self.assertEqual(str(caught.exception), "data[0] has 1 numbers, others 2")

    def test_replies_that_are_refused(self) -> None:
        good = row(0, 1.0, 0.0)
        points_nowhere = "data[1] has a vector that is empty or all zeros: it points nowhere"
        too_large = "data[1] has a vector with NaN or numbers that are too large"
        no_base64 = "data[1] has an embedding that is not base64 of float32 numbers"
        for encoding, replied, expected in (
            ("float", [good, good], "the reply is a list of 2, not an object"),
            ("float", {"data": "rows"}, "`data` is a string, not a list of 2 vectors"),
            ("float", reply(good), "`data` is a list of 1, not a list of 2 vectors"),
            (
                "float",
                reply(good, row(1, 1.0, 0.0), row(2, 1.0, 0.0)),
                "`data` is a list of 3, not a list of 2 vectors",
            ),
            ("float", reply(good, 7), "data[1] is 7, not an object"),
            (
                "float",
                reply(good, row("1", 1.0, 0.0)),
                "data[1] has the index a string, not one of 0 to 1",
            ),
            (
                "float",
                reply(good, row(True, 1.0, 0.0)),
                "data[1] has the index a bool, not one of 0 to 1",
            ),
            (
                "float",
                reply(good, row(1.0, 1.0, 0.0)),
                "data[1] has the index a number, not one of 0 to 1",
            ),
            (
                "float",
                reply(good, row(-1, 1.0, 0.0)),
                "data[1] has the index -1, not one of 0 to 1",
            ),
            ("float", reply(good, row(2, 1.0, 0.0)), "data[1] has the index 2, not one of 0 to 1"),
            (
                "float",
                reply(good, row(10**30, 1.0)),
                "data[1] has the index a number, not one of 0 to 1",
            ),
            ("float", reply(good, good), "data[1] has the index 0, for the second time"),
            (
                "float",
                reply(good, {"index": 1}),
                "data[1] has an embedding that is null, not all numbers",
            ),
            (
                "float",
                reply(good, {"index": 1, "embedding": packed(1, 0)}),
                "data[1] has an embedding that is a string, not all numbers",
            ),
            (
                "float",
                reply(good, row(1, [1.0, 0.0])),
                "data[1] has an embedding that is a list of 1, not all numbers",
            ),
            (
                "float",
                reply(good, row(1, 1.0, True)),
                "data[1] has an embedding that is a list of 2, not all numbers",
            ),
            (
                "float",
                reply(good, row(1, 1.0, None)),
                "data[1] has an embedding that is a list of 2, not all numbers",
            ),
            (
                "float",
                reply(good, row(1, 1.0, "0")),
                "data[1] has an embedding that is a list of 2, not all numbers",
            ),
            ("float", reply(good, row(1)), points_nowhere),
            ("float", reply(good, row(1, 0, 0.0)), points_nowhere),
            ("float", reply(good, row(1, 1.0, math.nan)), too_large),
            ("float", reply(good, row(1, 1.0, -math.inf)), too_large),
            ("float", reply(good, row(1, 1.7e308, 1.7e308)), too_large),
            ("float", reply(good, row(1, 10**400, 1.0)), too_large),
            ("float", reply(good, row(1, 1.0)), "data[1] has 1 numbers, others 2"),
            ("base64", reply(good, {"index": 1, "embedding": "====="}), no_base64),
            ("base64", reply(good, {"index": 1, "embedding": packed(1)[:-4]}), no_base64),
            ("base64", reply(good, {"index": 1, "embedding": packed(1, 0) + "\n"}), no_base64),
            ("base64", reply(good, {"index": 1, "embedding": "ю" * 8}), no_base64),
            ("base64", reply(good, {"index": 1, "embedding": ""}), points_nowhere),
            ("base64", reply(good, {"index": 1, "embedding": packed(math.nan, 0)}), too_large),
            (
                "base64",
                reply(good, {"index": 1, "embedding": {}}),
                "data[1] has an embedding that is an object, not all numbers",
            ),
        ):
            with self.subTest(expected=expected), self.assertRaises(rag.RagError) as caught:
                rag.check_embeddings(replied, 2, encoding)
            self.assertEqual(str(caught.exception), expected)


RECORDS = [{"id": f"r{i}", "text": f"Shelf {i} holds the volume {i * i}."} for i in range(7)]


class TestEmbed(RagTestCase):
    def test_inputs_go_in_batches_the_question_first_and_equal_texts_once(self) -> None:
        server = self.serve()
        knowledge = [*RECORDS, {**RECORDS[0], "id": "twin"}]
        environ = {
            **server.environment(rerank=False),
            "API_EMBEDDING_BATCH": "3",
            "RAG_SOURCES": "2",
        }
        result = run_rag(
            "What holds shelf 0?", "--knowledge", self.file("k.json", knowledge), environ=environ
        )
        self.assertEqual(result.status, 0, result.stderr)
        sent = [body["input"] for body in bodies(server, "/embeddings")]
        texts = ["What holds shelf 0?", *(record["text"] for record in RECORDS)]
        # The first goes alone, the others at the same time.
        self.assertEqual([sent[0], *sorted(sent[1:])], [texts[0:3], texts[3:6], texts[6:8]])

    def test_the_body_is_model_input_and_encoding_format_and_nothing_else(self) -> None:
        for encoding in ("float", "base64"):
            server = self.serve()
            environ = {**server.environment(rerank=False), "API_EMBEDDING_ENCODING": encoding}
            run_rag(
                "Which shelf?", "--knowledge", self.file("k.json", RECORDS[:1]), environ=environ
            )
            body = {"model": "mock-embedding", "input": ["Which shelf?", RECORDS[0]["text"]]}
            self.assertEqual(bodies(server, "/embeddings"), [{**body, "encoding_format": encoding}])

    def test_prefixes_go_before_question_and_passages_and_nowhere_else(self) -> None:
        server = self.serve()
        environ = {
            **server.environment(),
            "API_QUERY_PREFIX": "query: ",
            "API_DOCUMENT_PREFIX": "passage: ",
        }
        record = {"id": "a", "title": "Tower", "text": "41 metres high."}
        run_rag("How high?", "--knowledge", self.file("k.json", [record]), environ=environ)
        inputs = bodies(server, "/embeddings")[0]["input"]
        self.assertEqual(inputs, ["query: How high?", "passage: Tower\n41 metres high."])
        self.assertEqual(bodies(server, "/rerank")[0]["query"], "How high?")
        self.assertEqual(bodies(server, "/rerank")[0]["documents"], ["Tower\n41 metres high."])
        self.assertNotIn(
            "passage: ", bodies(server, "/chat/completions")[0]["messages"][1]["content"]
        )

    def test_a_bad_vector_in_a_later_batch_ends_the_run_there(self) -> None:
        short = last_row(embedding=[1.0])

        def change(good: Any, request: Any) -> Any:
            return good if "Which shelf?" in request["input"] else short(good, request)

        own = Scenario(
            "late", "own", "a short vector in the second batch", REFUSES, EMBEDDINGS, change
        )
        server = self.serve(own)
        environ = {**server.environment("late"), "API_EMBEDDING_BATCH": "3"}
        records = [{"id": f"r{i}", "text": f"Shelf {i}."} for i in range(40)]
        result = run_rag(
            "Which shelf?", "--knowledge", self.file("k.json", records), environ=environ
        )
        self.assert_failure(result, 1, "rag.py: embeddings: data[2] has 1 numbers, others 256")
        # The first, which was good, and at most 4 of the other 13.
        self.assertIn(len(server.request_log.entries), range(2, 6))

    def test_a_request_that_is_too_large_names_the_variable_and_the_longest_record(self) -> None:
        server = self.serve()
        long = {"id": "long", "text": "PRIVATE " * 40}
        path = self.file("k.json", [*RECORDS, long])
        for status in (400, 413, 500):
            result = run_rag(
                "Why?", "--knowledge", path, environ=server.environment(f"http-{status}")
            )
            advice = 'API_EMBEDDING_BATCH is 32; the longest input, "long", has 320 characters'
            self.assert_one_line(result, 1, f"answered {status}; too much for it? {advice}")
            self.assertNotIn("PRIVATE", result.stderr)
        self.assertEqual(paths(server), ["/embeddings"])
