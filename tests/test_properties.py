"""Replies mutated at random: a value that keeps every rule, or RagError, and nothing else.

The seeds are fixed, and each failure names its seed.
"""

from __future__ import annotations

import copy
import json
import math
import random
import unittest
from array import array
from collections.abc import Callable, Mapping
from typing import Any

import rag
from mock_server import models
from mock_server.scenarios import CHAT, EITHER, EMBEDDINGS, RERANK, STAGES, Reply, Scenario
from tests.support import RagTestCase, Result, bodies, run_rag

SENT = {"hours": "Open from nine to five.", "fees": "Entry is free.", "Bücher-7": "Bücher."}
IDS = list(SENT)
NASTY: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 10**30, -(10**400), 0.5, -0.0, 1.0, 1e308, 5e-324,
    math.nan, math.inf, -math.inf, "", " ", "0", "stop", "hours", "\ud83d", "\u202e\x00\x1b[2J",
    [], {}, [[]], [None], ["hours"], {"index": 0}, "x" * 5000, ["hours"] * 1000,
)  # fmt: skip
CITATIONS = [
    {"source_id": "hours", "quote": "open from nine"},
    {"source_id": "fees", "quote": "Entry is free"},
]
NASTY_TEXTS = ("NaN", "1e999", "9" * 5000, "[" * 10_000, '{"a":1,"a":2}', '"\\udc00"', "\x00", "}")


