"""The evaluation: its arithmetic against numbers made by hand, its figures on known geometry."""

from __future__ import annotations

import io
import json
import math
import re
import socket
import unittest
from array import array
from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

import rag
from mock_server import models
from mock_server.scenarios import ANSWERS, CHAT, EMBEDDINGS, RERANK, Change, Reply, Scenario
from mock_server.server import MockServer
from tests import evaluate, measures
from tests.evaluate import Question, read_questions
from tests.support import RagTestCase, Result, Terminal, bodies, paths, run_rag

RECORDS = rag.read_knowledge(str(rag.SAMPLE_KNOWLEDGE))
IDS = [record["id"] for record in RECORDS]
QUESTIONS = read_questions(str(evaluate.SAMPLE_QUESTIONS), IDS)


# ---- sets with known geometry --------------------------------------------------------------------


def at(degrees: float) -> rag.Vector:
    """A vector of length 1 in a plane."""
    angle = math.radians(degrees)
    return array("f", (math.cos(angle), math.sin(angle)))


def run_of(**settings: Any) -> rag.Run:
    """A run that can send nothing."""
    given = {"base_url": "http://127.0.0.1:9/v1", "key": "k", "model": "m", "embedding_model": "e"}
    return rag.Run(rag.Settings(**{**given, **settings}), {}, dict, rag.silent, rag.silent, None)


def base_of(records: Mapping[str, tuple[str, float]]) -> evaluate.Base:
    """{id: (text, degrees)} as records with vectors at these angles."""
    texts = [text for text, _ in records.values()]
    made = [{"id": name, "text": text} for name, (text, _) in records.items()]
    vectors = [at(degrees) for _, degrees in records.values()]
    return evaluate.Base(made, vectors, measures.keywords(texts))


def rows_of(
    base: evaluate.Base, asked: Sequence[tuple[float, Sequence[str]]], run: rag.Run, text: str = "q"
) -> list[evaluate.Row]:
    """Rows of questions at these angles, which need these ids."""
    return [
        evaluate.find(Question(f"{text} {i}", tuple(ids), "plain"), at(degrees), base, run)
        for i, (degrees, ids) in enumerate(asked)
    ]


def floor_of(
    asked: Sequence[tuple[float, Sequence[str]]],
    records: Mapping[str, tuple[str, float]],
    run: rag.Run,
) -> dict[str, Any]:
    rows = rows_of(base_of(records), asked, run)
    return evaluate.floor_figures(evaluate.sides(rows, run.settings), run.settings)


def counted(part: Mapping[str, Any]) -> tuple[int, int]:
    return part["count"], part["of"]


APART = {"east": ("east", 0.0), "west": ("west", 180.0)}


