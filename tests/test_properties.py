"""Whatever a server sends: a value that keeps every rule, or a refusal, and never anything else.

Good replies are mutated at random, with a fixed seed that every failure names.
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
from mock_server.scenarios import CHAT, EITHER, EMBEDDINGS, RERANK, Reply, Scenario
from tests.support import RagTestCase, Result, bodies, run_rag

SENT = ["hours", "fees", "Bücher-7"]
NASTY: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 10**30, -(10**400), 0.5, -0.0, 1.0, 1e308, 5e-324,
    math.nan, math.inf, -math.inf, "", " ", "0", "stop", "hours", "\ud83d", "\u202e\x00\x1b[2J",
    [], {}, [[]], [None], ["hours"], {"index": 0}, "x" * 5000, ["hours"] * 1000,
)  # fmt: skip
NASTY_TEXTS = ("NaN", "1e999", "9" * 5000, "[" * 10_000, '{"a":1,"a":2}', '"\\udc00"', "\x00", "}")


def paths_in(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path to every value inside a JSON value."""
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return [path, *(inner for key, item in items for inner in paths_in(item, (*path, key)))]


def mutated(value: Any, chance: random.Random) -> Any:
    """A copy of a JSON value with one to three changes: of type, range, size, key or order."""
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
    """JSON text with something cut out, cut off, put in or written twice."""
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
    lengths = {len(vector) for vector in vectors}
    norms = [math.hypot(*vector) for vector in vectors]
    unit = all(abs(norm - 1) < 1e-5 for norm in norms)
    return (
        len(vectors) == 3
        and len(lengths) == 1
        and unit
        and all(type(each) is array for each in vectors)
    )


def rerank_holds(rows: Any) -> bool:
    indices, scores = [index for index, _ in rows], [score for _, score in rows]
    known = len(set(indices)) == len(indices) and set(indices) <= {0, 1, 2}
    return known and scores == sorted(scores, reverse=True) and all(map(math.isfinite, scores))


def answer_holds(answer: Any) -> bool:
    text, ids = answer["answer"], answer["source_ids"]
    cited = bool(ids) and len(set(ids)) == len(ids) and set(ids) <= set(SENT)
    return set(answer) == {"answer", "source_ids"} and (
        (text is None and ids == []) or (isinstance(text, str) and bool(text.strip()) and cited)
    )


def json_holds(value: Any) -> bool:
    return bool(json.dumps(value, allow_nan=False, ensure_ascii=False).encode())


def good(path: str) -> Any:
    """A good reply of the mock's models."""
    inputs = ["When is it open?", "Open from nine.", "Entry is free."]
    content = json.dumps({"question": inputs[0], "sources": [{"id": SENT[0], "text": inputs[1]}]})
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
        """Every run ends in a value that holds or in a RagError of one line, and both do happen."""
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
        reply = {"answer": "From nine.", "source_ids": ["hours", "fees"]}

        def check(chance: random.Random) -> Any:
            text = json.dumps(mutated(reply, chance), ensure_ascii=False)
            return rag.check_answer(mangled(text, chance) if chance.random() < 0.3 else text, SENT)

        self.hold(600, check, answer_holds)

    def test_mangled_json_is_plain_data_or_is_refused(self) -> None:
        text = json.dumps({"a": [0.5, 1, {"b": "é", "c": None}], "d": "\u202e", "e": True})
        self.hold(600, lambda chance: rag.strict_json(mangled(text, chance), "here"), json_holds)

    def test_an_answer_that_is_cut_off_at_any_byte_is_refused(self) -> None:
        text = json.dumps(
            {"answer": "Von neun bis fünf.", "source_ids": ["Bücher-7"]}, ensure_ascii=False
        )
        for size in range(len(text)):
            with self.subTest(size=size), self.assertRaises(rag.RagError):
                rag.check_answer(text[:size], SENT)


class TestProgram(RagTestCase):
    def assert_invariant(self, result: Result, chats: list[Any]) -> None:
        if result.status != 0:
            self.assert_one_line(result, 1, "rag.py: ")
            return
        self.assertEqual(result.stderr, "")
        asked = json.loads(chats[-1]["messages"][1]["content"]) if chats else {"sources": []}
        sent = {source["id"] for source in asked["sources"]}
        cited = [source["id"] for source in result.document["sources"]]
        self.assertLessEqual(set(cited), sent)
        self.assertEqual(bool(cited), result.document["answer"] is not None)

    def test_whatever_the_server_sends_one_valid_document_or_one_line_comes_out(self) -> None:
        statuses = []
        for seed in range(100):
            chance = random.Random(seed)
            path = chance.choice((EMBEDDINGS, RERANK, CHAT))

            def change(reply: Any, request: Any, chance: random.Random = chance) -> Any:
                changed = mutated(reply, chance)
                if chance.random() < 0.7:
                    return Reply(200, json.dumps(changed).encode())
                text = mangled(json.dumps(changed, ensure_ascii=False), chance)
                return Reply(200, text.encode("utf-8", "surrogatepass"))

            server = self.serve(Scenario("own", "own", "a mutation", EITHER, path, change))
            with self.subTest(seed=seed, path=path):
                result = run_rag(environ=server.environment("own"))
                self.assert_invariant(result, bodies(server, CHAT))
                statuses.append(result.status)
        self.assertEqual((len(statuses), set(statuses)), (100, {0, 1}))
