"""The verdict: what a client did, judged by the contract. Pure functions of plain data.

What came is the request log of one run and, from `check`, how the command ended. Replies are not
recorded: equal requests get equal replies, so each reply can be made again from its request.
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
CLOSE = 1e-6  # similarities are float32 in base64, and summed in another order elsewhere


@dataclass(frozen=True)
class Finding:
    """A rule that a client broke, or what a run could not show (severity `not judged`)."""

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
    """How a command ended; the status is None if it had to be killed."""

    status: int | None
    stdout: bytes
    stderr: bytes


# code: (what is wrong, what is expected, what to do)
RULES: dict[str, tuple[str, str, str]] = {
    # The requests.
    "no-request": (
        "no request came",
        "POST API_BASE_URL/embeddings",
        "see whether the command starts; then, whether it takes the address from API_BASE_URL",
    ),
    "request-refused": (
        "the mock refused a request",
        "a request as the contract has it",
        "mend what the message names; look at how the address is joined if it is the path",
    ),
    "key-elsewhere": (
        "the key is in a body, an address or another header",
        "the key in the Authorization header, and nowhere else",
        "take it out: bodies and addresses end up in logs",
    ),
    "address-changed": (
        "a request went to another address",
        "no request but below API_BASE_URL; a reply with status 3xx is refused",
        "switch redirects off: the other address may be another host, and would get the records",
    ),
    "request-repeated": (
        "a request was sent twice",
        "every request once",
        "switch the retries of the HTTP client or SDK off",
    ),
    "request-too-many": (
        "more than one request to an endpoint",
        "one request each to /rerank and /chat/completions",
        "rank all documents in one request, and ask once",
    ),
    "stage-order": (
        "the stages are out of order",
        "embeddings, then rerank, then chat",
        "send a request when the reply to the one before is there and checked",
    ),
    "rerank-unasked": (
        "reranked without a rerank model",
        "no request to /rerank while API_RERANK_MODEL is blank",
        "leave the stage out if API_RERANK_MODEL is blank",
    ),
    "chat-unasked": (
        "the chat was asked with nothing to answer from",
        "no chat request after a reranker that returned no row",
        'print {"answer": null, "sources": []}, and ask nothing',
    ),
    "stage-missing": (
        "a request did not come",
        "every stage",
        "look at stderr of the command: it ended early, or leaves a stage out",
    ),
    "went-on": (
        "it went on after a reply that must be refused",
        "no further request",
        "check each reply before the next request is made",
    ),
    # What is in them.
    "input-repeated": (
        "a text was embedded twice",
        "every text once",
        "send each input in one batch only, and equal texts once",
    ),
    "inputs-too-few": (
        "too few texts were embedded",
        f"the question and {FEWEST_RECORDS} or more records",
        "embed the question and every record",
    ),
    "record-not-embedded": (
        "a record of knowledge.json was not embedded",
        "all records of knowledge.json, if some are the client's",
        "embed every record",
    ),
    "question-not-embedded": (
        "the question was not embedded",
        "an input that holds the question as it was asked",
        "embed the question, unchanged but for a prefix",
    ),
    "question-differs": (
        "the question is not the same throughout",
        "one text as query and as question",
        "hand the question through unchanged",
    ),
    "document-not-embedded": (
        "a document is no part of an embedded text",
        "documents that were embedded",
        "rerank the texts that were embedded",
    ),
    "documents-not-nearest": (
        "the documents are not the records nearest to the question",
        "no record left out that is nearer than one sent",
        "bind vectors by `index`, and rank by cosine similarity, highest first",
    ),
    "source-not-known": (
        "a source was not embedded or not reranked",
        "sources with the text of the client's own records",
        "take texts from your records: what a server echoes is no source",
    ),
    "source-differs": (
        "a source is not the record with its id",
        "id, title and text of one record",
        "send each record as it is",
    ),
    "source-not-ranked": (
        "a source has no row in the reranker's reply",
        "sources for which there is a row",
        "send the chat what the reranker returned, and nothing else",
    ),
    "sources-not-best": (
        "the sources are not the best ones, best first",
        "sources by rerank score after a rerank, else by cosine similarity",
        "bind rows by `index`, sort by score, and cut after sorting",
    ),
    "sources-too-many": (
        "too many sources, or none",
        f"1 to {MOST_SOURCES} sources",
        "send the best few; with none there is nothing to ask",
    ),
    "source-repeated": (
        "two sources have one id",
        "each record once",
        "keep a record once, and its id unique",
    ),
    # How it ended.
    "hang": (
        "it did not end",
        "an end within the time",
        "set a time-out for every request, and end at the first failure",
    ),
    "key-printed": (
        "the key was printed",
        "the key on neither stream",
        "a server may repeat the key in its error text: take it out before you show that",
    ),
    "accepted": (
        "it published from a reply that must be refused",
        "an exit status that is not 0, and nothing on stdout",
        "check the whole reply before you use any of it",
    ),
    "exit-zero": (
        "a failure ended with exit status 0",
        "an exit status that is not 0",
        "exit with 1 when a stage fails",
    ),
    "stdout-not-empty": (
        "a failure left something on stdout",
        "nothing on stdout",
        "print when all is checked; errors go to stderr",
    ),
    "refused": (
        "it refused what is right",
        "exit status 0, and a document on stdout",
        "look at its stderr; the contract says what must be accepted",
    ),
    "stdout-no-document": (
        "stdout is not the document",
        'one JSON object with "answer" and "sources"',
        "print exactly one JSON document in UTF-8; all else goes to stderr",
    ),
    "answer-differs": (
        "the answer is not the model's",
        "the model's answer, unchanged",
        "publish `answer` as it came",
    ),
    "abstained": (
        "it abstained from an answer that is right",
        "the model's answer with its sources",
        "publish an answer that keeps the rules",
    ),
    "not-abstained": (
        "it published where it must abstain",
        '{"answer": null, "sources": []}',
        "a null answer without ids, or a reranker without rows, is an abstention",
    ),
    "sources-not-cited": (
        "the published sources are not the cited ones",
        "the records cited, in the order cited",
        "look the cited ids up, one by one, among the sources that were sent",
    ),
    "quotes-differ": (
        "the published quotes are not the slices of the records that were quoted",
        '"quotes": [{"id", "start", "end", "text"}], one for each citation, in their order',
        "find the quote in your own record, and publish what stands there, counted in code points",
    ),
    "source-altered": (
        "a published text is not the record's",
        "the text that was embedded",
        "publish your own record, and nothing that a server echoed",
    ),
    # What a run could not show.
    "requests-lost": (
        "the request log lost requests",
        "a request log with every request",
        "send fewer or smaller requests",
    ),
    "not-served": (
        "the client never met what the scenario is about",
        "a request to which the reply differs from the plain one",
        "nothing to mend: it is about batches, an encoding or a top_n that it does not use",
    ),
    "order-not-told": (
        "right and wrong would look the same",
        "an order that only the right way gives",
        "use records, or a question, for which the two orders differ (those of knowledge.json do)",
    ),
    "record-not-known": (
        "the record that was cited is none of the client's",
        "the id of a record that was embedded and not sent",
        "use the records of knowledge.json",
    ),
}
UNSHOWN = ("requests-lost", "not-served", "order-not-told", "record-not-known")


def found(scenario: Scenario, code: str, came: str, nearest: str = "") -> Finding:
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
    """What a run has shown: faults or, if there are none, what it could not show.

    Without `ended` (the client is no command of ours) only the requests are judged. `key` is what
    no stream may hold.
    """
    if dropped:
        return [found(scenario, "requests-lost", f"{dropped} requests lost")]
    # One without a status has no reply yet, or never gets one.
    run = [exchange(entry, scenario) for entry in entries if entry.status]
    findings = in_requests(scenario, run, ended) or in_stages(scenario, run, ended)
    findings = findings or in_texts(scenario, run)
    if ended:
        findings += in_end(scenario, run, ended, key)
    return findings or unshown(scenario, run)


def verdict(findings: Iterable[Finding]) -> str:
    severities = {finding.severity for finding in findings}
    return "failed" if FAULT in severities else NOT_JUDGED if severities else "passed"


def report(
    scenarios: Mapping[str, Scenario], entries: Sequence[Entry], dropped: int
) -> dict[str, Any]:
    """The verdict on the requests of a request log, which are taken as one run of a client."""
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
    """A request, the faithful reply to it (None if the mock refused it), and the reply served."""

    entry: Entry
    good: Any
    reply: Reply

    @property
    def changed(self) -> bool:
        plain = Reply(200, self.good)
        # As text too, because in Python 1 == True.
        differs = self.reply != plain or self.reply.data() != plain.data()
        return self.good is not None and differs


def exchange(entry: Entry, scenario: Scenario) -> Exchange:
    if entry.refused:
        return Exchange(entry, None, Reply(entry.status))
    good = endpoints.REPLIES[entry.endpoint](entry.body)
    if entry.scenario != scenario.name:  # plain, or where a redirect leads to
        return Exchange(entry, good, Reply(200, good))
    return Exchange(entry, good, scenario.reply(entry.endpoint, good, entry.body))


def of(run: Sequence[Exchange], path: str) -> list[Exchange]:
    return [each for each in run if each.entry.endpoint == path]


def broken(scenario: Scenario, run: Sequence[Exchange]) -> int | None:
    """The place of the first reply that must be refused."""
    own = of(run, scenario.path)
    usual = bool(scenario.beside and own and own[0].changed)  # then the fault is to differ from it
    for i, each in enumerate(run):
        mine = scenario.expected == REFUSES and each.entry.endpoint == scenario.path
        if each.reply.status != 200 or (mine and each.changed != usual):
            return i
    return None


def rows(run: Sequence[Exchange]) -> list[tuple[str, float]] | None:
    """(document, score) for every row that the reranker returned; None if it was not asked."""
    for each in of(run, RERANK):
        body = each.reply.body
        items = body if isinstance(body, list) else body.get("results", body.get("data"))
        documents = each.entry.body["documents"]
        names = ("relevance_score", "score")
        return [
            (documents[row["index"]], next(row[name] for name in names if name in row))
            for row in items
        ]
    return None


def vectors(run: Sequence[Exchange], by_position: bool = False) -> dict[str, list[float]]:
    """{input: vector} in the order sent, bound by index or, as a wrong client does, by position."""
    bound = {}
    for each in of(run, EMBEDDINGS):
        items = each.reply.body["data"]
        if not by_position:
            items = sorted(items, key=lambda row: row.get("index") or 0)
        for text, row in zip(models.inputs_of(each.entry.body), items):
            bound[text] = as_numbers(row)["embedding"]
    return bound


def cosines(question: str, bound: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """{input: similarity to the question}, without the question."""
    norm = {text: math.hypot(*vector) for text, vector in bound.items()}
    return {
        text: product / (norm[text] * norm[question])
        for text, product in products(question, bound).items()
    }


def products(question: str, bound: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """{input: dot product with the question}, which is no similarity unless lengths are 1."""
    return {
        text: sum(a * b for a, b in zip(bound[question], vector))
        for text, vector in bound.items()
        if text != question
    }


def best(values: Mapping[str, float], count: int) -> list[str]:
    return sorted(values, key=lambda text: -values[text])[:count]


def said(run: Sequence[Exchange]) -> dict[str, Any]:
    """What the chat model wrote: {"answer", "source_ids"} where that can be read, else {}.

    With quotes it is {"answer", "citations", "source_ids"}, with the ids in the order first cited.
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
    """{"question", "sources"} as the chat model got them; {} if it was not asked."""
    for each in of(run, CHAT):
        return models.question_and_sources(each.entry.body["messages"]) or {}
    return {}


