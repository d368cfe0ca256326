"""How well records are found, and answers cited, on your own questions: `python -m tests.evaluate`.

It asks the service that the API_* variables name, through the functions of rag.py: the records are
embedded once, all questions in batches, and each question then goes the way that rag.py would send
it. Nothing here says whether an answer is true: that is for a person to read.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import rag
from tests import measures

SAMPLE_QUESTIONS = Path(__file__).resolve().with_name("questions.json")

# What a kind of question is, and how many ids it has: at least, at most.
KINDS = {
    "plain": ("words of the record", 1, 99),
    "paraphrase": ("no word of the record", 1, 99),
    "code": ("an exact code, name or number decides", 1, 99),
    "two-part": ("two or more records are needed", 2, 99),
    "conflict": ("another record says otherwise, and is out of date", 1, 99),
    "language": ("another language than the record's", 1, 99),
    "near-miss": ("a record's topic, which no record answers", 0, 0),
    "unrelated": ("nothing to do with the records", 0, 0),
    "injection": ("orders to the model, with a question or without", 0, 99),
}
VECTORS, KEYWORDS, FUSED, RERANKED = "vectors", "BM25", "fused", "reranked"
ANSWERABLE = ("cited right", "cited wrong", "abstained wrongly", "rejected", "failed")
UNANSWERABLE = ("abstained rightly", "invented", "rejected", "failed")


# ---- the questions file --------------------------------------------------------------------------


@dataclass(frozen=True)
class Question:
    """A labelled question. `ids`: the records that are needed to answer it; () if none does."""

    text: str
    ids: tuple[str, ...]
    kind: str


def read_questions(path: str, known: Sequence[str]) -> list[Question]:
    """The questions of a file, whose ids are all `known`.

    Raises RagError, which names the entry and what is wrong with it."""
    file = rag.shortened(path, 100)
    try:
        data = Path(path).read_bytes().removeprefix(b"\xef\xbb\xbf")
    except OSError as error:
        raise rag.RagError(f"cannot read {file}: {error.strerror} (see --questions)") from None
    entries = rag.expect(rag.strict_json(data, file), list, f"{file}: what must be an array")
    rag.require(entries, f"{file} holds no question")
    numbers: dict[str, int] = {}
    questions = []
    for number, entry in enumerate(entries, 1):
        try:
            question = check_question(entry, known)
            earlier = numbers.setdefault(question.text, number)
            rag.require(earlier == number, f"the same question as entry {earlier}")
        except rag.RagError as error:
            raise rag.RagError(f"{file}, entry {number}: {error}") from None
        questions.append(question)
    return questions


def check_question(entry: Any, known: Sequence[str]) -> Question:
    """The question of an entry. Raises RagError with the rule that it breaks."""
    keys = set(rag.expect(entry, dict, "the entry"))
    right = keys == {"question", "ids", "kind"}
    rag.require(right, "the keys are not `question`, `ids` and `kind`")
    text, kind = (rag.expect(entry[name], str, name) for name in ("question", "kind"))
    rag.require(text.strip(), "the question is blank")
    rag.require(
        kind in KINDS, f'the kind "{rag.shortened(kind, 40)}" is none of {", ".join(KINDS)}'
    )
    ids = rag.expect(entry["ids"], list, "ids")
    for i, name in enumerate(ids):
        shown = f'ids[{i}] is "{rag.shortened(rag.expect(name, str, f"ids[{i}]"), 60)}"'
        rag.require(name in known, f"{shown}, which is the id of no record")
        rag.require(name not in ids[:i], f"{shown}, for the second time")
    _, least, most = KINDS[kind]
    wanted = "no id" if not most else f"at least {least} id{'s' * (least > 1)}"
    rag.require(least <= len(ids) <= most, f"a {kind} question has {wanted}; this has {len(ids)}")
    return Question(text, tuple(ids), kind)


# ---- retrieval -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Base:
    """The records, their vectors in the same order, and the words of their passages."""

    records: Sequence[rag.Record]
    vectors: Sequence[rag.Vector]
    keywords: measures.Keywords


@dataclass(frozen=True)
class Row:
    """A question and what was found for it.

    `nearest`: all records with their similarity, best first; `reranked`: the candidates by the
    rerank model's score; each is empty where its request failed. `failures`: {stage: reason}."""

    question: Question
    vector: rag.Vector | None
    nearest: Sequence[rag.Candidate]
    reranked: Sequence[rag.Candidate]
    rankings: Mapping[str, measures.Ranking]
    failures: Mapping[str, str]


