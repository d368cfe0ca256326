"""The three models of the mock: functions that make a good reply from a request.

They use no random numbers and keep no state, so equal requests get equal replies. The parts of a
request are read by the functions of the section "the parts of a request" only, so that another form
of a request (another name for `documents`, for example) is added in one place.
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
CREATED = 1_700_000_000  # a fixed time in seconds

# Frequent English words, which are ignored when texts are compared.
COMMON = frozenset(
    "a about after all also an and any are as at be been before but by can could did do does for "
    "from had has have he her his how i if in into is it its may me more most my no not of on one "
    "or our out shall she should so some than that the their them then there these they this to up "
    "us was we were what when where which who whom why will with would you your".split()
)


def plain_data(text: str) -> Any:
    """Parse JSON into data that can be written as JSON again, also as a part of the request log.

    Raise ValueError for anything else: also for NaN, Infinity, 1e999, half of a surrogate pair, a
    repeated key, and nesting that is too deep for Python.
    """
    try:
        value = json.loads(text, object_pairs_hook=unique_keys)
        deeper = [[[[[[[[[[value]]]]]]]]]]  # the request log puts the value into further levels
        json.dumps(deeper, ensure_ascii=False, allow_nan=False).encode()
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return value


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object with these members. Raise ValueError for a repeated key."""
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a repeated key")
    return dict(pairs)


# ---- the parts of a request ----------------------------------------------------------------------


def inputs_of(request: Mapping[str, Any]) -> Any:
    """The inputs of an embedding request as a list; a single input may be sent as a string."""
    return [request["input"]] if isinstance(request["input"], str) else request["input"]


def query_of(request: Mapping[str, Any]) -> Any:
    """The query of a rerank request."""
    return request["query"]


def documents_of(request: Mapping[str, Any]) -> Any:
    """The documents of a rerank request."""
    return request["documents"]


def top_n_of(request: Mapping[str, Any]) -> Any:
    """How many rows a rerank request wants; by default one for each document."""
    return request.get("top_n", len(documents_of(request)))


def asked_of(request: Mapping[str, Any]) -> dict[str, Any] | None:
    """{"question", "sources"} from the last user message of a chat request that is such JSON."""
    for message in reversed(request["messages"]):
        if message["role"] != "user":
            continue
        try:
            asked = plain_data(message["content"])
        except ValueError:
            continue
        if isinstance(asked, dict) and {"question", "sources"} <= set(asked):
            return asked
    return None


def sources_of(request: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The sources of a chat request."""
    return list((asked_of(request) or {"sources": []})["sources"])


def wants_base64(request: Mapping[str, Any]) -> bool:
    """Whether an embedding request asks for vectors in base64."""
    return request.get("encoding_format") == "base64"


def wants_quotes(request: Mapping[str, Any]) -> bool:
    """Whether a chat request asks for quotes: an instruction or the schema names `citations`."""
    instructions = [each["content"] for each in request["messages"] if each["role"] != "user"]
    return "citations" in json.dumps([instructions, request.get("response_format")])


# ---- embeddings ----------------------------------------------------------------------------------


def stems(text: str) -> list[str]:
    """The words of a text in lower case, without endings and without frequent words.

    A Han character is a word. stems("The libraries opened") == ["librari", "open"]
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
    """A vector of length 1 with 256 numbers, one of which each stem increases or decreases.

    Equal texts have equal vectors. The more words two texts share, the more similar their vectors
    are; without a shared word the cosine similarity is about 0.
    """
    sums = [0.0] * DIMENSIONS
    words = stems(text) or [text]  # the text may have frequent words only
    for word, count in Counter(words).items():
        checksum = zlib.crc32(word.encode())
        sums[checksum % DIMENSIONS] += math.sqrt(count) * (1.0 if checksum >> 31 else -1.0)
    if not any(sums):  # the stems can cancel each other out
        sums[zlib.crc32(text.encode()) % DIMENSIONS] = 1.0
    norm = math.hypot(*sums)
    return [part / norm for part in sums]


def embeddings(request: Mapping[str, Any]) -> dict[str, Any]:
    """A row for each input, with its index; the rows are not in the order of the inputs."""
    inputs = inputs_of(request)
    rows = []
    for index, text in enumerate(inputs):
        numbers: Any = vector(text)
        if wants_base64(request):
            numbers = base64.b64encode(struct.pack(f"<{DIMENSIONS}f", *numbers)).decode()
        rows.append({"object": "embedding", "index": index, "embedding": numbers})
    rows.sort(key=lambda row: zlib.crc32(inputs[row["index"]].encode()))
    used = sum(map(tokens, inputs))
    usage = {"prompt_tokens": used, "total_tokens": used}
    return {"object": "list", "data": rows, "model": request["model"], "usage": usage}


# ---- rerank --------------------------------------------------------------------------------------


def rerank(request: Mapping[str, Any]) -> dict[str, Any]:
    """The best rows. A score is the share of the query's words in the document, 0 to 1."""
    query, documents = set(stems(query_of(request))), documents_of(request)
    results: list[dict[str, Any]] = []
    for index, text in enumerate(documents):
        score = round(len(query & set(stems(text))) / max(len(query), 1), 6)
        document = {"document": {"text": text}} if request.get("return_documents") else {}
        results.append({"index": index, "relevance_score": score, **document})
    results.sort(key=lambda row: (-row["relevance_score"], row["index"]))
    used = sum(map(tokens, [query_of(request), *documents]))
    return {
        "id": identifier("rerank", request),
        "model": request["model"],
        "results": results[: top_n_of(request)],
        "usage": {"total_tokens": used},
    }


# ---- chat ----------------------------------------------------------------------------------------


def chat(request: Mapping[str, Any]) -> dict[str, Any]:
    """An answer of the sentences that share most words with the question, or an abstention."""
    asked = asked_of(request) or {}
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


Found = tuple[str, Mapping[str, Any]]  # a sentence and its source


def with_ids(best: Sequence[Found]) -> dict[str, Any]:
    """The answer in the form {"answer", "source_ids"}."""
    answer = " ".join(sentence for sentence, _ in best) or None
    return {"answer": answer, "source_ids": [source["id"] for _, source in best]}


def with_quotes(best: Sequence[Found]) -> dict[str, Any]:
    """The answer in the form {"citations", "answer"}; each sentence is quoted.

    Of a sentence that is too short for a quote, the whole text of its source is quoted.
    """
    citations = []
    for sentence, source in best:
        short = len(sentence.split()) < 3 and sentence.isascii()
        quote = source["text"].strip() if short else sentence
        citations.append({"source_id": source["id"], "quote": quote})
    return {"citations": citations, "answer": with_ids(best)["answer"]}


def best_sentences(question: str, sources: Sequence[Mapping[str, Any]]) -> list[Found]:
    """The sentences with the most words of the question, at most one of each source.

    A source's text is only compared and copied, so an instruction in it has no effect.
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
    """The number of words and signs in a text, which is about what a tokenizer counts."""
    return len(re.findall(r"\w+|[^\w\s]", text))


def identifier(kind: str, request: Mapping[str, Any]) -> str:
    """An id made from the request: equal requests get equal ids."""
    return f"{kind}-mock-{zlib.crc32(json.dumps(request, sort_keys=True).encode()):08x}"
