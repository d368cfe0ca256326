"""Arithmetic of the evaluation: functions of plain data, which send nothing."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import TypeAlias

Ranking: TypeAlias = Sequence[str]  # ids of the records that were found, best first
Places: TypeAlias = Sequence[int | None]  # of each needed record, from 1; None: not found

K1, B = 1.2, 0.75  # the usual constants of BM25
RRF_CONSTANT = 60
NORMAL_95 = 1.959964  # 95 % of a normal distribution lie within so many standard deviations


# ---- keyword search: BM25 ------------------------------------------------------------------------

HAN_AND_KANA = "\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"


def words(text: str) -> list[str]:
    """Return the words of a text in lower case. Each Han or kana character is a word.

    words("Notice HK-417") == ["notice", "hk", "417"]; words("自行 2h") == ["自", "行", "2h"]"""
    return re.findall(rf"[{HAN_AND_KANA}]|[^\W_{HAN_AND_KANA}]+", text.casefold())


@dataclass(frozen=True)
class Index:
    """How often each word is in each text, and in how many texts it is."""

    counts: Mapping[str, Mapping[str, int]]  # by the id of the text
    texts_with: Mapping[str, int]
    average_length: float


def index_words(texts: Mapping[str, str]) -> Index:
    """Return the index of {id: text}."""
    counts = {name: Counter(words(text)) for name, text in texts.items()}
    texts_with = Counter(word for count in counts.values() for word in count)
    return Index(counts, texts_with, sum(map(Counter.total, counts.values())) / len(texts))


def bm25(question: str, index: Index) -> dict[str, float]:
    """Return {id: BM25 score} of the texts that share a word with the question.

    Robertson and Zaragoza, "The Probabilistic Relevance Framework: BM25 and Beyond", Foundations
    and Trends in Information Retrieval 3(4), 2009; with the inverse document frequency of Lucene,
    which is never negative."""
    asked = [word for word in dict.fromkeys(words(question)) if word in index.texts_with]
    texts, rarity = len(index.counts), {}
    for word in asked:
        having = index.texts_with[word]
        rarity[word] = math.log(1 + (texts - having + 0.5) / (having + 0.5))
    scores = {}
    for name, count in index.counts.items():
        shared = [word for word in asked if word in count]
        if shared:
            damping = K1 * (1 - B + B * sum(count.values()) / index.average_length)
            parts = [rarity[word] * count[word] / (count[word] + damping) for word in shared]
            scores[name] = (K1 + 1) * math.fsum(parts)
    return scores


def rank_by_words(question: str, index: Index) -> list[str]:
    """Return the ids of the texts that share a word with the question, best first."""
    return best_first(bm25(question, index))


# ---- rankings ------------------------------------------------------------------------------------


def best_first(scores: Mapping[str, float]) -> list[str]:
    """Return the ids by their scores. Equal scores keep their order."""
    return sorted(scores, key=lambda name: -scores[name])


def reciprocal_rank_fusion(*rankings: Ranking) -> list[str]:
    """Return one ranking, by the sum of 1 / (60 + place) over the rankings that hold an id.

    Cormack, Clarke and Buettcher, "Reciprocal rank fusion outperforms Condorcet and individual rank
    learning methods", SIGIR 2009."""
    scores: dict[str, float] = {}
    for ranking in rankings:
        for place, name in enumerate(ranking, 1):
            scores[name] = scores.get(name, 0.0) + 1 / (RRF_CONSTANT + place)
    return best_first(scores)


def places(ranking: Ranking, needs: Sequence[AbstractSet[str]]) -> Places:
    """Return for each needed record the place of the first id that stands for it."""
    return [next((i for i, name in enumerate(ranking, 1) if name in need), None) for need in needs]


def hit_at_1(found: Places) -> bool:
    """Return whether the first record is a needed one."""
    return 1 in found


def hit_at_k(found: Places, k: int) -> bool:
    """Return whether all needed records are among the first k."""
    return all(place is not None and place <= k for place in found)


def reciprocal_rank(found: Places) -> float:
    """Return 1 / the place of the first needed record, or 0 if none was found."""
    return max((1 / place for place in found if place), default=0.0)


# ---- small counts --------------------------------------------------------------------------------


def wilson(count: int, of: int) -> tuple[float, float]:
    """Return the 95 % score interval of a share. wilson(12, 15) is 0.548 to 0.930.

    Wilson, "Probable Inference, the Law of Succession, and Statistical Inference", Journal of the
    American Statistical Association 22, 1927. It assumes that the cases are independent."""
    if not of:
        return 0.0, 1.0
    share, square = count / of, NORMAL_95**2
    middle = share + square / (2 * of)
    half = NORMAL_95 * math.sqrt(share * (1 - share) / of + square / (4 * of * of))
    low, high = (middle - half) / (1 + square / of), (middle + half) / (1 + square / of)
    return max(0.0, low), min(1.0, high)
