"""Quotes: with RAG_QUOTES=1 each one is found in its record word for word, or refused."""

from __future__ import annotations

import json
import random
import re
import unicodedata
import unittest
from typing import Any

import rag
from mock_server.scenarios import ANSWERS, CHAT, Scenario, message
from tests.support import RagTestCase, Result, bodies, run_rag

TEXT = "On Saturday the library is open from 10:15 to 14:45. The music room stays locked."
SOURCES = {"hours": TEXT, "fees": "Entry costs -5 or 3.14 pounds.", "short": "No entry."}


def reply(*citations: Any, answer: Any = "It is open.") -> str:
    """Return what the model writes. A citation is (source_id, quote)."""
    cited = [{"source_id": source_id, "quote": quote} for source_id, quote in citations]
    return json.dumps({"citations": cited, "answer": answer})


def check(text: str) -> Any:
    return rag.check_answer(text, SOURCES, quotes=True)


class TestCheckQuotes(unittest.TestCase):
    def test_a_quote_becomes_the_slice_of_the_record(self) -> None:
        quote = {"id": "hours", "start": 53, "end": 67, "text": "The music room"}
        expected = {"answer": "It is open.", "source_ids": ["hours"], "quotes": [quote]}
        self.assertEqual(check(reply(("hours", "the MUSIC\n room"))), expected)

    def test_sources_come_in_the_order_first_cited(self) -> None:
        fees = ("Entry costs -5", "or 3.14 pounds")
        checked = check(reply(("fees", fees[0]), ("hours", "The music room"), ("fees", fees[1])))
        self.assertEqual(checked["source_ids"], ["fees", "hours"])
        self.assertEqual([quote["id"] for quote in checked["quotes"]], ["fees", "hours", "fees"])

    def test_an_abstention_is_null_with_an_empty_list(self) -> None:
        expected: Any = {"answer": None, "source_ids": [], "quotes": []}
        self.assertEqual(check(reply(answer=None)), expected)

    def test_the_whole_text_can_be_shorter_than_three_words(self) -> None:
        for quote in (" No entry. ", "no entry", '"No entry"'):
            checked = check(reply(("short", quote)))
            self.assertIn(checked["quotes"][0]["text"], ("No entry.", "No entry"))

    def test_replies_that_are_refused(self) -> None:
        good = ("hours", "The music room")
        keys = "the keys are not `answer` and `citations`"
        nowhere = 'the quote is not in the text of "{}", word for word'
        few = 'the quote from "hours" has fewer than 3 words'
        twice = "citations[1]: it repeats an earlier citation"
        for text, expected in (
            ('{"answer": null}', keys),
            ('{"answer": null, "source_ids": []}', keys),
            ('{"answer": null, "citations": [], "n": 1}', keys),
            ('{"answer": null, "citations": null}', "citations is null, not a list"),
            ('{"answer": null, "citations": ["a"]}', "citations[0]: it is a string, not an object"),
            (
                '{"answer": null, "citations": [{"source_id": "hours"}]}',
                "citations[0]: its keys are not `source_id` and `quote`",
            ),
            (reply((1, "a b c")), "citations[0]: it is a number, not a string"),
            (
                reply(("Hours", "The music room")),
                'citations[0]: "Hours" is not the id of a source that was sent',
            ),
            (reply(("hours", None)), "citations[0]: the quote is null, not a string"),
            (reply(good, ("hours", "the  music room.")), twice),
            (reply(("hours", "music room")), f"citations[0]: {few}"),
            (reply(("hours", "music - room")), f"citations[0]: {few}"),
            (reply(("hours", "")), f"citations[0]: {few}"),
            (reply(good, ("hours", "The music hall")), f"citations[1]: {nowhere.format('hours')}"),
            (reply(("fees", "The music room")), f"citations[0]: {nowhere.format('fees')}"),
            (reply(), "the answer: it cites no source"),
            (reply(good, answer=None), "the answer: it is null, but sources are cited"),
        ):
            with self.subTest(text=text):
                with self.assertRaises(rag.RagError) as caught:
                    check(text)
                self.assertEqual(str(caught.exception), expected)


