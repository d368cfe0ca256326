"""Knowledge: which files and records are taken, and what is said of the others."""

from __future__ import annotations

import json
import unittest
from pathlib import Path
from typing import Any

import rag
from tests.support import ROOT, RagTestCase, bodies, paths, run_rag

A = {"id": "a", "text": "The tower is 41 metres high."}
B = {"id": "b", "title": "Bell", "text": "The bell weighs 900 kilograms."}


class KnowledgeTestCase(RagTestCase):
    def read(self, name: str, content: Any) -> list[rag.Record]:
        return rag.read_knowledge(self.file(name, content))

    def reason(self, name: str, content: Any) -> str:
        """Why a file is refused, without its folder."""
        with self.assertRaises(rag.RagError) as caught:
            self.read(name, content)
        return str(caught.exception).replace(f"{self.folder}/", "")


class TestFiles(KnowledgeTestCase):
    def test_an_array_and_its_json_lines_give_the_same_records(self) -> None:
        lines = f"{json.dumps(A)}\r\n\n  \n{json.dumps(B)}"
        self.assertEqual(self.read("k.json", [A, B]), [A, B])
        self.assertEqual(self.read("k.jsonl", lines), [A, B])
        self.assertEqual(self.read("K.JSONL", lines), [A, B])
        self.assertEqual(self.read("k.txt", [A, B]), [A, B])

    def test_a_byte_order_mark_and_crlf_are_taken(self) -> None:
        text = json.dumps([A, B], indent=1).replace("\n", "\r\n")
        self.assertEqual(self.read("k.json", b"\xef\xbb\xbf" + text.encode()), [A, B])

    def test_lines_end_at_line_feeds_and_at_no_other_character(self) -> None:
        odd = {"id": "a", "text": "one\u2028two\x85three"}
        self.assertEqual(self.read("k.jsonl", json.dumps(odd, ensure_ascii=False)), [odd])

    def test_other_fields_come_back_equal(self) -> None:
        entry = {**A, "n": 1.5, "big": 10**30, "none": None, "deep": {"list": [True, "é\u202e"]}}
        self.assertEqual(self.read("k.json", [entry]), [entry])

    def test_files_that_are_refused(self) -> None:
        deep = "[" * 100_000
        rename = "an object, not an array of objects; if it has one a line, name the file .jsonl"
        good = json.dumps(A)
        for name, content, expected in (
            ("k.json", "", "k.json: empty (line 1, column 1)"),
            ("k.json", "[]", "k.json holds no record"),
            ("k.jsonl", "\n\n", "k.jsonl holds no record"),
            ("k.json", good, f"k.json: {rename}"),
            ("k.json", f"{good}\n{good}\n", f"k.json: {rename}"),
            (
                "k.json",
                '"text"',
                "k.json: what must be an array of objects is a string, not a list",
            ),
            (
                "k.json",
                f"[{good},\n {{]",
                "k.json: not JSON: Expecting property name enclosed in "
                "double quotes (line 2, column 3)",
            ),
            (
                "k.jsonl",
                f"{good}\n{{'id'}}",
                "k.jsonl: not JSON: Expecting property name enclosed in "
                "double quotes (line 2, column 2)",
            ),
            ("k.json", b'[\n{"id": "\xff"}]', "k.json: not UTF-8 (line 2)"),
            ("k.json", deep, "k.json: nesting too deep to read (line 1)"),
            ("k.jsonl", f"{good}\n{deep}", "k.jsonl: nesting too deep to read (line 2)"),
        ):
            with self.subTest(content=content[:40]):
                self.assertEqual(self.reason(name, content), expected)

    def test_a_file_that_cannot_be_read_is_named_with_the_variable(self) -> None:
        for path, why in (
            (self.folder / "none.json", "No such file or directory"),
            (self.folder, "Is a directory"),
        ):
            with self.subTest(path=path), self.assertRaises(rag.RagError) as caught:
                rag.read_knowledge(str(path))
            self.assertIn(f": {why} (see --knowledge)", str(caught.exception))


