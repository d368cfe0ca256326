"""The chat model's answer to each question, and how it is judged."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import rag
from tests.evaluate.questions import Question
from tests.evaluate.retrieval import Row, ids_of, recommended, with_settings

VARIANTS = ("plain", "threshold", "quotes")  # the ways in which a question can be asked
ANSWERED, ABSTAINED, REJECTED, FAILED = "answered", "abstained", "rejected", "failed"
RIGHT, OTHERS_TOO, WRONG = "cited right", "cited others too", "cited wrong"
UNSUPPORTED = "unsupported"


@dataclass(frozen=True)
class Attempt:
    """A reply of the chat model, with its cost.

    rejected: the reason, or an empty string
    tokens: `usage.total_tokens`, or None if the server reported none"""

    text: str
    rejected: str
    tokens: int | None
    seconds: float


@dataclass(frozen=True)
class Reply:
    """How a question ended: answered or, with a reason, abstained, rejected or failed.

    rejected: the checks refused what the model wrote
    failed: a request failed, or the service sent a malformed reply
    sources: ids of the sources that were sent"""

    end: str
    reason: str = ""
    answer: str | None = None
    ids: Sequence[str] = ()
    quotes: Sequence[Any] = ()
    sources: Sequence[str] = ()
    attempts: Sequence[Attempt] = ()


def ask(question: str, sources: rag.Ranking, run: rag.Run) -> Reply:
    """Return the checked answer, as rag.ask() does, with every reply on the way to it."""
    texts = {record["id"]: record["text"] for record, _ in sources}
    sent, attempts = ids_of(sources), list[Attempt]()
    for _ in range(run.settings.RAG_ATTEMPTS):
        started = time.perf_counter()
        try:
            reply = rag.complete(question, sources, run)
            text = rag.check_completion(reply)
        except rag.RagError as error:
            return Reply(FAILED, f"answer: {error}", sources=sent, attempts=attempts)
        usage, seconds = reply.get("usage"), time.perf_counter() - started
        total = usage.get("total_tokens") if isinstance(usage, dict) else None
        tokens = total if isinstance(total, int) else None
        try:
            checked = rag.check_answer(text, texts, bool(run.settings.RAG_QUOTES))
        except rag.RagError as error:
            attempts.append(Attempt(text, str(error), tokens, seconds))
            continue
        attempts.append(Attempt(text, "", tokens, seconds))
        answer, ids, quotes = checked["answer"], checked["source_ids"], checked.get("quotes", ())
        if answer is None:
            return Reply(ABSTAINED, "sources_do_not_answer", sources=sent, attempts=attempts)
        return Reply(ANSWERED, "", answer, ids, quotes, sent, attempts)
    return Reply(REJECTED, attempts[-1].rejected, sources=sent, attempts=attempts)


def reply_to(row: Row, threshold: float | None, run: rag.Run, plain: Reply | None = None) -> Reply:
    """Return how a question ends with a threshold, or without one if it is None.

    plain: the reply without a threshold, which is returned where the same sources would be sent."""
    kept = [each for each in row.candidates if threshold is None or each[1] >= threshold]
    sources, failure = row.sources, row.failure
    if not failure and len(kept) < len(row.candidates):
        sources = kept
        if kept and run.settings.API_RERANK_MODEL:
            try:
                sources = rag.rerank(row.question.text, kept, run)
            except rag.RagError as error:
                failure = f"rerank: {error}"
    if failure:
        return Reply(FAILED, failure)
    if not sources:
        return Reply(ABSTAINED, "reranker_kept_nothing" if kept else "below_min_similarity")
    if plain and plain.sources == ids_of(sources):
        return plain
    return ask(row.question.text, sources, run)


def answer_all(
    rows: Sequence[Row], variants: Sequence[str], run: rag.Run
) -> list[dict[str, Reply]]:
    """Return {variant: reply} for each question, and write a line on stderr for each.

    plain: no threshold and no quotes. quotes: no threshold, RAG_QUOTES=1. threshold: no quotes, and
    RAG_MIN_SIMILARITY or, if it is not set, the threshold that the other questions recommend
    (leave-one-out)."""
    plain, quotes = with_settings(run, RAG_QUOTES=0), with_settings(run, RAG_QUOTES=1)
    answered = []
    for i, row in enumerate(rows):
        replies: dict[str, Reply] = {}
        for variant in variants:
            threshold = None
            if variant == "threshold":
                own, others = run.settings.RAG_MIN_SIMILARITY, [*rows[:i], *rows[i + 1 :]]
                threshold = recommended(others) if own is None else own
            known = replies.get("plain") if variant == "threshold" else None
            asking = quotes if variant == "quotes" else plain
            replies[variant] = reply_to(row, threshold, asking, known)
        if replies:
            ends = ", ".join(ending(row.question, name, replies[name]) for name in replies)
            rag.tell(f"evaluate: {i + 1} of {len(rows)}, {title(row.question.text)}: {ends}")
        answered.append(replies)
    return answered


def title(question: str) -> str:
    """Return a question in quotation marks, in at most 62 characters."""
    return f'"{rag.shown(question, 60)}"'


def ending(question: Question, variant: str, reply: Reply) -> str:
    """Return how a question ended, with the reason if there is no usable reply."""
    reason = f" ({rag.shown(reply.reason, 100)})" if reply.end in (REJECTED, FAILED) else ""
    return f"{variant} {outcome(question, reply)}{reason}"


def outcome(question: Question, reply: Reply) -> str:
    """Return how a reply is judged.

    cited right: the needed records and no other; cited others too: the needed records and others;
    cited wrong: a needed record is not cited; unsupported: an answer to an unanswerable question;
    else reply.end"""
    if reply.end != ANSWERED:
        return reply.end
    if not question.needs:
        return UNSUPPORTED
    if not all(need & {*reply.ids} for need in question.needs):
        return WRONG
    return RIGHT if {*reply.ids} <= frozenset().union(*question.needs) else OTHERS_TOO
