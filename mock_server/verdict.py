"""The verdict on a run of a client, by the rules of the contract. Pure functions of plain data.

Input is the request log of the run and, in `check`, how the command ended. Replies are not
recorded: equal requests get equal replies, so each reply is made again from its request.
"""

from __future__ import annotations

import difflib
import json
import math
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mock_server import endpoints, models
from mock_server.request_log import Entry
from mock_server.scenarios import (
    ABSTAINS,
    ANSWERS,
    BY_POSITION,
    BY_PRODUCT,
    BY_ROWS,
    CHAT,
    EITHER,
    EMBEDDINGS,
    MAY_ABSTAIN,
    ORDER,
    RECORDS,
    REFUSES,
    RERANK,
    Reply,
    Scenario,
    as_numbers,
    unchanged,
)

FAULT, NOT_JUDGED = "fault", "not judged"
MOST_SOURCES, FEWEST_RECORDS, MOST_AT_A_TIME = 10, 12, 8
CLOSE = 1e-6  # the tolerance of similarities: base64 is float32, and sums differ in order


@dataclass(frozen=True)
class Finding:
    """A rule that a client broke, or the reason why a run is not judged."""

    scenario: str
    severity: str
    code: str
    title: str
    expected: str
    came: str
    nearest: str
    advice: str


@dataclass(frozen=True)
class Ended:
    """How a command ended. The status is None if it was killed."""

    status: int | None
    stdout: bytes
    stderr: bytes