class TestFloor(unittest.TestCase):
    def test_a_clean_gap_has_its_middle_as_floor_which_keeps_and_drops_all(self) -> None:
        # Needed records at cos 20 = 0.940, cos 30 = 0.866, cos 40 = 0.766; the best of the others
        # at cos 60 = 0.5, cos 70 = 0.342, cos 90 = 0. The middle of 0.5 and 0.766 is 0.633.
        asked = [(20, ["east"]), (30, ["east"]), (140, ["west"]), (60, []), (110, []), (90, [])]
        found = floor_of(asked, APART, run_of(sources=1))
        self.assertTrue(found["clean"])
        self.assertEqual(found["recommended"]["floor"], 0.63)
        self.assertEqual(counted(found["recommended"]["kept"]), (3, 3))
        self.assertEqual(counted(found["recommended"]["dropped"]), (3, 3))
        self.assertEqual(found["right"], [0.766044, 0.866025, 0.939693])
        self.assertEqual(found["wrong"], [0.0, 0.34202, 0.5])
        # Without 0.766 the gap is 0.5 to 0.866 (0.683); without 0.5 it is 0.342 to 0.766 (0.554).
        left_out = found["left_out"]
        self.assertEqual((left_out["lowest"], left_out["highest"]), (0.55, 0.68))
        self.assertEqual(
            (counted(left_out["kept"]), counted(left_out["dropped"])), ((3, 3), (3, 3))
        )
        text = "\n".join(evaluate.floor_text(found))
        self.assertIn(
            "gap: nothing between 0.500 and 0.766\nexport RAG_MIN_SIMILARITY=0.63\n", text
        )
        self.assertIn("  keeps 3 of 3 (44 to 100 %), drops 3 of 3 (44 to 100 %)\n", text)
        self.assertIn("  with one question left out: 0.55 to 0.68\n", text)
        self.assertNotIn("no clean floor", text)

    def test_an_overlap_is_said_and_gets_the_best_trade_off(self) -> None:
        # Needed at cos 20 = 0.940, cos 40 = 0.766, cos 70 = 0.342; others at cos 60 = 0.5,
        # cos 62 = 0.469, cos 80 = 0.174, cos 85 = 0.087. A floor between 0.5 and 0.766 keeps 2/3
        # and drops 4/4; one between 0.174 and 0.342 keeps 3/3 and drops 2/4, which is less.
        asked = [
            (20, ["east"]),
            (40, ["east"]),
            (70, ["east"]),
            (60, []),
            (62, []),
            (80, []),
            (85, []),
        ]
        found = floor_of(asked, APART, run_of(sources=1, min_similarity=0.8))
        self.assertFalse(found["clean"])
        self.assertEqual(found["recommended"]["floor"], 0.63)
        self.assertEqual(counted(found["recommended"]["kept"]), (2, 3))
        self.assertEqual(counted(found["recommended"]["dropped"]), (4, 4))
        self.assertEqual(found["harmless"]["floor"], 0.26)
        self.assertEqual(counted(found["harmless"]["kept"]), (3, 3))
        self.assertEqual(counted(found["harmless"]["dropped"]), (2, 4))
        self.assertEqual(counted(found["yours"]["kept"]), (1, 3))
        # Left out: of 0.342 the others have a clean gap (0.63), which loses it; of 0.940 and 0.766
        # two floors are equal, and the lower one (0.26) keeps them. Of 0.5 and 0.469 likewise, and
        # the lower one does not drop them; of 0.174 and 0.087 it is 0.63, which does.
        left_out = found["left_out"]
        self.assertEqual((left_out["lowest"], left_out["highest"]), (0.26, 0.63))
        self.assertEqual(
            (counted(left_out["kept"]), counted(left_out["dropped"])), ((2, 3), (2, 4))
        )
        text = "\n".join(evaluate.floor_text(found))
        self.assertIn("overlap: 3 of 7 lie in 0.342 to 0.500\n", text)
        self.assertIn(
            "no clean floor on this set: best trade-off\nexport RAG_MIN_SIMILARITY=0.63\n", text
        )
        self.assertIn(
            "  to lose none, 0.26: keeps 3 of 3 (44 to 100 %), drops 2 of 4 (15 to 85 %)", text
        )
        self.assertIn("  yours, 0.8: keeps 1 of 3 (6 to 79 %), drops 4 of 4 (51 to 100 %)", text)

    def test_of_two_needed_records_the_less_similar_one_counts(self) -> None:
        records = {"near": ("n", 10.0), "far": ("f", 60.0)}
        found = floor_of([(0, ["near", "far"])], records, run_of())
        self.assertEqual(found["right"], [0.5])

    def test_records_that_are_no_candidates_do_not_count_whatever_the_floor(self) -> None:
        records = {"near": ("n", 10.0), "far": ("f", 60.0)}
        asked = [(0, ["far"]), (0, ["near"]), (100, [])]
        found = floor_of(asked, records, run_of(sources=1))
        self.assertEqual((found["unreached"], found["right"]), (["q 0"], [0.984808]))
        self.assertIn("  not counted: 1 whose", "\n".join(evaluate.floor_text(found)))
        self.assertEqual(floor_of(asked, records, run_of(sources=2))["unreached"], [])

    def test_the_candidates_for_a_reranker_count_and_not_the_sources(self) -> None:
        run = run_of(sources=1, candidates=2)
        rows = rows_of(base_of({"near": ("n", 10.0), "far": ("f", 60.0)}), [(0, ["far"])], run)
        with_model = run_of(sources=1, candidates=2, rerank_model="r").settings
        self.assertEqual(evaluate.sides(rows, with_model).unreached, [])
        self.assertEqual(evaluate.sides(rows, run.settings).unreached, ["q 0"])

    def test_a_set_without_one_side_has_no_floor_and_says_so(self) -> None:
        for asked, words in (
            ([(0, ["east"])], "no unanswerable question"),
            ([(0, [])], "no answerable"),
        ):
            found = floor_of(asked, APART, run_of(sources=1))
            self.assertEqual((found["clean"], found["recommended"]["floor"]), (False, None))
            self.assertIn(
                f"no floor can be measured: there is {words}", evaluate.floor_text(found)[-1]
            )

    def test_where_every_floor_loses_as_much_as_it_gains_there_is_none(self) -> None:
        found = floor_of([(60, ["east"]), (20, [])], APART, run_of(sources=1))
        self.assertIsNone(found["recommended"]["floor"])
        text = "\n".join(evaluate.floor_text(found))
        self.assertIn("no clean floor on this set, and none is better", text)
        self.assertNotIn("export", text)

    def test_equal_gains_take_the_lower_floor(self) -> None:
        # Between 0.1 and 0.2: all kept, half dropped. Between 0.3 and 0.4: half kept, all dropped.
        self.assertEqual(measures.best_floor([0.2, 0.4], [0.1, 0.3]), 0.15)

    def test_the_sides_weigh_the_same_whatever_their_sizes(self) -> None:
        # 0.35 keeps 3/4 and drops 1/1, in sum 1.75; 0.15 would keep 4/4 and drop 0/1.
        self.assertEqual(measures.best_floor([0.2, 0.4, 0.5, 0.6], [0.3]), 0.35)
        # 0.35 drops 4/4 and keeps 1/2; 0.15 keeps 2/2 and drops 3/4, which is more.
        self.assertEqual(measures.best_floor([0.2, 0.4], [0.1, 0.1, 0.1, 0.3]), 0.15)

    def test_a_similarity_at_the_floor_is_kept(self) -> None:
        self.assertEqual(measures.kept([0.5, 0.49, 0.51], 0.5), 2)
        self.assertEqual(measures.kept([0.5, -1.0], None), 2)

    def test_equal_similarities_on_both_sides_cannot_be_told_apart(self) -> None:
        self.assertIsNone(measures.best_floor([0.5], [0.5]))
        self.assertIsNone(measures.harmless_floor([0.5], [0.5]))

    def test_similarities_are_compared_as_far_as_vectors_hold_them(self) -> None:
        base, run = base_of(APART), run_of(sources=1)
        rows = rows_of(base, [(60, ["east"]), (60.000005, [])], run)
        self.assertGreater(rows[0].nearest[0][1], rows[1].nearest[0][1])  # by less than 1e-7
        self.assertFalse(
            evaluate.floor_figures(evaluate.sides(rows, run.settings), run.settings)["clean"]
        )

    def test_a_floor_has_as_few_decimals_as_tell_its_neighbours_apart(self) -> None:
        self.assertEqual(measures.between(0.2, 0.5), 0.35)
        self.assertEqual(measures.between(0.4, 0.4), 0.4)
        self.assertEqual(measures.between(0.5012, 0.5018), 0.5015)
        self.assertEqual(measures.between(-0.6, -0.2), -0.4)
        for low, high in ((0.1234, 0.1235), (0.495, 0.505), (-0.001, 0.001), (0.2, 0.2 + 1e-12)):
            floor = measures.between(low, high)
            self.assertTrue(low < floor <= high, (low, floor, high))

    def test_a_question_has_no_say_in_the_floor_that_it_is_judged_by(self) -> None:
        # Right 0.2 and 0.6, wrong 0.1 and 0.3. Without 0.2 the gap is 0.3 to 0.6, its middle 0.45;
        # without 0.6 a floor of 0.15 keeps 1/1 and drops 1/2; without 0.1 one of 0.45 keeps 1/2 and
        # drops 1/1; without 0.3 the gap is 0.1 to 0.2.
        right, wrong = measures.left_out([0.2, 0.6], [0.1, 0.3])
        self.assertEqual((right, wrong), ([0.45, 0.15], [0.45, 0.15]))


