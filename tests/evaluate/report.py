"""The figures of an evaluation, as one JSON document and as text."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import rag
from tests.evaluate import answers, measures, retrieval
from tests.evaluate.answers import Reply, outcome, title
from tests.evaluate.questions import KINDS
from tests.evaluate.retrieval import Row

CITED = (answers.RIGHT, answers.OTHERS_TOO, answers.WRONG)
NO_ANSWER = (answers.ABSTAINED, answers.REJECTED, answers.FAILED)
OUTCOMES = {"answerable": (*CITED, *NO_ANSWER), "unanswerable": (answers.UNSUPPORTED, *NO_ANSWER)}
REPORTED_SETTINGS = (
    "API_EMBEDDING_MODEL", "API_RERANK_MODEL", "API_MODEL", "API_QUERY_PREFIX",
    "API_DOCUMENT_PREFIX", "API_RESPONSE_FORMAT", "API_CHAT_OPTIONS", "RAG_CANDIDATES",
    "RAG_SOURCES", "RAG_MIN_SIMILARITY", "RAG_ATTEMPTS",
)  # fmt: skip


# ---- the figures, as plain data ------------------------------------------------------------------


def figures(
    rows: Sequence[Row], replies: Sequence[Mapping[str, Reply]], settings: rag.Settings
) -> dict[str, Any]:
    """Return everything that was measured. replies: for each row {variant: reply}."""
    k, asked = settings.RAG_SOURCES, [row for row in rows if row.question.needs]
    by_kind = {kind: [row for row in asked if row.question.kind == kind] for kind in KINDS}
    variants = {name: [each[name] for each in replies] for name in replies[0]}
    return {
        "settings": {name: getattr(settings, name) for name in REPORTED_SETTINGS},
        "questions": len(rows),
        "answerable": len(asked),
        "retrieval": retrieval_figures(asked, k),
        "kinds": {kind: retrieval_figures(same, k) for kind, same in by_kind.items() if same},
        "threshold": threshold_figures(rows, settings.RAG_MIN_SIMILARITY),
        "answers": {name: answer_figures(rows, each) for name, each in variants.items()},
        "failures": failures(rows, replies),
        "each": [question_figures(row, each) for row, each in zip(rows, replies)],
    }


def share(count: int, of: int) -> dict[str, Any]:
    """Return a share with its 95 % interval."""
    low, high = measures.wilson(count, of)
    return {"count": count, "of": of, "low": round(low, 4), "high": round(high, 4)}


def retrieval_figures(rows: Sequence[Row], k: int) -> dict[str, Any]:
    """Return {search: hit@1, hit@k, mean reciprocal rank} over answerable questions."""
    result = {}
    for search in rows[0].places if rows else ():
        found = [row.places[search] for row in rows]
        result[search] = {
            "hit_at_1": share(sum(map(measures.hit_at_1, found)), len(found)),
            "hit_at_k": share(sum(measures.hit_at_k(each, k) for each in found), len(found)),
            "mean_reciprocal_rank": sum(map(measures.reciprocal_rank, found)) / len(found),
        }
    return result


def threshold_figures(rows: Sequence[Row], own: float | None) -> dict[str, Any]:
    """Return the effects of the recommended threshold, of alternatives and of your own one.

    Each keeps and loses needed records that are found, and drops unanswerable questions."""
    needed = sorted(score for row in rows for score in retrieval.needed(row))
    unanswerable = sorted(score for row in rows for score in retrieval.unanswerable(row))

    def effect(threshold: float | None) -> dict[str, Any] | None:
        if threshold is None:
            return None
        kept = sum(each >= threshold for each in needed)
        dropped = sum(each < threshold for each in unanswerable)
        keeps, drops = share(kept, len(needed)), share(dropped, len(unanswerable))
        return {"value": threshold, "keeps": keeps, "loses": len(needed) - kept, "drops": drops}

    best, others = retrieval.recommended(rows), retrieval.alternatives(rows)
    return {
        "needed": needed,
        "not_found": sum(len(row.question.needs) for row in rows) - len(needed),
        "unanswerable": unanswerable,
        "recommended": effect(best),
        "alternatives": [effect(each) for each in others if each != best],
        "own": effect(own),
    }


def answer_figures(rows: Sequence[Row], replies: Sequence[Reply]) -> dict[str, Any]:
    """Return the outcomes, the reasons of all rejected replies, and the costs.

    asked_again: outcomes of the questions that were asked again after a rejected reply, and the
    tokens of the further replies. Tokens that the server does not report count as 0."""
    pairs = [(row.question, reply) for row, reply in zip(rows, replies)]
    attempts = [attempt for reply in replies for attempt in reply.attempts]
    again = [(question, reply) for question, reply in pairs if reply.attempts[1:]]
    shares = {}
    for group, ends in OUTCOMES.items():
        same = [pair for pair in pairs if bool(pair[0].needs) == (group == "answerable")]
        counts = Counter(outcome(*pair) for pair in same)
        shares[group] = {end: share(counts[end], len(same)) for end in ends}
    return {
        **shares,
        "rejected": dict(Counter(kind_of(each.rejected) for each in attempts if each.rejected)),
        "replies": len(attempts),
        "tokens": sum(each.tokens or 0 for each in attempts),
        "seconds": round(sum(each.seconds for each in attempts), 3),
        "asked_again": {
            "outcomes": dict(Counter(outcome(*pair) for pair in again)),
            "tokens": sum(each.tokens or 0 for _, reply in again for each in reply.attempts[1:]),
        },
    }


def kind_of(reason: str) -> str:
    """Return a reason without names and numbers, so that equal faults are counted together."""
    return re.sub(r"\d+", "N", re.sub(r'"[^"]*"', '"…"', reason))


def failures(rows: Sequence[Row], replies: Sequence[Mapping[str, Reply]]) -> list[dict[str, str]]:
    """Return {question, reason} for each failed request and malformed reply."""
    found = []
    for row, each in zip(rows, replies):
        ends = [reply.reason for reply in each.values() if reply.end == answers.FAILED]
        for reason in dict.fromkeys(filter(None, [row.failure, *ends])):
            found.append({"question": row.question.text, "reason": reason})
    return found


def question_figures(row: Row, replies: Mapping[str, Reply]) -> dict[str, Any]:
    """Return what was measured of one question."""
    said = {
        name: {"outcome": outcome(row.question, reply), **asdict(reply)}
        for name, reply in replies.items()
    }
    return {
        "question": row.question.text,
        "kind": row.question.kind,
        "needs": [sorted(need) for need in row.question.needs],
        "places": row.places,
        "nearest": [[record["id"], score] for record, score in row.candidates[:3]],
        "answers": said,
    }


# ---- the figures, as text ------------------------------------------------------------------------


def shown(part: Mapping[str, Any]) -> str:
    """Return a share as "12 of 15 (55 to 93 %)"."""
    low, high = round(100 * part["low"]), round(100 * part["high"])
    return f"{part['count']} of {part['of']}" + f" ({low} to {high} %)" * bool(part["of"])


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as lines with aligned columns."""
    wide = [max(map(len, cells)) for cells in zip(*rows)]
    return ["  ".join(f"{cell:<{n}}" for cell, n in zip(row, wide)).rstrip() for row in rows]