class TestRecords(KnowledgeTestCase):
    def test_records_that_are_refused(self) -> None:
        for second, expected in (
            ("7", "k.json, record 2: the record is 7, not an object"),
            ("null", "k.json, record 2: the record is null, not an object"),
            ('{"text": "t"}', "k.json, record 2: id is missing, not a string"),
            ('{"id": 7, "text": "t"}', "k.json, record 2: id is 7, not a string"),
            ('{"id": null, "text": "t"}', "k.json, record 2: id is null, not a string"),
            ('{"id": " ", "text": "t"}', 'k.json, record 2 (id " "): id is blank'),
            ('{"id": "b"}', 'k.json, record 2 (id "b"): text is missing, not a string'),
            (
                '{"id": "b", "text": ["t"]}',
                'k.json, record 2 (id "b"): text is a list of 1, not a string',
            ),
            ('{"id": "b", "text": "\\n\\t"}', 'k.json, record 2 (id "b"): text is blank'),
            (
                '{"id": "b", "text": "t", "title": null}',
                'k.json, record 2 (id "b"): title is null, not a string',
            ),
            ('{"id": "b", "text": "t", "title": ""}', 'k.json, record 2 (id "b"): title is blank'),
            (
                '{"id": "a", "text": "t"}',
                'k.json, record 2 (id "a"): this id is taken by k.json, record 1',
            ),
            ('{"id": "b", "text": "t", "text": "u"}', 'k.json, record 2 (id "b"): a repeated key'),
            (
                '{"id": "b", "text": "t", "x": {"y": 1, "y": 1}}',
                'k.json, record 2 (id "b"): a repeated key',
            ),
            *(
                (
                    f'{{"id": "b", "text": "t", "x": {number}}}',
                    'k.json, record 2 (id "b"): NaN, Infinity or a number too large',
                )
                for number in ("NaN", "-Infinity", "1e999", "[0.5, 1e999]", "9" * 641)
            ),
            (
                '{"id": "b", "text": "\\ud83d"}',
                'k.json, record 2 (id "b"): half of a surrogate pair',
            ),
            (
                '{"id": "b", "text": "t", "\\udc00": 1}',
                'k.json, record 2 (id "b"): half of a surrogate pair',
            ),
            (
                f'{{"id": "b", "text": "t", "x": {"[" * 150 + "]" * 150}}}',
                'k.json, record 2 (id "b"): nesting more than 100 deep',
            ),
            *(
                (
                    f'{{"id": {json.dumps(text)}, "text": "t"}}',
                    f'k.json, record 2 (id "{shown}"): '
                    "the id has white space around it, or a control character",
                )
                for text, shown in (
                    (" b", " b"),
                    ("b\u00a0", "b\\u00a0"),
                    ("b\tc", "b\\tc"),
                    ("b\x7f", "b\\u007f"),
                    ("b\x85c", "b\\u0085c"),
                )
            ),
        ):
            with self.subTest(second=second[:60]):
                self.assertEqual(self.reason("k.json", f"[{json.dumps(A)}, {second}]"), expected)

    def test_a_long_id_is_shortened_in_the_message(self) -> None:
        reason = self.reason("k.json", [{"id": "x" * 500, "text": ""}])
        self.assertEqual(reason, f'k.json, record 1 (id "{"x" * 99}…"): text is blank')

    def test_the_passage_is_title_newline_text_or_the_text_alone(self) -> None:
        self.assertEqual(rag.passage(B), "Bell\nThe bell weighs 900 kilograms.")
        self.assertEqual(rag.passage(A), "The tower is 41 metres high.")


