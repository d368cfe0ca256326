"""RAG_QUOTES=1: every quote is found in the record word for word, with the record's own offsets."""

from __future__ import annotations

import json
import random
import re
import unicodedata
import unittest
from typing import Any

import rag
from mock_server.scenarios import ANSWERS, CHAT, Scenario, message
from tests.support import RagTestCase, bodies, run_rag

TEXT = "On Saturday the library is open from 10:15 to 14:45. The music room stays locked."
SOURCES = {"hours": TEXT, "fees": "Entry costs -5 or 3.14 pounds.", "short": "No entry."}

NOT_THERE = "and its quote is not in that text, word for word"


def reply(*citations: Any, answer: Any = "It is open.") -> str:
    """What the model writes; a citation is (source_id, quote)."""
    cited = [{"source_id": source_id, "quote": quote} for source_id, quote in citations]
    return json.dumps({"citations": cited, "answer": answer})


class TestCheckQuotes(unittest.TestCase):
    def refused(self, text: str, reason: str) -> None:
        with self.assertRaises(rag.RagError) as raised:
            rag.check_quotes(text, SOURCES)
        self.assertEqual(str(raised.exception), reason)

    def test_a_quote_becomes_the_slice_of_the_record(self) -> None:
        checked = rag.check_quotes(reply(("hours", "The music\n room")), SOURCES)
        quote = {"id": "hours", "start": 53, "end": 67, "text": "The music room"}
        expected = {"answer": "It is open.", "source_ids": ["hours"], "quotes": [quote]}
        self.assertEqual(checked, expected)

    def test_sources_come_in_the_order_first_cited(self) -> None:
        fees = ("Entry costs -5", "or 3.14 pounds")
        cited = (("fees", fees[0]), ("hours", "The music room"), ("fees", fees[1]))
        checked = rag.check_quotes(reply(*cited), SOURCES)
        self.assertEqual(checked["source_ids"], ["fees", "hours"])
        self.assertEqual([quote["id"] for quote in checked["quotes"]], ["fees", "hours", "fees"])

    def test_an_abstention_is_null_with_an_empty_list(self) -> None:
        expected: Any = {"answer": None, "source_ids": [], "quotes": []}
        self.assertEqual(rag.check_quotes(reply(answer=None), SOURCES), expected)

    def test_the_whole_text_may_be_shorter_than_3_words(self) -> None:
        checked = rag.check_quotes(reply(("short", " No entry. ")), SOURCES)
        self.assertEqual(checked["quotes"][0]["text"], "No entry.")

    def test_every_rule_has_its_reason(self) -> None:
        good = ("hours", "The music room")
        where = 'citations[0].source_id is "hours", '
        twice = 'citations[1].source_id is "hours", with the same quote for the second time'
        for text, reason in (
            ("[]", "the model's text is a list of 0, not an object"),
            ('{"answer": null}', "the keys are not `citations` and `answer`"),
            ('{"answer": null, "source_ids": []}', "the keys are not `citations` and `answer`"),
            (
                '{"answer": null, "citations": [], "n": 1}',
                "the keys are not `citations` and `answer`",
            ),
            ('{"answer": null, "citations": null}', "citations is null, not a list"),
            ('{"answer": null, "citations": ["hours"]}', "citations[0] is a string, not an object"),
            (
                '{"answer": null, "citations": [{"source_id": "hours"}]}',
                "citations[0] has not `source_id` and `quote`",
            ),
            (reply((1, "a b c")), "citations[0].source_id is 1, not a string"),
            (
                reply(("Hours", "The music room")),
                'citations[0].source_id is "Hours", which is not the id of a source that was sent',
            ),
            (reply(("hours", None)), "citations[0].quote is null, not a string"),
            (
                reply(good, good),
                twice,
            ),
            (
                reply(good, ("hours", "The  music room")),
                twice,
            ),
            (reply(("hours", "music room")), f"{where}and its quote has fewer than 3 words"),
            (reply(("hours", "")), f"{where}and its quote is not in that text, word for word"),
            (reply(), "the answer cites no source"),
            (reply(good, answer=None), "the answer is null, and yet it cites sources"),
            (reply(good, answer=" "), "the answer is blank"),
            (reply(good, answer=7), "the answer is 7, not a string or null"),
        ):
            with self.subTest(text=text):
                self.refused(text, reason)

    def test_a_quote_of_another_source_or_of_a_title_is_refused(self) -> None:
        reason = f'citations[0].source_id is "fees", {NOT_THERE}'
        self.refused(reply(("fees", "The music room")), reason)