def home(texts: Iterable[str], *parts: str) -> str | None:
    """The shortest of the texts that holds all the parts."""
    holding = [text for text in texts if all(part in text for part in parts)]
    return min(holding, key=len, default=None)


def shown(value: Any, limit: int = 100) -> str:
    plain = isinstance(value, str) and value.isprintable()
    text = json.dumps(value, ensure_ascii=not plain)
    return text if len(text) <= limit else f'{text[: limit - 2]}…"'


# ---- the requests --------------------------------------------------------------------------------


def in_requests(scenario: Scenario, run: Sequence[Exchange], ended: Ended | None) -> list[Finding]:
    """Requests that no client may send, whatever the replies: the first of each kind."""
    if not run:
        return [found(scenario, "no-request", how(ended) if ended else "nothing")]
    kinds: dict[str, Finding] = {}
    before: list[tuple[str, Any]] = []
    stop = broken(scenario, run)
    for i, each in enumerate(run):
        entry = each.entry
        line = f"{entry.method} {entry.path}"
        same = (entry.endpoint, entry.body)
        came = f"{line}, answered {entry.status}: {entry.refused}"
        elsewhere = (entry.scenario or "plain") != scenario.name
        if elsewhere and not (entry.refused and scenario.name == "plain"):
            kinds.setdefault("address-changed", found(scenario, "address-changed", line))
        elif entry.refused and i == stop:  # one that comes later should not have come at all
            kinds.setdefault("request-refused", found(scenario, "request-refused", came))
        elif entry.key_in_body or entry.key_elsewhere:
            kinds.setdefault("key-elsewhere", found(scenario, "key-elsewhere", line))
        elif same in before:
            kinds.setdefault("request-repeated", found(scenario, "request-repeated", line))
        before.append(same)
    return list(kinds.values())