class TestWhere(unittest.TestCase):
    RECORDS = (
        {
            "id": "1",
            "text": "t",
            "for": "all",
            "floor": 1,
            "open": True,
            "tags": ["a", {"b": None}],
        },
        {"id": "2", "text": "t", "for": "1", "floor": 2, "open": 1, "tags": []},
        {"id": "3", "text": "t", "for": "true", "open": None},
    )

    def test_a_condition_keeps_the_records_with_that_value_and_all_conditions_must_match(
        self,
    ) -> None:
        for conditions, expected in (
            ((), "123"),
            (("for=all",), "1"),
            (("for=1",), "2"),
            (("floor=1",), "1"),
            (("for=true",), "3"),
            (("open=true",), "1"),
            (("open=1",), "2"),
            (("open=null",), "3"),
            (('tags=["a",{"b":null}]',), "1"),
            (("id=2", "floor=2"), "2"),
        ):
            with self.subTest(conditions=conditions):
                kept = rag.matching(self.RECORDS, list(map(rag.condition, conditions)))
                self.assertEqual("".join(record["id"] for record in kept), expected)

    def test_a_condition_that_leaves_no_record_is_an_error(self) -> None:
        for conditions, expected in (
            (("for=ALL",), "--where for=ALL leaves no record"),
            (("floor=1", "for=1"), "--where for=1 leaves no record"),
            (("open=null", "floor=1"), "--where floor=1 leaves no record"),
            (("none=x",), "--where none=x: no record has that field"),
            (("For=all",), "--where For=all: no record has that field"),
        ):
            with self.subTest(conditions=conditions), self.assertRaises(rag.RagError) as caught:
                rag.matching(self.RECORDS, list(map(rag.condition, conditions)))
            self.assertEqual(str(caught.exception), expected)


class TestKnowledgeStage(RagTestCase):
    def test_a_broken_file_ends_the_run_with_status_2_before_the_first_request(self) -> None:
        server = self.serve()
        path = self.file("k.json", [A, {"id": "b", "text": ""}])
        result = run_rag("Why?", "--knowledge", path, environ=server.environment())
        self.assert_failure(
            result, 2, f'rag.py: knowledge: {path}, record 2 (id "b"): text is blank'
        )
        self.assertEqual(paths(server), [])

    def test_the_option_overrides_the_variable(self) -> None:
        server = self.serve()
        environ = {**server.environment(), "RAG_KNOWLEDGE": self.file("one.json", [A])}
        other = self.file("two.json", [B])
        result = run_rag("What does the bell weigh?", "--knowledge", other, environ=environ)
        self.assertEqual(result.document["sources"], [B])
        result = run_rag("How high is the tower?", environ=environ)
        self.assertEqual(result.document["sources"], [A])

    def test_nothing_but_the_records_id_title_and_text_is_ever_sent(self) -> None:
        server = self.serve()
        hidden = {"page": "HIDDEN-PAGE", "nested": {"HIDDEN-KEY": ["HIDDEN-ITEM"]}, "n": 918273645}
        knowledge = [
            {**A, **hidden, "who": "all"},
            {**B, **hidden, "who": "all"},
            {
                "id": "secret",
                "title": "SECRET-TITLE",
                "text": "SECRET-TEXT high tower",
                "who": "staff",
            },
        ]
        path = self.file("k.json", knowledge)
        question = "How high is the tower?"
        result = run_rag(
            question, "--knowledge", path, "--where", "who=all", environ=server.environment()
        )
        self.assertEqual(result.document["sources"], [knowledge[0]])
        self.assertEqual(paths(server), ["/embeddings", "/rerank", "/chat/completions"])
        for entry in server.request_log.entries:
            sent = json.dumps(entry.body)
            for text in ("HIDDEN", "SECRET", "918273645", "secret", "who", "staff", "[key]"):
                self.assertNotIn(text, sent)
            self.assertFalse(entry.key_in_body)
        self.assertEqual(
            bodies(server, "/embeddings")[0]["input"], [question, rag.passage(A), rag.passage(B)]
        )
        asked = json.loads(bodies(server, "/chat/completions")[0]["messages"][1]["content"])
        self.assertEqual(asked, {"question": question, "sources": [A, B]})

    def test_no_match_sends_nothing(self) -> None:
        server = self.serve()
        result = run_rag("--where", "audience=nobody", environ=server.environment())
        self.assert_failure(
            result, 2, "rag.py: knowledge: --where audience=nobody leaves no record"
        )
        self.assertEqual(paths(server), [])


class TestBundledKnowledge(unittest.TestCase):
    def test_it_is_what_the_readme_promises(self) -> None:
        records = rag.read_knowledge(str(ROOT / "knowledge.json"))
        self.assertTrue(16 <= len(records) <= 20)
        self.assertTrue(any("title" in record for record in records))
        self.assertTrue(any("title" not in record for record in records))
        self.assertTrue(any(not record["text"].isascii() for record in records))
        self.assertEqual(
            rag.SAMPLE_KNOWLEDGE, Path(rag.__file__).resolve().parent / "knowledge.json"
        )
