"""Knowledge: which files and records are taken, and the message about any other."""

from __future__ import annotations

import json
import os
import unittest
from collections.abc import Sequence
from typing import Any
from unittest import mock

import rag
from tests.support import ROOT, RagTestCase, bodies, paths, run_rag

A = {"id": "a", "text": "The tower is 41 metres high."}
B = {"id": "b", "title": "Bell", "text": "The bell weighs 900 kilograms."}


class KnowledgeTestCase(RagTestCase):
    def read(self, name: str, content: Any) -> list[rag.Record]:
        return rag.read_knowledge(self.file(name, content))

    def reason(self, name: str, content: Any) -> str:
        """Return why a file is refused, without its folder."""
        with self.assertRaises(rag.RagError) as caught:
            self.read(name, content)
        return str(caught.exception).replace(f"{self.folder}/", "")


class TestFiles(KnowledgeTestCase):
    def test_an_array_and_its_json_lines_give_the_same_records(self) -> None:
        lines = f"{json.dumps(A)}\r\n\n  \n{json.dumps(B)}"
        for name in ("k.jsonl", "K.JSONL"):
            self.assertEqual(self.read(name, lines), [A, B])
        for name in ("k.json", "k"):
            self.assertEqual(self.read(name, [A, B]), [A, B])

    def test_utf_8_and_utf_16_with_a_byte_order_mark_are_read(self) -> None:
        records = [{**A, "text": "自行车 🚲\u2028one\u0a0d\u0d0a"}, B]
        array = json.dumps(records, ensure_ascii=False, indent=1).replace("\n", "\r\n")
        lines = "\r\n".join(json.dumps(each, ensure_ascii=False) for each in records)
        for name, text in (("k.json", array), ("k.jsonl", lines)):
            for mark, encoding in (
                (b"", "utf-8"),
                (b"\xef\xbb\xbf", "utf-8"),
                (b"\xff\xfe", "utf-16-le"),
                (b"\xfe\xff", "utf-16-be"),
            ):
                with self.subTest(name=name, mark=mark):
                    self.assertEqual(self.read(name, mark + text.encode(encoding)), records)

    def test_other_fields_come_back_equal(self) -> None:
        entry = {**A, "n": 1.5, "big": 10**30, "none": None, "deep": {"list": [True, "é\u202e"]}}
        self.assertEqual(self.read("k.json", [entry]), [entry])

    def test_a_file_that_is_refused_is_named_with_the_place_and_the_reason(self) -> None:
        good = json.dumps(A)
        deep = "[" * 100_000
        for name, content, words in (
            ("k.json", "", ["k.json (not named .jsonl) is not JSON"]),
            ("k.json", "[]", ["k.json holds no record"]),
            ("k.jsonl", "\n\n", ["k.jsonl holds no record"]),
            ("k.json", f"{good}\n{good}\n", ["k.json", ".jsonl"]),
            ("k.json", '{"records": []}', ["k.json: its JSON is an object, not a list"]),
            ("k.json", '"text"', ["k.json", "its JSON is a string, not a list"]),
            ("k.json", f"[{good},\n {{]", ["(not named .jsonl) is not JSON", "line 2 column 3"]),
            ("k.jsonl", f"{good}\n{{'id'}}", ["k.jsonl, line 2 is not JSON"]),
            ("k.json", b'[\n{"id": "\xff"}]', ["k.json: ", "'utf-8' codec", "0xff"]),
            ("k.json", b"\xff\xfea", ["k.json: ", "'utf-16-le' codec"]),
            ("k.json", deep, ["k.json (not named .jsonl) is not JSON", "recursion depth"]),
            ("k.jsonl", f"{good}\n{deep}", ["k.jsonl, line 2 is not JSON", "recursion depth"]),
            ("k.json", '[{"id": 1, "id": 1}]', ["k.json", 'the key "id" is repeated']),
            ("k.jsonl", '\n{"id": 1, "id": 1}', ["k.jsonl, line 2 ", 'key "id" is repeated']),
            ("k.json", '[{"id": NaN}]', ["k.json", "NaN"]),
        ):
            with self.subTest(content=content[:40]):
                reason = self.reason(name, content)
                for word in words:
                    self.assertIn(word, reason)