def with_settings(run: rag.Run, **changes: Any) -> rag.Run:
    return replace(run, settings=replace(run.settings, **changes))


def kept_by_rank(settings: rag.Settings) -> int:
    """How many records rank() keeps where there is no floor."""
    return settings.candidates if settings.rerank_model else settings.sources


def ids_of(candidates: Sequence[rag.Candidate]) -> list[str]:
    return [record["id"] for record, _ in candidates]


def embed_all(
    questions: Sequence[Question], records: Sequence[rag.Record], run: rag.Run
) -> tuple[Base, list[rag.Vector | rag.RagError]]:
    """The records with their vectors; and for each question its vector, or why it has none.

    The first question goes with the records, as in a run of rag.py, and ends this one if it fails.
    Of a batch that fails each question is asked again alone, so that the failure is its own."""
    first, *vectors = rag.embed(questions[0].text, records, run)
    found: list[rag.Vector | rag.RagError] = [first]
    texts = [run.settings.query_prefix + question.text for question in questions[1:]]
    for start in range(0, len(texts), run.settings.batch):
        batch = texts[start : start + run.settings.batch]
        try:
            found += rag.embed_batch(batch, len(first), run)[0].values()
        except rag.RagError as error:
            found += (
                [embed_alone(text, len(first), run) for text in batch] if batch[1:] else [error]
            )
        run.progress(f"embedded {len(found)} of {len(questions)} questions")
    index = measures.keywords([rag.passage(record) for record in records])
    return Base(records, vectors, index), found


def embed_alone(text: str, length: int, run: rag.Run) -> rag.Vector | rag.RagError:
    try:
        return rag.embed_batch([text], length, run)[0][text]
    except rag.RagError as error:
        return error


def find(question: Question, vector: rag.Vector | rag.RagError, base: Base, run: rag.Run) -> Row:
    """The rankings of one question by vectors, by words, by both, and by the rerank model if set.

    No floor is applied. The rerank model ranks RAG_CANDIDATES records and is asked for all of them,
    so that its order is known beyond RAG_SOURCES."""
    settings, ids = run.settings, [record["id"] for record in base.records]
    words = measures.by_keywords(question.text, base.keywords, ids)
    last: dict[str, measures.Ranking] = {RERANKED: []} if settings.rerank_model else {}
    if isinstance(vector, rag.RagError):
        rankings = {VECTORS: [], KEYWORDS: words, FUSED: [], **last}
        return Row(question, None, [], [], rankings, {"embeddings": str(vector)})
    everything = with_settings(run, rerank_model="", sources=len(ids), min_similarity=-1.0)
    nearest = rag.rank([vector, *base.vectors], base.records, everything)
    reranked: Sequence[rag.Candidate] = []
    failures = {}
    if settings.rerank_model:
        candidates = nearest[: kept_by_rank(settings)]
        all_of_them = with_settings(run, sources=len(candidates))
        try:
            reranked = rag.rerank(question.text, candidates, all_of_them)
        except rag.RagError as error:
            failures["rerank"] = str(error)
        last = {RERANKED: ids_of(reranked)}
    by_vectors = ids_of(nearest)
    both = measures.fuse(by_vectors, words)
    rankings = {VECTORS: by_vectors, KEYWORDS: words, FUSED: both, **last}
    return Row(question, vector, nearest, reranked, rankings, failures)


# ---- the floor -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sides:
    """{question: similarity} on the two sides of a floor.

    `right`: answerable questions, with the similarity of the record they need (the least of two);
    those whose records rank() does not keep anyway are `unreached`. `wrong`: questions that no
    record answers, with the similarity of the best one. Without a vector a question is on neither.
    Six decimals: vectors of float32 hold no more."""

    right: Mapping[str, float]
    wrong: Mapping[str, float]
    unreached: Sequence[str]


def sides(rows: Sequence[Row], settings: rag.Settings) -> Sides:
    right, wrong, unreached = {}, {}, []
    for row in rows:
        question = row.question
        similarity = {record["id"]: round(score, 6) + 0.0 for record, score in row.nearest}
        reached = ids_of(row.nearest[: kept_by_rank(settings)])
        if row.vector is None:
            continue
        if not question.ids:
            wrong[question.text] = max(similarity.values())
        elif set(question.ids) <= set(reached):
            right[question.text] = min(similarity[name] for name in question.ids)
        else:
            unreached.append(question.text)
    return Sides(right, wrong, unreached)


def floors_of_others(both: Sides) -> dict[str, float | None]:
    """For each question the floor that the other questions recommend: it has no say in its own."""
    right, wrong = measures.left_out([*both.right.values()], [*both.wrong.values()])
    return {**dict(zip(both.right, right)), **dict(zip(both.wrong, wrong))}


