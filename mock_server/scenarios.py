"""The table of scenarios: what each one serves, and what a correct client does.

The server, the listing and the tests use this one table. A scenario changes the replies of one
endpoint; the other endpoints reply as in the scenario `plain`.
"""

from __future__ import annotations

import base64
import json
import re
import struct
import unicodedata
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mock_server.models import documents_of, inputs_of, sources_of, wants_base64, wants_quotes

EMBEDDINGS, RERANK, CHAT = "/embeddings", "/rerank", "/chat/completions"
ORDER = (EMBEDDINGS, RERANK, CHAT)
STAGES = {EMBEDDINGS: "embeddings", RERANK: "rerank", CHAT: "answer"}
ANSWERS, ABSTAINS, REFUSES = "answers", "abstains", "refuses"
EITHER, MAY_ABSTAIN = "answers or refuses", "answers or abstains"
JSON_LIBRARY = "json-library"  # the group of what a JSON library decides, not the client


@dataclass(frozen=True)
class Reply:
    """An HTTP reply. `body` is a JSON value, or bytes that are sent as they are.

    Content-Length is too large by `missing_bytes`. `ending` is "whole", or, if no reply is sent,
    "hang-up" (the connection is closed) or "silence" (it stays open).
    """

    status: int = 200
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)
    missing_bytes: int = 0
    ending: str = "whole"

    def data(self) -> bytes:
        """The body as bytes."""
        return (
            self.body
            if isinstance(self.body, bytes)
            else json.dumps(self.body, ensure_ascii=False).encode()
        )


# From the good body and the request to what is served instead: a JSON value or a Reply.
Change = Callable[[Any, Mapping[str, Any]], Any]


def unchanged(good: Any, request: Mapping[str, Any]) -> Any:
    return good


@dataclass(frozen=True)
class Scenario:
    """A row of the table. `settings` are further variables that `check` sets for the client.

    A client meets the scenario if it gets a changed reply. Three fields narrow this down. `asks`:
    only a reply to such a request counts. `beside`: the client must also get an unchanged reply,
    because the fault is the difference between the two. `told_from`: this wrong way of ranking
    must lead to other sources than the right way.
    """

    name: str
    group: str
    serves: str
    expected: str
    path: str = CHAT
    change: Change = unchanged
    rerank: bool = True
    settings: Mapping[str, str] = field(default_factory=dict)
    asks: Callable[[Mapping[str, Any]], bool] | None = None
    beside: bool = False
    told_from: str = ""

    def shown(self) -> dict[str, Any]:
        """The row as JSON data, for other test suites."""
        return {
            "name": self.name,
            "group": self.group,
            "serves": self.serves,
            "expected": self.expected,
            "stage": self.stage,
            "rerank": self.rerank,
            "requests": self.requests,
        }

    @property
    def stage(self) -> str:
        """The stage whose reply is changed."""
        return STAGES[self.path]

    @property
    def does(self) -> str:
        """What a correct client does, as the listing shows it."""
        return f"{self.expected} at {self.stage}" if REFUSES in self.expected else self.expected

    @property
    def requests(self) -> list[str]:
        """The endpoints to which a correct client sends requests."""
        last = CHAT if ANSWERS in self.expected else self.path
        return [path for path in ORDER[: ORDER.index(last) + 1] if self.rerank or path != RERANK]

    def reply(self, path: str, good: Any, request: Mapping[str, Any]) -> Reply:
        """The reply to a request to `path`, for which `good` is the body of the plain reply."""
        served = self.change(good, request) if path == self.path else good
        return served if isinstance(served, Reply) else Reply(200, served)


# ---- ways to change a good reply -----------------------------------------------------------------

ABSENT = object()