class TestStrip(unittest.TestCase):
    def test_a_column_shows_how_many_similarities_fall_into_it(self) -> None:
        values = [0.0, 0.05, 0.31, 1.0, 0.99, 0.95, *[0.5] * 10]
        self.assertEqual(measures.strip(values, 0.0, 1.0, 10), "2  1 +   3")

    def test_one_similarity_alone_has_a_strip_too(self) -> None:
        self.assertEqual(measures.strip([0.4], 0.4, 0.4, 3), "1  ")

    def test_the_strips_share_an_axis_and_the_floor_stands_below_its_column(self) -> None:
        lines = evaluate.strips([0.5, 1.0], [0.0], 0.25)
        self.assertEqual(lines[1], "needed        |" + " " * 30 + "1" + " " * 28 + "1|")
        self.assertEqual(lines[2], "unanswerable  |1" + " " * 59 + "|")
        self.assertEqual(lines[3].index("^"), lines[2].index("|") + 1 + 15)
        self.assertEqual(lines[4].split(), ["0.000", "1.000"])
        self.assertTrue(all(60 <= len(line) <= 80 for line in lines[1:3]))
        self.assertEqual(len(evaluate.strips([0.5], [0.0], None)), 4)


# ---- keywords, fusion, intervals -----------------------------------------------------------------


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
        index = measures.keywords(["a b", "a a c", "d"])
        scores = measures.bm25("a c x a", index)  # a word counts once, an unknown one not at all
        for score, expected in zip(scores, (0.470004, 1.380853, 0.0), strict=True):
            self.assertAlmostEqual(score, expected, places=5)

    def test_texts_without_a_word_of_the_question_are_not_found_and_ties_keep_their_order(
        self,
    ) -> None:
        index = measures.keywords(["x", "a", "b b b", "a"])
        self.assertEqual(measures.by_keywords("a b", index, ["1", "2", "3", "4"]), ["3", "2", "4"])
        self.assertEqual(measures.by_keywords("?", index, ["1", "2", "3", "4"]), [])

    def test_texts_without_any_word_are_no_fault(self) -> None:
        self.assertEqual(measures.bm25("a", measures.keywords(["!", "?"])), [0.0, 0.0])


class TestFusion(unittest.TestCase):
    def test_places_are_summed_as_computed_by_hand(self) -> None:
        # a: 1/61 + 1/63 = 0.032266; b: 1/62 + 1/61 = 0.032522; c: 1/63 = 0.015873;
        # d: 1/62 = 0.016129.
        self.assertEqual(measures.fuse("abc", "bda"), ["b", "a", "d", "c"])
        scores = measures.fusion_scores("abc", "bda")
        for name, expected in (("a", 0.032266), ("b", 0.032522), ("c", 0.015873), ("d", 0.016129)):
            self.assertAlmostEqual(scores[name], expected, places=6)

    def test_ties_keep_the_order_of_the_first_ranking(self) -> None:
        self.assertEqual(measures.fuse("ab", "ba"), ["a", "b"])

    def test_fusion_helps_where_a_record_is_second_for_both(self) -> None:
        # By vectors b, a, d, c; by words c ("red kite"), a ("red"). Fused: a 2/62 = 0.032258,
        # c 1/61 + 1/64 = 0.032018, b 1/61.
        records = {
            "a": ("red boat", 20.0), "b": ("blue boat", 10.0), "c": ("red kite", 90.0),
            "d": ("green hill", 80.0),
        }  # fmt: skip
        run = run_of(sources=1)
        rows = rows_of(base_of(records), [(0, ["a"])], run, "red kite")
        self.assertEqual(rows[0].rankings["vectors"], ["b", "a", "d", "c"])
        self.assertEqual(rows[0].rankings["BM25"], ["c", "a"])
        found = evaluate.retrieval_figures(rows, 1)
        self.assertEqual(
            [counted(found[system]["hit_at_1"]) for system in ("vectors", "BM25", "fused")],
            [(0, 1), (0, 1), (1, 1)],
        )

    def test_fusion_hurts_where_words_lead_astray(self) -> None:
        # By vectors a, x; by words x alone. Fused: x 1/62 + 1/61, a 1/61.
        records = {"a": ("blue boat", 0.0), "x": ("red kite", 10.0)}
        rows = rows_of(base_of(records), [(0, ["a"])], run_of(sources=1), "red kite")
        found = evaluate.retrieval_figures(rows, 1)
        self.assertEqual(
            [counted(found[system]["hit_at_1"]) for system in ("vectors", "BM25", "fused")],
            [(1, 1), (0, 1), (0, 1)],
        )
        (lost,) = [
            each
            for each in evaluate.differences(rows, 1)
            if (each["got_by"], each["missed_by"]) == ("vectors", "fused")
        ]
        self.assertEqual((lost["at_1"], lost["at_k"]), (["red kite 0"], ["red kite 0"]))