def find(quote: str, text: str) -> str | None:
    """Return the slice of text that is published for a quote, or None if it is refused."""
    try:
        cited, cut = {"source_id": "a", "quote": quote}, {"a": rag.tokens(text)}
        return str(rag.find_quote(cited, {"a": text}, cut)["text"])
    except rag.RagError:
        return None


# Rows of (quote, text, slice that is published).
TAKEN = (
    # White space, case, sentence marks at the ends
    ("from ten\n to\u3000two", "open from\r\nten\u00a0to two", None),
    ("From ten to two", "It is open from ten to two.", "from ten to two"),
    ("from ten to two!", "It is open from ten to two.", "from ten to two"),
    ("“from ten to two,”", "It is open from ten to two.", "from ten to two"),
    ("(from ten to two)", "It is open (from ten to two).", "from ten to two"),
    ("from ten to two。", "from ten to two.", "from ten to two"),
    ("ΩΜΕΓΑ is the last", "ωμεγα is the last", "ωμεγα is the last"),
    ("one two three", "one two three four one two three", "one two three"),
    ("two three four", "xtwo three four two three four", "two three four"),
    # Quotation marks, apostrophes, dashes, ellipses
    ("say “yes” and it’s done", 'say "yes" and it\'s done', 'say "yes" and it\'s done'),
    ('say "yes" and it\'s done', "say «yes» and it’s done", "say «yes» and it’s done"),
    ("a – b — c", "a - b - c", "a - b - c"),
    ("the Paris-London train", "the Paris–London train leaves", "the Paris–London train"),
    ("from ten to two", "open—from ten to two—daily", "from ten to two"),
    ("and so on... until ten", "and so on… until ten", "and so on… until ten"),
    # Numbers, signs and operators
    ("at −5 degrees", "at -5 degrees", "at -5 degrees"),
    ("-3 degrees at night", "-5 to -3 degrees at night", "-3 degrees at night"),
    ("open 10-15 each day", "open 10–15 each day", "open 10–15 each day"),
    ("costs 1,234.50 EUR each", "It costs 1,234.50 EUR each.", "costs 1,234.50 EUR each"),
    (".001 in all cases", "p < .001 in all cases", ".001 in all cases"),
    ("on 2024-01-05 at noon", "on 2024-01-05 at noon", "on 2024-01-05 at noon"),
    ("if x != 3 then", "if x!=3 then", "if x!=3 then"),
    ("a price of $5.00", "a price of $5.00 each", "a price of $5.00"),
    ("it is open[1] today", "it is open [1] today", "it is open [1] today"),
    ("12\u00a0500 people live here", "12\u202f500 people live here", None),
    # Markdown and code
    ("bold words here", "Some **bold words here** stay.", "bold words here"),
    ("Some bold words here stay", "Some **bold words** `here` stay", None),
    ("an italic 10:15 here", "an _italic_ *10:15* here", None),
    ("a note: ten to two", "A **note:** ten to two", "A **note:** ten to two"),
    ("call f(*args) at once", "call f(*args) at once", "call f(*args) at once"),
    ("the __init__ method", "the `__init__` method", "the `__init__` method"),
    ("written in C++", "It is written in C++.", "written in C++"),
    # Characters that are not drawn, composed letters, ligatures
    ("the unbroken word", "the un\u00adbro\u200bken word", "the un\u00adbro\u200bken word"),
    ("open from ten", "\u200fopen from ten\u200f", "open from ten\u200f"),
    ("open 10:15 to two", "open \u200f10:15 to two", "open \u200f10:15 to two"),
    ("the cafe\u0301 is open", "the café is open", "the café is open"),
    ("the café is open", "the cafe\u0301 is open", "the cafe\u0301 is open"),
    ("file is here", "a ﬁle is here", "ﬁle is here"),
    ("👩\u200d💻 works till five", "A 👩\u200d💻 works till five", "👩\u200d💻 works till five"),
    ("I ❤ this place", "I ❤\ufe0f this place", "I ❤\ufe0f this place"),
    # Scripts
    ("自行车可以停", "门旁自行车可以停在", "自行车可以停"),
    ("图书馆开门。", "图书馆开门，下午也开", "图书馆开门"),
    ("10:15到14:45开放", "上午10：15到14：45开放。", "10：15到14：45开放"),
    ("「休館日は月曜」", "休館日は月曜です", "休館日は月曜"),
    ("ห้องสมุดเปิด", "วันนี้ห้องสมุดเปิดทุกวัน", "ห้องสมุดเปิด"),
    ("नमस्ते यह है", "वह नमस्ते यह है।", "नमस्ते यह है"),
    ("مفتوحة يوم السبت", "المكتبة مفتوحة يوم السبت.", "مفتوحة يوم السبت"),
    ("שָׁלוֹם לכל הבאים", "אמר שָׁלוֹם לכל הבאים", "שָׁלוֹם לכל הבאים"),
    ("\u1112\u1161\u11ab \u1100\u1173 \u110b\u1165", "한 그 어", "한 그 어"),
)  # fmt: skip