class TestPlaceOf(unittest.TestCase):
    def test_only_how_signs_are_drawn_may_differ(self) -> None:
        for quote, text, place in (
            ("from ten to two", "It is open from ten to two.", (11, 26)),
            ("from ten\n to  two", "open from ten to two", (5, 20)),
            ("from ten to two", "open from\r\nten\u00a0to\u3000two", (5, 21)),
            (" from ten to two\n", "open from ten to two", (5, 20)),
            ("say “yes” and it’s done", 'say "yes" and it\'s done', (0, 23)),
            ('say "yes" and it\'s done', "say “yes” and it’s done", (0, 23)),
            ("a – b — c", "a - b - c", (0, 9)),
            ("at −5 degrees", "at -5 degrees", (0, 13)),
            ("the cafe\u0301 is open", "the café is open", (0, 16)),
            ("the café is open", "the cafe\u0301 is open", (0, 17)),
            ("café. It opens", "A café. It opens late", (2, 16)),
            ("\u1112\u1161\u11ab \u1100\u1173 \u110b\u1165", "한 그 어", (0, 5)),
            ("한 그 어", "\u1112\u1161\u11ab \u1100\u1173 \u110b\u1165", (0, 9)),
            ("ﬁle is here", "a ﬁle is here", (2, 13)),
            ("自行车可以停", "门旁自行车可以停在", (2, 8)),
            ("مفتوحة يوم السبت", "المكتبة مفتوحة يوم السبت.", (8, 24)),
            ("👩\u200d💻 works till five", "A 👩\u200d💻 works till five", (2, 21)),
            ("नमस्ते यह है", "वह नमस्ते यह है।", (3, 15)),
            ("(from ten to two)", "open (from ten to two).", (5, 22)),
            ("from ten to two", "open—from ten to two—daily", (5, 20)),
            ("one two three", "one two three four one two three", (0, 13)),
            ("two three four", "xtwo three four two three four", (16, 30)),
            ("bold words here", "Some **bold words here** stay.", (7, 22)),
            (".001 in all cases", "p < .001 in all cases", (4, 21)),
            ("open from ten", "\u200fopen from ten\u200f", (1, 14)),
            ("端口后面有灯", "打开USB端口后面有灯", (5, 11)),
            ("at ten (or two)", "It opens (at ten (or two)).", (10, 25)),
        ):
            with self.subTest(quote=quote, text=text):
                self.assertEqual(rag.place_of(quote, text), place)

    def test_every_letter_digit_sign_and_operator_counts(self) -> None:
        for quote, text in (
            ("From ten to two", "open from ten to two"),
            ("from ten to tow", "open from ten to two"),
            ("is open today", "is not open today"),
            ("from 11:15 to 14:45", "from 10:15 to 14:45"),
            ("p>0.001 in all", "p<0.001 in all"),
            ("at 5 degrees", "at -5 degrees"),
            ("5 degrees at night", "at -5 degrees at night"),
            ("14 in all cases", "3.14 in all cases"),
            ("it was 3", "it was 3.14"),
            ("able to read it", "unable to read it"),
            ("smoking in here please", "non-smoking in here please"),
            ("5 of all users", "of all 15 of all users"),
            ("rose by 5", "rose by 5%"),
            ("we do n", "we do n't"),
            ("the cafe is open", "the café is open"),
            ("the cafe is open", "the cafe\u0301 is open"),
            ("file is here", "a ﬁle is here"),
            ("👩 works till five", "👩\u200d💻 works till five"),
            ("open … two days", "open from ten to two days"),
            ("open ... two days", "open from ten to two days"),
            ("open two days", "open for two days"),
            ("ο κόσμος είναι", "ο κοσμος είναι"),
            ("１２３ four five", "123 four five"),
            ("自行车可以停", "自行车不可以停"),
            ("001 in all cases", "p < .001 in all cases"),
            ("= 3 in all rows", "x != 3 in all rows"),
            ("5H2O is blue", "CuSO4·5H2O is blue"),
            ("500 people live here", "12\u202f500 people live here"),
            ("it has 12", "it has 12\u00a0500"),
            ("๕๐ บาท", "ราคา ๑๕๐ บาท"),
            ("10 in all cases", "5*10 in all cases"),
            ("able to read it", "(un)able to read it"),
            ("万人住在这里", "有5万人住在这里"),
            (". Next one here", "five. Next one here"),
        ):
            with self.subTest(quote=quote, text=text):
                self.assertEqual(rag.place_of(quote, text), (0, 0))

    def test_words_are_counted_in_scripts_with_and_without_spaces(self) -> None:
        for text, count in (
            ("", 0),
            ("one", 1),
            ("one two three", 3),
            ("one -- three", 2),
            ("-5 3.14", 2),
            ("自行车", 3),
            ("図書館 A", 4),
            ("हिन्दी", 1),
            ("ห้องสมุด", 8),
        ):
            self.assertEqual(rag.words(text), count, text)