class TestHits(unittest.TestCase):
    def test_a_hit_at_k_needs_all_records_and_one_at_1_any_of_them_first(self) -> None:
        self.assertTrue(measures.all_within("abc", "ca", 3))
        self.assertFalse(measures.all_within("abcd", "ad", 3))
        self.assertTrue(measures.first_is_needed("abc", "ca"))
        self.assertFalse(measures.first_is_needed("abc", "bc"))
        self.assertFalse(measures.first_is_needed([], ["a"]))

    def test_the_reciprocal_rank_is_that_of_the_first_needed_record(self) -> None:
        self.assertEqual(measures.reciprocal_rank("abcd", "db"), 1 / 2)
        self.assertEqual(measures.reciprocal_rank("abcd", "x"), 0)
        self.assertEqual(measures.places("abcd", "dx"), [4, None])

    def test_unanswerable_questions_have_no_part_in_retrieval(self) -> None:
        rows = rows_of(base_of(APART), [(0, ["east"]), (0, []), (180, ["east"])], run_of(sources=1))
        vectors = evaluate.retrieval_figures(rows, 1)["vectors"]
        self.assertEqual(counted(vectors["hit_at_1"]), (1, 2))
        self.assertEqual(vectors["mean_reciprocal_rank"], 0.75)  # (1 + 1/2) / 2

    def test_a_floor_in_the_settings_does_not_change_what_is_found(self) -> None:
        run = run_of(sources=1, min_similarity=0.9)
        (row,) = rows_of(base_of(APART), [(90, ["west"])], run)
        self.assertEqual(len(row.nearest), 2)


class TestWilson(unittest.TestCase):
    def test_the_interval_is_the_one_computed_by_hand(self) -> None:
        # 12 of 15, z² = 3.841459: middle (0.8 + 3.841459/30) / (1 + 3.841459/15) = 0.738840;
        # half 1.959964 * sqrt(0.8 * 0.2 / 15 + 3.841459 / 900) / 1.256097 = 0.190688.
        low, high = measures.wilson(12, 15)
        self.assertAlmostEqual(low, 0.548152, places=4)
        self.assertAlmostEqual(high, 0.929528, places=4)

    def test_none_and_all_have_an_interval_too(self) -> None:
        # 0 of 10: from 0 to z² / (10 + z²) = 3.841459 / 13.841459 = 0.277533.
        self.assertAlmostEqual(measures.wilson(0, 10)[0], 0)
        self.assertAlmostEqual(measures.wilson(0, 10)[1], 0.277533, places=5)
        self.assertAlmostEqual(measures.wilson(10, 10)[0], 1 - 0.277533, places=5)
        self.assertEqual(measures.wilson(0, 0), (0.0, 1.0))

    def test_a_share_is_never_shown_as_a_bare_percentage(self) -> None:
        self.assertEqual(evaluate.shown(evaluate.share(12, 15)), "12 of 15 (55 to 93 %)")
        self.assertEqual(evaluate.shown(evaluate.share(0, 0)), "0 of 0")


class TestOutcome(unittest.TestCase):
    def test_every_end_of_a_question_has_its_name(self) -> None:
        for ids, end, cited, expected in (
            ("ab", "answered", "ba", "cited right"),
            ("ab", "answered", "a", "cited wrong"),
            ("a", "answered", "ab", "cited wrong"),
            ("a", "abstained", "", "abstained wrongly"),
            ("", "abstained", "", "abstained rightly"),
            ("", "answered", "a", "invented"),
            ("a", "rejected", "", "rejected"),
            ("", "failed", "", "failed"),
        ):
            question = Question("q", tuple(ids), "plain")
            self.assertEqual(
                evaluate.outcome(question, evaluate.Reply(end, tuple(cited))), expected
            )

    def test_precision_is_of_the_ids_cited_and_recall_of_the_ids_needed(self) -> None:
        # Cited: a and x for a, b; y for nothing. Needed: a, b and c. In both: a.
        found = evaluate.answer_figures(
            [
                (Question("1", ("a", "b"), "plain"), evaluate.Reply("answered", ("a", "x"))),
                (Question("2", ("c",), "plain"), evaluate.Reply("rejected", reason="r")),
                (Question("3", (), "plain"), evaluate.Reply("answered", ("y",))),
            ]
        )
        self.assertEqual(counted(found["citation_precision"]), (1, 3))
        self.assertEqual(counted(found["citation_recall"]), (1, 3))
        self.assertEqual(counted(found["answerable"]["rejected"]), (1, 2))
        self.assertEqual(counted(found["unanswerable"]["invented"]), (1, 1))
        self.assertEqual(found["rejected"], {"r": 1})

    def test_tokens_are_those_that_were_told_and_seconds_those_of_all_requests(self) -> None:
        reply = evaluate.Reply("answered", ("a",), asked=True, tokens=100, seconds=0.5)
        untold = evaluate.Reply("answered", ("a",), asked=True, seconds=0.25)
        silent = evaluate.Reply("abstained", reason="below_min_similarity")
        question = Question("q", ("a",), "plain")
        chat = evaluate.answer_figures([(question, each) for each in (reply, untold, silent)])[
            "chat"
        ]
        self.assertEqual(chat, {"questions": 2, "told_tokens": 1, "tokens": 100, "seconds": 0.75})
        self.assertEqual(
            evaluate.chat_text(chat),
            "the chat model was asked 2 times, 100 tokens (told by 1) and 375 ms each",
        )

    def test_reasons_that_differ_in_details_only_are_one(self) -> None:
        rule = "which is not the id of a source that was sent"
        one = f'reply 1 of 2 rejected: source_ids[0] is "a", {rule}'
        other = f'reply 2 of 2 rejected: source_ids[3] is "b c", {rule}'
        expected = f'source_ids[N] is "…", {rule}'
        advice = "; API_RESPONSE_FORMAT or more RAG_ATTEMPTS may help"
        self.assertEqual(evaluate.reason_kind(one + advice), expected)
        self.assertEqual(evaluate.reason_kind(other), expected)


# ---- the questions file --------------------------------------------------------------------------