# code: (what is wrong, what is expected, what to do)
RULES: dict[str, tuple[str, str, str]] = {
    # The requests.
    "no-request": (
        "the client sent no request",
        "POST API_BASE_URL/embeddings",
        "check that the command starts, and that it reads the address from API_BASE_URL",
    ),
    "request-refused": (
        "the mock refused a request",
        "a request as the contract describes it",
        "correct what the message names; for a path, check how the client joins the address",
    ),
    "key-elsewhere": (
        "the key is in a body, an address or another header",
        "the key in the Authorization header only",
        "remove it: bodies and addresses are often logged",
    ),
    "address-changed": (
        "a request went to another address",
        "requests below API_BASE_URL only; a reply with status 3xx is refused",
        "turn redirects off: another server could receive the records and the key",
    ),
    "request-repeated": (
        "a request was sent twice",
        "each request once",
        "turn the retries of the HTTP client or SDK off",
    ),
    "request-too-many": (
        "more than one request to an endpoint",
        "one request each to /rerank and /chat/completions",
        "rerank all documents in one request, and ask once",
    ),
    "stage-order": (
        "the stages are in the wrong order",
        "embeddings, then rerank, then chat",
        "send a request only when the reply to the one before has arrived and was checked",
    ),
    "rerank-unasked": (
        "a rerank request without a rerank model",
        "no request to /rerank if API_RERANK_MODEL is blank",
        "skip the stage if API_RERANK_MODEL is blank",
    ),
    "chat-unasked": (
        "a chat request without sources to answer from",
        "no chat request after a reranker that returned no row",
        'print {"answer": null, "sources": []} instead',
    ),
    "stage-missing": (
        "a request is missing",
        "a request for each stage",
        "look at stderr of the command: it ended too early, or it skips a stage",
    ),
    "went-on": (
        "the client sent another request after a reply that it must refuse",
        "no further request",
        "check each reply before you send the next request",
    ),
    # The content of the requests.
    "input-repeated": (
        "a text was embedded twice",
        "each text once",
        "send each input in one batch only, and equal texts once",
    ),
    "inputs-too-few": (
        "too few texts were embedded",
        f"the question and at least {FEWEST_RECORDS} records",
        "embed the question and each record",
    ),
    "record-not-embedded": (
        "a record of knowledge.json was not embedded",
        "all records of knowledge.json, if the client uses this file",
        "embed each record",
    ),
    "question-not-embedded": (
        "the question was not embedded",
        "an input that contains the question, unchanged",
        "embed the question as it is; text before and after it is allowed",
    ),
    "question-differs": (
        "the query of the rerank request is not the question of the chat request",
        "the same text in both",
        "pass the question on unchanged",
    ),
    "document-not-embedded": (
        "a document is not part of an embedded text",
        "documents that were embedded",
        "rerank the texts that were embedded",
    ),
    "documents-not-nearest": (
        "the documents are not the records that are most similar to the question",
        "no record left out that is more similar than one that was sent",
        "bind vectors by `index`, and sort by cosine similarity, highest first",
    ),
    "source-not-known": (
        "the text of a source was neither embedded nor reranked",
        "sources with the text of the client's own records",
        "use the texts of your records, never a text from a reply",
    ),
    "source-differs": (
        "a source differs from the record with its id",
        "id, title and text of one record",
        "send each record unchanged",
    ),
    "source-not-ranked": (
        "a source has no row in the reranker's reply",
        "sources that have a row",
        "send only the documents for which the reranker returned a row",
    ),
    "sources-not-best": (
        "the sources are not the best ones, with the best first",
        "sources by rerank score after a rerank, else by cosine similarity",
        "bind rows by `index`, sort by score, and cut the list after sorting",
    ),
    "sources-too-many": (
        "too many sources, or none",
        f"1 to {MOST_SOURCES} sources",
        "send the best few; without sources send no chat request",
    ),
    "source-repeated": (
        "two sources have the same id",
        "each record once",
        "send each record once, with a unique id",
    ),
    # The end of the run.
    "hang": (
        "the client did not end in time",
        "an end within the time limit",
        "set a time-out for each request, and end at the first failure",
    ),
    "key-printed": (
        "the key was printed",
        "the key on neither stream",
        "remove the key from a server's error text before you show it",
    ),
    "accepted": (
        "the client published an answer from a reply that it must refuse",
        "an exit status other than 0, and nothing on stdout",
        "check each reply listed here before you use any part of it",
    ),
    "exit-zero": (
        "the client failed with exit status 0",
        "an exit status other than 0",
        "exit with 1 when a stage fails",
    ),
    "stdout-not-empty": (
        "the client failed and printed something on stdout",
        "nothing on stdout",
        "print only after all checks; errors go to stderr",
    ),
    "refused": (
        "the client refused a reply that it must accept",
        "exit status 0, and a document on stdout",
        "look at stderr of the command; the contract says what must be accepted",
    ),
    "stdout-no-document": (
        "stdout is not the document",
        'one JSON object with "answer" and "sources"',
        "print exactly one JSON document in UTF-8; everything else goes to stderr",
    ),
    "answer-differs": (
        "the answer is not the model's",
        "the model's answer, unchanged",
        "publish `answer` as the model wrote it",
    ),
    "abstained": (
        "the client abstained although the model's answer is valid",
        "the model's answer with its sources",
        "publish each answer that follows the rules",
    ),
    "not-abstained": (
        "the client published an answer where it must abstain",
        '{"answer": null, "sources": []}',
        "abstain if the answer is null without ids, or if the reranker returned no row",
    ),
    "sources-not-cited": (
        "the published sources are not the cited ones",
        "the cited records, in the order cited",
        "look up each cited id among the sources that were sent",
    ),
    "quotes-differ": (
        "the published quotes are not the quoted slices of the records",
        '"quotes": [{"id", "start", "end", "text"}], one for each citation, in the same order',
        "find each quote in your record; publish that slice, with positions in code points",
    ),
    "source-altered": (
        "a published text is not the record's",
        "the text that was embedded",
        "publish your own record, never a text from a reply",
    ),
    # What a run could not show.
    "requests-lost": (
        "the request log dropped requests of this run",
        "a request log with all requests",
        "send fewer or smaller requests",
    ),
    "not-served": (
        "the client did not get the reply that this scenario is about",
        "a reply that differs from the plain one",
        "nothing to correct: the scenario is about something that the client does not use "
        "(further batches, base64, quotes)",
    ),
    "not-reached": (
        "in the plain run the client did not get past this stage",
        "a plain run that gets past the stage",
        "correct the plain run first: a refusal proves nothing if the client never goes on",
    ),
    "order-not-told": (
        "the right and the wrong order are the same",
        "an order that only the right way gives",
        "use the records of knowledge.json, or others for which the two orders differ",
    ),
    "record-not-known": (
        "the cited record is not one of the client's records",
        "the id of a record that was embedded and not sent",
        "use the records of knowledge.json",
    ),
}
UNSHOWN = ("requests-lost", "not-served", "not-reached", "order-not-told", "record-not-known")


