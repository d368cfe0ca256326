"""The arithmetic of `python -m tests.evaluate`: functions of plain data, which ask no service.

A RANKING is a list of record ids, best first; what it does not hold was not found. NEEDED are the
ids that answer a question.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

Ranking: TypeAlias = Sequence[str]

K1, B = 1.2, 0.75
FUSION = 60
NORMAL_95 = 1.959964  # 95 % of a normal distribution lie within so many standard deviations


# ---- keywords: BM25 ------------------------------------------------------------------------------

HAN_AND_KANA = "\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"


def words(text: str) -> list[str]:
    """The runs of letters and digits, in lower case; of Han and kana each character is a word.

    words("Notice HK-417") == ["notice", "hk", "417"]; words("自行 2h") == ["自", "行", "2h"]
    """
    return re.findall(rf"[{HAN_AND_KANA}]|[^\W_{HAN_AND_KANA}]+", text.casefold())


@dataclass(frozen=True)
class Keywords:
    """The words of some texts: how often each is in each, and how many texts have it."""

    counts: Sequence[Mapping[str, int]]
    texts_with: Mapping[str, int]
    average: float  # words in a text


def keywords(texts: Sequence[str]) -> Keywords:
    counts = [Counter(words(text)) for text in texts]
    texts_with = Counter(word for count in counts for word in count)
    return Keywords(counts, texts_with, sum(map(Counter.total, counts)) / max(len(texts), 1))


def bm25(question: str, index: Keywords) -> list[float]:
    """The score of each text, in their order: 0 where no word of the question is in it.

    The sum of idf * tf * (k1 + 1) / (tf + k1 * (1 - b + b * length / average)) over the different
    words of the question: Robertson and Zaragoza, "The Probabilistic Relevance Framework: BM25 and
    Beyond", Foundations and Trends in Information Retrieval 3(4), 2009. idf is that of Lucene,
    ln(1 + (N - n + 0.5) / (n + 0.5)): without the 1 a word that most texts have would count against
    a text.
    """
    asked = [word for word in dict.fromkeys(words(question)) if word in index.texts_with]
    weights = {word: inverse_frequency(index.texts_with[word], len(index.counts)) for word in asked}
    scores = []
    for count in index.counts:
        length = sum(count.values()) / index.average if index.average else 0.0
        damping = K1 * (1 - B + B * length)
        there = [word for word in asked if word in count]
        parts = [weights[word] * count[word] * (K1 + 1) / (count[word] + damping) for word in there]
        scores.append(math.fsum(parts))
    return scores


def inverse_frequency(texts_with: int, texts: int) -> float:
    return math.log(1 + (texts - texts_with + 0.5) / (texts_with + 0.5))


def by_keywords(question: str, index: Keywords, ids: Sequence[str]) -> list[str]:
    """The ids of the texts that share a word with the question, best first, ties in their order."""
    scores = bm25(question, index)
    order = sorted(range(len(ids)), key=lambda i: -scores[i])
    return [ids[i] for i in order if scores[i] > 0]


# ---- rankings ------------------------------------------------------------------------------------


def fuse(*rankings: Ranking) -> list[str]:
    """One ranking by fusion_scores(). Ties keep the order in which the ids are met."""
    scores = fusion_scores(*rankings)
    return sorted(scores, key=lambda name: -scores[name])


def fusion_scores(*rankings: Ranking) -> dict[str, float]:
    """{id: the sum of 1 / (60 + place), over the rankings that hold it}.

    Cormack, Clarke and Buettcher, "Reciprocal rank fusion outperforms Condorcet and individual rank
    learning methods", SIGIR 2009.
    """
    scores: dict[str, float] = {}
    for ranking in rankings:
        for place, name in enumerate(ranking, 1):
            scores[name] = scores.get(name, 0.0) + 1 / (FUSION + place)
    return scores


def places(ranking: Ranking, needed: Sequence[str]) -> list[int | None]:
    """The place of each needed id, counted from 1; None where it was not found."""
    found = {name: place for place, name in enumerate(ranking, 1)}
    return [found.get(name) for name in needed]


def first_is_needed(ranking: Ranking, needed: Sequence[str]) -> bool:
    """hit@1: the first record is one of those that are needed."""
    return ranking[:1] != [] and ranking[0] in needed


def all_within(ranking: Ranking, needed: Sequence[str], limit: int) -> bool:
    """hit@k: every record that is needed is among the first `limit`."""
    return set(needed) <= set(ranking[:limit])


def reciprocal_rank(ranking: Ranking, needed: Sequence[str]) -> float:
    """1 / the place of the first needed record, 0 if none was found."""
    found = [place for place in places(ranking, needed) if place]
    return 1 / min(found) if found else 0.0


# ---- small counts --------------------------------------------------------------------------------


def wilson(count: int, of: int) -> tuple[float, float]:
    """The 95 % score interval of a share: wilson(12, 15) is 0.548 to 0.930; of nothing, 0 to 1.

    Wilson, "Probable Inference, the Law of Succession, and Statistical Inference", Journal of the
    American Statistical Association 22, 1927. It takes the cases for independent of each other.
    """
    if not of:
        return 0.0, 1.0
    share, square = count / of, NORMAL_95**2
    middle = share + square / (2 * of)
    half = NORMAL_95 * math.sqrt(share * (1 - share) / of + square / (4 * of * of))
    low, high = (middle - half) / (1 + square / of), (middle + half) / (1 + square / of)
    return max(0.0, low), min(1.0, high)


# ---- the floor -----------------------------------------------------------------------------------

# `right` are the similarities that a floor should keep (of the records that a question needs, the
# least); `wrong` those that it should drop (of the best record for an unanswerable question).


def kept(similarities: Sequence[float], floor: float | None) -> int:
    """How many are not below the floor, which None is not."""
    return len(similarities) if floor is None else sum(each >= floor for each in similarities)


def best_floor(right: Sequence[float], wrong: Sequence[float]) -> float | None:
    """The floor with the greatest sum: share of `right` kept + share of `wrong` dropped.

    (That sum less 1 is Youden's index, Cancer 3(1), 1950: the mix of the set has no weight in it.)
    Of equals the lowest, which keeps most. It lies in the middle between two of the similarities.
    None: no floor does better than none, or there is nothing on one side.
    """
    if not right or not wrong:
        return None
    values = sorted({*right, *wrong})
    keep, drop = Counter(right), Counter(wrong)
    best, gain, floor = 0, 0, None
    for below, value in zip(values, values[1:]):
        gain += drop[below] * len(right) - keep[below] * len(wrong)
        if gain > best:
            best, floor = gain, between(below, value)
    return floor


def harmless_floor(right: Sequence[float], wrong: Sequence[float]) -> float | None:
    """The floor that drops most of `wrong` and nothing of `right`; None if it drops nothing."""
    least = min(right, default=-1.0)
    below = [each for each in wrong if each < least]
    return between(max(below), least) if below else None


def between(low: float, high: float) -> float:
    """The middle, in the fewest decimals (two or more) that keep it above `low`, at most `high`."""
    rounded = (round((low + high) / 2, digits) for digits in range(2, 17))
    return next((each for each in rounded if low < each <= high), high)


def left_out(
    right: Sequence[float], wrong: Sequence[float]
) -> tuple[list[float | None], list[float | None]]:
    """For each similarity the floor that all the others recommend: (for `right`, for `wrong`)."""
    return (
        [best_floor([*right[:i], *right[i + 1 :]], wrong) for i in range(len(right))],
        [best_floor(right, [*wrong[:i], *wrong[i + 1 :]]) for i in range(len(wrong))],
    )


def column(value: float, low: float, high: float, width: int) -> int:
    """The column, 0 to width - 1, of a value on an axis from `low` to `high`."""
    part = (value - low) / (high - low) if high > low else 0.0
    return min(width - 1, max(0, int(part * width)))


def strip(values: Sequence[float], low: float, high: float, width: int) -> str:
    """How many values fall into each column: a blank, 1 to 9, or + for more."""
    counts = Counter(column(value, low, high, width) for value in values)
    marks = {0: " ", **{count: str(count) for count in range(1, 10)}}
    return "".join(marks.get(counts[i], "+") for i in range(width))