def as_text(document: Mapping[str, Any]) -> str:
    """Return the report on the figures."""
    settings, count = document["settings"], document["questions"]
    answerable = document["answerable"]
    names = ("API_EMBEDDING_MODEL", "API_RERANK_MODEL", "API_MODEL")
    lines = [
        f"{count} questions: {answerable} answerable, {count - answerable} not",
        f"models: {', '.join(settings[name] for name in names if settings[name])}",
        "",
    ]
    lines += retrieval_text(document) if answerable else ["RETRIEVAL  no question is answerable"]
    lines += ["", *threshold_text(document["threshold"])]
    if document["answers"]:
        lines += ["", *answer_text(document["answers"], settings["RAG_MIN_SIMILARITY"])]
    return "\n".join(lines + failure_text(document["failures"]))


def retrieval_text(document: Mapping[str, Any]) -> list[str]:
    """Return the tables of all searches, and the questions in which they differ."""
    k, searches = document["settings"]["RAG_SOURCES"], document["retrieval"]
    rows = [["RETRIEVAL", "hit@1", f"hit@{k}" if k > 1 else "all at 1", "MRR"]]
    for name, part in searches.items():
        mrr = f"{part['mean_reciprocal_rank']:.2f}"
        rows.append([name, shown(part["hit_at_1"]), shown(part["hit_at_k"]), mrr])
    kinds = [[f"hit@{k} by kind", *searches]]
    for kind, parts in document["kinds"].items():
        hits = [part["hit_at_k"] for part in parts.values()]
        kinds.append([kind, *(f"{hit['count']} of {hit['of']}" for hit in hits)])
    different = [[*searches, "PLACES of the needed records, where the searches differ"]]
    for each in document["each"]:
        found = each["places"].values()
        if len({(measures.hit_at_1(one), measures.hit_at_k(one, k)) for one in found}) > 1:
            cells = ["+".join(str(place or "-") for place in one) for one in found]
            different.append([*cells, title(each["question"])])
    return [*table(rows), "", *table(kinds), *(["", *table(different)] if different[1:] else [])]