def found(scenario: Scenario, code: str, came: str, nearest: str = "") -> Finding:
    """The finding with this code. `came` is what the client did."""
    title, expected, advice = RULES[code]
    severity = NOT_JUDGED if code in UNSHOWN else FAULT
    return Finding(scenario.name, severity, code, title, expected, came, nearest, advice)


def judge(
    scenario: Scenario,
    entries: Sequence[Entry],
    dropped: int = 0,
    ended: Ended | None = None,
    key: str = models.KEY,
) -> list[Finding]:
    """The faults of a run; if there are none, the reasons why it is not judged; [] if it passed.

    Without `ended` only the requests are judged. `key` is the API key, which must not be printed.
    """
    if dropped:
        return [found(scenario, "requests-lost", f"{dropped} requests lost")]
    # An entry without a status has no reply yet, and perhaps never gets one.
    run = [exchange(entry, scenario) for entry in with_key(entries) if entry.status]
    findings = in_requests(scenario, run, ended) or in_stages(scenario, run, ended)
    findings = findings or in_texts(scenario, run)
    if ended:
        findings += in_end(scenario, run, ended, key)
    return findings or unshown(scenario, run)


def with_key(entries: Sequence[Entry]) -> Sequence[Entry]:
    """The requests that are the client's: those with the right key, if it sent any.

    Another program can send requests without the key to the same address. After a redirect all
    requests count, because HTTP libraries remove the key when they follow one.
    """
    if all(entry.authorization != "right" for entry in entries):
        return entries
    statuses = [entry.status for entry in entries]
    redirect = next((i for i, status in enumerate(statuses) if 300 <= status < 400), len(entries))
    return [e for i, e in enumerate(entries) if e.authorization == "right" or i > redirect]


def verdict(findings: Iterable[Finding]) -> str:
    """ "passed", "failed" or "not judged"."""
    severities = {finding.severity for finding in findings}
    return "failed" if FAULT in severities else NOT_JUDGED if severities else "passed"


def report(
    scenarios: Mapping[str, Scenario], entries: Sequence[Entry], dropped: int
) -> dict[str, Any]:
    """The verdict on requests, which are taken as one run of a client, as JSON data."""
    name = (entries[0].scenario or "plain") if entries else "plain"
    scenario = scenarios.get(name, scenarios["plain"])
    findings = judge(scenario, entries, dropped)
    return {
        "scenario": scenario.name,
        "verdict": verdict(findings),
        "requests": [entry.endpoint for entry in entries],
        "findings": [asdict(finding) for finding in findings],
    }


# ---- what was served -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Exchange:
    """A request, the good body for it (None if the mock refused it), and the reply served."""

    entry: Entry
    good: Any
    reply: Reply

    @property
    def changed(self) -> bool:
        """Whether the reply differs from that of the scenario `plain`."""
        plain = Reply(200, self.good)
        # Compare the JSON text too, because in Python 1 == True.
        differs = self.reply != plain or self.reply.data() != plain.data()
        return self.good is not None and differs


def exchange(entry: Entry, scenario: Scenario) -> Exchange:
    """The request with its reply, made again."""
    if entry.refused:
        return Exchange(entry, None, Reply(entry.status))
    good = endpoints.REPLIES[entry.endpoint](entry.body)
    if entry.scenario != scenario.name:  # the plain scenario, or the target of a redirect
        return Exchange(entry, good, Reply(200, good))
    return Exchange(entry, good, scenario.reply(entry.endpoint, good, entry.body))


def of(run: Sequence[Exchange], path: str) -> list[Exchange]:
    """The requests to an endpoint."""
    return [each for each in run if each.entry.endpoint == path]


def broken(scenario: Scenario, run: Sequence[Exchange]) -> int | None:
    """The position of the first reply that must be refused; None if there is none."""
    own = of(run, scenario.path)
    # With `beside` the fault is that a reply differs from the first one.
    usual = bool(scenario.beside and own and own[0].changed)
    for i, each in enumerate(run):
        mine = scenario.expected == REFUSES and each.entry.endpoint == scenario.path
        if each.reply.status != 200 or (mine and each.changed != usual):
            return i
    return None