# ---- answers -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reply:
    """How a question ended: answered (citing `ids`), abstained, rejected or failed, with a reason.

    `sources`: the ids that were sent, if the chat model was `asked`; `seconds` and `tokens` are of
    that request, None where the service did not tell."""

    end: str
    ids: tuple[str, ...] = ()
    reason: str = ""
    sources: tuple[str, ...] = ()
    asked: bool = False
    tokens: int | None = None
    seconds: float = 0.0


def ask(question: Question, sources: Sequence[rag.Candidate], run: rag.Run) -> Reply:
    """The chat model's reply. What it wrote may be rejected; a service that fails is a failure."""
    lines: list[str] = []
    sent, started = tuple(ids_of(sources)), time.perf_counter()
    try:
        checked = rag.ask(question.text, sources, replace(run, explain=lines.append))
    except rag.RagError as error:
        # Every error of the service names its address; what a model writes is never shown so far.
        failed = run.endpoints["/chat/completions"].url in str(error)
        end, ids, reason = "failed" if failed else "rejected", (), str(error)
    else:
        answered = checked["answer"] is not None
        end, ids = "answered" if answered else "abstained", tuple(checked["source_ids"])
        reason = "" if answered else "sources_do_not_answer"
    seconds = time.perf_counter() - started
    told = re.search(r", (\d+) tokens, \d+ ms$", lines[-1] if lines else "")
    reason = f"answer: {reason}" if end == "failed" else reason
    return Reply(end, ids, reason, sent, True, int(told[1]) if told else None, seconds)


def reply_without_floor(row: Row, run: rag.Run) -> Reply:
    for stage, reason in row.failures.items():
        return Reply("failed", reason=f"{stage}: {reason}")
    found = row.reranked if run.settings.rerank_model else row.nearest
    if not found:
        return Reply("abstained", reason="reranker_kept_nothing")
    return ask(row.question, found[: run.settings.sources], run)


def reply_with_floor(
    row: Row, base: Base, floor: float | None, plain: Reply, run: rag.Run
) -> Reply:
    """The reply where less similar records are dropped: `plain` itself if no source changes."""
    if row.vector is None or floor is None:
        return plain
    before = row.nearest[: kept_by_rank(run.settings)]
    floored = with_settings(run, min_similarity=floor)
    sources = rag.rank([row.vector, *base.vectors], base.records, floored)
    if len(sources) == len(before):
        return plain
    if not sources:
        return Reply("abstained", reason="below_min_similarity")
    if run.settings.rerank_model:
        try:
            sources = rag.rerank(row.question.text, sources, floored)
        except rag.RagError as error:
            return Reply("failed", reason=f"rerank: {error}")
    if not sources:
        return Reply("abstained", reason="reranker_kept_nothing")
    if tuple(ids_of(sources)) == plain.sources:
        return plain
    return ask(row.question, sources, run)


def outcome(question: Question, reply: Reply) -> str:
    """One of ANSWERABLE or UNANSWERABLE. Cited right: all the ids that are needed, and no other."""
    if reply.end == "abstained":
        return "abstained wrongly" if question.ids else "abstained rightly"
    if reply.end != "answered":
        return reply.end
    if not question.ids:
        return "invented"
    return "cited right" if set(reply.ids) == set(question.ids) else "cited wrong"


def reason_kind(reason: str) -> str:
    """A reason without what differs from reply to reply: equal faults are counted as one."""
    reason = re.sub(r"^reply \d+ of \d+ rejected: ", "", reason)
    reason = reason.removesuffix("; API_RESPONSE_FORMAT or more RAG_ATTEMPTS may help")
    return re.sub(r"\d+", "N", re.sub(r'"[^"]*"', '"…"', reason))


# ---- the figures, as plain data ------------------------------------------------------------------


def share(count: int, of: int) -> dict[str, Any]:
    low, high = measures.wilson(count, of)
    return {"count": count, "of": of, "low": round(low, 4), "high": round(high, 4)}


def mean(numbers: Sequence[float], digits: int) -> float | None:
    return round(sum(numbers) / len(numbers), digits) if numbers else None


def retrieval_figures(rows: Sequence[Row], limit: int) -> dict[str, Any]:
    """{system: hit@1, hit@k, mean reciprocal rank}, over all answerable questions."""
    figures = {}
    for system in rows[0].rankings:
        found = [(row.rankings[system], row.question.ids) for row in rows if row.question.ids]
        first = sum(measures.first_is_needed(ranking, ids) for ranking, ids in found)
        within = sum(measures.all_within(ranking, ids, limit) for ranking, ids in found)
        figures[system] = {
            "hit_at_1": share(first, len(found)),
            "hit_at_k": share(within, len(found)),
            "mean_reciprocal_rank": mean([measures.reciprocal_rank(*each) for each in found], 4),
        }
    return figures


