"""The strict reader: what a person, a server or a model wrote is plain data, or is refused."""

from __future__ import annotations

import json
import sys
import unittest

import rag


class TestStrictJson(unittest.TestCase):
    def test_plain_data_comes_through_unchanged(self) -> None:
        for text in (
            "null",
            "[]",
            "-0",
            '{"": {"a": [1, 2.5, -3e-5, true, null, "\\u00e9\\ud83d\\ude00"]}}',
            "1e308",
            "1e-999",
            "9" * 640,
            "[" * 101 + "]" * 101,
            " \r\n\t[0.5,0.25]\n",
        ):
            with self.subTest(text=text[:40]):
                self.assertEqual(rag.strict_json(text, "here"), json.loads(text))

    def test_what_two_readers_could_read_differently_is_refused(self) -> None:
        for text, expected in (
            ('{"a": 1, "a": 1}', "a repeated key"),
            ('[{"b": {"a": 1, "\\u0061": 2}}]', "a repeated key"),
            ("NaN", "NaN, Infinity or a number too large"),
            ("[0.5, NaN]", "NaN, Infinity or a number too large"),
            ("[[-Infinity]]", "NaN, Infinity or a number too large"),
            ('{"a": 1e999}', "NaN, Infinity or a number too large"),
            ("[0.5, -1e999]", "NaN, Infinity or a number too large"),
            ("9" * 641, "NaN, Infinity or a number too large"),
            ('"\\ud83d"', "half of a surrogate pair"),
            ('{"\\ude00": 1}', "half of a surrogate pair"),
            ("[" * 102 + "]" * 102, "nesting more than 100 deep"),
            ("[" * 200_000, "nesting too deep to read (line 1)"),
            ("", "empty (line 1, column 1)"),
            (" \n ", "empty (line 2, column 2)"),
            ("<!doctype html>", "not JSON: Expecting value (line 1, column 1)"),
            ("data: {}", "an event stream, and none was asked for (line 1, column 1)"),
            ("```json\n{}\n```", "wrapped in a Markdown fence (line 1, column 1)"),
            ("<think>", "a <think> block; switch the model's thinking off (line 1, column 1)"),
            ("{} {}", "not JSON: Extra data (line 1, column 4)"),
            ("[1, 2", "not JSON: Expecting ',' delimiter (line 1, column 6)"),
            (
                "\ufeff{}",
                "not JSON: Unexpected UTF-8 BOM (decode using utf-8-sig) (line 1, column 1)",
            ),
        ):
            with self.subTest(text=text[:40]), self.assertRaises(rag.RagError) as caught:
                rag.strict_json(text, "here")
            self.assertEqual(str(caught.exception), f"here: {expected}")

    @unittest.skipUnless(hasattr(sys, "set_int_max_str_digits"), "this Python reads any number")
    def test_a_number_with_more_digits_than_python_is_told_to_read_is_refused(self) -> None:
        limit = sys.get_int_max_str_digits()
        self.addCleanup(sys.set_int_max_str_digits, limit)
        sys.set_int_max_str_digits(640)
        with self.assertRaises(rag.RagError) as caught:
            rag.strict_json("9" * 641, "here")
        reason = "here: NaN, Infinity or a number too large"
        self.assertEqual(str(caught.exception), reason)

    def test_a_value_is_named_by_its_kind_and_never_by_its_text(self) -> None:
        for value, expected in (
            (None, "null"),
            (False, "a bool"),
            (-1, "-1"),
            (10**9, "a number"),
            (0.5, "a number"),
            ("secret", "a string"),
            (["secret"], "a list of 1"),
            ({"secret": 1}, "an object"),
        ):
            self.assertEqual(rag.describe(value), expected)
