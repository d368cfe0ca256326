"""What stands in for the three models: functions from a request body to a faithful reply body.

Nothing here is random and nothing is remembered, so equal requests get equal replies.
"""

from __future__ import annotations

import base64
import json
import math
import re
import struct
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

CHAT_MODEL, EMBEDDING_MODEL, RERANK_MODEL = "mock-chat", "mock-embedding", "mock-rerank"
DIMENSIONS = 256
KEY = "mock-key-for-tests"
CREATED = 1_700_000_000  # a fixed time, in seconds, so that equal requests get equal replies

# Words that nearly every English sentence has: sharing them does not make two texts alike.
COMMON = frozenset(
    "a about after all also an and any are as at be been before but by can could did do does for "
    "from had has have he her his how i if in into is it its may me more most my no not of on one "
    "or our out shall she should so some than that the their them then there these they this to up "
    "us was we were what when where which who whom why will with would you your".split()
)


def plain_data(text: str) -> Any:
    """A JSON text as plain data that can be written as JSON again, also inside the request log.

    Raises ValueError: for NaN, Infinity, 1e999, half a surrogate pair, deep nesting and a repeated
    key too.
    """
    try:
        value = json.loads(text, object_pairs_hook=members)
        deeper = [[[[[[[[[[value]]]]]]]]]]  # the request log and its callers need some levels more
        json.dumps(deeper, ensure_ascii=False, allow_nan=False).encode()
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return value


def members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object. Raises ValueError where a key would hide another."""
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a repeated key")
    return dict(pairs)


def stems(text: str) -> list[str]:
    """The words of a text, lower-cased, less common words and endings; a Han character is a word.

    stems("The libraries opened") == ["librari", "open"]
    """
    words = re.findall(
        r"[\u3040-\u30ff\u3400-\u9fff]|[^\W_\u3040-\u30ff\u3400-\u9fff]+", text.lower()
    )
    return [stem(word) for word in words if word not in COMMON]


def stem(word: str) -> str:
    for ending, rest in (
        ("ies", "i"),
        ("ing", ""),
        ("ed", ""),
        ("es", ""),
        ("s", ""),
        ("y", "i"),
        ("e", ""),
    ):
        if word.endswith(ending) and len(word) - len(ending) >= 3:
            return word[: -len(ending)] + rest
    return word


def vector(text: str) -> list[float]:
    """A vector of length 1: each stem adds to, or takes from, one of 256 numbers by its checksum.

    Equal texts have equal vectors; texts are the nearer the more words they share; those that share
    none have a cosine of about 0.
    """
    sums = [0.0] * DIMENSIONS
    words = stems(text) or [text]  # a text of common words only still has a vector
    for word, count in Counter(words).items():
        checksum = zlib.crc32(word.encode())
        sums[checksum % DIMENSIONS] += math.sqrt(count) * (1.0 if checksum >> 31 else -1.0)
    if not any(sums):  # two stems can take each other away
        sums[zlib.crc32(text.encode()) % DIMENSIONS] = 1.0
    norm = math.hypot(*sums)
    return [part / norm for part in sums]


def inputs_of(request: Mapping[str, Any]) -> Any:
    """The inputs of an embedding request as a list: one may be sent without a list around it."""
    return [request["input"]] if isinstance(request["input"], str) else request["input"]


def embeddings(request: Mapping[str, Any]) -> dict[str, Any]:
    """One row an input, with the right index but not in the order of the inputs."""
    inputs = inputs_of(request)
    rows = []
    for index, text in enumerate(inputs):
        numbers: Any = vector(text)
        if request.get("encoding_format") == "base64":
            numbers = base64.b64encode(struct.pack(f"<{DIMENSIONS}f", *numbers)).decode()
        rows.append({"object": "embedding", "index": index, "embedding": numbers})
    rows.sort(key=lambda row: zlib.crc32(inputs[row["index"]].encode()))
    used = sum(map(tokens, inputs))
    usage = {"prompt_tokens": used, "total_tokens": used}
    return {"object": "list", "data": rows, "model": request["model"], "usage": usage}


def rerank(request: Mapping[str, Any]) -> dict[str, Any]:
    """Each document with the part of the query's words that it holds, 0 to 1; the best top_n."""
    query = set(stems(request["query"]))
    results: list[dict[str, Any]] = []
    for index, text in enumerate(request["documents"]):
        score = round(len(query & set(stems(text))) / max(len(query), 1), 6)
        document = {"document": {"text": text}} if request.get("return_documents") else {}
        results.append({"index": index, "relevance_score": score, **document})
    results.sort(key=lambda row: (-row["relevance_score"], row["index"]))
    used = sum(map(tokens, [request["query"], *request["documents"]]))
    return {
        "id": identifier("rerank", request),
        "model": request["model"],
        "results": results[: request.get("top_n", len(results))],
        "usage": {"total_tokens": used},
    }


