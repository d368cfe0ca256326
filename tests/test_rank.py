"""Rank: by cosine similarity, at angles that are known."""

from __future__ import annotations

import json
import math
import unittest
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import rag
from mock_server.scenarios import ANSWERS, CHAT, EMBEDDINGS, Scenario
from tests.support import RagTestCase, Result, bodies, paths, run_rag


def at(degrees: float) -> rag.Vector:
    """Return a vector of length 1 in a plane."""
    return array("f", (math.cos(math.radians(degrees)), math.sin(math.radians(degrees))))


def ranked(degrees: Sequence[float], count: int) -> list[tuple[str, float]]:
    """Return (id, similarity) of the nearest among records at these angles from the question."""
    records = [{"id": str(degree), "text": "t"} for degree in degrees]
    nearest = rag.rank(at(0), [at(degree) for degree in degrees], records, count)
    return [(record["id"], round(similarity, 6)) for record, similarity in nearest]


class TestRank(unittest.TestCase):
    def test_similarity_is_the_cosine_highest_first(self) -> None:
        expected = [("0", 1.0), ("-60", 0.5), ("90", 0.0), ("120", -0.5), ("180", -1.0)]
        self.assertEqual(ranked([90, 180, 0, 120, -60], 9), expected)
        self.assertEqual(ranked([90, 180, 0, 120, -60], 2), expected[:2])

    def test_ties_keep_the_order_of_the_file(self) -> None:
        names = [name for name, _ in ranked([60, 30, -30, 30.0, -60], 5)]
        self.assertEqual(names, ["30", "-30", "30.0", "60", "-60"])

    def test_no_similarity_is_below_minus_1(self) -> None:
        far, opposite = array("f", [1 + 1e-6, 0]), array("f", [-1 - 1e-6, 0])
        ((_, similarity),) = rag.rank(far, [opposite], [{"id": "a", "text": "t"}], 1)
        self.assertEqual(similarity, -1.0)


class TestThreshold(RagTestCase):
    def run_with(
        self, vectors: Mapping[str, Any], rerank: bool = False, **environ: str
    ) -> tuple[Result, list[str], list[str]]:
        """Return a run on records with these vectors from the question [1, 0], the endpoints that
        it asked, and the ids of the sources that were sent to the chat model."""

        def change(good: Any, request: Any) -> Any:
            inputs = enumerate(request["input"])
            return {"data": [{"index": i, "embedding": all_of[text]} for i, text in inputs]}

        all_of = {"Which?": [1, 0], **vectors}
        server = self.serve(Scenario("own", "own", "own", ANSWERS, EMBEDDINGS, change))
        path = self.file("k.json", [{"id": name, "text": name} for name in vectors])
        given = {**server.environment("own", rerank), **environ}
        result = run_rag("Which?", "--knowledge", path, "--explain", environ=given)
        contents = [json.loads(each["messages"][1]["content"]) for each in bodies(server, CHAT)]
        sent = [source["id"] for content in contents for source in content["sources"]]
        return result, paths(server), sent

    def test_a_record_below_the_threshold_is_dropped_and_one_at_it_is_kept(self) -> None:
        vectors = {"below": [0.8, 0.6], "at": [1, 0], "opposite": [-1, 0]}
        for threshold, expected in (("1", ["at"]), ("0.5", ["at", "below"]), ("-1", None)):
            with self.subTest(threshold=threshold):
                _, _, sent = self.run_with(vectors, RAG_MIN_SIMILARITY=threshold)
                self.assertEqual(sent, expected or ["at", "below", "opposite"])

    def test_what_the_threshold_dropped_is_explained(self) -> None:
        vectors = {"near": [1, 0], "far": [3, 4]}
        result, _, _ = self.run_with(vectors, RAG_MIN_SIMILARITY="0.7")
        self.assertIn("rank: nearest near 1.0000; dropped far 0.6000\n", result.stderr)

    def test_nothing_above_the_threshold_is_an_abstention_without_a_further_request(self) -> None:
        far = {"far": [0, 1]}
        result, asked, _ = self.run_with(far, rerank=True, RAG_MIN_SIMILARITY="0.1")
        expected: Any = {"answer": None, "sources": [], "reason": "below_min_similarity"}
        self.assertEqual((result.status, result.document), (0, expected))
        self.assertEqual(asked, ["/embeddings"])

    def test_without_a_reranker_the_best_of_rag_sources_are_sent(self) -> None:
        vectors = {str(i): [i, 10] for i in range(9)}
        _, _, sent = self.run_with(vectors, RAG_SOURCES="4", RAG_CANDIDATES="2")
        self.assertEqual(sent, ["8", "7", "6", "5"])

    def test_the_length_of_a_vector_does_not_count(self) -> None:
        result, _, _ = self.run_with({"far": [900, 900], "near": [0.001, 0.0001]})
        self.assertIn("rank: nearest near 0.9950, far 0.7071; dropped none\n", result.stderr)