def in_stages(scenario: Scenario, run: Sequence[Exchange], ended: Ended | None) -> list[Finding]:
    """Requests that come too early, too late, too often or not at all."""
    stop = broken(scenario, run)
    if stop is not None:
        after = [each.entry.endpoint for each in run[stop + 1 :]]
        # Batches that are sent at the same time may be on their way when the first reply is bad.
        on_their_way = run[stop].entry.endpoint == EMBEDDINGS and len(after) < MOST_AT_A_TIME
        late = [path for path in after if path != EMBEDDINGS or not on_their_way]
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
    return [found(scenario, "stage-missing", f"{flow}, and nothing to {missing[0]}{end}")]


def may_refuse(scenario: Scenario, run: Sequence[Exchange]) -> bool:
    return scenario.expected == EITHER and any(each.changed for each in run)


# ---- what is in them -----------------------------------------------------------------------------


def in_texts(scenario: Scenario, run: Sequence[Exchange]) -> list[Finding]:
    """Texts that were not embedded, and records that are not the best ones."""
    inputs = [text for each in of(run, EMBEDDINGS) for text in models.inputs_of(each.entry.body)]
    again = [text for text, count in Counter(inputs).items() if count > 1]
    if again:
        return [found(scenario, "input-repeated", shown(again[0]))]
    stop = broken(scenario, run)
    if stop is not None and run[stop].entry.endpoint == EMBEDDINGS:
        return []
    questions = [each.entry.body["query"] for each in of(run, RERANK)]
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
    values = cosines(question, vectors(run))
    for each in of(run, RERANK):
        homes = []
        for document in each.entry.body["documents"]:
            homes.append(home(values, document))
            if homes[-1] is None:
                near = nearest(document, values)
                return [found(scenario, "document-not-embedded", shown(document), near)]
        kept = {text for text in homes if text}
        left = {text: value for text, value in values.items() if text not in kept}
        lowest = min(kept, key=lambda text: values[text])
        if left and max(left.values()) > values[lowest] + CLOSE:
            came = f"{shown(lowest, 50)} was sent, and {shown(best(left, 1)[0], 50)} is nearer"
            ways = [
                f"exactly the documents that one gets {way}"
                for way, wrong in misread_vectors(run, question).items()
                if set(best(wrong, len(kept))) == kept
            ]
            return [found(scenario, "documents-not-nearest", came, ways[0] if ways else "")]
    return []


