"""Rank: by cosine, at angles that are known."""

from __future__ import annotations

import math
import unittest
from array import array
from collections.abc import Sequence
from typing import Any

import rag
from mock_server.scenarios import ANSWERS, EMBEDDINGS, Scenario
from tests.support import RagTestCase, paths, run_rag


def at(*degrees: float) -> list[rag.Vector]:
    """Vectors of length 1 in a plane."""
    angles = [math.radians(each) for each in degrees]
    return [array("f", (math.cos(angle), math.sin(angle))) for angle in angles]


def ranked(degrees: Sequence[float], **settings: Any) -> list[tuple[str, float]]:
    """(id, similarity) of the candidates among records at these angles from the question."""
    lines: list[str] = []
    given = {"base_url": "http://127.0.0.1:9/v1", "key": "k", "model": "m", "embedding_model": "e"}
    run = rag.Run(rag.Settings(**{**given, **settings}), {}, dict, lines.append, lines.append, None)
    records = [{"id": str(degree), "text": "t"} for degree in degrees]
    candidates = rag.rank(at(0, *degrees), records, run)
    return [(record["id"], round(score, 6)) for record, score in candidates]


class TestRank(unittest.TestCase):
    def test_similarity_is_the_cosine_highest_first(self) -> None:
        expected = [("0", 1.0), ("-60", 0.5), ("90", 0.0), ("120", -0.5), ("180", -1.0)]
        self.assertEqual(ranked([90, 180, 0, 120, -60], sources=5), expected)

    def test_ties_keep_the_order_of_the_file(self) -> None:
        self.assertEqual(
            [each for each, _ in ranked([60, 30, -30, 30.0, -60], sources=5)],
            ["30", "-30", "30.0", "60", "-60"],
        )

    def test_without_a_reranker_as_many_are_kept_as_will_be_sources(self) -> None:
        self.assertEqual(len(ranked(range(50))), 3)
        self.assertEqual(len(ranked(range(50), rerank_model="r")), 20)
        self.assertEqual(len(ranked(range(2), rerank_model="r")), 2)

    def test_candidates_below_the_floor_are_dropped_and_one_at_the_floor_is_kept(self) -> None:
        degrees = [0, 45, 90, 135]
        self.assertEqual(
            [each for each, _ in ranked(degrees, sources=4, min_similarity=0.5)], ["0", "45"]
        )
        self.assertEqual(
            [each for each, _ in ranked(degrees, sources=4, min_similarity=1.0)], ["0"]
        )
        self.assertEqual([each for each, _ in ranked([180], min_similarity=-1.0)], ["180"])


class TestFloor(RagTestCase):
    def test_nothing_above_the_floor_is_an_abstention_without_a_further_request(self) -> None:
        server = self.serve()
        environ = {**server.environment(), "RAG_MIN_SIMILARITY": "0.99"}
        result = run_rag("When is the library open on Saturday?", environ=environ)
        self.assertEqual((result.status, result.stderr), (0, ""))
        expected: Any = {"answer": None, "sources": [], "reason": "below_min_similarity"}
        self.assertEqual(result.document, expected)
        self.assertEqual(paths(server), ["/embeddings"])

    def test_the_length_of_a_vector_does_not_count(self) -> None:
        def change(good: Any, request: Any) -> Any:
            vectors = {"Which?": [1, 0], "near": [0.001, 0.0001], "far": [900, 900]}
            rows = [
                {"index": i, "embedding": vectors[text]} for i, text in enumerate(request["input"])
            ]
            return {"data": rows}

        server = self.serve(
            Scenario("lengths", "own", "vectors of odd lengths", ANSWERS, EMBEDDINGS, change)
        )
        path = self.file("k.json", [{"id": "f", "text": "far"}, {"id": "n", "text": "near"}])
        result = run_rag(
            "Which?", "--knowledge", path, "--explain", environ=server.environment("lengths", False)
        )
        self.assertIn("rank: nearest of 2 records: n 0.9950, f 0.7071; ", result.stderr)
