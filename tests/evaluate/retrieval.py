"""The records that each search finds for a question, and the threshold that separates them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import rag
from tests.evaluate import measures
from tests.evaluate.questions import Question


@dataclass(frozen=True)
class Row:
    """A question and what was found for it, without a threshold.

    candidates: what goes to the rerank model or, without one, to the chat model
    sources: what goes to the chat model
    places: {search: place of each needed record}
    failure: why the rerank request failed, or an empty string"""

    question: Question
    candidates: rag.Ranking
    sources: rag.Ranking
    places: Mapping[str, measures.Places]
    failure: str


def with_settings(run: rag.Run, **changes: Any) -> rag.Run:
    """Return the run with other settings."""
    return replace(run, settings=replace(run.settings, **changes))


def ids_of(ranking: rag.Ranking) -> list[str]:
    """Return the ids of ranked records."""
    return [record["id"] for record, _ in ranking]


def search_all(questions: Sequence[Question], records: rag.Records, run: rag.Run) -> list[Row]:
    """Return what each search finds for each question. Raise RagError if the embeddings fail."""
    with rag.located("embeddings"):
        vectors = rag.embed([question.text for question in questions], records, run)
    index = measures.index_words({record["id"]: rag.passage(record) for record in records})
    targets, vectors = vectors[: len(questions)], vectors[len(questions) :]
    return [
        search(question, rag.rank(target, vectors, records, len(records)), index, run)
        for question, target in zip(questions, targets)
    ]


def search(question: Question, nearest: rag.Ranking, index: measures.Index, run: rag.Run) -> Row:
    """Return what each search finds for a question. nearest: all records, by similarity."""
    count, by_words = run.settings.RAG_SOURCES, measures.rank_by_words(question.text, index)
    hybrid = measures.reciprocal_rank_fusion(ids_of(nearest), by_words)
    rankings = {"vectors": ids_of(nearest), "BM25": by_words, "hybrid": hybrid}
    candidates = sources = nearest[:count]
    failure = ""
    if run.settings.API_RERANK_MODEL:
        candidates, reranked = nearest[: run.settings.RAG_CANDIDATES], []
        try:
            # It is asked for all candidates, to know their places beyond RAG_SOURCES.
            whole = with_settings(run, RAG_SOURCES=len(candidates))
            reranked = rag.rerank(question.text, candidates, whole)
        except rag.RagError as error:
            failure = f"rerank: {error}"
        sources, rankings["reranked"] = reranked[:count], ids_of(reranked)
    found = {name: measures.places(each, question.needs) for name, each in rankings.items()}
    return Row(question, candidates, sources, found, failure)


# ---- the threshold -------------------------------------------------------------------------------

# Thresholds have three decimals. Similarities of float32 vectors are exact to about 1e-7, so a
# threshold stays 1e-6 away from the similarities that it separates.


def needed(row: Row) -> list[float]:
    """Return the similarities of the needed records that are among the sources.

    Where several chunks of a file are, the best one counts."""
    similarity = {record["id"]: score for record, score in row.candidates}
    found = [need & {*ids_of(row.sources)} for need in row.question.needs]
    return [max(similarity[name] for name in each) for each in found if each]


def unanswerable(row: Row) -> list[float]:
    """Return the similarity of the best record, if no record answers the question."""
    return [] if row.question.needs else [row.candidates[0][1]]


def recommended(rows: Sequence[Row]) -> float | None:
    """Return the highest threshold that loses no needed record, or None if it drops nothing."""
    keep = [score for row in rows for score in needed(row)]
    drop = [score for row in rows for score in unanswerable(row)]
    if not keep or not drop:
        return None
    threshold = math.floor((min(keep) - 1e-6) * 1000) / 1000
    return threshold if min(drop) < threshold else None


def alternatives(rows: Sequence[Row]) -> list[float]:
    """Return the lowest thresholds that drop a half, three quarters, and all of the unanswerable
    questions, without those that lose every needed record."""
    keep = [score for row in rows for score in needed(row)]
    drop = sorted(score for row in rows for score in unanswerable(row))
    last = {drop[math.ceil(part * len(drop)) - 1] for part in (0.5, 0.75, 1.0) if drop}
    found = {math.ceil((score + 1e-6) * 1000) / 1000 for score in last}
    return sorted(each for each in found if each <= max(keep, default=-1.0))