def misread_vectors(run: Sequence[Exchange], question: str) -> dict[str, dict[str, float]]:
    """Similarities as wrong clients have them."""
    return {
        BY_POSITION: cosines(question, vectors(run, by_position=True)),
        BY_PRODUCT: products(question, vectors(run)),
        "with the lowest similarity first": {
            text: -value for text, value in cosines(question, vectors(run)).items()
        },
    }


def misread_rows(run: Sequence[Exchange]) -> dict[str, list[str]]:
    """The order of documents as wrong clients have it."""
    ranked = rows(run) or []
    documents = [text for each in of(run, RERANK) for text in each.entry.body["documents"]]
    return {
        BY_ROWS: [text for text, _ in ranked],
        "in the order of the documents": documents,
        "with the lowest score first": best({text: -score for text, score in ranked}, len(ranked)),
    }


def ranking(run: Sequence[Exchange], question: str) -> dict[str, float]:
    """{document or input: what sources are ordered by}."""
    ranked = rows(run)
    if ranked is None:
        return cosines(question, vectors(run))
    return {text: max(score for same, score in ranked if same == text) for text, _ in ranked}


def homes_of_sources(run: Sequence[Exchange], question: str) -> list[str | None]:
    """For each source the document or, without a rerank, the input that holds it."""
    texts: Iterable[str] = vectors(run).keys() - {question}
    for each in of(run, RERANK):
        texts = each.entry.body["documents"]
    found_in = []
    for source in asked(run)["sources"]:
        whole = home(texts, source.get("title", ""), source["text"])
        found_in.append(whole or home(texts, source["text"]))
    return found_in


def in_sources(scenario: Scenario, run: Sequence[Exchange], question: str) -> list[Finding]:
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
        own = home(vectors(run), record["text"])  # one of knowledge.json, and not another's
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
    ways = [f"exactly the sources that one gets {way}" for way in misreadings(run, question)]
    return [found(scenario, "sources-not-best", came, ways[0] if ways else "")]