def by_kind(rows: Sequence[Row], limit: int) -> dict[str, Any]:
    """{kind: {system: hit@k}}, over the answerable questions of each kind."""
    asked = [row for row in rows if row.question.ids]
    figures: dict[str, Any] = {}
    for kind in [kind for kind in KINDS if any(row.question.kind == kind for row in asked)]:
        same = [row for row in asked if row.question.kind == kind]
        hits = {
            system: sum(
                measures.all_within(r.rankings[system], r.question.ids, limit) for r in same
            )
            for system in same[0].rankings
        }
        figures[kind] = {system: share(count, len(same)) for system, count in hits.items()}
    return figures


def differences(rows: Sequence[Row], limit: int) -> list[dict[str, Any]]:
    """For each two systems the questions that one gets and the other misses, at 1 and at k."""
    found = []
    systems = [*rows[0].rankings]
    for got, missed in ((a, b) for a in systems for b in systems if a != b):
        at_1, at_k = [], []
        for row in (row for row in rows if row.question.ids):
            ids, one, other = row.question.ids, row.rankings[got], row.rankings[missed]
            if measures.first_is_needed(one, ids) and not measures.first_is_needed(other, ids):
                at_1.append(row.question.text)
            if measures.all_within(one, ids, limit) and not measures.all_within(other, ids, limit):
                at_k.append(row.question.text)
        found.append({"got_by": got, "missed_by": missed, "at_1": at_1, "at_k": at_k})
    return found


def effect(right: Sequence[float], wrong: Sequence[float], floor: float | None) -> dict[str, Any]:
    """A floor, and what it would keep and drop."""
    kept, dropped = measures.kept(right, floor), len(wrong) - measures.kept(wrong, floor)
    return {
        "floor": floor,
        "kept": share(kept, len(right)),
        "dropped": share(dropped, len(wrong)),
    }


def floor_figures(both: Sides, settings: rag.Settings) -> dict[str, Any]:
    right, wrong = [*both.right.values()], [*both.wrong.values()]
    others = floors_of_others(both)
    floors = {floor for floor in others.values() if floor is not None}
    safe = measures.harmless_floor(right, wrong)
    set_by_user = settings.min_similarity > -1
    kept_alone = [measures.kept([each], others[text]) for text, each in both.right.items()]
    dropped_alone = [1 - measures.kept([each], others[text]) for text, each in both.wrong.items()]
    return {
        "right": [round(each, 6) for each in sorted(right)],
        "wrong": [round(each, 6) for each in sorted(wrong)],
        "unreached": [*both.unreached],
        "clean": bool(right and wrong) and max(wrong) < min(right),
        "recommended": effect(right, wrong, measures.best_floor(right, wrong)),
        "left_out": {
            "lowest": min(floors, default=None),
            "highest": max(floors, default=None),
            "none": sum(floor is None for floor in others.values()),
            "kept": share(sum(kept_alone), len(right)),
            "dropped": share(sum(dropped_alone), len(wrong)),
        },
        "harmless": effect(right, wrong, safe) if safe is not None else None,
        "yours": effect(right, wrong, settings.min_similarity) if set_by_user else None,
    }


def answer_figures(pairs: Sequence[tuple[Question, Reply]]) -> dict[str, Any]:
    """The outcomes, and precision and recall of the citations of all questions together.

    Precision: of the ids cited, those that were needed (of an invented answer none is). Recall: of
    the ids needed, those that were cited."""
    ends = Counter((bool(question.ids), outcome(question, reply)) for question, reply in pairs)
    answerable = sum(bool(question.ids) for question, _ in pairs)
    cited = sum(len(reply.ids) for _, reply in pairs)
    needed = sum(len(question.ids) for question, _ in pairs)
    both = sum(len({*question.ids} & {*reply.ids}) for question, reply in pairs)
    asked = [reply for _, reply in pairs if reply.asked]
    told = [reply.tokens for reply in asked if reply.tokens is not None]
    reasons = Counter(reason_kind(reply.reason) for _, reply in pairs if reply.end == "rejected")
    abstained = Counter(reply.reason for _, reply in pairs if reply.end == "abstained")
    return {
        "answerable": {end: share(ends[True, end], answerable) for end in ANSWERABLE},
        "unanswerable": {
            end: share(ends[False, end], len(pairs) - answerable) for end in UNANSWERABLE
        },
        "citation_precision": share(both, cited),
        "citation_recall": share(both, needed),
        "rejected": dict(reasons.most_common()),
        "abstained": dict(abstained.most_common()),
        "chat": {
            "questions": len(asked),
            "told_tokens": len(told),
            "tokens": sum(told),
            "seconds": round(sum(reply.seconds for reply in asked), 3),
        },
    }