def chat(request: Mapping[str, Any]) -> dict[str, Any]:
    """The sentences that share most words with the question, with their sources; else null."""
    asked = question_and_sources(request["messages"]) or {}
    best = best_sentences(asked["question"], asked["sources"])
    form = with_quotes if wants_quotes(request) else with_ids
    content = json.dumps(form(best), ensure_ascii=False)
    prompt = sum(tokens(message["content"]) for message in request["messages"])
    return {
        "id": identifier("chatcmpl", request),
        "object": "chat.completion",
        "created": CREATED,
        "model": request["model"],
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": content},
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": tokens(content),
            "total_tokens": prompt + tokens(content),
        },
    }


def question_and_sources(messages: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """{"question", "sources"} out of the last user message that is such a JSON object."""
    for message in reversed(messages):
        if message["role"] != "user":
            continue
        try:
            asked = plain_data(message["content"])
        except ValueError:
            continue
        if isinstance(asked, dict) and {"question", "sources"} <= set(asked):
            return asked
    return None


def wants_quotes(request: Mapping[str, Any]) -> bool:
    """Whether a chat request asks for quotes: an instruction or the schema names `citations`."""
    instructions = [each["content"] for each in request["messages"] if each["role"] != "user"]
    return "citations" in json.dumps([instructions, request.get("response_format")])


Found = tuple[str, Mapping[str, Any]]  # a sentence and its source


def with_ids(best: Sequence[Found]) -> dict[str, Any]:
    answer = " ".join(sentence for sentence, _ in best) or None
    return {"answer": answer, "source_ids": [source["id"] for _, source in best]}


def with_quotes(best: Sequence[Found]) -> dict[str, Any]:
    """Each sentence is its own quote; a short one is quoted with all of its text."""
    citations = []
    for sentence, source in best:
        short = len(sentence.split()) < 3 and sentence.isascii()
        quote = source["text"].strip() if short else sentence
        citations.append({"source_id": source["id"], "quote": quote})
    return {"citations": citations, "answer": with_ids(best)["answer"]}


def best_sentences(question: str, sources: Sequence[Mapping[str, Any]]) -> list[Found]:
    """The best sentence of each source that no other source beats.

    Text inside a source is only ever compared and copied: an order in it has no effect.
    """
    wanted = set(stems(question))
    found = []
    for source in sources:
        title = set(stems(source.get("title", "")))
        sentences = re.split(r"(?<=[.!?])\s+|(?<=。)(?=.)", source["text"].strip())
        overlaps = [len(wanted & title | wanted & set(stems(sentence))) for sentence in sentences]
        best = max(
            range(len(sentences)),
            key=lambda i: (overlaps[i], len(wanted & set(stems(sentences[i])))),
        )
        found.append((overlaps[best], sentences[best], source))
    most = max((overlap for overlap, _, _ in found), default=0)
    return [(sentence, source) for overlap, sentence, source in found if overlap == most > 0]


def tokens(text: str) -> int:
    """About what a tokenizer would count: the words and signs of a text."""
    return len(re.findall(r"\w+|[^\w\s]", text))


def identifier(kind: str, request: Mapping[str, Any]) -> str:
    """An id that is the same for the same request."""
    return f"{kind}-mock-{zlib.crc32(json.dumps(request, sort_keys=True).encode()):08x}"