def changed(value: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """The object with these fields set, or removed where the value is ABSENT."""
    return {name: item for name, item in {**value, **fields}.items() if item is not ABSENT}


def top(**fields: Any) -> Change:
    """Change fields of the body itself."""
    return lambda good, request: changed(good, fields)


def raw(edit: Callable[[str], str | bytes]) -> Change:
    """Change the JSON text, for bodies that no Python value stands for."""

    def change(good: Any, request: Mapping[str, Any]) -> Reply:
        text = edit(json.dumps(good, ensure_ascii=False))
        return Reply(
            200, text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
        )

    return change


def rows_in(good: Mapping[str, Any]) -> str:
    """The name of the list of rows in a body."""
    return "data" if "data" in good else "results"


def rows(edit: Callable[[list[Any]], Any]) -> Change:
    """Change the list of embedding rows or of rerank rows."""
    return lambda good, request: {**good, rows_in(good): edit([*good[rows_in(good)]])}


def last_row(**fields: Any) -> Change:
    """Change fields of the last row."""
    return rows(lambda items: [*items[:-1], changed(items[-1], fields)])


def last_index(edit: Callable[[int], Any]) -> Change:
    """Change the index of the last row."""
    return rows(lambda items: [*items[:-1], {**items[-1], "index": edit(items[-1]["index"])}])


def true_for_1(items: list[Any]) -> list[Any]:
    """The rows with true in place of the index 1, or of the last row's index."""
    place = next((i for i, row in enumerate(items) if row["index"] == 1), -1)
    items[place] = {**items[place], "index": True}
    return items


def every_row(edit: Callable[[dict[str, Any]], Any]) -> Change:
    """Change each row."""
    return rows(lambda items: [edit(item) for item in items])


def last_vector(edit: Callable[[list[float]], Any]) -> Change:
    """Change the numbers of the last vector; they are sent as numbers also if base64 is wanted."""

    def changed_row(row: Mapping[str, Any]) -> dict[str, Any]:
        return {**row, "embedding": edit(as_numbers(row)["embedding"])}

    return rows(lambda items: [*items[:-1], changed_row(items[-1])])


def last_number(text: str) -> Change:
    """Write `text` in place of one number of a vector, or in place of a score."""
    mark = "the number goes here"

    def change(good: Any, request: Mapping[str, Any]) -> Any:
        marked = (
            last_vector(lambda vector: [*vector[:-1], mark])
            if "data" in good
            else last_row(relevance_score=mark)
        )
        return raw(lambda body: body.replace(f'"{mark}"', text))(marked(good, request), request)

    return change


def choice(**fields: Any) -> Change:
    """Change fields of the choice."""
    return lambda good, request: {**good, "choices": [changed(good["choices"][0], fields)]}


def message(**fields: Any) -> Change:
    """Change fields of the message in the choice."""
    return lambda good, request: choice(message=changed(good["choices"][0]["message"], fields))(
        good, request
    )


def text(edit: Callable[[str], Any]) -> Change:
    """Change the text that the chat model wrote."""
    return lambda good, request: message(content=edit(good["choices"][0]["message"]["content"]))(
        good, request
    )


def says(**fields: Any) -> Change:
    """Change keys of the JSON object that the chat model wrote."""
    return text(lambda content: json.dumps(changed(json.loads(content), fields)))


def ids(edit: Callable[[list[str]], Any]) -> Change:
    """Change the ids that the chat model cited. After an abstention there is one id to change."""

    def change(content: str) -> str:
        said = json.loads(content)
        if "citations" in said:
            cited = said["citations"] or [{"source_id": UNSENT, "quote": "It is so."}]
            edited = edit([each["source_id"] for each in cited])
            if isinstance(edited, list):
                quote = cited[0]["quote"]
                edited = [{"source_id": each, "quote": quote} for each in edited]
            return json.dumps({**said, "citations": edited})
        return json.dumps({**said, "source_ids": edit(said["source_ids"] or [UNSENT])})

    return text(change)


def status(code: int, said: str, headers: Mapping[str, str] = MappingProxyType({})) -> Change:
    """An HTTP error with this message."""
    body = {"error": {"message": said, "type": "mock_error", "param": None, "code": None}}
    return lambda good, request: Reply(code, body, headers)


def redirect(code: int, target: str) -> Change:
    """A redirect. In `target` the server replaces {port} and {run}."""
    return lambda good, request: Reply(code, b"", {"Location": target})


def bytes_of(body: bytes, content_type: str = "application/json") -> Change:
    """This body with status 200."""
    return lambda good, request: Reply(200, body, {"Content-Type": content_type})


def without_index_zero(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != "index" or value != 0}


def at_most_10(good: Any, request: Mapping[str, Any]) -> Any:
    if len(inputs_of(request)) <= 10:
        return good
    return status(400, "batch size is invalid, it should not be larger than 10")(good, request)


def scaled(good: Mapping[str, Any], request: Mapping[str, Any]) -> dict[str, Any]:
    """Vectors of whole numbers. Their norms are 1,000 to 97,000, chosen by a checksum."""
    inputs = inputs_of(request)
    data = []
    for row in good["data"]:
        factor = 1000 * (1 + zlib.crc32(inputs[row["index"]].encode()) % 97)
        numbers = [round(factor * part) for part in as_numbers(row)["embedding"]]
        data.append({**row, "embedding": numbers})
    return {**good, "data": data}


def unless_sent(change: Change) -> Change:
    """The change, or the good reply if all ids that are cited after the change were sent.

    A client may use any ids, so that a changed id may be the id of another source.
    """

    def change_unless(good: Any, request: Mapping[str, Any]) -> Any:
        sent = [source["id"] for source in sources_of(request)]
        reply = change(good, request)
        said = json.loads(reply["choices"][0]["message"]["content"])
        quoted = [each["source_id"] for each in said.get("citations", [])]
        cited = said.get("source_ids", quoted)
        return good if cited and all(each in sent for each in cited) else reply

    return change_unless


def cites(edit: Callable[[list[str]], Any]) -> Change:
    """Change the cited ids, so that at least one of them was not sent."""
    return unless_sent(ids(edit))


def if_several(change: Change) -> Change:
    """The change, for replies with more than one row."""
    return lambda good, request: change(good, request) if len(good["data"]) > 1 else good


def beyond(good: Mapping[str, Any], request: Mapping[str, Any]) -> Any:
    """An index that is too large by the number of inputs or documents.

    A client that takes it modulo that number reads the right index.
    """
    count = len(inputs_of(request)) if "data" in good else len(documents_of(request))
    return last_index(lambda index: index + count)(good, request)


def is_question(text: str) -> bool:
    return text.rstrip().endswith(("?", "？"))


def without_question(change: Change) -> Change:
    """The change, for requests in which no input is a question: the later batches."""

    def changed_later(good: Any, request: Mapping[str, Any]) -> Any:
        return good if any(map(is_question, inputs_of(request))) else change(good, request)

    return changed_later


def shorter(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row without the last number of its vector, which does not become all zeros."""
    vector = as_numbers(row)["embedding"][:-1]
    return {**row, "embedding": vector if any(vector) else [1.0, *vector[1:]]}


def highest_shorter(good: Mapping[str, Any], request: Mapping[str, Any]) -> dict[str, Any]:
    """The rows with one number less in the vector of the last input."""
    last = len(good["data"]) - 1
    return {
        **good,
        "data": [shorter(row) if row["index"] == last else row for row in good["data"]],
    }


def other_index_absent(items: list[Any]) -> list[Any]:
    """The rows without an index in one row, which is not the one with the index 0."""
    place = next((i for i, row in enumerate(items) if row["index"]), 0)
    return [changed(row, {"index": ABSENT}) if i == place else row for i, row in enumerate(items)]


def at_right_angles(good: Mapping[str, Any], request: Mapping[str, Any]) -> dict[str, Any]:
    """Vectors of two numbers: [1, 0] for texts that end with a question mark, else [0, 1]."""
    inputs = inputs_of(request)
    data = []
    for row in good["data"]:
        asks = is_question(inputs[row["index"]])
        data.append({**row, "embedding": [1.0, 0.0] if asks else [0.0, 1.0]})
    return {**good, "data": data}


def as_numbers(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with its vector as a list of numbers, also if it was base64."""
    vector = row["embedding"]
    if isinstance(vector, str):
        data = base64.b64decode(vector)
        vector = list(struct.unpack(f"<{len(data) // 4}f", data))
    return {**row, "embedding": vector}


def with_rest(good: Mapping[str, Any], request: Mapping[str, Any]) -> dict[str, Any]:
    """A row for each document, with the best row last."""
    best = [row["index"] for row in good["results"]]
    rest = [index for index in range(len(documents_of(request))) if index not in best]
    others = [{"index": index, "relevance_score": -1.0} for index in rest]
    return {**good, "results": [*others, *good["results"][::-1]]}


def in_parts(good: Mapping[str, Any], request: Mapping[str, Any]) -> Any:
    """The content as a list of parts, the form of multimodal messages."""
    content = good["choices"][0]["message"]["content"]
    return message(content=[{"type": "text", "text": content}])(good, request)


def quotes(edit: Callable[[str], str]) -> Change:
    """Change the first quote, in a reply to a client that asks for quotes."""
    return if_quotes(
        cites_in_quotes(lambda cited: [{**cited[0], "quote": edit(cited[0]["quote"])}, *cited[1:]])
    )


def cites_in_quotes(edit: Callable[[list[Any]], list[Any]]) -> Change:
    """Change the list of citations."""

    def change(content: str) -> str:
        said = json.loads(content)
        cited = said["citations"] or [{"source_id": UNSENT, "quote": "It is so."}]
        return json.dumps({"citations": edit(cited), "answer": said["answer"] or "It is."})

    return text(change)


def if_quotes(change: Change) -> Change:
    """The change, for a client that asks for quotes."""
    return lambda good, request: change(good, request) if wants_quotes(request) else good


def quotes_all(edit: Callable[[str], str]) -> Change:
    """Quote the whole text of the first source that the edit changes."""

    def change(good: Any, request: Mapping[str, Any]) -> Any:
        for source in sources_of(request):
            if edit(source["text"]) != source["text"]:
                cited = {"source_id": source["id"], "quote": edit(source["text"])}
                said = json.dumps({"citations": [cited], "answer": "It says so."})
                return message(content=said)(good, request)
        return good

    return if_quotes(change)


def quotes_for_another_source(good: Any, request: Mapping[str, Any]) -> Any:
    """The first quote, unchanged, with the id of a source that does not contain it."""

    def edit(cited: list[Any]) -> list[Any]:
        quote = cited[0]["quote"]
        wrong = [each["id"] for each in sources_of(request) if quote not in each["text"]]
        return [{**cited[0], "source_id": [*wrong, UNSENT][0]}, *cited[1:]]

    return cites_in_quotes(edit)(good, request)


def quotes_a_title(good: Any, request: Mapping[str, Any]) -> Any:
    titles = [source.get("title", "") for source in sources_of(request)]
    return quotes(lambda quote: f"{[*titles, ''][0]}: {quote}")(good, request)


def next_digit(quote: str) -> str:
    changed = re.sub(r"[0-9]", lambda digit: str((int(digit[0]) + 1) % 10), quote, count=1)
    return changed if changed != quote else f"{quote} 7"


def without_a_word(quote: str) -> str:
    words = quote.split(" ")
    parts = words if len(words) > 2 else list(quote)
    return (" " if parts is words else "").join([*parts[:1], *parts[2:]])


def with_a_sign(quote: str) -> str:
    signed = re.sub(r"(?<![0-9])[0-9]", lambda digit: f"-{digit[0]}", quote, count=1)
    return signed if signed != quote else f"-{quote}"


def ends(quote: str, between: str) -> str:
    """The first and the last third of a quote, without the middle."""
    size = max(1, len(quote) // 3)
    return f"{quote[:size].rstrip()}{between}{quote[-size:].lstrip()}"


def curly(quote: str) -> str:
    """Curly quotation marks in place of straight ones, and dashes in place of hyphens."""
    opened = re.sub(r'(^|(?<=[\s(]))"', "“", quote).replace('"', "”")
    return re.sub(r"(?<=\w)'", "’", opened).replace("-", "–")


def cites_a_record_that_was_not_sent(good: Mapping[str, Any], request: Mapping[str, Any]) -> Any:
    """An answer that cites the first record of knowledge.json that is not among the sources."""
    sent = {source["id"] for source in sources_of(request)}
    others = [record_id for record_id in RECORDS if record_id not in sent]
    return says(answer="It is.", source_ids=[*others, UNSENT][:1])(good, request)


def cites_first(name: Callable[[Mapping[str, Any]], str]) -> Change:
    """An answer that cites the first source by another name than its id."""

    def change(good: Any, request: Mapping[str, Any]) -> Any:
        names = [name(source) for source in sources_of(request)]
        return says(answer="It is.", source_ids=[*names, UNSENT][:1])(good, request)

    return unless_sent(change)


def full_width(text: str) -> str:
    """The text with full-width letters, digits and signs."""
    return "".join(chr(ord(char) + 0xFEE0) if "!" <= char <= "~" else char for char in text)


def document_not_sent(good: Mapping[str, Any], request: Mapping[str, Any]) -> dict[str, Any]:
    """The rows with a row, which has the best score, for a document that was not sent."""
    row = {
        "index": len(documents_of(request)),
        "relevance_score": 1.0,
        "document": {"text": "Mine."},
    }
    return {**good, "results": [row, *good["results"][:-1]]}


def cites_all(good: Mapping[str, Any], request: Mapping[str, Any]) -> Any:
    """An answer of unusual characters that cites all sources, neither in order nor reversed."""
    sent = [source["id"] for source in sources_of(request)]
    return says(answer=ODD_TEXT, source_ids=sent[1:][::-1] + sent[:1])(good, request)


def other_script_first(good: Mapping[str, Any], request: Mapping[str, Any]) -> dict[str, Any]:
    """The rows with the first document that is not ASCII first, in place of the last row."""
    others = [i for i, text in enumerate(documents_of(request)) if not text.isascii()]
    kept = [row for row in good["results"] if row["index"] not in others[:1]]
    first = [{"index": i, "relevance_score": 2.0} for i in others[:1]]
    return {**good, "results": [*first, *kept][: len(good["results"])]}


def in_reasoning(good: Mapping[str, Any], request: Mapping[str, Any]) -> Any:
    """The text of the chat model in a reasoning field, and a blank content."""
    content = good["choices"][0]["message"]["content"]
    return message(content="", reasoning_content=content)(good, request)


def as_base64(vector: list[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


def scored(name: str, score: Callable[[float], float]) -> Callable[[dict[str, Any]], Any]:
    """The row with its score changed, and under this name."""
    return lambda row: {"index": row["index"], name: score(row["relevance_score"])}


def echoed(document: Any) -> Callable[[dict[str, Any]], Any]:
    """The row with this document in it."""
    return lambda row: {**row, "document": document}


# ---- the table -----------------------------------------------------------------------------------


def knowledge() -> dict[str, Any]:
    """{id: record} of knowledge.json beside this package; {} if there is no such file."""
    try:
        text = (Path(__file__).resolve().parents[1] / "knowledge.json").read_text("utf-8-sig")
        return {record["id"]: record for record in json.loads(text) if "text" in record}
    except (OSError, ValueError, TypeError, KeyError):
        return {}


RECORDS = knowledge()
UNSENT = "no-such-record"
# A text that changes if it is trimmed, cut, escaped, encoded twice or normalized.
ODD_TEXT = f" Café “Ω” – 自行车, \U0001f6b2 ﬁ\u2028<b>&amp; *so*</b>  on. {'x' * 400} "
DRAFT = '{"answer": "A draft.", "source_ids": []}'
DEEP = "[" * 100_000 + "]" * 100_000
BASE64: dict[str, Any] = {
    "settings": {"API_EMBEDDING_ENCODING": "base64"},
    "asks": wants_base64,
}
QUOTES: dict[str, Any] = {"settings": {"RAG_QUOTES": "1"}, "asks": wants_quotes}
# Wrong ways of ranking, in the words of the findings.
BY_POSITION = "with vectors bound by position, not by index"
BY_PRODUCT = "by the dot product of vectors that are not scaled"
BY_ROWS = "in the order of the rows"

TOOL_CALL = {"id": "c1", "type": "function", "function": {"name": "search", "arguments": "{}"}}

# Status, message, headers.
STATUSES: tuple[tuple[int, str, Mapping[str, str]], ...] = (
    (400, "this input is not valid", {}),
    (401, "Incorrect API key provided: {key}", {}),
    (404, "the model does not exist", {}),
    (413, "the request is too large", {}),
    (421, "this connection serves another host", {}),
    (429, "too many requests", {"Retry-After": "7"}),
    (500, "681 tokens do not fit", {}),
    (503, "no worker is free", {}),
)


def legal(name: str, path: str, serves: str, change: Change, **more: Any) -> Scenario:
    """A reply that a correct client accepts."""
    group = more.pop("group", "variants")
    return Scenario(name, group, serves, more.pop("expected", ANSWERS), path, change, **more)


def fault(name: str, path: str, serves: str, change: Change, **more: Any) -> Scenario:
    """A reply that a correct client refuses."""
    group = more.pop("group", STAGES[path])
    return Scenario(name, group, serves, more.pop("expected", REFUSES), path, change, **more)


def later(name: str, path: str, serves: str, change: Change) -> Scenario:
    """A fault of the transport at a later endpoint than /embeddings."""
    return fault(name, path, serves, change, group="transport")


def transport(name: str, serves: str, change: Change, **more: Any) -> Scenario:
    """A fault of the transport at /embeddings."""
    return fault(name, EMBEDDINGS, serves, change, **{"group": "transport", **more})


def quoted(name: str, serves: str, change: Change, **more: Any) -> Scenario:
    """A quote that a correct client refuses."""
    return fault(name, CHAT, serves, change, group="quotes", **QUOTES, **more)


def http(code: int, said: str, headers: Mapping[str, str]) -> Scenario:
    """An HTTP error at /embeddings."""
    serves = f"status {code} for every request to /embeddings"
    change = status(code, said, headers)
    return fault(f"http-{code}", EMBEDDINGS, serves, change, group="transport")


# fmt: off
TABLE = (
    Scenario("plain", "plain", "correct replies", ANSWERS),
    Scenario("plain-no-rerank", "plain", "correct replies; no rerank model is set", ANSWERS,
        rerank=False, told_from=BY_POSITION),
    Scenario("plain-abstention", "plain", "a null answer with no ids", ABSTAINS, CHAT,
        says(answer=None, source_ids=[])),
    # Variants that correct clients accept.
    legal("embeddings-in-order", EMBEDDINGS, "vectors in the order of the inputs",
        rows(lambda items: sorted(items, key=lambda row: row["index"])), rerank=False),
    legal("embeddings-reversed", EMBEDDINGS, "vectors in the reverse order, each with its index",
        rows(lambda items: sorted(items, key=lambda row: -row["index"])), rerank=False,
        told_from=BY_POSITION),
    legal("embeddings-index-zero-absent", EMBEDDINGS, "no index in the row whose index is 0",
        every_row(without_index_zero), rerank=False),
    legal("embeddings-index-zero-null", EMBEDDINGS, "index null in the row whose index is 0",
        every_row(lambda row: {**row, "index": row["index"] or None}), rerank=False),
    legal("embeddings-not-scaled", EMBEDDINGS, "vectors of whole numbers, with many norms",
        scaled, rerank=False,
        told_from=BY_PRODUCT),
    legal("embeddings-base64", EMBEDDINGS, "base64, to a client that asks for it", unchanged,
        **BASE64),
    legal("embeddings-numbers-for-base64", EMBEDDINGS, "numbers, to a client that asks for base64",
        every_row(as_numbers), **BASE64),
    legal("embeddings-no-usage", EMBEDDINGS, "no usage and no model name",
        top(usage=ABSENT, model=ABSENT, object=ABSENT)),
    legal("embeddings-error-null", EMBEDDINGS, "null as `error` beside the vectors",
        top(error=None)),
    legal("embeddings-limit-10", EMBEDDINGS, "status 400 for more than 10 inputs in a request",
        at_most_10, settings={"API_EMBEDDING_BATCH": "10"}, expected=EITHER),
    legal("embeddings-nothing-near", EMBEDDINGS,
        "record vectors with a similarity of 0; a client may have a threshold", at_right_angles,
        expected=MAY_ABSTAIN, settings={"RAG_MIN_SIMILARITY": "0.5"}),
    legal("rerank-data", RERANK, "the rows in `data`",
        lambda good, request: {"object": "list", "data": good["results"]}),
    legal("rerank-bare-list", RERANK, "a bare list of rows with `score`",
        lambda good, request: [scored("score", float)(row) for row in good["results"]]),
    legal("rerank-score", RERANK, "`score` instead of `relevance_score`",
        every_row(scored("score", float))),
    legal("rerank-negative", RERANK, "scores below 0",
        every_row(scored("relevance_score", lambda score: 16 * score - 17))),
    legal("rerank-logits", RERANK, "scores from -8 to 8",
        every_row(scored("relevance_score", lambda score: 16 * score - 8))),
    legal("rerank-unsorted", RERANK, "rows in the reverse order, the best last",
        rows(lambda items: items[::-1]), told_from=BY_ROWS),
    legal("rerank-equal-scores", RERANK, "one score in all rows",
        every_row(scored("relevance_score", lambda score: 0.5))),
    legal("rerank-all-rows", RERANK, "a row for every document, whatever top_n says", with_rest),
    legal("rerank-fewer-rows", RERANK, "one row only", rows(lambda items: items[:1])),
    legal("rerank-documents-echoed", RERANK, "another text as the document of each row",
        every_row(echoed({"text": "a text that was never sent"}))),
    legal("rerank-documents-text", RERANK, "another text, as a string, as the document of each row",
        every_row(echoed("a text that was never sent"))),
    legal("rerank-documents-null", RERANK, "null as the document of each row",
        every_row(echoed(None))),
    legal("rerank-nothing", RERANK, "no row", rows(lambda items: []), expected=ABSTAINS),
    legal("rerank-other-script", RERANK, "a document that is not in ASCII as the best one",
        other_script_first),
    legal("answer-cites-all", CHAT, "unusual characters, and all ids in another order than sent",
        cites_all),
    legal("answer-white-space", CHAT, "white space around the JSON object",
        text(lambda content: f"\n {content}\t\n")),
    legal("answer-empty-tool-calls", CHAT,
        "an empty list of tool calls, and null as refusal and function call",
        message(tool_calls=[], refusal=None, function_call=None)),
    legal("answer-refusal-empty", CHAT, "an empty string as refusal", message(refusal="")),
    legal("answer-no-usage", CHAT, "no usage, id or model name",
        top(usage=ABSENT, id=ABSENT, model=ABSENT)),
    legal("answer-reasoning", CHAT, "a reasoning field beside the content",
        message(reasoning_content="{\"answer\": \"a draft\", \"source_ids\": []}")),
    # Replies to /embeddings that break the rules.
    fault("embeddings-data-absent", EMBEDDINGS, "no `data`", top(data=ABSENT)),
    fault("embeddings-data-object", EMBEDDINGS, "an object as `data`", top(data={})),
    fault("embeddings-reply-list", EMBEDDINGS, "a bare list", lambda good, request: good["data"]),
    fault("embeddings-one-fewer", EMBEDDINGS, "one vector too few", rows(lambda items: items[:-1])),
    fault("embeddings-one-more", EMBEDDINGS, "one vector too many",
        rows(lambda items: [*items, {**items[0], "index": len(items)}])),
    fault("embeddings-row-null", EMBEDDINGS, "null as a row",
        rows(lambda items: [*items[:-1], None])),
    fault("embeddings-index-all-zero", EMBEDDINGS, "the index 0 in all rows",
        if_several(every_row(lambda row: {**row, "index": 0}))),
    fault("embeddings-index-absent", EMBEDDINGS, "no index in any row",
        if_several(every_row(lambda row: changed(row, {"index": ABSENT})))),
    fault("embeddings-other-index-absent", EMBEDDINGS,
        "no index in one row, which is not that of 0", if_several(rows(other_index_absent))),
    fault("embeddings-index-string", EMBEDDINGS, "an index as a string",
        every_row(lambda row: {**row, "index": str(row["index"])})),
    fault("embeddings-index-float", EMBEDDINGS, "an index with a fraction",
        last_index(lambda index: index + 0.5)),
    fault("embeddings-index-boolean", EMBEDDINGS, "true as an index", rows(true_for_1)),
    fault("embeddings-index-negative", EMBEDDINGS, "the index -1", last_row(index=-1)),
    fault("embeddings-index-too-large", EMBEDDINGS, "an index beyond the inputs",
        beyond),
    fault("embeddings-index-repeated", EMBEDDINGS, "an index twice",
        rows(lambda items: [*items[:-1], {**items[-1], "index": items[0]["index"]}])),
    fault("embeddings-vector-absent", EMBEDDINGS, "no embedding in a row",
        last_row(embedding=ABSENT)),
    fault("embeddings-vector-nested", EMBEDDINGS, "a vector inside a list",
        last_vector(lambda vector: [vector])),
    fault("embeddings-vector-empty", EMBEDDINGS, "an empty vector", last_vector(lambda vector: [])),
    fault("embeddings-vector-zero", EMBEDDINGS, "a vector of zeros",
        last_vector(lambda vector: [0.0] * len(vector))),
    fault("embeddings-vector-shorter", EMBEDDINGS, "a vector with fewer numbers",
        if_several(highest_shorter)),
    fault("embeddings-vector-too-long", EMBEDDINGS, "numbers whose squares overflow",
        last_vector(lambda vector: [1.7e308] * len(vector))),
    fault("embeddings-number-null", EMBEDDINGS, "null in a vector", last_number("null")),
    fault("embeddings-number-string", EMBEDDINGS, "a number as a string", last_number('"0.5"')),
    fault("embeddings-number-boolean", EMBEDDINGS, "true in a vector", last_number("true")),
    fault("embeddings-number-nan", EMBEDDINGS, "NaN in a vector", last_number("NaN")),
    fault("embeddings-number-infinity", EMBEDDINGS, "-Infinity in a vector",
        last_number("-Infinity")),
    fault("embeddings-number-1e999", EMBEDDINGS, "1e999 in a vector", last_number("1e999")),
    fault("embeddings-number-400-digits", EMBEDDINGS, "a whole number of 400 digits in a vector",
        last_number("9" * 400)),
    fault("embeddings-base64-unasked", EMBEDDINGS, "base64, to a client that asks for numbers",
        last_vector(as_base64)),
    fault("embeddings-base64-broken", EMBEDDINGS,
        "text that is not base64, to a client that asks for base64",
        last_row(embedding="not base64!"), **BASE64),
    fault("embeddings-base64-cut", EMBEDDINGS, "base64 of a part of a number",
        last_row(embedding="AAAAAAA="), **BASE64),
    fault("embeddings-later-batch", EMBEDDINGS,
        "an index beyond the inputs, in requests without the question",
        without_question(beyond),
        settings={"API_EMBEDDING_BATCH": "8"}),
    fault("embeddings-later-batch-shorter", EMBEDDINGS,
        "vectors with one number less, in requests without the question",
        without_question(every_row(shorter)), beside=True,
        settings={"API_EMBEDDING_BATCH": "8"}),
    fault("embeddings-repeated-key", EMBEDDINGS, "the key `data` twice",
        raw(lambda body: '{"data": [], ' + body[1:]), group=JSON_LIBRARY),
    # Replies to /rerank that break the rules.
    fault("rerank-results-absent", RERANK, "neither `results` nor `data`", top(results=ABSENT)),
    fault("rerank-results-null", RERANK, "null as `results`", top(results=None)),
    fault("rerank-results-and-data", RERANK, "both `results` and `data`",
        lambda good, request: {**good, "data": good["results"]}),
    fault("rerank-row-null", RERANK, "null as a row", rows(lambda items: [None])),
    fault("rerank-index-absent", RERANK, "no index", last_row(index=ABSENT)),
    fault("rerank-index-string", RERANK, "an index as a string", last_index(str)),
    fault("rerank-index-float", RERANK, "an index with a fraction",
        last_index(lambda index: index + 0.5)),
    fault("rerank-index-boolean", RERANK, "true as an index", rows(true_for_1)),
    fault("rerank-index-negative", RERANK, "the index -1", last_row(index=-1)),
    fault("rerank-index-too-large", RERANK, "an index beyond the documents", beyond),
    fault("rerank-index-zero-absent", RERANK, "no index in the row whose index is 0",
        every_row(without_index_zero)),
    fault("rerank-index-zero-null", RERANK, "index null in the row whose index is 0",
        every_row(lambda row: {**row, "index": row["index"] or None})),
    fault("rerank-document-not-sent", RERANK, "a row for a document that was not sent",
        document_not_sent),
    fault("rerank-index-repeated", RERANK, "an index twice",
        rows(lambda items: [items[0], {**items[0], "relevance_score": 0.1}])),
    fault("rerank-score-absent", RERANK, "no score", last_row(relevance_score=ABSENT)),
    fault("rerank-score-twice", RERANK, "both `relevance_score` and `score`", last_row(score=0.5)),
    fault("rerank-score-twice-equal", RERANK, "both `relevance_score` and `score`, with one value",
        every_row(lambda row: {**row, "score": row["relevance_score"]})),
    fault("rerank-score-null", RERANK, "null as a score", last_row(relevance_score=None)),
    fault("rerank-score-string", RERANK, "a score as a string", last_row(relevance_score="0.5")),
    fault("rerank-score-boolean", RERANK, "true as a score", last_row(relevance_score=True)),
    fault("rerank-score-nan", RERANK, "NaN as a score", last_number("NaN")),
    fault("rerank-score-1e999", RERANK, "1e999 as a score", last_number("1e999")),
    # Replies to /chat/completions that break the rules.
    fault("answer-choices-absent", CHAT, "no `choices`", top(choices=ABSENT)),
    fault("answer-choices-empty", CHAT, "no choice", top(choices=[])),
    fault("answer-choices-two", CHAT, "two choices",
        lambda good, request: {**good, "choices": good["choices"] * 2}),
    fault("answer-choice-null", CHAT, "null as the choice", top(choices=[None])),
    fault("answer-finish-length", CHAT, "finish_reason length, with an answer that is whole",
        choice(finish_reason="length")),
    fault("answer-finish-length-upper-case", CHAT, "finish_reason LENGTH",
        choice(finish_reason="LENGTH")),
    fault("answer-finish-max-tokens", CHAT, "finish_reason max_tokens",
        choice(finish_reason="max_tokens")),
    fault("answer-finish-model-length", CHAT, "finish_reason model_length",
        choice(finish_reason="model_length")),
    fault("answer-finish-content-filter", CHAT, "finish_reason content_filter",
        choice(finish_reason="content_filter")),
    fault("answer-finish-tool-calls", CHAT, "finish_reason tool_calls",
        choice(finish_reason="tool_calls")),
    fault("answer-finish-eos", CHAT, "finish_reason eos", choice(finish_reason="eos")),
    fault("answer-finish-end-turn", CHAT, "finish_reason end_turn",
        choice(finish_reason="end_turn")),
    fault("answer-finish-longer", CHAT, "finish_reason stop_sequence",
        choice(finish_reason="stop_sequence")),
    fault("answer-finish-other-case", CHAT, "finish_reason STOP", choice(finish_reason="STOP")),
    fault("answer-finish-absent", CHAT, "no finish_reason", choice(finish_reason=ABSENT)),
    fault("answer-finish-null", CHAT, "finish_reason null", choice(finish_reason=None)),
    fault("answer-message-null", CHAT, "null as the message", choice(message=None)),
    fault("answer-refusal", CHAT, "a refusal beside an answer",
        message(refusal="I cannot help with that.")),
    fault("answer-tool-call", CHAT, "a tool call beside an answer",
        message(tool_calls=[TOOL_CALL])),
    fault("answer-function-call", CHAT, "a function call in the old form",
        message(function_call={"name": "f", "arguments": ""})),
    fault("answer-content-null", CHAT, "null as the content", message(content=None)),
    fault("answer-content-parts", CHAT, "the content in parts", in_parts),
    fault("answer-content-object", CHAT, "the content as an object, not as text", text(json.loads)),
    fault("answer-blank", CHAT, "a blank content", text(lambda content: " \n")),
    fault("answer-fence", CHAT, "a Markdown fence around the object",
        text(lambda content: f"```json\n{content}\n```")),
    fault("answer-fence-plain", CHAT, "a fence without a language",
        text(lambda content: f"```\n{content}\n```")),
    fault("answer-byte-order-mark", CHAT, "a byte order mark before the object",
        text(lambda content: f"\ufeff{content}")),
    fault("answer-no-break-space", CHAT, "a no-break space before the object",
        text(lambda content: f"\u00a0{content}")),
    fault("answer-line-break", CHAT, "a line break inside the text of the answer",
        text(lambda content: '{"answer": "At ten\n.", "source_ids": []}')),
    fault("answer-think-block", CHAT, "a think block before the object",
        text(lambda content: f"<think>Hm.</think>{content}")),
    fault("answer-think-end", CHAT, "`</think>` without `<think>`, then the object",
        text(lambda content: f"Hm.</think>{content}")),
    fault("answer-template-marks", CHAT, "a marker of a chat template after the object",
        text(lambda content: f"{content}<|im_end|>")),
    fault("answer-draft", CHAT, "a draft in a think block, then the object",
        text(lambda content: f"<think>{DRAFT}</think>\n{content}")),
    fault("answer-in-reasoning", CHAT, "a blank content, and the object in a reasoning field",
        in_reasoning),
    fault("answer-prose-before", CHAT, "text before the object",
        text(lambda content: f"Here it is: {content}")),
    fault("answer-prose-after", CHAT, "text after the object",
        text(lambda content: f"{content} I hope this helps.")),
    fault("answer-two-objects", CHAT, "two objects", text(lambda content: f"{content}\n{content}")),
    fault("answer-cut-off", CHAT, "half of the object",
        text(lambda content: content[: len(content) // 2])),
    fault("answer-trailing-comma", CHAT, "a comma before the closing brace",
        text(lambda content: f"{content[:-1]},}}")),
    fault("answer-nan", CHAT, "NaN as the answer",
        text(lambda content: '{"answer": NaN, "source_ids": []}')),
    fault("answer-repeated-key", CHAT, "the key `answer` twice",
        text(lambda content: '{"answer": null, ' + content[1:]), group=JSON_LIBRARY),
    fault("answer-repeated-key-escaped", CHAT, "the key `answer` twice, once with an escape",
        text(lambda content: '{"\\u0061nswer": null, ' + content[1:]), group=JSON_LIBRARY),
    fault("answer-half-surrogate", CHAT, "half of a surrogate pair in the answer",
        text(lambda content: '{"answer": "\\ud83d", "source_ids": []}')),
    fault("answer-nested-deeply", CHAT, "100,000 nested lists as the answer",
        text(lambda content: f'{{"answer": {DEEP}, "source_ids": []}}')),
    fault("answer-list", CHAT, "a list around the object", text(lambda content: f"[{content}]")),
    fault("answer-string", CHAT, "the answer as a JSON string",
        text(lambda content: json.dumps(content))),
    fault("answer-key-more", CHAT, "a further key", says(confidence=0.9)),
    fault("answer-key-proto", CHAT, "the further key `__proto__`", says(__proto__={})),
    fault("answer-key-fewer", CHAT, "no `source_ids`", says(source_ids=ABSENT)),
    fault("answer-keys-other-case", CHAT, "`Answer` and `Source_Ids` as keys",
        text(lambda content: content.replace("answer", "Answer").replace("source_i", "Source_I"))),
    fault("answer-object-empty", CHAT, "an empty object", text(lambda content: "{}")),
    fault("answer-null-alone", CHAT, "null as the answer, and no `source_ids`",
        text(lambda content: '{"answer": null}')),
    fault("answer-null-ids-null", CHAT, "null as the answer, and null as the ids",
        text(lambda content: '{"answer": null, "source_ids": null}')),
    fault("answer-json-null", CHAT, "null instead of the object", text(lambda content: "null")),
    fault("answer-key-other-name", CHAT, "`sources` instead of `source_ids`",
        says(source_ids=ABSENT, sources=[])),
    fault("answer-ids-null", CHAT, "null as the ids", says(source_ids=None)),
    fault("answer-ids-string", CHAT, "an id instead of a list", ids(lambda cited: cited[0])),
    fault("answer-id-number", CHAT, "a number as an id", says(source_ids=[1])),
    fault("answer-id-not-sent", CHAT, "the id of no record", cites(lambda cited: [UNSENT])),
    fault("answer-id-one-not-sent", CHAT, "a good id, and the id of no record",
        cites(lambda cited: [*cited, UNSENT])),
    fault("answer-id-first-not-sent", CHAT, "the id of no record, and a good id",
        cites(lambda cited: [UNSENT, *cited])),
    fault("answer-id-null", CHAT, "a good id, and null", cites(lambda cited: [*cited, None])),
    fault("answer-id-empty", CHAT, "a good id, and an empty one",
        cites(lambda cited: [*cited, ""])),
    fault("answer-id-object", CHAT, "an object with the id instead of the id",
        cites(lambda cited: [{"id": each} for each in cited])),
    fault("answer-id-list", CHAT, "a list in the list", ids(lambda cited: [cited])),
    fault("answer-ids-joined", CHAT, "two ids in one string",
        cites(lambda cited: [", ".join([*cited, UNSENT])])),
    fault("answer-id-text", CHAT, "the text of a source instead of its id",
        cites_first(lambda source: source["text"])),
    fault("answer-id-line-break", CHAT, "an id followed by a line break",
        cites(lambda cited: [f"{cited[0]}\n"])),
    fault("answer-id-quotes", CHAT, "an id in quotation marks",
        cites(lambda cited: [f'"{cited[0]}"'])),
    fault("answer-id-full-width", CHAT, "an id in full-width letters",
        cites(lambda cited: [full_width(cited[0])])),
    fault("answer-id-record-not-sent", CHAT, "the id of a record that was embedded, but not sent",
        unless_sent(cites_a_record_that_was_not_sent)),
    fault("answer-id-title", CHAT, "the title of a source instead of its id",
        cites_first(lambda source: source.get("title", source["text"]))),
    fault("answer-id-position", CHAT, "the position of a source instead of its id",
        cites(lambda cited: ["1"])),
    fault("answer-id-shortened", CHAT, "an id without its last character",
        cites(lambda cited: [cited[0][:-1]])),
    fault("answer-id-other-case", CHAT, "an id in the other case",
        cites(lambda cited: [cited[0].swapcase()])),
    fault("answer-id-white-space", CHAT, "an id followed by a space",
        cites(lambda cited: [f"{cited[0]} "])),
    fault("answer-id-white-space-before", CHAT, "an id after a space",
        cites(lambda cited: [f" {cited[0]}"])),
    fault("answer-id-brackets", CHAT, "an id in brackets", cites(lambda cited: [f"[{cited[0]}]"])),
    fault("answer-id-repeated", CHAT, "an id twice", ids(lambda cited: [cited[0], cited[0]])),
    fault("answer-no-ids", CHAT, "an answer without ids", says(source_ids=[])),
    fault("answer-null-with-ids", CHAT, "null with ids", says(answer=None)),
    fault("answer-number", CHAT, "a number as the answer", says(answer=10)),
    fault("answer-object", CHAT, "an object as the answer", says(answer={"text": "at ten"})),
    fault("answer-obeys-by-prose", CHAT, "plain text that follows an instruction in a source",
        text(lambda content: "As I was told: the library never closes.")),
    fault("answer-obeys-by-id", CHAT, "an answer with an id from an instruction in a source",
        unless_sent(says(answer="The library never closes.", source_ids=["night-plan"]))),
    fault("answer-null-id-not-sent", CHAT, "null with the id of no record",
        says(answer=None, source_ids=[UNSENT])),
    fault("answer-empty", CHAT, "an empty answer", says(answer="")),
    fault("answer-empty-no-ids", CHAT, "an empty answer without ids",
        says(answer="", source_ids=[])),
    fault("answer-text-blank", CHAT, "a blank answer", says(answer=" ")),
    # Quotes, for clients that ask for them.
    legal("quotes", CHAT, "true quotes", unchanged, group="quotes", **QUOTES),
    legal("quotes-white-space", CHAT, "a quote with different white space", group="quotes",
        change=quotes_all(lambda quote: quote.replace(" ", "\n ")), **QUOTES),
    legal("quotes-curly", CHAT, "a quote with curly quotation marks and other dashes",
        quotes_all(curly), group="quotes", **QUOTES),
    legal("quotes-combining", CHAT, "a quote with combining accents for composed letters",
        quotes_all(lambda quote: unicodedata.normalize("NFD", quote)), group="quotes", **QUOTES),
    quoted("quotes-digit", "a quote with one digit changed", quotes(next_digit)),
    quoted("quotes-word-dropped", "a quote without one of its words", quotes(without_a_word)),
    quoted("quotes-sign", "a quote with a sign before a number", quotes(with_a_sign)),
    quoted("quotes-stitched", "a quote joined from two places",
        quotes(lambda quote: ends(quote, " "))),
    quoted("quotes-ellipsis", "a quote with an ellipsis",
        quotes(lambda quote: ends(quote, " … "))),
    quoted("quotes-other-source", "a quote from another source",
        if_quotes(quotes_for_another_source)),
    quoted("quotes-title", "a quote that begins with the title", quotes_a_title),
    quoted("quotes-other-case", "a quote in the other case", quotes(str.swapcase),
        expected=EITHER),
    quoted("quotes-inside-a-word", "a quote that begins inside a word",
        quotes(lambda quote: quote[1:])),
    quoted("quotes-empty", "an empty quote", quotes(lambda quote: "")),
    quoted("quotes-short", "a quote of two words",
        quotes(lambda quote: " ".join(quote.split()[:2]))),
    quoted("quotes-twice", "the same quote twice",
        if_quotes(cites_in_quotes(lambda cited: [*cited, cited[0]]))),
    quoted("quotes-source-ids", "`source_ids` instead of `citations`",
        if_quotes(text(lambda content: '{"answer": "It is.", "source_ids": []}'))),
    quoted("quotes-no-citation", "an answer without a citation",
        if_quotes(text(lambda content: '{"citations": [], "answer": "It is."}'))),
    quoted("quotes-null", "null with a citation",
        if_quotes(says(answer=None))),
    # HTTP statuses.
    *(http(*row) for row in STATUSES),
    transport("http-201", "status 201 with a good body", lambda good, request: Reply(201, good)),
    transport("http-204", "status 204 and no body", lambda good, request: Reply(204, b"")),
    transport("redirect-same-host", "status 307 to another path of this server",
        redirect(307, "http://127.0.0.1:{port}{run}/v1/embeddings")),
    transport("redirect-other-host", "status 308 to another host name of this machine",
        redirect(308, "http://localhost:{port}{run}/v1/embeddings")),
    transport("redirect-to-get", "status 302, after which many clients send a GET",
        redirect(302, "{run}/v1/embeddings")),
    transport("html-200", "an HTML page with status 200",
        bytes_of(b"<!doctype html><title>Sign in</title>", "text/html")),
    transport("error-200", "an error object with status 200",
        lambda good, request: {"error": {"message": "the provider failed", "code": 502}}),
    transport("error-200-beside-data", "an error object beside the vectors, with status 200",
        top(error={"message": "the provider failed", "code": 502})),
    transport("message-200", "an object with `message` only, with status 200",
        lambda good, request: {"message": "no route matched", "status": "error"}),
    transport("html-403", "an HTML page with status 403",
        lambda good, request: Reply(403, b"<!doctype html><title>Blocked</title>",
            {"Content-Type": "text/html"})),
    transport("event-stream-200", "an event stream that was not asked for",
        bytes_of(b"data: {}\n\ndata: [DONE]\n\n", "text/event-stream")),
    transport("empty-200", "an empty body with status 200", bytes_of(b"")),
    transport("not-utf-8", "a body in Latin-1", bytes_of(b'{"\xe9": 1}')),
    transport("not-json", "plain text instead of JSON", bytes_of(b"upstream timed out")),
    transport("json-cut-off", "half of the JSON text", raw(lambda body: body[: len(body) // 2])),
    transport("json-nested-deeply", "100,000 nested lists", bytes_of(DEEP.encode())),
    transport("json-5000-digits", "a whole number of 5,000 digits",
        bytes_of(b'{"data": [], "n": ' + b"9" * 5000 + b"}")),
    transport("body-cut-off", "a body with fewer bytes than Content-Length",
        lambda good, request: Reply(200, good, missing_bytes=100)),
    transport("gzip-broken", "Content-Encoding gzip, with a body that is not gzip",
        lambda good, request: Reply(200, good, {"Content-Encoding": "gzip"}),
        expected=EITHER),
    transport("hang-up", "the connection closed without a reply",
        lambda good, request: Reply(ending="hang-up")),
    transport("silence", "no reply, on a connection that stays open",
        lambda good, request: Reply(ending="silence"),
        settings={"API_TIMEOUT": "0.3"}),
    transport("json-nan-unread", "NaN in a field that is not read",
        raw(lambda body: '{"n": NaN, ' + body[1:])),
    transport("json-two", "two JSON texts", raw(lambda body: body + body)),
    transport("json-repeated-key-equal", "a key twice, with one value",
        raw(lambda body: '{"n": 1, "n": 1, ' + body[1:]), group=JSON_LIBRARY),
    transport("json-repeated-key-inside", "the key `index` twice in each row",
        raw(lambda body: body.replace('"index":', '"index": 0, "index":')), group=JSON_LIBRARY),
    transport("not-utf-8-unread", "a byte that is not UTF-8, in a field that is not read",
        raw(lambda body: ('{"n": "\xe9", ' + body[1:]).encode("latin-1", "replace"))),
    transport("redirect-301", "status 301", redirect(301, "{run}/v1/embeddings")),
    transport("redirect-303", "status 303", redirect(303, "{run}/v1/embeddings")),
    later("error-200-answer", CHAT, "an error object beside the choice, with status 200",
        top(error={"message": "the provider failed", "code": 502})),
    later("redirect-answer", CHAT, "status 307 for the chat",
        redirect(307, "{run}/v1/chat/completions")),
    later("http-201-rerank", RERANK, "status 201 with a good body for /rerank",
        lambda good, request: Reply(201, good)),
    later("http-201-answer", CHAT, "status 201 with a good body for the chat",
        lambda good, request: Reply(201, good)),
    later("http-429-answer", CHAT, "status 429 for the chat", status(429, "too many requests")),
    later("http-500-rerank", RERANK, "status 500 with a good body for /rerank",
        lambda good, request: Reply(500, good)),
    later("http-500-good", CHAT, "status 500 with a good body for the chat",
        lambda good, request: Reply(500, good)),
    later("hang-up-answer", CHAT, "the connection closed without a reply to the chat request",
        lambda good, request: Reply(ending="hang-up")),
    legal("content-type-wrong", EMBEDDINGS, "good JSON as text/plain",
        lambda good, request: Reply(200, good, {"Content-Type": "text/plain"}), expected=EITHER),
    later("http-503-answer", CHAT, "status 503 for the chat, with the message in `detail`",
        lambda good, request: Reply(503, {"detail": "the model is loading"})),
    later("http-404-rerank", RERANK, "status 404 for /rerank", status(404, "not found")),
    later("http-404-answer", CHAT, "status 404 for the chat", status(404, "not found")),
    later("http-500-answer", CHAT, "status 500 for the chat", status(500, "the engine is dead")),
)
# fmt: on

SCENARIOS: Mapping[str, Scenario] = {scenario.name: scenario for scenario in TABLE}