@dataclass(frozen=True)
class Answers:
    """The replies to all questions, in their order. `with_floor` is empty where there is none.

    `with_quotes` has no floor, but RAG_QUOTES=1; the others have no quotes."""

    floor: str
    without: Sequence[Reply]
    with_floor: Sequence[Reply]
    with_quotes: Sequence[Reply]


def failures_of(rows: Sequence[Row], answers: Answers | None) -> list[dict[str, str]]:
    """Each request that the service failed: question, stage, reason."""
    found = [
        {"question": row.question.text, "stage": stage, "reason": reason}
        for row in rows
        for stage, reason in row.failures.items()
    ]
    every = (answers.without, answers.with_floor, answers.with_quotes) if answers else ()
    for replies in every:
        for row, reply in zip(rows, replies):
            if reply.end == "failed" and not row.failures:
                stage, reason = reply.reason.split(": ", 1)
                found.append({"question": row.question.text, "stage": stage, "reason": reason})
    return [failure for i, failure in enumerate(found) if failure not in found[:i]]


def one_question(row: Row, replies: Mapping[str, Reply]) -> dict[str, Any]:
    """What was measured of one question."""
    question = row.question
    places = {
        system: measures.places(ranking, question.ids) for system, ranking in row.rankings.items()
    }
    return {
        "question": question.text,
        "kind": question.kind,
        "ids": [*question.ids],
        "places": places,
        "nearest": [[record["id"], round(score, 6)] for record, score in row.nearest[:3]],
        "answers": {
            name: {
                "outcome": outcome(question, reply),
                "cited": [*reply.ids],
                "reason": reply.reason,
            }
            for name, reply in replies.items()
        },
    }


def figures(rows: Sequence[Row], answers: Answers | None, base: Base, run: rag.Run) -> Any:
    """Everything that was measured, as one JSON document."""
    settings, questions = run.settings, [row.question for row in rows]
    failures = failures_of(rows, answers)
    replies: dict[str, Sequence[Reply]] = {}
    if answers:
        with_floor = {"with_floor": answers.with_floor} if answers.with_floor else {}
        with_quotes = {"with_quotes": answers.with_quotes}
        replies = {"without_floor": answers.without, **with_floor, **with_quotes}
    measured = {name: answer_figures([*zip(questions, each)]) for name, each in replies.items()}
    return {
        "questions": {
            "all": len(rows),
            "answerable": sum(bool(question.ids) for question in questions),
            "failed": len({failure["question"] for failure in failures}),
        },
        "records": len(base.records),
        "models": {
            "embedding": settings.embedding_model,
            "rerank": settings.rerank_model or None,
            "chat": settings.model if answers else None,
        },
        "sources": settings.sources,
        "candidates": kept_by_rank(settings),
        "retrieval": retrieval_figures(rows, settings.sources),
        "kinds": by_kind(rows, settings.sources),
        "differences": differences(rows, settings.sources),
        "floor": floor_figures(sides(rows, settings), settings),
        "answers": {"floor": answers.floor, **measured} if answers else None,
        "failures": failures,
        "each": [
            one_question(row, {name: each[i] for name, each in replies.items()})
            for i, row in enumerate(rows)
        ],
    }


# ---- the figures, for people ---------------------------------------------------------------------

WIDTH = 60  # columns of a strip
COLUMNS = {
    "without_floor": "without a floor",
    "with_floor": "with a floor",
    "with_quotes": "with quotes",
}