class TestRecords(KnowledgeTestCase):
    def test_no_part_of_a_key_is_shown_where_an_id_is_cut(self) -> None:
        key = "sk-secret-0123456789abcdefghijklmnop"
        for before in (0, 85, 200, 235):
            with self.subTest(before=before), mock.patch.dict(os.environ, {"API_KEY": key}):
                record = {"id": "a" * before + key, "text": " "}
                reason = self.reason("k.json", [record])
                self.assertNotIn("sk-secret", reason)
                self.assertTrue(reason.endswith(": text is blank"), reason)

    def test_a_record_that_is_refused_is_named_with_its_number_its_id_and_the_reason(self) -> None:
        cannot = "it cannot be written as JSON again: "
        for second, expected in (
            ("7", "id null: the record is a number, not an object"),
            ('{"text": "t"}', "id null: id is null, not a string"),
            ('{"id": 7, "text": "t"}', "id 7: id is a number, not a string"),
            ('{"id": " ", "text": "t"}', 'id " ": id is blank'),
            ('{"id": "b"}', 'id "b": text is null, not a string'),
            ('{"id": "b", "text": ["t"]}', 'id "b": text is a list, not a string'),
            ('{"id": "b", "text": "\\n\\t"}', 'id "b": text is blank'),
            ('{"id": "b", "text": "t", "title": 7}', 'id "b": title is a number, not a string'),
            ('{"id": "a", "text": "t"}', 'id "a": an earlier record has this id'),
            ('{"id": "b", "text": "t", "x": [1e999]}', f'id "b": {cannot}Out of range'),
            ('{"id": "b", "text": "\\ud83d"}', f"id \"b\": {cannot}'utf-8' codec can't encode"),
            ('{"id": "b", "text": "t", "\\udc00": 1}', f'id "b": {cannot}'),
            ('{"id": " b", "text": "t"}', 'id " b": the id has white space around it'),
            ('{"id": "b\\u00a0", "text": "t"}', 'id "b\\u00a0": the id has white space around'),
            ('{"id": "b\\tc", "text": "t"}', 'id "b\\tc": the id has white space around it, or a'),
            ('{"id": "b\\u0085c", "text": "t"}', 'id "b\\u0085c": the id has white space around'),
        ):
            with self.subTest(second=second):
                reason = self.reason("k.json", f"[{json.dumps(A)}, {second}]")
                self.assertTrue(reason.startswith(f"k.json, record 2, {expected}"), reason)
                reason = self.reason("k.jsonl", f"{json.dumps(A)}\n\n{second}")
                self.assertTrue(reason.startswith(f"k.jsonl, line 3, {expected}"), reason)

    def test_a_passage_is_title_newline_text_and_a_title_that_is_null_or_blank_is_absent(
        self,
    ) -> None:
        self.assertEqual(rag.passage(B), "Bell\nThe bell weighs 900 kilograms.")
        self.assertEqual(rag.passage(A), A["text"])
        titles: tuple[Any, ...] = (None, "", " \n")
        for title in titles:
            with self.subTest(title=title):
                (record,) = self.read("k.json", [{**A, "title": title}])
                self.assertEqual((rag.passage(record), record["title"]), (A["text"], title))