class TestQuestions(unittest.TestCase):
    def test_there_are_as_many_of_every_kind_as_promised(self) -> None:
        self.assertGreaterEqual(len(QUESTIONS), 40)
        self.assertGreaterEqual(sum(not question.ids for question in QUESTIONS), 12)
        self.assertEqual({question.kind for question in QUESTIONS}, set(evaluate.KINDS))

    def test_every_id_is_that_of_a_record(self) -> None:
        self.assertLessEqual({name for question in QUESTIONS for name in question.ids}, set(IDS))

    def test_a_paraphrase_shares_no_word_with_its_record(self) -> None:
        passages = {record["id"]: rag.passage(record) for record in RECORDS}
        for question in QUESTIONS:
            if question.kind == "paraphrase":
                for name in question.ids:
                    shared = set(models.stems(question.text)) & set(models.stems(passages[name]))
                    self.assertEqual(shared, set(), question.text)

    def test_at_least_five_are_missed_at_rank_1_by_the_vectors_of_the_mock(self) -> None:
        # By plain sums, not by rag.py: what BM25 finds among them, and what only vectors find.
        passages = [rag.passage(record) for record in RECORDS]
        index = measures.keywords(passages)
        ends = []
        for question in QUESTIONS:
            if question.ids:
                words = measures.by_keywords(question.text, index, IDS)
                near = nearest_by_sums(question.text)
                ends.append((near[0] in question.ids, words[:1] != [] and words[0] in question.ids))
        self.assertGreaterEqual(sum(not vectors for vectors, _ in ends), 5)
        self.assertGreaterEqual(ends.count((False, True)), 3)
        self.assertGreaterEqual(ends.count((True, False)), 2)

    def test_both_notices_and_a_notice_that_does_not_exist_are_asked_for(self) -> None:
        asked = {(code, question.ids) for question in QUESTIONS for code in codes(question.text)}
        self.assertLessEqual(
            {("417", ("notice-hk-417",)), ("471", ("notice-hk-471",)), ("714", ())}, asked
        )


def codes(text: str) -> list[str]:
    return re.findall(r"(?i)hk.(\d+)", text)


def nearest_by_sums(question: str) -> list[str]:
    """The ids by the dot product of the mock's vectors."""
    asked = models.vector(question)
    vectors = [models.vector(rag.passage(record)) for record in RECORDS]
    dots = [sum(a * b for a, b in zip(asked, vector)) for vector in vectors]
    return [IDS[i] for i in sorted(range(len(IDS)), key=lambda i: -dots[i])]


# ---- the command ---------------------------------------------------------------------------------


def run_evaluate(
    *argv: str, environ: Mapping[str, str], stream: type[io.TextIOWrapper] = io.TextIOWrapper
) -> Result:
    """evaluate.main(argv), run as the tests run rag.main()."""
    with mock.patch.object(rag, "main", evaluate.main):
        return run_rag(*argv, environ=environ, stream=stream)


def status_500_for(word: str) -> Change:
    """Status 500 for every request that has the word in it."""

    def change(good: Any, request: Any) -> Any:
        there = word in json.dumps(request, ensure_ascii=False)
        return Reply(500, {"error": {"message": "broken"}}) if there else good

    return change


def plain_chats(server: MockServer) -> list[Any]:
    """The bodies of the chat requests that ask for no quotes."""
    return [body for body in bodies(server, CHAT) if not models.wants_quotes(body)]


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