def shown(part: Mapping[str, Any]) -> str:
    """A share of a small count: "12 of 15 (55 to 93 %)"."""
    count = f"{part['count']} of {part['of']}"
    if not part["of"]:
        return count
    return f"{count} ({part['low'] * 100:.0f} to {part['high'] * 100:.0f} %)"


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as lines, with columns as wide as they need."""
    wide = [max(map(len, cells)) for cells in zip(*rows)]
    return ["  ".join(f"{cell:<{n}}" for cell, n in zip(row, wide)).rstrip() for row in rows]


def as_text(document: Mapping[str, Any]) -> str:
    count, models = document["questions"], document["models"]
    unanswerable = count["all"] - count["answerable"]
    named = [models["embedding"], models["rerank"] or "no rerank model", models["chat"]]
    reranked = min(document["candidates"], document["records"])
    candidates = f", {reranked} candidates" if models["rerank"] else ""
    retrieval = ["RETRIEVAL  no question is answerable"]
    if count["answerable"]:
        retrieval = retrieval_text(document)
    lines = [
        f"{count['all']} questions on {document['records']} records: {count['answerable']} "
        f"answerable, {unanswerable} not; {count['failed']} failed",
        f"{', '.join(filter(None, named))}; k = {document['sources']}{candidates}",
        *["", *retrieval],
        *["", *floor_text(document["floor"])],
        *(["", *answer_text(document["answers"])] if document["answers"] else []),
        *failure_text(document["failures"]),
    ]
    return "\n".join(lines)


def failure_text(failures: Sequence[Mapping[str, str]]) -> list[str]:
    """The failed questions, by stage and reason; of reasons that differ in details, the first."""
    groups: dict[tuple[str, str], list[Mapping[str, str]]] = {}
    for each in failures:
        groups.setdefault((each["stage"], reason_kind(each["reason"])), []).append(each)
    lines = []
    for (stage, _), group in groups.items():
        reason = rag.shortened(group[0]["reason"], 300)
        lines += ["", f"FAILED at {stage}, {len(group)} of the questions: {reason}"]
        lines += [f"  {title(each['question'])}" for each in group]
    return lines


def title(question: str) -> str:
    return f'"{rag.shortened(question, 60)}"'


def retrieval_text(document: Mapping[str, Any]) -> list[str]:
    k, figures = document["sources"], document["retrieval"]
    rows = [["RETRIEVAL", "hit@1", f"hit@{k}" if k > 1 else "all at 1", "MRR"]]
    for system, part in figures.items():
        rows.append([
            system, shown(part["hit_at_1"]), shown(part["hit_at_k"]),
            f"{part['mean_reciprocal_rank']:.2f}",
        ])  # fmt: skip
    kinds = [[f"hit@{k} by kind", *figures]]
    for kind, parts in document["kinds"].items():
        kinds.append([kind, *(f"{part['count']} of {part['of']}" for part in parts.values())])
    return [*table(rows), "", *table(kinds), "", *difference_text(document)]


def difference_text(document: Mapping[str, Any]) -> list[str]:
    """The questions that one system gets and another misses, with the places of their records."""
    systems = [*document["retrieval"]]
    pairs = document["differences"]
    told = {text for pair in pairs for text in (*pair["at_1"], *pair["at_k"])}
    rows = [[*systems, "PLACES of the needed records, where one gets what another misses"]]
    for each in document["each"]:
        if each["question"] in told:
            found = [each["places"][system] for system in systems]
            cells = ["+".join(str(place or "-") for place in places) for places in found]
            rows.append([*cells, title(each["question"])])
    return table(rows) if told else ["no question that one gets and another misses"]


def floor_text(floor: Mapping[str, Any]) -> list[str]:
    right, wrong, best = floor["right"], floor["wrong"], floor["recommended"]
    lines = strips(right, wrong, best["floor"]) if right or wrong else []
    if not right or not wrong:
        side = "answerable question whose records are found" if wrong else "unanswerable question"
        return [*lines, f"no floor can be measured: there is no {side}"]
    least, most, harmless, yours = min(right), max(wrong), floor["harmless"], floor["yours"]
    if floor["clean"]:
        lines.append(f"gap: nothing between {most:.3f} and {least:.3f}")
    else:
        inside = sum(least <= each <= most for each in right + wrong)
        lines.append(f"overlap: {inside} of {len(right + wrong)} lie in {least:.3f} to {most:.3f}")
        known = "no clean floor on this set"
        better = ": best trade-off" if best["floor"] is not None else ", and none is better"
        lines.append(known + better)
    if best["floor"] is not None:
        lines += [f"export RAG_MIN_SIMILARITY={best['floor']}", f"  {effect_text(best)}"]
    lines += stability_text(floor["left_out"])
    if harmless and not floor["clean"]:
        lines.append(f"  to lose none, {harmless['floor']}: {effect_text(harmless)}")
    if yours:
        lines.append(f"  yours, {yours['floor']:g}: {effect_text(yours)}")
    if floor["unreached"]:
        lines.append(f"  not counted: {len(floor['unreached'])} whose records are no candidates")
    return lines


def stability_text(left_out: Mapping[str, Any]) -> list[str]:
    if left_out["lowest"] is None:
        return []
    none = f", and {left_out['none']} times none" if left_out["none"] else ""
    return [
        f"  with one question left out: {left_out['lowest']} to {left_out['highest']}{none}",
        f"  each under the floor of the others: {effect_text(left_out)}",
    ]


def effect_text(part: Mapping[str, Any]) -> str:
    return f"keeps {shown(part['kept'])}, drops {shown(part['dropped'])}"


def strips(right: Sequence[float], wrong: Sequence[float], floor: float | None) -> list[str]:
    """Two strips on one axis, and below them the floor and the ends of the axis."""
    low, high = min([*right, *wrong]), max([*right, *wrong])
    lines = ["FLOOR         similarity of the needed record; of the best one, where none answers"]
    for label, values in (("needed", right), ("unanswerable", wrong)):
        lines.append(f"{label:<12}  |{measures.strip(values, low, high, WIDTH)}|")
    if floor is not None:
        lines.append(f"{'':<15}{' ' * measures.column(floor, low, high, WIDTH)}^ {floor}")
    left, right_end = f"{low:.3f}", f"{high:.3f}"
    lines.append(f"{'':<15}{left}{right_end:>{WIDTH - len(left)}}")
    return lines


def answer_text(answers: Mapping[str, Any]) -> list[str]:
    heads = {name: head for name, head in COLUMNS.items() if name in answers}
    columns = [answers[name] for name in heads]
    rows = [["ANSWERS", *heads.values()]]
    for group, ends in (("answerable", ANSWERABLE), ("unanswerable", UNANSWERABLE)):
        for end in ends:
            parts = [each[group][end] for each in columns]
            seldom = end in ("rejected", "failed")
            if not seldom or any(part["count"] for part in parts):
                rows.append([f"{end} ({group})" if seldom else end, *map(shown, parts)])
    for name in ("citation precision", "citation recall"):
        rows.append([name, *(shown(each[name.replace(" ", "_")]) for each in columns)])
    lines = table(rows)
    for reason in dict.fromkeys(reason for each in columns for reason in each["rejected"]):
        counts = ", ".join(str(each["rejected"].get(reason, 0)) for each in columns)
        lines.append(f"rejected ({counts}): {rag.shortened(reason, 200)}")
    lines += [f"{name}: {chat_text(each['chat'])}" for name, each in zip(rows[0][1:], columns)]
    told = f"floor: {answers['floor']}"
    return [*lines, told if "with_floor" in heads else "no floor to compare with"]


def chat_text(chat: Mapping[str, Any]) -> str:
    """How many questions the chat model was asked, and what one took, in tokens and time."""
    asked, told = chat["questions"], chat["told_tokens"]
    if not asked:
        return "the chat model was not asked"
    tokens = f"{chat['tokens'] / told:.0f}" if told else "untold"
    some = f" (told by {told})" if 0 < told < asked else ""
    time_each = f"{chat['seconds'] / asked * 1000:.0f} ms"
    return f"the chat model was asked {asked} times, {tokens} tokens{some} and {time_each} each"


# ---- the command line ----------------------------------------------------------------------------

HELP = """\
questions file: a JSON array of objects, each with exactly these keys:
  question  text, in a user's words; no question twice
  ids       the ids of all records that are needed to answer it; [] if none answers it
  kind      {kinds}