class TestWhere(unittest.TestCase):
    RECORDS: Sequence[rag.Record] = (
        {"id": "1", "for": "all", "floor": 1, "open": True, "tags": ["a", {"b": None}, 7]},
        {"id": "2", "for": "1", "floor": 2, "open": 1, "tags": [], "n": "a=b"},
        {"id": "3", "for": "true", "open": None, "tags": "a"},
    )

    def test_a_condition_keeps_the_records_with_that_value_and_all_conditions_must_match(
        self,
    ) -> None:
        for conditions, expected in (
            ((), "123"),
            (("for=all",), "1"),
            (("floor=1",), "1"),
            (("for=true",), "3"),
            (("open=true",), "1"),
            (("open=null",), "3"),
            (("tags=a",), "13"),
            (("tags=7",), "1"),
            (('tags={"b": null}',), "1"),
            (("tags=[]",), "2"),
            (("n=a=b",), "2"),
            (("id=2", "floor=2"), "2"),
        ):
            with self.subTest(conditions=conditions):
                kept = rag.matching(self.RECORDS, conditions)
                self.assertEqual("".join(record["id"] for record in kept), expected)

    def test_a_condition_without_a_match_is_an_error(self) -> None:
        for conditions in (
            ("for=ALL",),
            ("floor=1", "for=1"),
            ("open=null", "floor=null"),
            ("none=null",),
            ("For=all",),
        ):
            with self.subTest(conditions=conditions), self.assertRaises(rag.RagError) as caught:
                rag.matching(self.RECORDS, conditions)
            self.assertIn(f'no record has "{conditions[-1]}"', str(caught.exception))


class TestKnowledgeStage(RagTestCase):
    def test_knowledge_that_is_refused_ends_the_run_with_status_2_before_the_first_request(
        self,
    ) -> None:
        server = self.serve()
        good, bad = self.file("k.json", [A, B]), self.file("bad.json", [{"id": "b", "text": ""}])
        for argv, line in (
            (["--knowledge", bad], f'{bad}, record 1, id "b": text is blank'),
            (["--knowledge", f"{good}x"], f"cannot read {good}x: No such file"),
            (["--knowledge", good, "--where", "id=c"], 'no record has "id=c" (see --where)'),
            (["--knowledge", good, "--where", "id"], 'no record has "id" (see --where)'),
        ):
            with self.subTest(argv=argv):
                result = run_rag("Why?", *argv, environ=server.environment())
                self.assert_one_line(result, 2, f"rag.py: knowledge: {line}")
        self.assertEqual(paths(server), [])

    def test_the_option_overrides_the_variable(self) -> None:
        server = self.serve()
        environ = {**server.environment(), "RAG_KNOWLEDGE": self.file("one.json", [A])}
        other = self.file("two.json", [B])
        result = run_rag("What does the bell weigh?", "--knowledge", other, environ=environ)
        self.assertEqual(result.document["sources"], [B])
        result = run_rag("How high is the tower?", environ=environ)
        self.assertEqual(result.document["sources"], [A])

    def test_nothing_but_the_id_title_and_text_of_the_matching_records_is_sent(self) -> None:
        server = self.serve()
        hidden = {"page": "HIDDEN", "nested": {"HIDDEN": ["HIDDEN"]}, "who": ["HIDDEN", "all"]}
        tower, bell = {**A, **hidden, "title": None}, {**B, **hidden}
        secret = {"id": "SECRET", "title": "SECRET", "text": "SECRET high tower", "who": "staff"}
        path = self.file("k.json", [tower, bell, secret])
        question = "How high is the tower?"
        argv = (question, "--knowledge", path, "--where", "who=all")
        result = run_rag(*argv, environ=server.environment())
        self.assertEqual(result.document["sources"], [tower])
        self.assertEqual(paths(server), ["/embeddings", "/rerank", "/chat/completions"])
        for entry in server.request_log.entries:
            self.assertNotRegex(json.dumps(entry.body), "HIDDEN|SECRET|who|nested|page")
            self.assertFalse(entry.key_in_body)
        inputs = bodies(server, "/embeddings")[0]["input"]
        self.assertEqual(inputs, [question, rag.passage(A), rag.passage(B)])
        asked = json.loads(bodies(server, "/chat/completions")[0]["messages"][1]["content"])
        self.assertEqual(asked, {"question": question, "sources": [A, B]})


class TestBundledKnowledge(unittest.TestCase):
    def test_it_has_titles_and_none_and_other_scripts(self) -> None:
        records = rag.read_knowledge(str(ROOT / "knowledge.json"))
        self.assertTrue(16 <= len(records) <= 20)
        self.assertEqual({"title" in record for record in records}, {True, False})
        self.assertEqual({record["text"].isascii() for record in records}, {True, False})
