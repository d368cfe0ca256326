"""The command line: `python -m tests.evaluate`."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from collections.abc import Sequence
from typing import Any, NoReturn

import rag
from tests.evaluate import report
from tests.evaluate.answers import FAILED, VARIANTS, answer_all
from tests.evaluate.questions import KINDS, SAMPLE_QUESTIONS, Question, read_questions
from tests.evaluate.retrieval import search_all

HELP = """\
questions file: a JSON list of objects, each with exactly these keys:
  question  text; no question twice
  ids       the ids of all records that are needed for the answer; [] if no record answers it.
            The `file` of records stands for any chunk of that file
  kind      {kinds}

hit@1: the first record is a needed one. hit@k: all needed records are among the first k, which is
RAG_SOURCES. MRR: mean of 1 / place of the first needed record, 0 if it is not found.

exit status:
  0  measured; failed requests are listed at the end
  1  a stage failed, or every rerank or every chat request failed
  2  usage, settings or knowledge: nothing was sent
  130  Ctrl-C"""


class Arguments(argparse.ArgumentParser):
    """argparse, but a usage error is one line, as every other error."""

    def error(self, message: str) -> NoReturn:
        raise rag.RagError(f"{message} (see --help)")


def arguments() -> Arguments:
    """Return the parser. Its help describes the questions file and the exit status."""
    about = "Measure retrieval, thresholds and citations on labelled questions."
    form = argparse.RawDescriptionHelpFormatter
    parser = Arguments(prog="python -m tests.evaluate", description=about, formatter_class=form)
    parser.add_argument("--knowledge", metavar="PATH", help="overrides RAG_KNOWLEDGE")
    parser.add_argument("--questions", metavar="FILE", help="default: the sample questions")
    asked = f"ask the chat model too: {', '.join(VARIANTS)}, or those named here (default: all)"
    all_of_them = ",".join(VARIANTS)
    parser.add_argument("--answers", metavar="NAMES", nargs="?", const=all_of_them, help=asked)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    kinds = []
    for kind, (meaning, least, most) in KINDS.items():
        ids = f"{least or 'any number of'}{' or more' if least else ''} ids" if most else "no ids"
        kinds.append(f"{kind}: {meaning} ({ids})")
    parser.epilog = HELP.format(kinds=f"\n{'':12}".join(kinds))
    return parser


def measure(
    questions: Sequence[Question], records: rag.Records, variants: Sequence[str], run: rag.Run
) -> Any:
    """Return the figures. Raise RagError if the embeddings, or all requests of a stage, fail."""
    rows = search_all(questions, records, run)
    check_failures([row.failure for row in rows])
    replies = answer_all(rows, variants, run)
    ends = [reply for each in replies for reply in each.values()]
    asked = [reply for reply in ends if reply.attempts or reply.end == FAILED]
    check_failures([reply.reason if reply.end == FAILED else "" for reply in asked])
    return {"records": len(records), **report.figures(rows, replies, run.settings)}


def check_failures(failures: Sequence[str]) -> None:
    """Raise RagError if there is a failure wherever there can be one."""
    if failures and all(failures):
        stage, _, reason = failures[0].partition(": ")
        raise rag.RagError(f"{stage}: every request failed, the first with {reason}")


def document(argv: Sequence[str] | None) -> str:
    """Return the text for stdout. Raise RagError with the stage that failed."""
    with rag.located("usage"):
        options = arguments().parse_args(argv)
        variants = [name for name in (options.answers or "").split(",") if name]
        unknown = ", ".join(name for name in variants if name not in VARIANTS)
        rag.require(not unknown, f"--answers: {unknown} is none of {', '.join(VARIANTS)}")
    rag.warn_of_misspelled(os.environ)
    with rag.located("settings"):
        settings = rag.read_settings(os.environ)
    path = settings.RAG_KNOWLEDGE if options.knowledge is None else options.knowledge
    with rag.located("knowledge"):
        records = rag.read_knowledge(path)
    with rag.located("usage"):
        sample = path == str(rag.SAMPLE_KNOWLEDGE)
        needed = "give --questions: the sample ones are for the sample knowledge file"
        rag.require(sample or options.questions is not None, needed)
        questions = read_questions(options.questions or str(SAMPLE_QUESTIONS), records)
    for name in [name for name in os.environ if name.startswith("OPENAI_")]:
        del os.environ[name]  # as rag.py does, whose requests are measured
    with rag.open_run(settings) as run:
        figures = measure(questions, records, variants, run)
    return json.dumps(figures, ensure_ascii=False) if options.json else report.as_text(figures)


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status."""
    return rag.run_command("evaluate", lambda: document(argv))


if __name__ == "__main__":
    status = 130  # where Ctrl-C ends main() early
    with contextlib.suppress(KeyboardInterrupt):
        status = main()
    os._exit(status)  # a normal exit would wait for requests under way
