"""The file of labelled questions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rag

SAMPLE_QUESTIONS = Path(__file__).resolve().with_name("questions.json")

# {kind: (meaning, least number of ids, greatest number of ids)}
KINDS = {
    "plain": ("uses words of the record", 1, 99),
    "paraphrase": ("uses no word of the record", 1, 99),
    "code": ("an exact code, name or number decides", 1, 99),
    "two-part": ("two or more records are needed", 2, 99),
    "conflict": ("an outdated record contradicts the needed one", 1, 99),
    "language": ("is in another language than the record", 1, 99),
    "near-miss": ("a record has the topic, but no record has the answer", 0, 0),
    "unrelated": ("no record has the topic", 0, 0),
    "injection": ("gives orders to the model, with or without a question", 0, 99),
}


@dataclass(frozen=True)
class Question:
    """A labelled question.

    needs: for each needed record a set of ids, of which one is enough: the id of the record, or the
    ids of all chunks of a file. It is empty if no record answers the question."""

    text: str
    kind: str
    needs: tuple[frozenset[str], ...]


def read_questions(path: str, records: Sequence[rag.Record]) -> list[Question]:
    """Return the questions of a JSON file. Raise RagError, which names the entry and the rule."""
    file = rag.shown(path, 100)
    with rag.located(f"cannot read {file}", " (see --questions)"):
        text = rag.decode(Path(path).read_bytes())
    entries = rag.expect(rag.strict_json(text, file), list, f"the content of {file}")
    rag.require(entries, f"{file} holds no question")
    known = ids_by_name(records)
    questions: dict[str, Question] = {}
    for i, entry in enumerate(entries, 1):
        with rag.located(f"{file}, entry {i}"):
            question = check_question(entry, known)
            rag.require(question.text not in questions, "an earlier entry has this question")
        questions[question.text] = question
    return list(questions.values())


def ids_by_name(records: Sequence[rag.Record]) -> dict[str, frozenset[str]]:
    """Return {name: ids}: an id stands for its record, a path for all chunks of that file."""
    names: dict[str, frozenset[str]] = {}
    for record in records:
        if isinstance(record.get("file"), str):
            names[record["file"]] = names.get(record["file"], frozenset()) | {record["id"]}
    return names | {record["id"]: frozenset([record["id"]]) for record in records}


def check_question(entry: Any, known: Mapping[str, frozenset[str]]) -> Question:
    """Return the question of an entry. Raise RagError with the rule that it breaks."""
    keys = set(rag.expect(entry, dict, "the entry"))
    rag.require(
        keys == {"question", "ids", "kind"}, "the keys are not `question`, `ids` and `kind`"
    )
    text, kind = (rag.expect(entry[name], str, name) for name in ("question", "kind"))
    rag.require(text.strip(), "the question is blank")
    rag.require(kind in KINDS, f'the kind "{rag.shown(kind, 40)}" is none of {", ".join(KINDS)}')
    ids = rag.expect(entry["ids"], list, "ids")
    for i, name in enumerate(ids):
        place = f'ids[{i}], "{rag.shown(rag.expect(name, str, f"ids[{i}]"), 60)}",'
        rag.require(name in known, f"{place} is neither the id nor the `file` of a record")
        rag.require(name not in ids[:i], f"{place} is repeated")
    _, least, most = KINDS[kind]
    wanted = f"{least} or more" if most else "no"
    rag.require(least <= len(ids) <= most, f"a {kind} question has {wanted} ids; found {len(ids)}")
    return Question(text, kind, tuple(known[name] for name in ids))