def rows(run: Sequence[Exchange]) -> list[tuple[str, float]] | None:
    """(document, score) for each row of the reranker's reply; None without a rerank request."""
    for each in of(run, RERANK):
        body = each.reply.body
        items = body if isinstance(body, list) else body.get("results", body.get("data"))
        documents = models.documents_of(each.entry.body)
        names = ("relevance_score", "score")
        return [
            (documents[row["index"]], next(row[name] for name in names if name in row))
            for row in items
        ]
    return None


def vectors(run: Sequence[Exchange], by_position: bool = False) -> dict[str, list[float]]:
    """{input: vector} in the order sent, bound by index, or wrongly by position."""
    bound = {}
    for each in of(run, EMBEDDINGS):
        items = each.reply.body["data"]
        if not by_position:
            items = sorted(items, key=lambda row: row.get("index") or 0)
        for text, row in zip(models.inputs_of(each.entry.body), items):
            bound[text] = as_numbers(row)["embedding"]
    return bound


def cosines(question: str, bound: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """{input: cosine similarity to the question}, without the question."""
    norm = {text: math.hypot(*vector) for text, vector in bound.items()}
    return {
        text: product / (norm[text] * norm[question])
        for text, product in products(question, bound).items()
    }


def products(question: str, bound: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """{input: dot product with the question}, without the question."""
    return {
        text: sum(a * b for a, b in zip(bound[question], vector))
        for text, vector in bound.items()
        if text != question
    }


def best(values: Mapping[str, float], count: int) -> list[str]:
    """The keys with the highest values, highest first."""
    return sorted(values, key=lambda text: -values[text])[:count]


def said(run: Sequence[Exchange]) -> dict[str, Any]:
    """What the chat model wrote: {"answer", "source_ids"}, or {} if it cannot be read.

    With quotes it has `citations` too, and `source_ids` are in the order first cited.
    """
    for each in of(run, CHAT):
        try:
            value = models.plain_data(each.reply.body["choices"][0]["message"]["content"])
            if models.wants_quotes(each.entry.body):
                cited = dict.fromkeys(one["source_id"] for one in value["citations"])
                return {**value, "source_ids": list(cited)}
        except (TypeError, ValueError, KeyError, IndexError):
            return {}
        return value if isinstance(value, dict) else {}
    return {}


def asked(run: Sequence[Exchange]) -> dict[str, Any]:
    """{"question", "sources"} of the chat request; {} without one."""
    for each in of(run, CHAT):
        return models.asked_of(each.entry.body) or {}
    return {}


def home(texts: Iterable[str], *parts: str) -> str | None:
    """The shortest of the texts that contain all the parts."""
    holding = [text for text in texts if all(part in text for part in parts)]
    return min(holding, key=len, default=None)


def shown(value: Any, limit: int = 100) -> str:
    """A value as JSON text of at most `limit` characters."""
    plain = isinstance(value, str) and value.isprintable()
    text = json.dumps(value, ensure_ascii=not plain)
    return text if len(text) <= limit else f'{text[: limit - 2]}…"'


# ---- the requests --------------------------------------------------------------------------------


def in_requests(scenario: Scenario, run: Sequence[Exchange], ended: Ended | None) -> list[Finding]:
    """Requests that no client may send, whatever the replies are: the first of each kind."""
    if not run:
        return [found(scenario, "no-request", how(ended) if ended else "nothing")]
    kinds: dict[str, Finding] = {}
    before: list[tuple[str, Any]] = []
    stop = broken(scenario, run)
    for i, each in enumerate(run):
        entry = each.entry
        line = f"{entry.method} {entry.address}"
        same = (entry.endpoint, entry.body)
        came = f"{line}, answered {entry.status}: {entry.refused}"
        elsewhere = (entry.scenario or "plain") != scenario.name
        if elsewhere and not (entry.refused and scenario.name == "plain"):
            kinds.setdefault("address-changed", found(scenario, "address-changed", line))
        elif entry.refused and i == stop:  # a later one is a fault of another kind
            kinds.setdefault("request-refused", found(scenario, "request-refused", came))
        elif entry.key_in_body or entry.key_elsewhere:
            kinds.setdefault("key-elsewhere", found(scenario, "key-elsewhere", line))
        elif same in before:
            kinds.setdefault("request-repeated", found(scenario, "request-repeated", line))
        before.append(same)
    return list(kinds.values())


def in_stages(scenario: Scenario, run: Sequence[Exchange], ended: Ended | None) -> list[Finding]:
    """Requests that are too early, too late, too many or missing."""
    stop = broken(scenario, run)
    if stop is not None:
        after = [each.entry.endpoint for each in run[stop + 1 :]]
        # Further batches may already have been sent when the bad reply arrives.
        under_way = run[stop].entry.endpoint == EMBEDDINGS and len(after) < MOST_AT_A_TIME
        late = [path for path in after if path != EMBEDDINGS or not under_way]
        if late:
            came = f"POST {late[0]} after {scenario.serves}"
            return [found(scenario, "went-on", came)]
        run = run[: stop + 1]
    sent = [each.entry.endpoint for each in run]
    flow = " -> ".join(path for i, path in enumerate(sent) if sent[:i][-1:] != [path])
    if not scenario.rerank and RERANK in sent:
        return [found(scenario, "rerank-unasked", flow)]
    if sent != sorted(sent, key=ORDER.index):
        return [found(scenario, "stage-order", flow)]
    for path in (RERANK, CHAT):
        if sent.count(path) > 1:
            came = f"{sent.count(path)} requests to {path}"
            return [found(scenario, "request-too-many", came)]
    wanted = [path for path in ORDER if scenario.rerank or path != RERANK]
    if stop is not None:
        wanted = wanted[: wanted.index(sent[-1])]
    elif rows(run) == []:
        wanted.remove(CHAT)
        if CHAT in sent:
            return [found(scenario, "chat-unasked", flow)]
    elif scenario.expected == MAY_ABSTAIN or may_refuse(scenario, run):
        wanted = []
    missing = [path for path in wanted if path not in sent]
    if not missing:
        return []
    end = f"; {how(ended)}" if ended else ""
    came = f"{flow}, and no request to {missing[0]} with the right key{end}"
    return [found(scenario, "stage-missing", came)]


def may_refuse(scenario: Scenario, run: Sequence[Exchange]) -> bool:
    """Whether the client got a reply that it may accept or refuse."""
    return scenario.expected == EITHER and any(each.changed for each in run)


# ---- what is in them -----------------------------------------------------------------------------


def in_texts(scenario: Scenario, run: Sequence[Exchange]) -> list[Finding]:
    """Texts that were not embedded, and documents and sources that are not the best ones."""
    inputs = [text for each in of(run, EMBEDDINGS) for text in models.inputs_of(each.entry.body)]
    again = [text for text, count in Counter(inputs).items() if count > 1]
    if again:
        return [found(scenario, "input-repeated", shown(again[0]))]
    stop = broken(scenario, run)
    if stop is not None and run[stop].entry.endpoint == EMBEDDINGS:
        return []
    questions = [models.query_of(each.entry.body) for each in of(run, RERANK)]
    questions += [asked(run)["question"]] if asked(run) else []
    if not questions:
        return []
    if len(inputs) <= FEWEST_RECORDS:
        return [found(scenario, "inputs-too-few", f"{len(inputs)} inputs")]
    missing = [name for name, record in RECORDS.items() if not home(inputs, record["text"])]
    if 0 < len(missing) < len(RECORDS) / 2:
        return [found(scenario, "record-not-embedded", ", ".join(map(shown, missing)))]
    if questions[0] != questions[-1]:
        return [found(scenario, "question-differs", " and ".join(map(shown, questions)))]
    question = home(inputs, questions[0])
    if question is None:
        near = nearest(questions[0], inputs)
        return [found(scenario, "question-not-embedded", shown(questions[0]), near)]
    findings = in_documents(scenario, run, question)
    return findings or (in_sources(scenario, run, question) if asked(run) else [])


def in_documents(scenario: Scenario, run: Sequence[Exchange], question: str) -> list[Finding]:
    """Documents that were not embedded, or are not the most similar ones."""
    values = cosines(question, vectors(run))
    for each in of(run, RERANK):
        homes = []
        for document in models.documents_of(each.entry.body):
            homes.append(home(values, document))
            if homes[-1] is None:
                near = nearest(document, values)
                return [found(scenario, "document-not-embedded", shown(document), near)]
        kept = {text for text in homes if text}
        left = {text: value for text, value in values.items() if text not in kept}
        lowest = min(kept, key=lambda text: values[text])
        if left and max(left.values()) > values[lowest] + CLOSE:
            nearer = shown(best(left, 1)[0], 50)
            came = f"{shown(lowest, 50)} was sent, and {nearer} is more similar"
            ways = [
                f"ranking {way} gives exactly these documents"
                for way, wrong in misread_vectors(run, question).items()
                if set(best(wrong, len(kept))) == kept
            ]
            return [found(scenario, "documents-not-nearest", came, ways[0] if ways else "")]
    return []


def misread_vectors(run: Sequence[Exchange], question: str) -> dict[str, dict[str, float]]:
    """{a wrong way of ranking: {input: what it sorts by}}."""
    return {
        BY_POSITION: cosines(question, vectors(run, by_position=True)),
        BY_PRODUCT: products(question, vectors(run)),
        "with the lowest similarity first": {
            text: -value for text, value in cosines(question, vectors(run)).items()
        },
    }


def misread_rows(run: Sequence[Exchange]) -> dict[str, list[str]]:
    """{a wrong way of sorting: the documents in its order}."""
    ranked = rows(run) or []
    documents = [text for each in of(run, RERANK) for text in models.documents_of(each.entry.body)]
    return {
        BY_ROWS: [text for text, _ in ranked],
        "in the order of the documents": documents,
        "with the lowest score first": best({text: -score for text, score in ranked}, len(ranked)),
    }


def ranking(run: Sequence[Exchange], question: str) -> dict[str, float]:
    """{document or input: the score or similarity by which sources are sorted}."""
    ranked = rows(run)
    if ranked is None:
        return cosines(question, vectors(run))
    return {text: max(score for same, score in ranked if same == text) for text, _ in ranked}


def homes_of_sources(run: Sequence[Exchange], question: str) -> list[str | None]:
    """For each source the document, or without a rerank the input, that contains it."""
    texts: Iterable[str] = vectors(run).keys() - {question}
    for each in of(run, RERANK):
        texts = models.documents_of(each.entry.body)
    found_in = []
    for source in asked(run)["sources"]:
        whole = home(texts, source.get("title", ""), source["text"])
        found_in.append(whole or home(texts, source["text"]))
    return found_in


def in_sources(scenario: Scenario, run: Sequence[Exchange], question: str) -> list[Finding]:
    """Sources that are not the client's records, not ranked, or not the best ones."""
    sources = asked(run)["sources"]
    if not 1 <= len(sources) <= MOST_SOURCES:
        return [found(scenario, "sources-too-many", f"{len(sources)} sources")]
    ids = [source["id"] for source in sources]
    for i, each in enumerate(ids):
        if each in ids[:i]:
            return [found(scenario, "source-repeated", shown(each))]
    values = ranking(run, question)
    homes = []
    for source, text in zip(sources, homes_of_sources(run, question)):
        name = f"the source {shown(source['id'], 40)}"
        if text is None:
            near = nearest(source["text"], vectors(run))
            return [found(scenario, "source-not-known", f"{name}: {shown(source['text'])}", near)]
        record = RECORDS.get(source["id"], source)
        own = home(vectors(run), record["text"])  # whether the client uses knowledge.json
        titles = (None, record.get("title"))
        same = source["text"] == record["text"] and source.get("title") in titles
        if own and not same:
            return [found(scenario, "source-differs", f"{name}: {shown(source['text'])}")]
        if text not in values:
            return [found(scenario, "source-not-ranked", name)]
        homes.append(text)
    sent = [values[text] for text in homes]
    left = [value for text, value in values.items() if text not in homes]
    ordered = all(one >= two - CLOSE for one, two in zip(sent, sent[1:]))
    if ordered and max(left, default=-math.inf) <= sent[-1] + CLOSE:
        return []
    came = f"{', '.join(map(shown, ids))} with {', '.join(f'{value:.4f}' for value in sent)}"
    came += f"; the best of the rest has {max(left):.4f}" if left else ""
    ways = [f"ranking {way} gives exactly these sources" for way in misreadings(run, question)]
    return [found(scenario, "sources-not-best", came, ways[0] if ways else "")]


def misreadings(run: Sequence[Exchange], question: str) -> list[str]:
    """The wrong ways of ranking that give the sources that were sent, in the same order."""
    homes = homes_of_sources(run, question)
    if rows(run) is None:
        wrong = misread_vectors(run, question)
        orders = {way: best(values, len(homes)) for way, values in wrong.items()}
    else:
        orders = {way: order[: len(homes)] for way, order in misread_rows(run).items()}
    return [way for way, order in orders.items() if order == homes]


def nearest(text: str, texts: Iterable[str]) -> str:
    """The most similar of the texts; "" if none is similar."""
    near = difflib.get_close_matches(text, list(texts), n=1, cutoff=0.6)
    return shown(near[0]) if near else ""


# ---- how it ended --------------------------------------------------------------------------------


def due(scenario: Scenario, run: Sequence[Exchange]) -> set[str]:
    """How a correct client may end; empty if a request is missing, which is a finding."""
    if broken(scenario, run) is not None:
        return {REFUSES}
    ends = {REFUSES} if may_refuse(scenario, run) else set()
    if asked(run):
        ends.add(ABSTAINS if said(run)["answer"] is None else ANSWERS)
    elif rows(run) == [] or scenario.expected == MAY_ABSTAIN:
        ends.add(ABSTAINS)
    return ends


def how(ended: Ended) -> str:
    """How a command ended, in words, with the most useful line of stderr."""
    if ended.status is None:
        return "killed"
    lines = ended.stderr.decode("utf-8", "replace").strip().splitlines()
    line = next((line for line in reversed(lines) if "rror" in line), lines[-1] if lines else "")
    return f"exit status {ended.status}" + (f", stderr {shown(line)}" if line else "")


def in_end(scenario: Scenario, run: Sequence[Exchange], ended: Ended, key: str) -> list[Finding]:
    """What is wrong with the exit status and the two streams."""
    findings = []
    out = ended.stdout.decode("utf-8", "replace")
    for name, data in (("stdout", ended.stdout), ("stderr", ended.stderr)):
        if key.encode() in data:
            findings.append(found(scenario, "key-printed", f"the key on {name}"))
    if ended.status is None:
        return [*findings, found(scenario, "hang", "it was killed")]
    ends = due(scenario, run) if not in_requests(scenario, run, ended) else set()
    if not ends:
        return findings
    if ended.status != 0:
        if REFUSES not in ends:
            findings.append(found(scenario, "refused", how(ended)))
        if out:
            came = f"exit status {ended.status}, stdout {shown(out)}"
            findings.append(found(scenario, "stdout-not-empty", came))
    elif ends == {REFUSES}:
        code = "accepted" if out.strip() else "exit-zero"
        came = f"exit status 0, stdout {shown(out)}"
        findings.append(found(scenario, code, came, wrote(run) if scenario.path == CHAT else ""))
    else:
        findings += in_document(scenario, run, ended.stdout, ends)
    return findings


def wrote(run: Sequence[Exchange]) -> str:
    """What the chat model wrote, and the ids of the sources."""
    for each in of(run, CHAT):
        try:
            content = each.reply.body["choices"][0]["message"]["content"]
        except (TypeError, KeyError, IndexError):
            return ""
        text = content if isinstance(content, str) else json.dumps(content)
        ids = ", ".join(shown(source["id"], 40) for source in asked(run)["sources"])
        return f"the model wrote {shown(text, 200)}; the ids sent were {ids}"
    return ""


def in_document(
    scenario: Scenario, run: Sequence[Exchange], stdout: bytes, ends: set[str]
) -> list[Finding]:
    """What is wrong with the document on stdout."""
    try:
        document = models.plain_data(stdout.decode("utf-8"))
        answer, sources = document["answer"], document["sources"]
        ids = [source["id"] for source in sources]
        if not isinstance(sources, list):
            raise TypeError
    except (ValueError, TypeError, KeyError):
        came = shown(stdout.decode("utf-8", "backslashreplace"))
        return [found(scenario, "stdout-no-document", came)]
    printed = f"answer {shown(json.dumps(answer))}, sources {', '.join(map(str, ids)) or 'none'}"
    if answer is None and not ids:
        return [] if ABSTAINS in ends else [found(scenario, "abstained", printed)]
    if ANSWERS not in ends:
        return [found(scenario, "not-abstained", printed)]
    model = said(run)
    if answer != model["answer"]:
        near = f"the model's is {shown(model['answer'])}"
        return [found(scenario, "answer-differs", printed, near)]
    if ids != model["source_ids"]:
        near = f"cited were {', '.join(map(shown, model['source_ids']))}"
        return [found(scenario, "sources-not-cited", printed, near)]
    texts = {source["id"]: source["text"] for source in asked(run)["sources"]}
    for source in sources:
        if source.get("text", texts[source["id"]]) != texts[source["id"]]:
            return [
                found(scenario, "source-altered", f"{shown(source['id'])}: {shown(source['text'])}")
            ]
    return in_quotes(scenario, document.get("quotes"), model.get("citations", []), texts)


def in_quotes(
    scenario: Scenario, quotes: Any, citations: Sequence[Any], texts: Mapping[str, str]
) -> list[Finding]:
    """What is wrong with the published quotes. Without citations nothing is expected."""
    if not citations:
        return []
    wanted = [(cited["source_id"], comparable(cited["quote"])) for cited in citations]
    try:
        came = [(each["id"], comparable(each["text"])) for each in quotes]
        ours = [texts[each["id"]][each["start"] : each["end"]] for each in quotes]
        numbers = {type(each[name]) for each in quotes for name in ("start", "end")}
        exact = ours == [each["text"] for each in quotes] and numbers == {int}
    except (TypeError, KeyError, AttributeError):
        came, exact = [], False
    if came == wanted and exact:
        return []
    near = f"cited were {shown(citations, 200)}"
    return [found(scenario, "quotes-differ", shown(quotes, 200), near)]


def comparable(text: str) -> str:
    """A quote in the form in which quotes are compared.

    Case, white space, kinds of quotation marks and dashes, the form of accents, and sentence marks
    at the ends do not count.
    """
    signs = str.maketrans("‘’‚‛“”„‟‐‑‒–—―−", "'" * 4 + '"' * 4 + "-" * 7)
    plain = unicodedata.normalize("NFC", text).casefold().translate(signs)
    return "".join(plain.split()).strip(".,;:!?'\"()[]。，；：！？")


# ---- what a run could not show -------------------------------------------------------------------


def met(scenario: Scenario, run: Sequence[Exchange]) -> bool:
    """Whether the client got the reply that the scenario is about."""
    own = of(run, scenario.path)
    if scenario.asks and not any(scenario.asks(each.entry.body) for each in own):
        return False
    if scenario.beside:
        return broken(scenario, run) is not None
    free = scenario.change is unchanged or scenario.expected == EITHER
    return free or any(each.changed for each in own)


def unshown(scenario: Scenario, run: Sequence[Exchange]) -> list[Finding]:
    """The reasons why a run without faults proves nothing; [] if it does prove something."""
    if not met(scenario, run):
        return [found(scenario, "not-served", "plain replies only")]
    sources = {source["id"] for source in asked(run).get("sources", [])}
    for cited in map(str, said(run).get("source_ids") or []):
        record = RECORDS.get(cited)
        if record and cited not in sources and not home(vectors(run), record["text"]):
            return [found(scenario, "record-not-known", shown(cited))]
    if scenario.told_from and asked(run):
        inputs = vectors(run)
        question = home(inputs, asked(run)["question"])
        if question and scenario.told_from in misreadings(run, question):
            came = f"ranking {scenario.told_from} gives the same sources"
            return [found(scenario, "order-not-told", came)]
    return []