class TestCommand(RagTestCase):
    def small(self, asked: Any = ASKED) -> tuple[str, ...]:
        knowledge, questions = self.file("k.json", SMALL), self.file("q.json", asked)
        return "--knowledge", knowledge, "--questions", questions

    def test_the_sample_is_measured_on_the_mock_with_each_text_embedded_once(self) -> None:
        server = self.serve()
        result = run_evaluate("--json", environ=server.environment())
        self.assertEqual((result.status, result.stderr), (0, ""))
        inputs = [text for body in bodies(server, EMBEDDINGS) for text in body["input"]]
        passages = [rag.passage(record) for record in RECORDS]
        expected = [*passages, *(question.text for question in QUESTIONS)]
        self.assertEqual(sorted(inputs), sorted(expected))
        self.assertEqual(len(bodies(server, EMBEDDINGS)), 1 + -(-(len(QUESTIONS) - 1) // 32))
        self.assertEqual(len(bodies(server, RERANK)), len(QUESTIONS))
        self.assertEqual(bodies(server, CHAT), [])
        found = result.document
        answerable = [question for question in QUESTIONS if question.ids]
        for figures in found["retrieval"].values():
            self.assertEqual(figures["hit_at_k"]["of"], len(answerable))
        first = sum(nearest_by_sums(question.text)[0] in question.ids for question in answerable)
        self.assertEqual(found["retrieval"]["vectors"]["hit_at_1"]["count"], first)
        self.assertEqual([*found["retrieval"]], ["vectors", "BM25", "fused", "reranked"])
        self.assertIsNone(found["answers"])

    def test_the_reranker_is_asked_for_all_candidates_and_its_order_is_measured(self) -> None:
        def last_first(good: Any, request: Any) -> Any:
            count = len(request["documents"])
            rows = [{"index": i, "relevance_score": float(i)} for i in range(count)]
            return {"results": rows}

        server = self.serve(Scenario("last-first", "own", "x", ANSWERS, RERANK, last_first))
        environ = {**server.environment("last-first"), "RAG_SOURCES": "1"}
        result = run_evaluate("--json", *self.small(), environ=environ)
        self.assertEqual([body["top_n"] for body in bodies(server, RERANK)], [2] * 4)
        found = result.document["retrieval"]
        self.assertEqual(counted(found["vectors"]["hit_at_k"]), (2, 2))
        self.assertEqual(counted(found["reranked"]["hit_at_k"]), (0, 2))
        self.assertEqual(found["reranked"]["mean_reciprocal_rank"], 0.5)

    def test_no_batch_has_more_inputs_than_allowed_and_prefixes_are_kept(self) -> None:
        server = self.serve()
        environ = {
            **server.environment(rerank=False),
            "API_EMBEDDING_BATCH": "10",
            "API_QUERY_PREFIX": "find: ",
        }
        result = run_evaluate("--json", environ=environ)
        self.assertEqual((result.status, result.stderr), (0, ""))
        sent = [body["input"] for body in bodies(server, EMBEDDINGS)]
        self.assertEqual(max(map(len, sent)), 10)
        asked = sorted(text for inputs in sent for text in inputs if text.startswith("find: "))
        self.assertEqual(asked, sorted(f"find: {question.text}" for question in QUESTIONS))
        self.assertEqual([*result.document["retrieval"]], ["vectors", "BM25", "fused"])

    def test_a_cache_leaves_only_the_questions_to_embed(self) -> None:
        server = self.serve()
        environ = {**server.environment(rerank=False), "RAG_CACHE": str(self.folder / "cache")}
        first = run_evaluate("--json", environ=environ)
        server.request_log.entries.clear()
        second = run_evaluate("--json", environ=environ)
        self.assertEqual(first.document, second.document)
        inputs = [text for body in bodies(server, EMBEDDINGS) for text in body["input"]]
        self.assertEqual(sorted(inputs), sorted(question.text for question in QUESTIONS))

    def test_answers_are_those_of_rag_py_with_a_floor_and_without(self) -> None:
        server = self.serve()
        environ = {**server.environment(), "RAG_MIN_SIMILARITY": "0.3"}
        result = run_evaluate("--answers", "--json", environ=environ)
        self.assertEqual((result.status, result.stderr), (0, ""))
        found = result.document
        for measured in (found["answers"]["without_floor"], found["answers"]["with_floor"]):
            answerable = sum(bool(question.ids) for question in QUESTIONS)
            sizes = {"answerable": answerable, "unanswerable": len(QUESTIONS) - answerable}
            for group, of in sizes.items():
                counts = [counted(part) for part in measured[group].values()]
                self.assertEqual(sum(count for count, _ in counts), of)
                self.assertEqual({total for _, total in counts}, {of})
        self.assertEqual(found["answers"]["floor"], "RAG_MIN_SIMILARITY=0.3")
        asked = bodies(server, CHAT)
        sources = [len(json.loads(body["messages"][1]["content"])["sources"]) for body in asked]
        self.assertEqual(set(sources), {1, 2, 3})
        for each in found["each"][::8]:
            for name, settings in (
                ("without_floor", server.environment()),
                ("with_floor", environ),
            ):
                published = run_rag(each["question"], environ=settings).document
                cited = [record["id"] for record in published["sources"]]
                self.assertEqual(each["answers"][name]["cited"], cited, each["question"])
                self.assertEqual(each["answers"][name]["reason"], published.get("reason", ""))

    def test_the_worth_of_a_floor_is_seen_and_an_abstention_costs_no_request(self) -> None:
        # The mock invents for "How high is the west door?" (similarity 0.82), which a floor of 0.9
        # drops, and the right answers with it (0.75).
        server = self.serve()
        environ = {**server.environment(rerank=False), "RAG_MIN_SIMILARITY": "0.9"}
        found = run_evaluate("--answers", "--json", *self.small(), environ=environ).document[
            "answers"
        ]
        self.assertEqual(counted(found["without_floor"]["unanswerable"]["invented"]), (1, 2))
        self.assertEqual(counted(found["without_floor"]["answerable"]["cited right"]), (2, 2))
        self.assertEqual(counted(found["with_floor"]["unanswerable"]["invented"]), (0, 2))
        self.assertEqual(counted(found["with_floor"]["answerable"]["abstained wrongly"]), (2, 2))
        self.assertEqual(found["with_floor"]["abstained"], {"below_min_similarity": 4})
        self.assertEqual(len(plain_chats(server)), 4)  # those without a floor

    def test_without_a_floor_of_the_users_each_question_has_that_of_the_others(self) -> None:
        server = self.serve()
        asked = [ASKED[0], ASKED[1], *ASKED[3:], {**ASKED[3], "question": "Whose turn?"}]
        environ = server.environment(rerank=False)
        found = run_evaluate("--answers", "--json", *self.small(asked), environ=environ).document
        self.assertTrue(found["floor"]["clean"])
        self.assertEqual(found["answers"]["with_floor"]["abstained"], {"below_min_similarity": 2})
        self.assertEqual(
            counted(found["answers"]["with_floor"]["answerable"]["cited right"]), (2, 2)
        )
        self.assertIn("that the others recommend", found["answers"]["floor"])

    def test_equal_sources_are_not_asked_for_a_second_time(self) -> None:
        server = self.serve()
        environ = {**server.environment(), "RAG_MIN_SIMILARITY": "-0.99"}
        result = run_evaluate("--answers", *self.small(), environ=environ)
        self.assertEqual(len(plain_chats(server)), 4)
        self.assertIn("with a floor: the chat model was asked 4 times, ", result.stdout)
        self.assertEqual(len(bodies(server, RERANK)), 4)

    def test_sources_that_stay_when_other_candidates_are_dropped_are_not_asked_for_again(
        self,
    ) -> None:
        server = self.serve()
        settings = {"RAG_SOURCES": "1", "RAG_MIN_SIMILARITY": "0.5"}
        environ = {**server.environment(), **settings}
        found = run_evaluate("--answers", "--json", *self.small(), environ=environ).document
        self.assertEqual(len(bodies(server, RERANK)), 4 + 3)
        self.assertEqual(len(plain_chats(server)), 4)
        self.assertEqual(found["answers"]["with_floor"]["chat"]["questions"], 3)

    def test_tokens_are_those_that_the_service_reports(self) -> None:
        server = self.serve()
        environ = server.environment()
        found = run_evaluate(
            "--answers", "--json", *self.small(ASKED[:2]), environ=environ
        ).document
        used = [models.chat(body)["usage"]["total_tokens"] for body in plain_chats(server)]
        chat = found["answers"]["without_floor"]["chat"]
        self.assertEqual((chat["tokens"], chat["told_tokens"]), (sum(used), 2))

    def test_quotes_are_measured_side_by_side_with_ids_and_rejected_by_kind(self) -> None:
        server = self.serve()
        environ = {**server.environment(rerank=False), "RAG_QUOTES": "1"}
        found = run_evaluate("--answers", "--json", *self.small(), environ=environ).document
        self.assertEqual(len(bodies(server, CHAT)) - len(plain_chats(server)), 4)
        answers = found["answers"]
        self.assertEqual(counted(answers["with_quotes"]["answerable"]["cited right"]), (2, 2))
        environ = server.environment("quotes-digit", rerank=False)
        found = run_evaluate("--answers", "--json", *self.small(), environ=environ).document
        reason = 'citations[N].source_id is "…", and its quote is not in that text, word for word'
        unsent = 'citations[N].source_id is "…", which is not the id of a source that was sent'
        rejected = found["answers"]["with_quotes"]["rejected"]
        self.assertEqual(rejected, {reason: 3, unsent: 1})  # one has nothing to quote
        self.assertEqual(found["answers"]["without_floor"]["rejected"], {})

    def test_a_reranker_that_keeps_nothing_is_an_abstention(self) -> None:
        server = self.serve()
        environ = {**server.environment("rerank-nothing"), "RAG_MIN_SIMILARITY": "0.5"}
        found = run_evaluate("--answers", "--json", *self.small(), environ=environ).document[
            "answers"
        ]
        self.assertEqual(found["without_floor"]["abstained"], {"reranker_kept_nothing": 4})
        reasons = {"reranker_kept_nothing": 3, "below_min_similarity": 1}
        self.assertEqual(found["with_floor"]["abstained"], reasons)
        self.assertEqual(bodies(server, CHAT), [])

    def test_a_floor_of_0_is_a_floor(self) -> None:
        environ = {**self.serve().environment(), "RAG_MIN_SIMILARITY": "0"}
        found = run_evaluate("--answers", "--json", *self.small(), environ=environ).document
        self.assertIn("with_floor", found["answers"])
        self.assertEqual(found["floor"]["yours"]["floor"], 0)

    def test_rejected_answers_are_counted_by_reason(self) -> None:
        server = self.serve()
        environ = server.environment("answer-id-not-sent", rerank=False)
        result = run_evaluate("--answers", "--json", *self.small(), environ=environ)
        answers = result.document["answers"]["without_floor"]
        self.assertEqual(
            answers["rejected"],
            {'source_ids[N] is "…", which is not the id of a source that was sent': 4},
        )
        self.assertEqual(counted(answers["answerable"]["rejected"]), (2, 2))
        self.assertEqual(counted(answers["unanswerable"]["rejected"]), (2, 2))
        self.assertEqual(result.document["questions"]["failed"], 0)
        text = run_evaluate("--answers", *self.small(), environ=environ).stdout
        self.assertIn("rejected (answerable)    2 of 2 (34 to 100 %)", text)
        self.assertIn('rejected (4, 4, 0): source_ids[N] is "…", which', text)
        self.assertIn('rejected (0, 0, 4): citations[N].source_id is "…", which', text)

    def test_a_question_that_fails_at_any_stage_is_counted_as_missed_and_named(self) -> None:
        question = "Which colour has the west door?"
        for path, stage, lost in (
            (EMBEDDINGS, "embeddings", {"vectors", "fused", "reranked"}),
            (RERANK, "rerank", {"reranked"}),
            (CHAT, "answer", set()),
        ):
            with self.subTest(stage=stage):
                own = Scenario("own", "own", "x", ANSWERS, path, status_500_for(question))
                environ = self.serve(own).environment("own")
                result = run_evaluate("--answers", "--json", *self.small(), environ=environ)
                self.assertEqual((result.status, result.stderr), (0, ""))
                found = result.document
                self.assertEqual(found["questions"], {"all": 4, "answerable": 2, "failed": 1})
                (failure,) = found["failures"]
                self.assertEqual((failure["question"], failure["stage"]), (question, stage))
                self.assertIn(f"{path} answered 500", failure["reason"])
                for system, figures in found["retrieval"].items():
                    self.assertEqual(
                        counted(figures["hit_at_1"]), (2 - (system in lost), 2), system
                    )
                answers = found["answers"]["without_floor"]["answerable"]
                self.assertEqual(counted(answers["failed"]), (1, 2))
                self.assertEqual(counted(answers["cited right"]), (1, 2))
                text = run_evaluate("--answers", *self.small(), environ=environ).stdout
                self.assertIn("2 answerable, 2 not; 1 failed", text)
                self.assertIn(f"FAILED at {stage}, 1 of the questions: http://127.0.0.1", text)
                self.assertTrue(text.endswith(f'\n  "{question}"\n'), text)
                self.assertIn("failed (answerable)  1 of 2 (9 to 91 %)", text)

    def test_a_service_that_fails_from_the_start_ends_it_with_one_line(self) -> None:
        server = self.serve()
        result = run_evaluate(environ={**server.environment(), "API_KEY": "another-key"})
        self.assert_one_line(result, 1, "evaluate: embeddings: ", "answered 401", "API_KEY")
        self.assertEqual(len(server.request_log.entries), 1)

    def test_the_table_is_for_people(self) -> None:
        server = self.serve()
        result = run_evaluate("--answers", environ=server.environment())
        self.assertEqual((result.status, result.stderr), (0, ""))
        lines = result.stdout.splitlines()
        answerable = sum(bool(question.ids) for question in QUESTIONS)
        counts = f"{answerable} answerable, {len(QUESTIONS) - answerable} not; 0 failed"
        self.assertEqual(lines[0], f"{len(QUESTIONS)} questions on {len(IDS)} records: {counts}")
        for words in (
            "RETRIEVAL",
            "hit@3 by kind",
            "FLOOR",
            "export RAG_MIN_SIMILARITY=",
            "ANSWERS",
        ):
            self.assertTrue(any(line.startswith(words) for line in lines), words)
        self.assertLessEqual(max(map(len, lines)), 100)
        named = [question.text for question in QUESTIONS if f'"{question.text}"' in result.stdout]
        self.assertIn("Où est le mot de passe du réseau MARROW-READ ?", named)  # BM25 only
        self.assertIn("May I bring a box as a gift?", named)  # vectors only
        self.assertIn("Is joining free?", named)  # at 1 only
        self.assertNotIn("What does a printed page in colour cost?", named)  # all find it
        bare = [line for line in lines if re.search(r"\d ?%", line) and " of " not in line]
        self.assertEqual(bare, [])

    def test_equal_failures_are_told_once_with_all_their_questions(self) -> None:
        environ = self.serve().environment("http-500-answer", rerank=False)
        result = run_evaluate("--answers", *self.small(), environ=environ)
        self.assertIn("2 answerable, 2 not; 4 failed\n", result.stdout)
        self.assertEqual(result.stdout.count("FAILED at answer, 4 of the questions: "), 1)
        self.assertTrue(result.stdout.endswith('\n  "Who won?"\n'))

    def test_requests_that_can_be_read_on_the_way_are_warned_of(self) -> None:
        with socket.socket() as taken:  # a proxy that takes no connection
            taken.bind(("127.0.0.1", 0))
            proxy = f"http://127.0.0.1:{taken.getsockname()[1]}"
            result = run_evaluate(environ={**self.serve().environment(), "HTTP_PROXY": proxy})
        warning, line, _ = result.stderr.split("\n")
        told = "key and records can be read on the way"
        self.assertEqual(warning, f"evaluate: warning: plain http: {told}")
        self.assertIn("evaluate: embeddings: the connection to ", line)

    def test_progress_is_shown_on_a_terminal_only(self) -> None:
        environ = self.serve().environment()
        result = run_evaluate("--answers", *self.small(), environ=environ, stream=Terminal)
        shown = [line.rstrip() for line in result.stderr.split("\r")]
        for line in ("embedded", "searched for", "asked"):
            self.assertIn(f"{line} 4 of 4 questions", shown)
        self.assertEqual(shown[-2:], ["", ""])
        quiet = run_evaluate("--answers", *self.small(), environ=environ)
        self.assertEqual(quiet.stderr, "")

    def test_a_wrong_questions_file_is_refused_before_any_request(self) -> None:
        good = ASKED[0]
        server = self.serve()
        knowledge = self.file("k.json", SMALL)
        near, nothing = {**ASKED[2], "ids": ["east"]}, {**good, "ids": []}
        for content, words in (
            ({"question": "q"}, "what must be an array is an object, not a list"),
            ([], "holds no question"),
            ("[", "not JSON"),
            (b"\xff", "not UTF-8"),
            ('[{"question": "a", "question": "b"}]', "a repeated key"),
            (["text"], "entry 1: the entry is a string, not an object"),
            ([good, {**good, "id": []}], "entry 2: the keys are not `question`, `ids` and `kind`"),
            ([{**good, "question": 7}], "entry 1: question is 7, not a string"),
            ([{**good, "question": " "}], "entry 1: the question is blank"),
            ([{**good, "kind": "odd"}], 'entry 1: the kind "odd" is none of plain, paraphrase, '),
            ([{**good, "ids": "east"}], "entry 1: ids is a string, not a list"),
            ([{**good, "ids": [1]}], "entry 1: ids[0] is 1, not a string"),
            (
                [{**good, "ids": ["East"]}],
                'entry 1: ids[0] is "East", which is the id of no record',
            ),
            ([{**good, "ids": ["east"] * 2}], 'entry 1: ids[1] is "east", for the second time'),
            ([good, ASKED[1], good], "entry 3: the same question as entry 1"),
            ([good, nothing], "entry 2: a plain question has at least 1 id; this has 0"),
            ([near], "entry 1: a near-miss question has no id; this has 1"),
            ([{**good, "kind": "two-part"}], "entry 1: a two-part question has at least 2 ids"),
        ):
            with self.subTest(words=words):
                path = self.file("q.json", content)
                argv = ("--knowledge", knowledge, "--questions", path)
                result = run_evaluate(*argv, environ=server.environment())
                self.assert_one_line(result, 1, "evaluate: questions: ", "q.json", words)
        missing = str(self.folder / "none.json")
        result = run_evaluate("--questions", missing, environ=server.environment())
        self.assert_one_line(result, 1, "evaluate: questions: cannot read ", "(see --questions)")
        self.assertEqual(server.request_log.entries, type(server.request_log.entries)())

    def test_what_else_is_wrong_is_one_line_with_its_stage(self) -> None:
        environ = self.serve().environment()
        knowledge = self.file("k.json", SMALL)
        for argv, given, words in (
            ((), {}, ("evaluate: settings: not set: API_BASE_URL",)),
            (("--odd",), environ, ("evaluate: usage: ", "--odd")),
            (("--knowledge", knowledge), environ, ("evaluate: usage: give --questions: ",)),
            (
                ("--knowledge", "none.json"),
                environ,
                ("evaluate: knowledge: cannot read none.json",),
            ),
        ):
            self.assert_one_line(run_evaluate(*argv, environ=given), 1, *words)

    def test_help_tells_the_form_of_the_questions_file(self) -> None:
        result = run_evaluate("--help", environ={})
        self.assertEqual((result.status, result.stderr), (0, ""))
        for word in ("question ", "ids ", "kind ", "hit@k", "--answers", *evaluate.KINDS):
            self.assertIn(f" {word}" if word in evaluate.KINDS else word, result.stdout)

    def test_a_set_of_one_side_only_is_measured_too(self) -> None:
        server = self.serve()
        for asked in (ASKED[:2], ASKED[2:]):
            environ = server.environment()
            result = run_evaluate("--answers", *self.small(asked), environ=environ)
            self.assertEqual((result.status, result.stderr), (0, ""))
            self.assertIn("no floor can be measured", result.stdout)
            self.assertIn("no floor to compare with", result.stdout)
            self.assertEqual(paths(server)[0], EMBEDDINGS)
