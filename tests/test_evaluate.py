"""The evaluation: arithmetic against numbers computed by hand, sets with known geometry, runs."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
import unittest
from array import array
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from operator import mul
from typing import Any
from unittest import mock

import rag
from mock_server import models
from mock_server.scenarios import ANSWERS, CHAT, EMBEDDINGS, RERANK, Change, Reply, Scenario
from mock_server.server import MockServer
from tests.evaluate import __main__ as command
from tests.evaluate import answers, measures, report, retrieval
from tests.evaluate.questions import KINDS, SAMPLE_QUESTIONS, Question, read_questions
from tests.support import ROOT, RagTestCase, Result, bodies, run_rag

RECORDS = rag.read_knowledge(str(rag.SAMPLE_KNOWLEDGE))
QUESTIONS = read_questions(str(SAMPLE_QUESTIONS), RECORDS)


# ---- arithmetic ----------------------------------------------------------------------------------


def needs(*ids: str) -> tuple[frozenset[str], ...]:
    """Return needs of one record each."""
    return tuple(frozenset([name]) for name in ids)


class TestKeywords(unittest.TestCase):
    def test_words_are_runs_of_letters_and_digits_and_han_or_kana_one_by_one(self) -> None:
        for text, expected in (
            ("Notice HK-417: off!", ["notice", "hk", "417", "off"]),
            ("Straße Où", ["strasse", "où"]),
            ("停6小时 ok", ["停", "6", "小", "时", "ok"]),
            ("かな_x", ["か", "な", "x"]),
            ("...", []),
        ):
            self.assertEqual(measures.words(text), expected)

    def test_bm25_is_the_sum_computed_by_hand(self) -> None:
        # N = 3 texts of 2, 3 and 1 words, on average 2. "a" is in 2 of them, "c" in 1:
        #   idf a = ln(1 + 1.5 / 2.5) = ln 1.6 = 0.470004, idf c = ln(1 + 2.5 / 1.5) = 0.980829.
        # Text 1: length 2/2, k1 * (0.25 + 0.75) = 1.2; a: 1 * 2.2 / (1 + 1.2) = 1; sum 0.470004.
        # Text 2: length 3/2, k1 * (0.25 + 1.125) = 1.65; a: 2 * 2.2 / 3.65 = 1.205479 times idf is
        #   0.566579; c: 2.2 / 2.65 = 0.830189 times idf is 0.814273; sum 1.380853. Text 3: nothing.
        index = measures.index_words({"1": "a b", "2": "a a c", "3": "d"})
        scores = measures.bm25("a c x a", index)  # a word counts once, an unknown one not at all
        self.assertEqual([*scores], ["1", "2"])
        self.assertAlmostEqual(scores["1"], 0.470004, places=5)
        self.assertAlmostEqual(scores["2"], 1.380853, places=5)

    def test_equal_scores_keep_the_order_of_the_texts(self) -> None:
        index = measures.index_words({"1": "x", "2": "a", "3": "b b b", "4": "a"})
        self.assertEqual(measures.rank_by_words("a b", index), ["3", "2", "4"])
        self.assertEqual(measures.rank_by_words("?", index), [])


class TestRankings(unittest.TestCase):
    def test_reciprocal_rank_fusion_is_computed_by_hand(self) -> None:
        # a: 1/61 + 1/63 = 0.032266; b: 1/62 + 1/61 = 0.032522; c: 1/63; d: 1/62.
        self.assertEqual(measures.reciprocal_rank_fusion("abc", "bda"), ["b", "a", "d", "c"])
        # b: 1/62 + 1/62 = 0.032258; a: 1/61 + 1/64 = 0.032018. With a constant of 0 a would lead.
        self.assertEqual(measures.reciprocal_rank_fusion("abxy", "cbza")[:2], ["b", "a"])
        self.assertEqual(measures.reciprocal_rank_fusion("ab", "ba"), ["a", "b"])

    def test_places_are_those_of_the_first_id_that_stands_for_a_record(self) -> None:
        chunks = frozenset("cd")
        self.assertEqual(measures.places("abcd", (chunks, *needs("a", "x"))), [3, 1, None])

    def test_hits_and_reciprocal_rank_follow_from_the_places(self) -> None:
        for places, first, within_3, rank in (
            ([3, 1], True, True, 1.0),
            ([1, 4], True, False, 1.0),
            ([2, 3], False, True, 1 / 2),
            ([None, 2], False, False, 1 / 2),
            ([None], False, False, 0.0),
        ):
            found = (
                measures.hit_at_1(places),
                measures.hit_at_k(places, 3),
                measures.reciprocal_rank(places),
            )
            self.assertEqual(found, (first, within_3, rank), places)

    def test_the_interval_is_the_one_computed_by_hand(self) -> None:
        # 12 of 15, z² = 3.841459: middle (0.8 + 3.841459/30) / (1 + 3.841459/15) = 0.738840;
        # half 1.959964 * sqrt(0.8 * 0.2 / 15 + 3.841459 / 900) / 1.256097 = 0.190688.
        # 0 of 10: from 0 to z² / (10 + z²) = 3.841459 / 13.841459 = 0.277533.
        for count, of, low, high in (
            (12, 15, 0.548152, 0.929528),
            (0, 10, 0, 0.277533),
            (10, 10, 1 - 0.277533, 1),
            (0, 0, 0, 1),
        ):
            for found, expected in zip(measures.wilson(count, of), (low, high)):
                self.assertAlmostEqual(found, expected, places=4)

    def test_a_share_is_never_shown_as_a_bare_percentage(self) -> None:
        self.assertEqual(report.shown(report.share(12, 15)), "12 of 15 (55 to 93 %)")
        self.assertEqual(report.shown(report.share(0, 0)), "0 of 0")


# ---- sets with known geometry --------------------------------------------------------------------


def run_of(**settings: Any) -> rag.Run:
    """Return a run that can send nothing."""
    given = {"API_BASE_URL": "http://127.0.0.1:9/v1", "API_KEY": "k", "API_MODEL": "m"}
    made = rag.Settings(**{**given, "API_EMBEDDING_MODEL": "e", **settings})
    return rag.Run(made, None, None, ThreadPoolExecutor(1), False)


def vector(degrees: float) -> rag.Vector:
    """Return a vector of length 1 in a plane."""
    return array("f", (math.cos(math.radians(degrees)), math.sin(math.radians(degrees))))


def row_of(
    degrees: float, needed: Sequence[frozenset[str]], records: Mapping[str, float], k: int = 1
) -> retrieval.Row:
    """Return what is found for a question at an angle. records: {id: angle}."""
    made = [{"id": name, "text": name} for name in records]
    nearest = rag.rank(vector(degrees), [*map(vector, records.values())], made, len(made))
    question = Question(f"question at {degrees}", "plain", tuple(needed))
    index = measures.index_words({name: name for name in records})
    return retrieval.search(question, nearest, index, run_of(RAG_SOURCES=k))


def set_of(answerable: Sequence[float], unanswerable: Sequence[float]) -> list[retrieval.Row]:
    """Return questions with these similarities to the only record, which some of them need."""
    angles = [(math.degrees(math.acos(each)), needs("a")) for each in answerable]
    angles += [(math.degrees(math.acos(each)), ()) for each in unanswerable]
    return [row_of(degrees, needed, {"a": 0}) for degrees, needed in angles]


def effects(found: Sequence[Mapping[str, Any] | None]) -> list[tuple[float, int, int, int]]:
    """Return (threshold, kept, lost, dropped) of each threshold."""
    return [
        (each["value"], each["keeps"]["count"], each["loses"], each["drops"]["count"])
        for each in found
        if each
    ]


class TestThreshold(unittest.TestCase):
    def test_the_highest_that_loses_nothing_is_recommended_and_others_stand_under_it(self) -> None:
        for name, answerable, unanswerable, best, others in (
            (
                "a clean gap",
                [0.91, 0.8766, 0.77],
                [0.5, 0.34, 0.1],
                [(0.769, 3, 0, 3)],
                [(0.341, 3, 0, 2), (0.501, 3, 0, 3)],
            ),
            (
                "an overlap",
                [0.9, 0.7, 0.34],
                [0.5, 0.47, 0.2, 0.1],
                [(0.339, 3, 0, 2)],
                [(0.201, 3, 0, 2), (0.471, 2, 1, 3), (0.501, 2, 1, 4)],
            ),
            (
                "one needed record far off",
                [0.9, 0.8, 0.7, 0.05],
                [0.5, 0.4, 0.3, 0.2],
                [],
                [(0.301, 3, 1, 2), (0.401, 3, 1, 3), (0.501, 3, 1, 4)],
            ),
            ("nothing separable", [0.1, 0.2], [0.8, 0.9], [], []),
            ("equal similarities", [0.5], [0.5], [], []),
        ):
            with self.subTest(name):
                found = report.threshold_figures(set_of(answerable, unanswerable), None)
                self.assertEqual(effects([found["recommended"]]), best)
                self.assertEqual(effects(found["alternatives"]), others)
                text = "\n".join(report.threshold_text(found))
                helps = f"\nexport RAG_MIN_SIMILARITY={best[0][0]}\n" if best else ""
                self.assertIn(helps or "\nno threshold helps on this set: ", text)
                self.assertEqual("export" in text, bool(best))

    def test_a_threshold_loses_no_needed_record_whatever_the_similarities(self) -> None:
        for similarity in (0.577, 0.5, 0.29, -0.2, 0.0, 0.123456, 1.0, 0.5769999):
            rows = set_of([similarity], [-1.0])
            threshold = retrieval.recommended(rows)
            assert threshold is not None
            (kept,) = retrieval.needed(rows[0])
            self.assertTrue(0 < kept - threshold < 0.0011, (kept, threshold))

    def test_needed_records_that_are_not_found_do_not_count(self) -> None:
        records = {"near": 10.0, "far": 60.0}
        rows = [row_of(0, needs("near", "far"), records), row_of(100, (), records)]
        found = report.threshold_figures(rows, None)
        self.assertEqual(([round(each, 3) for each in found["needed"]]), [0.985])
        self.assertIn("not counted: 1 needed", "\n".join(report.threshold_text(found)))
        rows = [row_of(0, needs("near", "far"), records, k=2), row_of(100, (), records, k=2)]
        found = report.threshold_figures(rows, None)
        self.assertEqual([round(each, 3) for each in found["needed"]], [0.5, 0.985])

    def test_of_several_chunks_of_a_file_the_best_one_counts(self) -> None:
        row = row_of(0, (frozenset(["near", "far"]),), {"near": 10.0, "far": 60.0}, k=2)
        self.assertEqual([round(each, 3) for each in retrieval.needed(row)], [0.985])

    def test_your_own_threshold_is_shown_beside_the_others(self) -> None:
        found = report.threshold_figures(set_of([0.9, 0.7], [0.5]), 0.8)
        self.assertEqual(effects([found["own"]]), [(0.8, 1, 1, 1)])
        self.assertIn("1 of 1 (21 to 100 %) (RAG_MIN_SIM", "\n".join(report.threshold_text(found)))

    def test_a_set_without_one_side_has_no_threshold_and_says_so(self) -> None:
        for rows, words in (
            (set_of([0.5], []), "no unanswerable question"),
            (set_of([], [0.5]), "no needed record that is found"),
        ):
            found = report.threshold_figures(rows, None)
            self.assertIsNone(found["recommended"])
            self.assertEqual(
                report.threshold_text(found), [f"THRESHOLD  cannot be measured: there is {words}"]
            )


class TestOutcome(unittest.TestCase):
    def test_every_ending_of_a_question_has_its_name(self) -> None:
        chunks = (frozenset(["f:1", "f:9"]),)
        for needed, end, cited, expected in (
            (needs("a", "b"), "answered", ["b", "a"], "cited right"),
            (needs("a"), "answered", ["a", "b"], "cited others too"),
            (needs("a", "b"), "answered", ["a"], "cited wrong"),
            (needs("a"), "answered", ["b"], "cited wrong"),
            (chunks, "answered", ["f:9"], "cited right"),
            (chunks, "answered", ["f:9", "f:1"], "cited right"),
            (chunks, "answered", ["f:9", "g:1"], "cited others too"),
            (needs("a"), "abstained", [], "abstained"),
            ((), "abstained", [], "abstained"),
            ((), "answered", ["a"], "unsupported"),
            (needs("a"), "rejected", [], "rejected"),
            ((), "failed", [], "failed"),
        ):
            question = Question("q", "plain", needed)
            found = answers.outcome(question, answers.Reply(end, ids=cited))
            self.assertEqual(found, expected, (needed, cited))

    def test_reasons_that_differ_in_names_and_numbers_are_one_kind(self) -> None:
        one, other = ('source_ids[0]: "a" is not sent', 'source_ids[31]: "b c" is not sent')
        self.assertEqual(report.kind_of(one), 'source_ids[N]: "…" is not sent')
        self.assertEqual(report.kind_of(other), report.kind_of(one))


# ---- the questions file --------------------------------------------------------------------------


class TestQuestions(RagTestCase):
    def test_the_sample_has_enough_questions_of_every_kind(self) -> None:
        self.assertGreaterEqual(len(QUESTIONS), 40)
        self.assertGreaterEqual(sum(not question.needs for question in QUESTIONS), 12)
        self.assertEqual({question.kind for question in QUESTIONS}, set(KINDS))

    def test_a_paraphrase_shares_no_word_with_its_record(self) -> None:
        passages = {record["id"]: rag.passage(record) for record in RECORDS}
        for question in QUESTIONS:
            if question.kind == "paraphrase":
                for name in frozenset().union(*question.needs):
                    shared = {*models.stems(question.text)} & {*models.stems(passages[name])}
                    self.assertEqual(shared, set(), question.text)

    def test_a_path_stands_for_any_chunk_of_its_file_and_an_id_for_its_record(self) -> None:
        records: list[rag.Record] = [
            {"id": "a.md:1", "text": "t", "file": "a.md"},
            {"id": "a.md:7", "text": "t", "file": "a.md"},
            {"id": "b.md", "text": "t", "file": "a.md"},
            {"id": "c", "text": "t", "file": "b.md"},
            {"id": "d", "text": "t", "file": 7},
        ]
        ids = ["a.md", "a.md:7", "b.md"]
        path = self.file("q.json", [{"question": "q", "ids": ids, "kind": "plain"}])
        (question,) = read_questions(path, records)
        expected = (frozenset(["a.md:1", "a.md:7", "b.md"]), *needs("a.md:7", "b.md"))
        self.assertEqual(question.needs, expected)

    def test_a_wrong_file_is_refused_with_the_entry_and_the_rule(self) -> None:
        good = ASKED[0]
        for content, words in (
            ({"question": "q"}, "the content of "),
            ([], "holds no question"),
            ("[", "is not JSON"),
            (b"\xff", "cannot read "),
            ('[{"question": "a", "question": "b"}]', "is repeated"),
            (["text"], "entry 1: the entry is a string, not an object"),
            ([good, {**good, "id": []}], "entry 2: the keys are not `question`, `ids` and `kind`"),
            ([{**good, "question": 7}], "entry 1: question is a number, not a string"),
            ([{**good, "question": " "}], "entry 1: the question is blank"),
            ([{**good, "kind": "odd"}], 'entry 1: the kind "odd" is none of plain, paraphrase, '),
            ([{**good, "ids": "east"}], "entry 1: ids is a string, not a list"),
            ([{**good, "ids": [1]}], "entry 1: ids[0] is a number, not a string"),
            ([{**good, "ids": ["East"]}], 'ids[0], "East", is neither the id nor the `file` of'),
            ([{**good, "ids": ["east"] * 2}], 'entry 1: ids[1], "east", is repeated'),
            ([good, ASKED[1], good], "entry 3: an earlier entry has this question"),
            ([{**good, "ids": []}], "entry 1: a plain question has 1 or more ids; found 0"),
            ([{**ASKED[2], "ids": ["east"]}], "a near-miss question has no ids; found 1"),
            ([{**good, "kind": "two-part"}], "a two-part question has 2 or more ids; found 1"),
        ):
            with self.subTest(words), self.assertRaises(rag.RagError) as raised:
                read_questions(self.file("q.json", content), SMALL)
            self.assertIn(words, str(raised.exception))


# ---- the command ---------------------------------------------------------------------------------

SMALL = [
    {"id": "east", "text": "The east gate is red."},
    {"id": "west", "text": "The west door is blue."},
]
ASKED = [
    {"question": "Which colour has the east gate?", "ids": ["east"], "kind": "plain"},
    {"question": "Which colour has the west door?", "ids": ["west"], "kind": "plain"},
    {"question": "How high is the west door?", "ids": [], "kind": "near-miss"},
    {"question": "Who won?", "ids": [], "kind": "unrelated"},
]


def run_evaluate(*argv: str, environ: Mapping[str, str]) -> Result:
    """Run the command in this process, as run_rag() runs rag.py."""
    with mock.patch.object(rag, "main", command.main):
        return run_rag(*argv, environ=environ)


def said(request: Any, content: str) -> Any:
    """Return a chat reply with this content."""
    good = models.chat(request)
    message = {**good["choices"][0]["message"], "content": content}
    return {**good, "choices": [{**good["choices"][0], "message": message}]}


def for_question(word: str, served: Change) -> Change:
    """Return a change of the replies to requests that have the word in them."""

    def change(good: Any, request: Any) -> Any:
        return served(good, request) if word in json.dumps(request) else good

    return change


def broken(good: Any, request: Any) -> Any:
    return Reply(500, {"error": {"message": "broken"}})


def counts(figures: Mapping[str, Any]) -> dict[str, int]:
    """Return the outcomes of a variant that occurred."""
    found = {
        f"{group} {end}": part["count"]
        for group in ("answerable", "unanswerable")
        for end, part in figures[group].items()
    }
    return {name: count for name, count in found.items() if count}


class TestCommand(RagTestCase):
    def evaluate(self, *argv: str, environ: Mapping[str, str], asked: Any = ASKED) -> Result:
        """Evaluate the small set."""
        knowledge, questions = self.file("k.json", SMALL), self.file("q.json", asked)
        return run_evaluate(
            "--knowledge", knowledge, "--questions", questions, *argv, environ=environ
        )

    def own(self, path: str, change: Change, rerank: bool = False) -> tuple[MockServer, Any]:
        """Return a server of a scenario of this test, and its environment."""
        server = self.serve(Scenario("own", "own", "x", ANSWERS, path, change))
        return server, server.environment("own", rerank=rerank)

    def test_each_text_of_the_sample_is_embedded_once_in_batches(self) -> None:
        server = self.serve()
        environ = {**server.environment(), "API_QUERY_PREFIX": "find: "}
        result = run_evaluate("--json", environ=environ)
        self.assertEqual((result.status, result.stderr), (0, ""))
        inputs = [body["input"] for body in bodies(server, EMBEDDINGS)]
        sent = [f"find: {question.text}" for question in QUESTIONS]
        sent += [rag.passage(record) for record in RECORDS]
        self.assertEqual(sorted(text for batch in inputs for text in batch), sorted(sent))
        self.assertEqual(sorted(map(len, inputs)), [len(sent) - 64, 32, 32])
        self.assertEqual(len(bodies(server, RERANK)), len(QUESTIONS))
        self.assertEqual(bodies(server, CHAT), [])
        found = result.document
        self.assertEqual([*found["retrieval"]], ["vectors", "BM25", "hybrid", "reranked"])
        self.assertEqual(found["answers"], {})

    def test_the_vectors_of_the_mock_are_ranked_as_by_plain_sums(self) -> None:
        found = run_evaluate("--json", environ=self.serve().environment(rerank=False)).document
        vectors = {record["id"]: models.vector(rag.passage(record)) for record in RECORDS}
        hits = {"vectors": set[str](), "BM25": set[str]()}
        for each in found["each"]:
            asked = models.vector(each["question"])
            sums = [(sum(map(mul, asked, each)), name) for name, each in vectors.items()]
            name, similarity = each["nearest"][0]
            self.assertAlmostEqual(similarity, max(sums)[0], places=6)
            self.assertIn(name, [other for score, other in sums if score > similarity - 1e-6])
            for search in hits:
                if each["needs"] and 1 in each["places"][search]:
                    hits[search].add(each["question"])
        # The sample shows what either search finds and the other does not.
        self.assertGreaterEqual(len(hits["BM25"] - hits["vectors"]), 3)
        self.assertGreaterEqual(len(hits["vectors"] - hits["BM25"]), 2)

    def test_the_rerank_model_is_asked_for_all_candidates(self) -> None:
        def last_first(good: Any, request: Any) -> Any:
            return [{"index": i, "score": i} for i in range(len(request["documents"]))]

        server, environ = self.own(RERANK, last_first, rerank=True)
        result = self.evaluate("--json", environ={**environ, "RAG_SOURCES": "1"})
        self.assertEqual([body["top_n"] for body in bodies(server, RERANK)], [2] * 4)
        found = result.document["retrieval"]
        self.assertEqual(found["vectors"]["hit_at_k"]["count"], 2)
        self.assertEqual(found["reranked"]["hit_at_k"]["count"], 0)
        self.assertEqual(found["reranked"]["mean_reciprocal_rank"], 0.5)

    def test_answers_are_those_that_rag_py_publishes(self) -> None:
        server = self.serve()
        plain = server.environment()
        environ = {**plain, "RAG_MIN_SIMILARITY": "0.3"}
        found = run_evaluate("--answers", "--json", environ=environ).document
        variants = {"plain": plain, "threshold": environ, "quotes": {**plain, "RAG_QUOTES": "1"}}
        for each in found["each"][::9]:
            for variant, settings in variants.items():
                published = run_rag(each["question"], environ=settings).document
                reply = each["answers"][variant]
                ids = [record["id"] for record in published["sources"]]
                self.assertEqual((reply["answer"], reply["ids"]), (published["answer"], ids))
                self.assertEqual(reply["quotes"], published.get("quotes", []))
                self.assertEqual(reply["reason"], published.get("reason", ""))

    def test_a_threshold_turns_answers_into_abstentions_without_a_request(self) -> None:
        # The mock answers "How high is the west door?" (similarity 0.82), and the right record of
        # the two answerable questions has 0.75.
        server = self.serve()
        environ = {**server.environment(rerank=False), "RAG_MIN_SIMILARITY": "0.9"}
        found = self.evaluate("--answers", "plain,threshold", "--json", environ=environ).document
        plain, threshold = found["answers"]["plain"], found["answers"]["threshold"]
        expected = {"answerable cited right": 2, "unanswerable unsupported": 1}
        self.assertEqual(counts(plain), {**expected, "unanswerable abstained": 1})
        abstained = {"answerable abstained": 2, "unanswerable abstained": 2}
        self.assertEqual(counts(threshold), abstained)
        self.assertEqual((len(bodies(server, CHAT)), threshold["replies"]), (4, 0))

    def test_without_your_threshold_each_question_has_that_of_the_others(self) -> None:
        # The needed record of the second question is less similar than that of the first: the
        # recommended threshold keeps it, and that of the other questions does not.
        less = {**ASKED[0], "question": "Is anything red, or is all of it painted over?"}
        asked = [ASKED[0], less, ASKED[3], {**ASKED[3], "question": "Whose turn?"}]
        environ = self.serve().environment(rerank=False)
        result = self.evaluate("--answers", "threshold", "--json", environ=environ, asked=asked)
        found = result.document
        self.assertEqual(effects([found["threshold"]["recommended"]])[0][1:], (2, 0, 2))
        reasons = [each["answers"]["threshold"]["reason"] for each in found["each"]]
        self.assertEqual(reasons, ["", *["below_min_similarity"] * 3])
        report = self.evaluate("--answers", environ=environ, asked=asked).stdout
        self.assertIn("threshold: for each question the one that the other", report)

    def test_equal_sources_are_not_sent_a_second_time(self) -> None:
        server = self.serve()
        settings = {"RAG_SOURCES": "1", "RAG_MIN_SIMILARITY": "0.5"}
        environ = {**server.environment(), **settings}
        self.evaluate("--answers", "plain,threshold", "--json", environ=environ)
        self.assertEqual(len(bodies(server, RERANK)), 4 + 3)  # with fewer candidates
        self.assertEqual(len(bodies(server, CHAT)), 4)

    def test_only_the_named_variants_are_asked(self) -> None:
        server = self.serve()
        environ = server.environment(rerank=False)
        found = self.evaluate("--answers", "quotes", "--json", environ=environ).document
        self.assertEqual([*found["answers"]], ["quotes"])
        self.assertTrue(all(map(models.wants_quotes, bodies(server, CHAT))))
        wrong = self.evaluate("--answers", "quotes,odd", environ=environ)
        line = "evaluate: usage: --answers: odd is none of plain, threshold, quotes"
        self.assert_failure(wrong, 2, line)

    def test_a_rejected_reply_is_asked_for_again_and_both_are_in_the_json(self) -> None:
        seen = set[str]()

        def fenced_at_first(good: Any, request: Any) -> Any:
            question = request["messages"][1]["content"]
            first = question not in seen
            seen.add(question)
            return said(request, "```json\n{}\n```") if first else good

        server, environ = self.own(CHAT, for_question("west", fenced_at_first))
        environ = {**environ, "RAG_ATTEMPTS": "3"}
        result = self.evaluate("--answers", "plain", "--json", environ=environ)
        found = result.document
        right, again, unsupported, abstained = (each["answers"]["plain"] for each in found["each"])
        used = [models.chat(body)["usage"]["total_tokens"] for body in bodies(server, CHAT)]
        for reply, tokens in ((right, used[:2]), (again, used[2:4]), (unsupported, used[4:6])):
            fenced, good = reply["attempts"]
            self.assertEqual([fenced["tokens"], good["tokens"]], tokens)
            self.assertEqual((fenced["text"], good["rejected"]), ("```json\n{}\n```", ""))
            self.assertIn("Markdown fence", fenced["rejected"])
            self.assertEqual(json.loads(good["text"])["source_ids"], reply["ids"])
        self.assertEqual(right["outcome"], "cited right")
        self.assertEqual(len(abstained["attempts"]), 2)
        figures = found["answers"]["plain"]
        self.assertEqual(
            figures["asked_again"],
            {
                "outcomes": {"cited right": 2, "unsupported": 1, "abstained": 1},
                "tokens": used[1] + used[3] + used[5] + used[7],
            },
        )
        self.assertEqual((figures["replies"], figures["tokens"]), (8, sum(used)))
        self.assertEqual([*figures["rejected"].values()], [4])

    def test_what_the_model_wrote_is_rejected_and_what_the_service_sent_fails(self) -> None:
        for scenario, end, words in (
            ("answer-id-not-sent", "rejected", "is not the id of a source that was sent"),
            ("answer-fence", "rejected", "Markdown fence"),
        ):
            with self.subTest(scenario):
                environ = self.serve().environment(scenario, rerank=False)
                found = self.evaluate("--answers", "plain", "--json", environ=environ)
                self.assertEqual(found.status, 0)
                for each in found.document["each"]:
                    reply = each["answers"]["plain"]
                    self.assertEqual(reply["outcome"], end)
                    self.assertIn(words, reply["reason"])
                    self.assertEqual(len(reply["attempts"]), 1)
        cut_off = {"choices": [{"finish_reason": "length", "message": {"content": "{}"}}]}
        for served, words in (
            (lambda good, request: cut_off, "answer: finish_reason is "),
            (broken, "/chat/completions answered 500"),
        ):
            with self.subTest(words):
                _, environ = self.own(CHAT, for_question("east gate?", served))
                result = self.evaluate("--answers", "plain", "--json", environ=environ)
                self.assertEqual(result.status, 0)
                self.assertEqual(result.document["answers"]["plain"]["rejected"], {})
                (failure,) = result.document["failures"]
                self.assertEqual(failure["question"], ASKED[0]["question"])
                self.assertIn(words, failure["reason"])
                first = result.document["each"][0]["answers"]["plain"]
                self.assertEqual(first["outcome"], "failed")

    def test_a_failed_rerank_request_is_named_and_counts_as_missed(self) -> None:
        _, environ = self.own(RERANK, for_question("west door?", broken), rerank=True)
        environ = {**environ, "RAG_SOURCES": "1"}
        result = self.evaluate("--answers", "--json", environ=environ)
        found = result.document
        self.assertEqual(found["retrieval"]["reranked"]["hit_at_1"]["count"], 1)
        expected = {"answerable cited right": 1, "answerable failed": 1, "unanswerable failed": 1}
        for figures in found["answers"].values():
            self.assertEqual(counts(figures) | expected, counts(figures))
        text = self.evaluate("--answers", environ=environ).stdout
        self.assertIn("\nFAILED 2: rerank: http://127.0.0.1", text)
        self.assertTrue(text.endswith('\n  "How high is the west door?"\n'), text)

    def test_it_ends_with_status_1_when_all_requests_of_a_stage_fail(self) -> None:
        for path, stage in ((EMBEDDINGS, "embeddings"), (RERANK, "rerank"), (CHAT, "answer")):
            with self.subTest(stage):
                server, environ = self.own(path, broken, rerank=True)
                result = self.evaluate("--answers", environ=environ)
                *lines, last, _ = result.stderr.split("\n")
                self.assertEqual((result.status, result.stdout), (1, ""))
                self.assertTrue(last.startswith(f"evaluate: {stage}: "), last)
                self.assertIn(f"{path} answered 500", last)
                self.assertEqual(len(lines), 4 if stage == "answer" else 0)
                self.assertEqual(bool(bodies(server, CHAT)), stage == "answer")

    def test_nothing_fails_where_the_threshold_leaves_nothing_to_ask(self) -> None:
        environ = {"RAG_MIN_SIMILARITY": "0.9"}
        _, given = self.own(CHAT, broken)
        result = self.evaluate("--answers", "threshold", environ={**given, **environ})
        self.assertEqual(result.status, 0, "no request was needed, so none failed")

    def test_each_finished_question_is_a_line_on_stderr(self) -> None:
        environ = self.serve().environment(rerank=False)
        result = self.evaluate("--answers", "plain,quotes", environ=environ)
        lines = result.stderr.splitlines()
        first = 'evaluate: 1 of 4, "Which colour has the east gate?": '
        self.assertEqual(lines[0], f"{first}plain cited right, quotes cited right")
        self.assertEqual(len(lines), 4)

    def test_the_report_has_a_section_for_each_measurement(self) -> None:
        result = run_evaluate("--answers", environ=self.serve().environment())
        lines = result.stdout.splitlines()
        answerable = sum(bool(question.needs) for question in QUESTIONS)
        counts = f"{answerable} answerable, {len(QUESTIONS) - answerable} not"
        self.assertEqual(lines[0], f"{len(QUESTIONS)} questions: {counts}")
        for words in ("RETRIEVAL", "hit@3 by kind", "THRESHOLD", "ANSWERS", "plain: 57 replies, "):
            self.assertEqual(sum(line.startswith(words) for line in lines), 1, words)
        self.assertLessEqual(max(map(len, lines)), 100)
        self.assertIn('"Is joining free?"', result.stdout)  # the searches differ
        self.assertNotIn("a printed page in colour cost?", result.stdout)

    def test_what_is_wrong_before_a_request_ends_with_status_2(self) -> None:
        server = self.serve()
        environ, knowledge = server.environment(), self.file("k.json", SMALL)
        for argv, given, words in (
            ((), {}, "settings: not set: API_BASE_URL"),
            (("--odd",), environ, "usage: unrecognized arguments: --odd (see --help)"),
            (("--knowledge", knowledge), environ, "usage: give --questions: "),
            (("--knowledge", "none.json"), environ, "knowledge: cannot read none.json"),
            (("--questions", "none.json"), environ, "usage: cannot read none.json"),
        ):
            result = run_evaluate(*argv, environ=given)
            self.assert_one_line(result, 2, f"evaluate: {words}")
        self.assertEqual(len(server.request_log.entries), 0)

    def test_a_misspelled_setting_is_warned_of(self) -> None:
        environ = {**self.serve().environment(), "RAG_SOURCE": "5"}
        self.assertIn("warning: RAG_SOURCE is no", run_evaluate(environ=environ).stderr)

    def test_help_describes_the_questions_file_and_the_exit_status(self) -> None:
        result = run_evaluate("--help", environ={})
        self.assertEqual((result.status, result.stderr), (0, ""))
        for words in ("question ", "ids ", "hit@k", "--answers", "130  Ctrl-C", *KINDS):
            self.assertIn(words, result.stdout)


@unittest.skipIf(os.name == "nt", "sends SIGINT")
class TestInterrupt(RagTestCase):
    def test_ctrl_c_ends_it_at_once_with_requests_under_way(self) -> None:
        under_way = threading.Event()

        def silent(good: Any, request: Any) -> Any:
            if len(good["data"]) == 1:
                return good  # the first batch, which goes alone
            under_way.set()
            return Reply(ending="silence")

        server = self.serve(Scenario("own", "own", "x", ANSWERS, EMBEDDINGS, silent))
        environ = {**server.environment("own"), "PATH": os.environ["PATH"]}
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.evaluate"], cwd=ROOT, env=environ,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip
        with process:
            self.assertTrue(under_way.wait(timeout=30))
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=10)
        self.assertEqual((process.returncode, out, err), (130, b"", b""))