hit@1: the first record is one that is needed. hit@k: all that are needed are among the first k
(RAG_SOURCES). MRR: the mean of 1 / the place of the first record that is needed, 0 if not found.
A question that the service failed counts as missed, and is named.

exit status:
  0  measured
  1  a stage failed: one line on stderr
  130  Ctrl-C"""


class Arguments(argparse.ArgumentParser):
    """argparse, but a usage error is one line, like every other failure."""

    def error(self, message: str) -> NoReturn:
        raise rag.RagError(f"{message} (--help tells more)")


def arguments() -> Arguments:
    about = "Measures retrieval, the similarity floor and answers on labelled questions."
    parser = Arguments(prog="python -m tests.evaluate", allow_abbrev=False, description=about)
    parser.add_argument("--knowledge", metavar="FILE", help="overrides RAG_KNOWLEDGE")
    parser.add_argument("--questions", metavar="FILE", help="default: the sample questions")
    asks = "ask the chat model too: without and with a floor, and with quotes"
    parser.add_argument("--answers", action="store_true", help=asks)
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    kinds = [f"{kind}: {what}{limits(least, most)}" for kind, (what, least, most) in KINDS.items()]
    parser.epilog = HELP.format(kinds=f"\n{'':12}".join(kinds))
    return parser


def limits(least: int, most: int) -> str:
    return " (no ids)" if not most else f" ({least} or more ids)" if least else " (any ids)"


@contextlib.contextmanager
def opened(
    settings: rag.Settings, records: Sequence[rag.Record], questions: Sequence[Question]
) -> Iterator[rag.Run]:
    """A run of rag.py for many questions: its client and cache, which are closed at the end."""
    with rag.stage("settings"):
        endpoints = rag.connect(settings)
        cache = rag.open_cache(settings.cache) if settings.cache else None
    if any(rag.in_the_clear(endpoint.url) for endpoint in endpoints.values()):
        rag.tell("evaluate: warning: plain http: key and records can be read on the way")
    owners = {question.text: "the question" for question in questions}
    owners |= {rag.passage(record): record["id"] for record in records}
    watched = rag.terminal(sys.stderr)
    progress = (lambda line: rag.tell(f"{line:<50}", "\r")) if watched else rag.silent
    with endpoints["/chat/completions"].client, contextlib.closing(cache or contextlib.ExitStack()):
        yield rag.Run(settings, endpoints, lambda: owners, rag.silent, progress, cache)


def measure(
    questions: Sequence[Question], records: Sequence[rag.Record], with_answers: bool, run: rag.Run
) -> Any:
    """The figures. Raises RagError if there is nothing to measure."""
    with rag.stage("embeddings"):
        base, vectors = embed_all(questions, records, run)
    rows = []
    for question, vector in zip(questions, vectors):
        rows.append(find(question, vector, base, run))
        run.progress(f"searched for {len(rows)} of {len(questions)} questions")
    answers = answer_all(rows, base, run) if with_answers else None
    run.progress("")
    return figures(rows, answers, base, run)


def answer_all(rows: Sequence[Row], base: Base, run: rag.Run) -> Answers:
    """All questions, with and without a floor, and with quotes.

    The floor is RAG_MIN_SIMILARITY or, where it is not set, for each question the one that the
    others recommend: a floor fits the questions that it is made from."""
    quoting, run = with_settings(run, quotes="1"), with_settings(run, quotes="0")
    fixed = run.settings.min_similarity
    floors = floors_of_others(sides(rows, run.settings))
    told = "for each question the floor that the others recommend"
    if fixed > -1:
        floors = {row.question.text: fixed for row in rows}
        told = f"RAG_MIN_SIMILARITY={fixed:g}"
    without, with_floor, with_quotes = [], [], []
    for row in rows:
        without.append(reply_without_floor(row, run))
        floor = floors.get(row.question.text)
        with_floor.append(reply_with_floor(row, base, floor, without[-1], run))
        with_quotes.append(reply_without_floor(row, quoting))
        run.progress(f"asked {len(without)} of {len(rows)} questions")
    some = any(floor is not None for floor in floors.values())
    return Answers(told, without, with_floor if some else [], with_quotes)


def document(argv: Sequence[str] | None) -> str:
    """The text for stdout. Raises RagError with the stage that failed."""
    with rag.stage("usage"):
        options = arguments().parse_args(argv)
    with rag.stage("settings"):
        settings = rag.read_settings(os.environ)
    path = settings.knowledge if options.knowledge is None else options.knowledge
    with rag.stage("knowledge"):
        records = rag.read_knowledge(path)
    with rag.stage("usage"):
        sample = path == str(rag.SAMPLE_KNOWLEDGE)
        needed = "give --questions: the sample ones are for the sample knowledge file"
        rag.require(sample or options.questions is not None, needed)
    with rag.stage("questions"):
        source = str(SAMPLE_QUESTIONS) if options.questions is None else options.questions
        questions = read_questions(source, [record["id"] for record in records])
    with opened(settings, records, questions) as run:
        measured = measure(questions, records, options.answers, run)
    if not options.json:
        return as_text(measured)
    indent = 2 if rag.terminal(sys.stdout) else None
    return json.dumps(measured, ensure_ascii=False, indent=indent)


def main(argv: Sequence[str] | None = None) -> int:
    """0 if everything was measured, 1 if not."""
    try:
        rag.write(sys.stdout, document(argv))
    except rag.RagError as error:
        rag.tell(f"evaluate: {error.stage}: {rag.shortened(str(error), 470)}")
        return 1
    except BrokenPipeError:  # the reader has left, and needs no word
        return 1
    except OSError as error:
        rag.tell(f"evaluate: publish: cannot write to stdout: {error.strerror}")
        return 1
    return 0


if __name__ == "__main__":
    status = 130  # where Ctrl-C cuts main() short
    with contextlib.suppress(KeyboardInterrupt):
        status = main()
    sys.exit(status)
