"""Rerank: what is sent, and which replies are accepted."""

from __future__ import annotations

import json
import math
import unittest
from typing import Any

import rag
from mock_server.scenarios import CHAT, EMBEDDINGS, RERANK
from mock_server.server import MockServer
from tests.support import RagTestCase, Result, bodies, paths, run_rag


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
        lists = "the reply has not exactly one of `results` and `data`"
        none_of = "result 1 has index {}, not one of 0 to 2"
        score = "index 1 has not exactly one score that is a finite number"
        for reply, expected in (
            ({}, lists),
            ({"results": [good], "data": [good]}, lists),
            (None, "the list of results is null, not a list"),
            ("text", "the list of results is a string, not a list"),
            ({"results": None}, "the list of results is null, not a list"),
            ({"results": {"0": good}}, "the list of results is an object, not a list"),
            ([good, None], "result 1 is null, not an object"),
            ([good, {"relevance_score": 1}], none_of.format("null")),
            ([good, row(None, 1)], none_of.format("null")),
            ([good, row("1", 1)], none_of.format('"1"')),
            ([good, row(True, 1)], none_of.format("true")),
            ([good, row(1.0, 1)], none_of.format("1.0")),
            ([good, row(-1, 1)], none_of.format("-1")),
            ([good, row(3, 1)], none_of.format("3")),
            ([good, row(0, 1)], "result 1 has index 0, as an earlier one"),
            ([good, {"index": 1}], score),
            ([good, {**row(1, 1), "score": 1}], score),
            ([good, {**row(1, 1), "score": None}], score),
            ([good, row(1, None)], score),
            ([good, row(1, "0.5")], score),
            ([good, row(1, True)], score),
            ([good, row(1, [1])], score),
            ([good, row(1, math.nan)], score),
            ([good, row(1, -math.inf)], score),
            ([good, row(1, 10**400)], score),
        ):
            with self.subTest(reply=reply):
                with self.assertRaises(rag.RagError) as caught:
                    rag.check_rerank(reply, 3)
                self.assertEqual(str(caught.exception), expected)


RECORDS = [
    {"id": f"r{i}", "title": "Shelf", "text": f"volume {'high ' * i}tower"} for i in range(6)
]


class TestRerank(RagTestCase):
    def run_with(self, server: MockServer, scenario: str = "plain", **environ: str) -> Result:
        """Return a run with RECORDS."""
        path = self.file("k.json", RECORDS)
        given = {**server.environment(scenario), **environ}
        return run_rag("Which tower?", "--knowledge", path, environ=given)

    def test_the_body_holds_the_passages_of_the_candidates_best_first(self) -> None:
        server = self.serve()
        self.run_with(server, RAG_CANDIDATES="4", RAG_SOURCES="2")
        expected = {
            "model": "mock-rerank",
            "query": "Which tower?",
            "documents": [f"Shelf\n{record['text']}" for record in RECORDS[:4]],
            "top_n": 2,
            "return_documents": False,
        }
        self.assertEqual(bodies(server, RERANK), [expected])

    def test_top_n_is_at_most_the_number_of_documents(self) -> None:
        server = self.serve()
        self.run_with(server, RAG_CANDIDATES="2")
        self.assertEqual(bodies(server, RERANK)[0]["top_n"], 2)

    def test_a_program_gets_the_best_rag_sources_rows_of_a_server_that_sends_all(self) -> None:
        environ = {**self.serve().environment("rerank-all-rows"), "RAG_SOURCES": "2"}
        with rag.open_run(rag.read_settings(environ)) as run:
            best = rag.rerank("Which tower?", [(record, 0.0) for record in RECORDS], run)
        self.assertEqual([record["id"] for record, _ in best], ["r0", "r1"])

    def test_the_sources_are_the_best_rows_with_our_own_texts(self) -> None:
        server = self.serve()
        for scenario in ("plain", "rerank-all-rows", "rerank-documents-echoed", "rerank-unsorted"):
            self.run_with(server, scenario)
        sent = [body["messages"][1]["content"] for body in bodies(server, CHAT)]
        self.assertEqual(len(set(sent)), 1)
        self.assertEqual(len(json.loads(sent[0])["sources"]), 3)

    def test_a_failing_reranker_fails_the_run(self) -> None:
        server = self.serve()
        result = self.run_with(server, "http-500-rerank")
        facts = "API_RERANK_MODEL=mock-rerank, RAG_CANDIDATES=20, 6 texts, longest"
        self.assert_one_line(result, 1, "rag.py: rerank: ", "answered 500", facts)
        self.assertEqual(paths(server), [EMBEDDINGS, RERANK])