def paths_in(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path to every value inside a JSON value."""
    items: Any = enumerate(value) if isinstance(value, list) else ()
    items = value.items() if isinstance(value, dict) else items
    return [path, *(inner for key, item in items for inner in paths_in(item, (*path, key)))]


def mutated(value: Any, chance: random.Random) -> Any:
    """Return a copy of a JSON value with one to three changes: of type, range, size, key, order."""
    value = copy.deepcopy(value)
    for _ in range(chance.randint(1, 3)):
        path = chance.choice(paths_in(value))
        if not path:
            continue
        *above, last = path
        parent = value
        for key in above:
            parent = parent[key]
        action = chance.choice(("replace", "replace", "remove", "repeat", "shuffle", "rename"))
        if action == "replace":
            parent[last] = copy.deepcopy(chance.choice(NASTY))
        elif action == "remove":
            del parent[last]
        elif action == "repeat" and isinstance(parent, list):
            parent.insert(chance.randint(0, len(parent)), copy.deepcopy(parent[last]))
        elif action == "shuffle" and isinstance(parent[last], list):
            chance.shuffle(parent[last])
        elif action == "rename" and isinstance(parent, dict):
            parent[chance.choice(("index", "data", "results", "answer", "score", last.upper()))] = (
                parent.pop(last)
            )
    return value


def mangled(text: str, chance: random.Random) -> str:
    """Return JSON text with something cut out, cut off, put in or written twice."""
    start, end = sorted(chance.randint(0, len(text)) for _ in range(2))
    return chance.choice(
        (
            text[:start],
            text[:start] + text[end:],
            text[:end] + text[start:],
            text[:start] + chance.choice(NASTY_TEXTS) + text[start:],
            text[:start] + chance.choice(NASTY_TEXTS) + text[end:],
        )
    )


def embeddings_hold(vectors: Any) -> bool:
    """Return whether these are 3 vectors of the same number of floats and of length 1."""
    unit = all(abs(math.hypot(*vector) - 1) < 1e-5 for vector in vectors)
    floats = all(type(vector) is array and vector.typecode == "f" for vector in vectors)
    return len(vectors) == 3 and len(set(map(len, vectors))) == 1 and floats and unit


def rerank_holds(rows: Any) -> bool:
    """Return whether these are distinct known indices, with finite scores in order."""
    indices, scores = [index for index, _ in rows], [score for _, score in rows]
    known = len(set(indices)) == len(indices) and set(indices) <= {0, 1, 2}
    return known and scores == sorted(scores, reverse=True) and all(map(math.isfinite, scores))


def answer_holds(answer: Any) -> bool:
    """Return whether this is an answer with sources that were sent, or an abstention."""
    text, ids = answer["answer"], answer["source_ids"]
    if text is None:
        return bool(ids == [])
    cited = bool(ids) and len(set(ids)) == len(ids) and set(ids) <= set(SENT)
    return isinstance(text, str) and bool(text.strip()) and cited


def quotes_hold(answer: Any) -> bool:
    """Return whether this is an answer whose quotes are distinct slices of its sources."""
    quotes = answer["quotes"]
    places = {(each["id"], each["start"], each["end"]) for each in quotes}
    own = all(slice_of(each, SENT[each["id"]]) == each["text"] != "" for each in quotes)
    cited = list(dict.fromkeys(each["id"] for each in quotes)) == answer["source_ids"]
    return answer_holds(answer) and own and cited and len(places) == len(quotes)


def slice_of(quote: Any, text: str) -> str:
    """Return the part of a text that a published quote points to."""
    return text[quote["start"] : quote["end"]]


def good(path: str) -> Any:
    """Return a good reply of the mock server's models."""
    inputs = ["When is it open?", "Open from nine.", "Entry is free."]
    content = json.dumps({"question": inputs[0], "sources": [{"id": IDS[0], "text": inputs[1]}]})
    request: Mapping[str, Any] = {
        "model": "m",
        "input": inputs,
        "query": inputs[0],
        "documents": inputs,
        "messages": [{"role": "user", "content": content}],
    }
    reply = {EMBEDDINGS: models.embeddings, RERANK: models.rerank, CHAT: models.chat}[path](request)
    if path == EMBEDDINGS:
        reply["data"] = [
            {**row, "embedding": [*row["embedding"][:4], 0.5]} for row in reply["data"]
        ]
    return reply


class TestChecks(unittest.TestCase):
    def hold(
        self, runs: int, check: Callable[[random.Random], Any], holds: Callable[[Any], bool]
    ) -> None:
        """Check that each run gives a value that holds or a printable RagError, and both happen."""
        kept = refused = 0
        for seed in range(runs):
            with self.subTest(seed=seed):
                try:
                    value = check(random.Random(seed))
                except rag.RagError as error:
                    self.assertTrue(str(error).isprintable(), str(error))
                    refused += 1
                else:
                    self.assertTrue(holds(value), value)
                    kept += 1
        self.assertEqual(kept + refused, runs)
        self.assertTrue(kept and refused, (kept, refused))

    def test_a_mutated_embeddings_reply_gives_good_vectors_or_is_refused(self) -> None:
        reply = good(EMBEDDINGS)
        self.assertTrue(embeddings_hold(rag.check_embeddings(reply, 3, "float")))
        self.hold(
            600,
            lambda chance: rag.check_embeddings(mutated(reply, chance), 3, "float"),
            embeddings_hold,
        )

    def test_a_mutated_base64_reply_gives_good_vectors_or_is_refused(self) -> None:
        reply = good(EMBEDDINGS)
        reply["data"] = [{"index": i, "embedding": "AACAPwAAAAA="} for i in range(3)]

        def check(chance: random.Random) -> Any:
            changed = copy.deepcopy(reply["data"])
            row = chance.choice(changed)
            row["embedding"] = mangled(row["embedding"], chance)
            return rag.check_embeddings({"data": changed}, 3, "base64")

        self.hold(400, check, embeddings_hold)

    def test_a_mutated_rerank_reply_gives_good_rows_or_is_refused(self) -> None:
        self.hold(
            600, lambda chance: rag.check_rerank(mutated(good(RERANK), chance), 3), rerank_holds
        )

    def test_a_mutated_completion_gives_a_text_or_is_refused(self) -> None:
        self.hold(
            400,
            lambda chance: rag.check_completion(mutated(good(CHAT), chance)),
            lambda text: isinstance(text, str),
        )

    def test_a_mutated_answer_cites_what_was_sent_or_is_refused(self) -> None:
        replies = (
            (False, {"answer": "From nine.", "source_ids": ["hours", "fees"]}, answer_holds),
            (True, {"citations": CITATIONS, "answer": "From nine."}, quotes_hold),
        )
        for quotes, reply, holds in replies:

            def check(chance: random.Random, quotes: bool = quotes, reply: Any = reply) -> Any:
                text = json.dumps(mutated(reply, chance), ensure_ascii=False)
                text = mangled(text, chance) if chance.random() < 0.3 else text
                return rag.check_answer(text, SENT, quotes)

            self.hold(600, check, holds)

    def test_mangled_json_is_a_value_or_is_refused(self) -> None:
        text = json.dumps({"a": [0.5, 1, {"b": "é", "c": None}], "d": "\u202e", "e": True})
        self.hold(
            600, lambda chance: rag.strict_json(mangled(text, chance), "here"), lambda value: True
        )

    def test_an_answer_that_is_cut_off_at_any_byte_is_refused(self) -> None:
        text = json.dumps(
            {"answer": "Von neun bis fünf.", "source_ids": ["Bücher-7"]}, ensure_ascii=False
        )
        for size in range(len(text)):
            with self.subTest(size=size), self.assertRaises(rag.RagError):
                rag.check_answer(text[:size], SENT)


class TestProgram(RagTestCase):
    def assert_invariant(self, result: Result, path: str, chats: list[Any]) -> None:
        if result.status != 0:
            self.assert_one_line(result, 1, f"rag.py: {STAGES[path]}: ")
            self.assertNotRegex(result.stderr, "object is not|unsupported operand|NoneType")
            return
        self.assertEqual(result.stderr, "")
        asked = json.loads(chats[-1]["messages"][1]["content"]) if chats else {"sources": []}
        sent = {source["id"] for source in asked["sources"]}
        cited = [source["id"] for source in result.document["sources"]]
        self.assertLessEqual(set(cited), sent)
        self.assertEqual(bool(cited), result.document["answer"] is not None)
        texts = {source["id"]: source["text"] for source in result.document["sources"]}
        for quote in result.document.get("quotes", []):
            self.assertEqual(slice_of(quote, texts[quote["id"]]), quote["text"])

    def test_whatever_the_server_sends_one_valid_document_or_one_line_comes_out(self) -> None:
        statuses = []
        for seed in range(100):
            chance = random.Random(seed)
            path = chance.choice((EMBEDDINGS, RERANK, CHAT))

            def change(reply: Any, request: Any, chance: random.Random = chance) -> Any:
                changed = chance.choice(NASTY) if chance.random() < 0.1 else mutated(reply, chance)
                if chance.random() < 0.7:
                    return Reply(200, json.dumps(changed).encode())
                text = mangled(json.dumps(changed, ensure_ascii=False), chance)
                return Reply(200, text.encode("utf-8", "surrogatepass"))

            server = self.serve(Scenario("own", "own", "a mutation", EITHER, path, change))
            with self.subTest(seed=seed, path=path):
                quotes = {"RAG_QUOTES": chance.choice("01")}
                result = run_rag(environ={**server.environment("own"), **quotes})
                self.assert_invariant(result, path, bodies(server, CHAT))
                statuses.append(result.status)
        self.assertEqual((len(statuses), set(statuses)), (100, {0, 1}))