# Rows of (quote, text in which it is not).
REFUSED = (
    # Other words, and words left out
    ("from ten to tow", "open from ten to two"),
    ("is open today", "is not open today"),
    ("open … two days", "open from ten to two days"),
    ("open ... two days", "open from ten to two days"),
    ("it is open today", "it is open[1] today"),
    ("it is open today", "it is open¹ today"),
    ("open two days", "open for two days"),
    # A quote begins and ends at whole words and numbers
    ("able to read it", "unable to read it"),
    ("smoking in here please", "non-smoking in here please"),
    ("we do n", "we do n't"),
    ("init method is called", "__init__ method is called"),
    ("programs written in C", "programs written in C++"),
    ("14 in all cases", "3.14 in all cases"),
    ("001 in all cases", "p < .001 in all cases"),
    ("it was 3", "it was 3.14"),
    ("15 to two daily", "open 10:15 to two daily"),
    ("15 to two daily", "open \u200f10:15 to two daily"),
    ("15 people came in", "10–15 people came in"),
    ("05 was a Friday", "2024-01-05 was a Friday"),
    ("500 people live here", "12\u202f500 people live here"),
    ("it has 12", "it has 12\u00a0500"),
    ("5 is the newest", "Version v2.5 is the newest"),
    ("the fee is CHF12", "the fee is CHF12.50"),
    ("5H2O is blue", "CuSO4·15H2O is blue"),
    ("weighs about 5", "weighs about 5kg"),
    # Signs, operators, superscripts
    ("at 5 degrees", "at -5 degrees"),
    ("5 degrees at night", "at -5 degrees at night"),
    ("5 degrees at night", "at −5 degrees at night"),
    ("3 degrees at night", "from -5--3 degrees at night"),
    ("5 in all rows", "x <-5 in all rows"),
    ("p>0.001 in all", "p<0.001 in all"),
    ("x = 3 in rows", "x != 3 in rows"),
    ("a price of 5.00", "a price of $5.00 each"),
    ("= 3 in all rows", "x != 3 in all rows"),
    ("x = 2 in rows", "x *= 2 in rows"),
    ("x = 2 in rows", "x*=2 in rows"),
    ("2 10 in all", "2**10 in all"),
    ("2 10 in all", "2 ** 10 in all"),
    ("is 102 in size", "is 10² in size"),
    # Letters, marks and digits
    ("the cafe is open", "the café is open"),
    ("the cafe is open", "the cafe\u0301 is open"),
    ("ο κόσμος είναι", "ο κοσμος είναι"),
    ("alpha is 0.05 here", "α is 0.05 here"),
    ("שלום לכל הבאים", "שָׁלוֹם לכל הבאים"),
    ("１２３ four five", "123 four five"),
    ("👩 works till five", "👩\u200d💻 works till five"),
    # Scripts without spaces
    ("自行车可以停", "自行车不可以停"),
    ("万人住在这里", "有5万人住在这里"),
    ("15到14：45开放", "上午10：15到14：45开放"),
    ("๕๐ บาท", "ราคา ๑๕๐ บาท"),
    ("หองสมุดเปิด", "ห้องสมุดเปิด"),
)


