"""The strict JSON reader, for settings, records, replies and what the model wrote."""

from __future__ import annotations

import json
import unittest
from typing import Any

import rag


class TestStrictJson(unittest.TestCase):
    def test_plain_data_comes_through_unchanged(self) -> None:
        for text in (
            "null",
            "-0",
            '{"": {"a": [1, 2.5, -3e-5, true, null, "\\u00e9\\ud83d\\ude00"]}}',
            "9" * 640,
            "[" * 101 + "]" * 101,
            " \r\n\t[0.5,0.25]\n",
        ):
            with self.subTest(text=text[:40]):
                self.assertEqual(rag.strict_json(text, "here"), json.loads(text))

    def test_any_other_text_is_refused_with_its_place_and_a_reason(self) -> None:
        syntax = "here is not JSON: Expecting "
        texts: tuple[tuple[str, str], ...] = (
            ('{"a": 1, "a": 1}', 'here is not JSON: the key "a" is repeated'),
            ('[{"b": 1, "c": {"a": 1, "\\u0061": 2}}]', 'the key "a" is repeated'),
            ("NaN", "NaN"),
            ("[0.5, [-Infinity]]", "Infinity"),
            ("[" * 100_000 + "]" * 100_000, "recursion depth"),
            ("", syntax),
            ("{'a': 1}", syntax),
            ("[1, 2", f"{syntax}',' delimiter: line 1 column 6"),
            ("{} {}", "Extra data"),
            ("\ufeff{}", "BOM"),
        )
        for text, reason in texts:
            with self.subTest(text=text[:40]), self.assertRaises(rag.RagError) as caught:
                rag.strict_json(text, "here")
            self.assertIn(reason, str(caught.exception))

    def test_a_value_of_another_kind_is_named_by_its_kind_and_not_by_its_text(self) -> None:
        values: tuple[tuple[Any, str], ...] = (
            (None, "null"),
            (False, "a bool"),
            (-1, "a number"),
            (0.5, "a number"),
            (["secret"], "a list"),
            ({"secret": 1}, "an object"),
        )
        for value, kind in values:
            with self.subTest(value=value), self.assertRaises(rag.RagError) as caught:
                rag.expect(value, str, "the id")
            self.assertEqual(str(caught.exception), f"the id is {kind}, not a string")