def misreadings(run: Sequence[Exchange], question: str) -> list[str]:
    """The wrong ways of ranking that lead to the sources that were sent, in their order."""
    homes = homes_of_sources(run, question)
    if rows(run) is None:
        wrong = misread_vectors(run, question)
        orders = {way: best(values, len(homes)) for way, values in wrong.items()}
    else:
        orders = {way: order[: len(homes)] for way, order in misread_rows(run).items()}
    return [way for way, order in orders.items() if order == homes]


def nearest(text: str, texts: Iterable[str]) -> str:
    near = difflib.get_close_matches(text, list(texts), n=1, cutoff=0.6)
    return shown(near[0]) if near else ""


# ---- how it ended --------------------------------------------------------------------------------


def due(scenario: Scenario, run: Sequence[Exchange]) -> set[str]:
    """How a correct client may end; empty where a request is missing, which is a finding."""
    if broken(scenario, run) is not None:
        return {REFUSES}
    ends = {REFUSES} if may_refuse(scenario, run) else set()
    if asked(run):
        ends.add(ABSTAINS if said(run)["answer"] is None else ANSWERS)
    elif rows(run) == [] or scenario.expected == MAY_ABSTAIN:
        ends.add(ABSTAINS)
    return ends


def how(ended: Ended) -> str:
    """The end in words."""
    if ended.status is None:
        return "killed"
    lines = ended.stderr.decode("utf-8", "replace").strip().splitlines()
    line = next((line for line in reversed(lines) if "rror" in line), lines[-1] if lines else "")
    return f"exit status {ended.status}" + (f", stderr {shown(line)}" if line else "")


def in_end(scenario: Scenario, run: Sequence[Exchange], ended: Ended, key: str) -> list[Finding]:
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
            findings.append(found(scenario, "refused", f"{scenario.serves}; {how(ended)}"))
        if out:
            came = f"exit status {ended.status}, stdout {shown(out)}"
            findings.append(found(scenario, "stdout-not-empty", came))
    elif ends == {REFUSES}:
        code = "accepted" if out.strip() else "exit-zero"
        came = f"{scenario.serves}; exit status 0, stdout {shown(out)}"
        findings.append(found(scenario, code, came, wrote(run) if scenario.path == CHAT else ""))
    else:
        findings += in_document(scenario, run, ended.stdout, ends)
    return findings


def wrote(run: Sequence[Exchange]) -> str:
    """What the chat model wrote, and which ids it had."""
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
    """What is wrong with the document of a run that ended well."""
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
    """What is wrong with the quotes that were published; nothing, where none were asked for."""
    if not citations:
        return []
    wanted = [(cited["source_id"], plain_marks(cited["quote"])) for cited in citations]
    try:
        came = [(each["id"], plain_marks(each["text"])) for each in quotes]
        ours = [texts[each["id"]][each["start"] : each["end"]] for each in quotes]
        numbers = {type(each[name]) for each in quotes for name in ("start", "end")}
        exact = ours == [each["text"] for each in quotes] and numbers == {int}
    except (TypeError, KeyError, AttributeError):
        came, exact = [], False
    if came == wanted and exact:
        return []
    near = f"cited were {shown(citations, 200)}"
    return [found(scenario, "quotes-differ", shown(quotes, 200), near)]


def plain_marks(text: str) -> str:
    """A quote without what it may differ in: composed, with plain marks and single spaces."""
    signs = str.maketrans("‘’‚‛“”„‟‐‑‒–—―−", "'" * 4 + '"' * 4 + "-" * 7)
    return " ".join(unicodedata.normalize("NFC", text).translate(signs).split())


# ---- what a run could not show -------------------------------------------------------------------


def met(scenario: Scenario, run: Sequence[Exchange]) -> bool:
    """Whether the client got what the scenario is about."""
    own = of(run, scenario.path)
    if scenario.asks and not any(scenario.asks(each.entry.body) for each in own):
        return False
    if scenario.beside:
        return broken(scenario, run) is not None
    free = scenario.change is unchanged or scenario.expected == EITHER
    return free or any(each.changed for each in own)


def unshown(scenario: Scenario, run: Sequence[Exchange]) -> list[Finding]:
    """Why a run without faults is no proof, if it is none."""
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
            came = f"the same sources, {scenario.told_from}"
            return [found(scenario, "order-not-told", came)]
    return []