class TestFindQuote(unittest.TestCase):
    def test_true_quotes_are_found_however_they_are_written(self) -> None:
        for quote, text, expected in TAKEN:
            with self.subTest(quote=quote, text=text):
                found = find(quote, text)
                self.assertIsNotNone(found)
                self.assertIn(expected, (found, None))

    def test_a_quote_that_differs_in_a_letter_digit_sign_or_operator_is_refused(self) -> None:
        for quote, text in REFUSED:
            with self.subTest(quote=quote, text=text):
                self.assertIsNone(find(quote, text))

    def test_at_least_three_tokens_have_a_letter_or_digit(self) -> None:
        for quote, enough in (
            ("one two", False), ("one - two", False), ("one two three", True), ("-5 3.14", False),
            ("自行", False), ("自行车", True), ("हिन्दी", False), ("🙂 🙂 🙂", False),
        ):  # fmt: skip
            with self.subTest(quote=quote):
                self.assertEqual(find(quote, f"Before {quote} after."), quote if enough else None)


WORDS = (
    "open Café naïve Straße ΩΜΕΓΑ κόσμος Ёлка библиотека مكتبة ספרייה नमस्ते 한국어 -5 3.14 "
    'p<0.001 10:15 x+y=2 1,000 it\'s "quoted" non-smoking a/b 👩\u200d💻 e\u0301te\u0301 ﬁn №7 '
    "50% (see below) end. 自行车 図書館 v2.5 x*=2 2**8"
).split()
SPACES = (" ", "  ", "\n", "\r\n", "\t", "\u3000", " \n ")
DRAWN = {"'": "'’", '"': '"“”«»', "-": "-–‐‑"}


class TestProperties(unittest.TestCase):
    def text(self, chance: random.Random) -> tuple[str, int, int]:
        """Return a text, and the start and end of a span of whole words in it."""
        words = [chance.choice((*WORDS, str(chance.randrange(10**6)))) for _ in range(14)]
        parts = [part for word in words for part in (word, chance.choice(SPACES))]
        first = chance.randrange(8)
        last = first + chance.randrange(5, 7)
        start = len("".join(parts[: 2 * first]))
        return "".join(parts), start, start + len("".join(parts[2 * first : 2 * last - 1]))

    def redrawn(self, quote: str, chance: random.Random) -> str:
        """Return the quote with other white space, quotation marks, dashes, case and form."""
        quote = re.sub(r"\s+", lambda _: chance.choice(SPACES), quote)
        quote = "".join(chance.choice(DRAWN.get(char, char)) for char in quote)
        quote = unicodedata.normalize(chance.choice(("NFC", "NFD")), quote)
        return quote if chance.random() < 0.5 else quote[:1].upper() + quote[1:]

    def test_a_span_of_whole_words_is_found_however_it_is_written(self) -> None:
        for seed in range(1000):
            chance = random.Random(seed)
            text, start, end = self.text(chance)
            with self.subTest(seed=seed):
                found = find(self.redrawn(text[start:end], chance), text)
                self.assertIsNotNone(found)
                self.assertEqual(plain(found or ""), plain(text[start:end]))

    def test_what_is_found_says_what_the_quote_says(self) -> None:
        signs = "abcXYZ0123456789+<>=%$€#@&ñßΩжه한中.,:-/'\u0301\u00a0 "
        taken = 0
        for seed in range(3000):
            chance = random.Random(seed)
            text, start, end = self.text(chance)
            quote = self.redrawn(text[start:end], chance)
            at, sign = chance.randrange(len(quote)), chance.choice(("", *signs))
            changed = quote[:at] + sign + quote[at + chance.randint(0, 1) :]
            with self.subTest(seed=seed):
                found = find(changed, text)
                if found is not None:
                    taken += 1
                    self.assertEqual(plain(found), plain(changed))
        self.assertGreater(taken, 100)