WORDS = (
    "open Café naïve Straße ΩΜΕΓΑ κόσμος Ёлка библиотека مكتبة ספרייה नमस्ते 한국어 -5 3.14 "
    'p<0.001 10:15 x+y=2 1,000 it\'s "quoted" non-smoking a/b 👩\u200d💻 🙂 e\u0301te\u0301 ﬁn №7 '
    "50% (see below) end. 自行车 図書館"
).split()
SPACES = (" ", "  ", "\n", "\r\n", "\t", "\u00a0", "\u3000", " \n ")
DRAWN = {"'": "'’‘", '"': '"“”', "-": "-–—‐‑−"}


class TestProperties(unittest.TestCase):
    def text(self, chance: random.Random) -> tuple[str, int, int]:
        """A text, and where a span of whole words in it starts and ends."""
        numbers = [chance.choice(("", str(chance.randrange(10**6)))) for _ in range(14)]
        words = [chance.choice(WORDS) + number for number in numbers]
        first = chance.randrange(10)
        last = first + chance.randrange(3, 5)
        parts = []
        for word in words:
            # Between numbers a no-break space may separate thousands.
            parts += [word, chance.choice([space for space in SPACES if space != "\u00a0"])]
        start = len("".join(parts[: 2 * first]))
        return "".join(parts), start, start + len("".join(parts[2 * first : 2 * last - 1]))

    def mangled(self, quote: str, chance: random.Random) -> str:
        """The quote, drawn in another way."""
        quote = re.sub(r"\s+", lambda _: chance.choice(SPACES), quote)
        quote = "".join(chance.choice(DRAWN.get(char, char)) for char in quote)
        return unicodedata.normalize(chance.choice(("NFC", "NFD")), quote)

    def test_a_span_of_whole_words_is_found_however_it_is_drawn(self) -> None:
        chance = random.Random(7)
        for _ in range(5000):
            text, start, end = self.text(chance)
            quote = self.mangled(text[start:end], chance)
            place = rag.place_of(quote, text)
            self.assertEqual(place, (start, end), (quote, text))

    def test_one_letter_digit_sign_or_operator_more_less_or_other_is_refused(self) -> None:
        chance = random.Random(8)
        signs = "abcXYZ0123456789+*<>=%$€#@&ñßΩжه한中"
        cases = 0
        while cases < 5000:
            text, start, end = self.text(chance)
            quote = self.mangled(text[start:end], chance)
            at = chance.randrange(len(quote))
            changed = chance.choice(
                (
                    quote[:at] + chance.choice(signs) + quote[at:],
                    quote[:at] + chance.choice(signs) + quote[at + 1 :],
                    quote[:at] + quote[at + 1 :],
                )
            )
            if plain(changed) in plain(text):  # it says the same, or less, or stands elsewhere
                continue
            cases += 1
            self.assertEqual(rag.place_of(changed, text), (0, 0), (changed, text))


