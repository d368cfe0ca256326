"""Rerank: what is sent, and which replies are taken."""

from __future__ import annotations

import math
import unittest
from typing import Any

import rag
from tests.support import RagTestCase, bodies, run_rag


def row(index: Any, score: Any, name: str = "relevance_score") -> dict[str, Any]:
    return {"index": index, name: score}


class TestCheckRerank(unittest.TestCase):
    def test_every_legal_form_gives_the_same_order(self) -> None:
        rows = [row(2, 0.5), row(0, 0.9)]
        scored = [row(2, 0.5, "score"), row(0, 0.9, "score")]
        echoed = [{**each, "document": {"text": "other"}, "extra": None} for each in rows]
        for reply in (
            rows,
            scored,
            {"results": rows},
            {"data": rows},
            {"data": scored, "usage": {}},
            {"results": echoed},
        ):
            self.assertEqual(rag.check_rerank(reply, 3), [(0, 0.9), (2, 0.5)])

    def test_scores_have_any_size_and_sign_and_ties_go_by_index(self) -> None:
        rows = [row(3, -8.5), row(1, 7), row(0, -8.5), row(2, 10**300)]
        self.assertEqual(rag.check_rerank(rows, 4), [(2, 1e300), (1, 7.0), (0, -8.5), (3, -8.5)])

    def test_no_row_is_no_error(self) -> None:
        self.assertEqual(rag.check_rerank({"results": []}, 3), [])

    def test_replies_that_are_refused(self) -> None:
        good = row(0, 0.9)
        neither = "the reply is {} that has not one list `results` or `data`"
        finite = "result 1 has the score {}, not a finite number"
        for reply, expected in (
            (None, neither.format("null")),
            ("text", neither.format("a string")),
            ({}, neither.format("an object")),
            ({"results": None}, neither.format("an object")),
            ({"results": {"0": good}}, neither.format("an object")),
            ({"results": [good], "data": [good]}, neither.format("an object")),
            ([good, None], "result 1 is null, not an object"),
            ([good, {"relevance_score": 1}], "result 1 has the index null, not one of 0 to 2"),
            ([good, row(None, 1)], "result 1 has the index null, not one of 0 to 2"),
            ([good, row("1", 1)], "result 1 has the index a string, not one of 0 to 2"),
            ([good, row(True, 1)], "result 1 has the index a bool, not one of 0 to 2"),
            ([good, row(1.0, 1)], "result 1 has the index a number, not one of 0 to 2"),
            ([good, row(-1, 1)], "result 1 has the index -1, not one of 0 to 2"),
            ([good, row(3, 1)], "result 1 has the index 3, not one of 0 to 2"),
            ([good, row(0, 1)], "result 1 has the index 0, for the second time"),
            ([good, {"index": 1}], "result 1 needs one of `relevance_score` and `score`"),
            (
                [good, {**row(1, 1), "score": 1}],
                "result 1 needs one of `relevance_score` and `score`",
            ),
            ([good, row(1, None)], finite.format("null")),
            ([good, row(1, "0.5")], finite.format("a string")),
            ([good, row(1, True)], finite.format("a bool")),
            ([good, row(1, [1])], finite.format("a list of 1")),
            ([good, row(1, math.nan)], finite.format("a number")),
            ([good, row(1, -math.inf)], finite.format("a number")),
            ([good, row(1, 10**400)], finite.format("a number")),
        ):
            with self.subTest(expected=expected), self.assertRaises(rag.RagError) as caught:
                rag.check_rerank(reply, 3)
            self.assertEqual(str(caught.exception), expected)


RECORDS = [
    {"id": f"r{i}", "title": "Shelf", "text": f"volume {'high ' * i}tower"} for i in range(6)
]


class TestRerank(RagTestCase):
    def test_the_body_holds_the_passages_of_the_candidates_best_first(self) -> None:
        server = self.serve()
        environ = {**server.environment(), "RAG_CANDIDATES": "4", "RAG_SOURCES": "2"}
        run_rag("Which tower?", "--knowledge", self.file("k.json", RECORDS), environ=environ)
        (body,) = bodies(server, "/rerank")
        self.assertEqual(
            body,
            {
                "model": "mock-rerank",
                "query": "Which tower?",
                "documents": [rag.passage(record) for record in RECORDS[:4]],
                "top_n": 2,
                "return_documents": False,
            },
        )

    def test_top_n_is_not_more_than_the_documents(self) -> None:
        server = self.serve()
        run_rag(
            "Which tower?",
            "--knowledge",
            self.file("k.json", RECORDS[:2]),
            environ=server.environment(),
        )
        self.assertEqual(bodies(server, "/rerank")[0]["top_n"], 2)

    def test_the_sources_are_the_best_rows_with_our_own_texts(self) -> None:
        server = self.serve()
        for name in ("rerank-all-rows", "rerank-documents-echoed", "rerank-unsorted"):
            run_rag(
                "How high?",
                "--knowledge",
                self.file("k.json", RECORDS),
                environ=server.environment(name),
            )
        sent = [body["messages"][1]["content"] for body in bodies(server, "/chat/completions")]
        self.assertEqual(len(set(sent)), 1)
        self.assertEqual(sent[0].count('"id": '), 3)
        self.assertNotIn("never sent", sent[0])