def threshold_text(found: Mapping[str, Any]) -> list[str]:
    """Return the line to export, and the effects of thresholds."""
    needed, best = found["needed"], found["recommended"]
    if not needed or not found["unanswerable"]:
        side = "unanswerable question" if needed else "needed record that is found"
        return [f"THRESHOLD  cannot be measured: there is no {side}"]
    rows = [["THRESHOLD", "needed records kept", "lost", "unanswerable questions dropped"]]
    effects = [best, *found["alternatives"], found["own"]]
    for each in filter(None, effects):
        kept, dropped = shown(each["keeps"]), shown(each["drops"])
        note = " (RAG_MIN_SIMILARITY)" * (each is found["own"])
        rows.append([f"{each['value']:g}", kept, str(each["loses"]), dropped + note])
    first = "no threshold helps on this set: one that loses no needed record drops nothing"
    if best:
        first = f"export RAG_MIN_SIMILARITY={best['value']:g}"
    note = "these figures are optimistic: the thresholds were chosen on the same questions"
    lines = [*table(rows), first, note]
    if found["not_found"]:
        lines.append(f"not counted: {found['not_found']} needed records that are not found")
    return lines


def answer_text(columns: Mapping[str, Any], threshold: float | None) -> list[str]:
    """Return the outcomes, rejections and costs of each variant."""
    rows = [["ANSWERS", *columns]]
    for group, outcomes in OUTCOMES.items():
        rows.append([f"{group} questions", *[""] * len(columns)])
        for end in outcomes:
            rows.append([f"  {end}", *(shown(each[group][end]) for each in columns.values())])
    lines = table(rows)
    for name, each in columns.items():
        count, again = each["replies"], each["asked_again"]["outcomes"]
        if count:
            tokens, milliseconds = each["tokens"] / count, 1000 * each["seconds"] / count
            cost = f"{tokens:.0f} tokens and {milliseconds:.0f} ms each"
            lines.append(f"{name}: {count} replies, {cost}")
        if again:
            ends = ", ".join(f"{end} {number}" for end, number in again.items())
            lines.append(f"  asked again: {ends}; {each['asked_again']['tokens']} tokens")
        lines += [f"  rejected {number}: {reason}" for reason, number in each["rejected"].items()]
    if "threshold" in columns:
        own = "for each question the one that the other questions recommend, if any"
        lines.append(f"threshold: {own if threshold is None else threshold}")
    return lines


def failure_text(found: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the failed questions by reason. Of reasons with other numbers the first is shown."""
    groups: dict[str, list[Mapping[str, str]]] = {}
    for each in found:
        groups.setdefault(kind_of(each["reason"]), []).append(each)
    lines = []
    for same in groups.values():
        lines += ["", f"FAILED {len(same)}: {rag.shown(same[0]['reason'], 300)}"]
        lines += [f"  {title(each['question'])}" for each in same]
    return lines