def plain(text: str) -> str:
    """A text without what a quote may differ in, made in another way than rag.py does it."""
    for sign, drawn in DRAWN.items():
        for other in drawn:
            text = text.replace(other, sign)
    return " ".join(unicodedata.normalize("NFC", text).split())


class TestRun(RagTestCase):
    def run_with(self, content: str, **environ: str) -> tuple[Any, list[Any]]:
        own = Scenario("own", "own", "own", ANSWERS, CHAT, message(content=content), rerank=False)
        server = self.serve(own)
        records = [
            {"id": name, "title": "Times", "text": text, "page": 3}
            for name, text in SOURCES.items()
        ]
        result = run_rag(
            *("When is it open?", "--knowledge", self.file("k.json", records)),
            environ={**server.environment("own", rerank=False), "RAG_QUOTES": "1", **environ},
        )
        return result, bodies(server, "/chat/completions")

    def test_quotes_are_published_beside_answer_and_sources(self) -> None:
        result, _ = self.run_with(reply(("hours", "The music room"), ("short", "No entry.")))
        document = result.document
        self.assertEqual(list(document), ["answer", "sources", "quotes"])
        self.assertEqual([source["id"] for source in document["sources"]], ["hours", "short"])
        self.assertEqual(document["sources"][0]["page"], 3)
        for quote, source in zip(document["quotes"], document["sources"]):
            self.assertEqual(source["text"][quote["start"] : quote["end"]], quote["text"])

    def test_an_abstention_looks_as_it_does_without_quotes(self) -> None:
        result, _ = self.run_with(reply(answer=None))
        expected: Any = {"answer": None, "sources": [], "reason": "sources_do_not_answer"}
        self.assertEqual(result.document, expected)

    def test_without_the_option_nothing_changes_on_the_wire_or_on_stdout(self) -> None:
        content = json.dumps({"answer": "Yes.", "source_ids": ["hours"]})
        for value in ("", "0"):
            result, (body,) = self.run_with(content, RAG_QUOTES=value)
            self.assertEqual(list(result.document), ["answer", "sources"])
            self.assertEqual(body["messages"][0]["content"], rag.PROMPT)
            self.assertNotIn("response_format", body)

    def test_the_prompt_names_citations_before_the_answer(self) -> None:
        _, (body,) = self.run_with(reply(answer=None))
        prompt = body["messages"][0]["content"]
        self.assertEqual(prompt, rag.QUOTES_PROMPT)
        self.assertLess(prompt.index('"citations"'), prompt.index('"answer"'))
        self.assertNotIn("{", prompt)

    def test_the_schema_names_citations_first_and_the_ids_that_were_sent(self) -> None:
        _, (body,) = self.run_with(reply(answer=None), API_RESPONSE_FORMAT="json_schema")
        schema = body["response_format"]["json_schema"]["schema"]
        self.assertEqual(list(schema["properties"]), ["citations", "answer"])
        self.assertEqual(schema["required"], ["citations", "answer"])
        item = schema["properties"]["citations"]["items"]
        self.assertEqual(item["required"], ["source_id", "quote"])
        self.assertEqual({*item["properties"]["source_id"]["enum"]}, {*SOURCES})
        self.assertFalse(schema["additionalProperties"] or item["additionalProperties"])

    def test_a_quote_that_is_not_there_goes_back_with_its_number_and_source(self) -> None:
        wrong = reply(("hours", "The music hall"))
        result, (first, second) = self.run_with(wrong, RAG_ATTEMPTS="2")
        reason = f'citations[0].source_id is "hours", {NOT_THERE}'
        self.assertEqual(len(first["messages"]), 2)
        self.assertIn(reason, second["messages"][-1]["content"])
        self.assert_one_line(result, 1, f"rag.py: answer: reply 2 of 2 rejected: {reason}")

    def test_no_quote_is_shown_in_a_message(self) -> None:
        result, _ = self.run_with(reply(("hours", "SECRET WORDS OF A MODEL")))
        self.assertNotIn("SECRET", result.stderr)

    def test_the_option_is_0_or_1(self) -> None:
        result, _ = self.run_with("", RAG_QUOTES="yes")
        line = 'rag.py: settings: RAG_QUOTES must be 0 or 1; found "yes"'
        self.assert_failure(result, 2, line)