def plain(text: str) -> str:
    """Return a text without all in which a quote can differ, by a simpler way than rag.py has."""
    for sign, drawn in DRAWN.items():
        text = re.sub(f"[{re.escape(drawn)}]", sign, text)
    text = unicodedata.normalize("NFC", text).lower().replace("ﬁ", "fi")
    text = re.sub(r"[\s\u200d]", "", text)
    return re.sub(r"^[.,:;\"'()]+|[.,:;\"'()]+$", "", text)


class TestRun(RagTestCase):
    def run_with(self, content: str, **environ: str) -> tuple[Result, list[Any]]:
        """Return a run in which the model writes this content, and the chat requests."""
        own = Scenario("own", "own", "own", ANSWERS, CHAT, message(content=content), rerank=False)
        server = self.serve(own)
        records = [{"id": name, "title": "Times", "text": SOURCES[name]} for name in SOURCES]
        result = run_rag(
            *("When is it open?", "--knowledge", self.file("k.json", records)),
            environ={**server.environment("own", rerank=False), "RAG_QUOTES": "1", **environ},
        )
        return result, bodies(server, CHAT)

    def test_quotes_are_published_beside_answer_and_sources(self) -> None:
        result, _ = self.run_with(reply(("hours", "The music room"), ("short", "No entry.")))
        document = result.document
        self.assertEqual([source["id"] for source in document["sources"]], ["hours", "short"])
        for quote, source in zip(document["quotes"], document["sources"]):
            self.assertEqual(source["text"][quote["start"] : quote["end"]], quote["text"])

    def test_a_title_cannot_be_quoted(self) -> None:
        result, _ = self.run_with(reply(("hours", "Times On Saturday the library")))
        self.assert_one_line(result, 1, "the quote is not in the text of")

    def test_an_abstention_looks_as_it_does_without_quotes(self) -> None:
        result, _ = self.run_with(reply(answer=None))
        expected: Any = {"answer": None, "sources": [], "reason": "sources_do_not_answer"}
        self.assertEqual(result.document, expected)

    def test_the_prompt_and_the_schema_name_citations_before_the_answer(self) -> None:
        _, (body,) = self.run_with(reply(answer=None), API_RESPONSE_FORMAT="json_schema")
        prompt = body["messages"][0]["content"]
        self.assertLess(prompt.index('"citations"'), prompt.index('"answer"'))
        self.assertNotIn("source_ids", prompt)
        schema = body["response_format"]["json_schema"]["schema"]
        self.assertEqual(list(schema["properties"]), ["citations", "answer"])
        self.assertEqual(schema["required"], ["citations", "answer"])
        citation = schema["properties"]["citations"]["items"]
        self.assertEqual(citation["required"], ["source_id", "quote"])
        self.assertEqual({*citation["properties"]["source_id"]["enum"]}, {*SOURCES})
        self.assertFalse(schema["additionalProperties"] or citation["additionalProperties"])

    def test_a_quote_that_is_not_there_is_asked_for_again_and_never_shown(self) -> None:
        wrong = reply(("hours", "SECRET WORDS OF A MODEL"))
        result, (first, second) = self.run_with(wrong, RAG_ATTEMPTS="2")
        self.assertEqual(first, second)
        self.assert_one_line(result, 1, "rag.py: answer: citations[0]: ")
        self.assertNotIn("SECRET", result.stderr)
