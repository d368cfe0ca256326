"""README.md tells the truth: its commands are run on a terminal, and print what it shows."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
from contextlib import redirect_stdout
from pathlib import Path
from unittest import mock

import rag
from mock_server.contract import CONTRACT
from tests.evaluate import read_questions
from tests.support import ROOT, RagTestCase, run_rag

README = (ROOT / "README.md").read_text(encoding="utf-8")
INSTALL = "python3 -m venv .venv && . .venv/bin/activate && pip install openai && "


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def commands() -> list[tuple[str, str]]:
    """(command, what it prints) of every console block; `.ci/run` runs what installs and tests."""
    found = []
    for block in blocks("console"):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            found.append((command.removeprefix(INSTALL), output))
    return [(command, output) for command, output in found if command != "python -m unittest"]


def normalised(text: str) -> str:
    """The text without what differs from run to run and from machine to machine."""
    return re.sub(r"\d+ ms", "N ms", text.replace("\r\n", "\n"))


@unittest.skipIf(os.name == "nt", "needs a POSIX terminal and shell")
class TestConsole(unittest.TestCase):
    def test_every_command_prints_what_is_shown(self) -> None:
        shown = commands()
        self.assertEqual(len(shown), 15)
        with tempfile.TemporaryDirectory() as folder:
            python = Path(folder) / "python"
            python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
            python.chmod(0o755)
            environ = {"PATH": f"{folder}:{os.environ['PATH']}", "HOME": folder}
            for command, output in shown:
                with self.subTest(command=command):
                    if "curl" in command and not shutil.which("curl"):
                        self.skipTest("there is no curl")
                    self.assertEqual(normalised(on_terminal(command, environ)), normalised(output))


def on_terminal(command: str, environ: dict[str, str]) -> str:
    """What a terminal shows of a command."""
    main, side = os.openpty()
    with open(main, "rb", closefd=True) as terminal:
        process = subprocess.Popen(
            ["sh", "-c", command], cwd=ROOT, env=environ, stdin=side, stdout=side, stderr=side
        )
        os.close(side)
        shown = b""
        while True:
            try:
                part = os.read(terminal.fileno(), 65536)
            except OSError:  # how Linux says that nobody holds the other side any more
                part = b""
            if not part:
                break
            shown += part
        process.wait(timeout=60)
    return shown.decode("utf-8")


class TestText(RagTestCase):
    def test_the_first_command_is_the_whole_way_from_a_clone_to_an_answer(self) -> None:
        first = blocks("console")[0].split("\n")[0]
        self.assertTrue(first.startswith(f"$ {INSTALL}python -m mock_server run -- python rag.py "))

    def test_every_variable_that_it_names_exists(self) -> None:
        known = {row.metadata["variable"] for row in dataclasses.fields(rag.Settings)}
        named = set(re.findall(r"\b(?:API|RAG)_[A-Z_]*[A-Z]", README))
        self.assertEqual(named - known, set())

    def test_the_contract_is_the_one_that_is_judged(self) -> None:
        self.assertEqual(blocks("text"), [f"{CONTRACT}\n"])

    def test_the_sample_of_a_questions_file_is_one(self) -> None:
        (sample,) = blocks("json questions")
        questions = read_questions(self.file("q.json", sample), ["hours", "fees"])
        self.assertEqual(len(questions), 3)

    def test_the_sample_of_a_knowledge_file_is_one(self) -> None:
        (sample,) = blocks("json")
        self.assertEqual(len(rag.read_knowledge(self.file("my.json", sample))), 2)

    def test_the_requests_on_the_wire_are_the_bodies_that_are_sent(self) -> None:
        server = self.serve()
        (sample,) = blocks("json")
        path = self.file("my.json", sample)
        result = run_rag("What does entry cost?", "--knowledge", path, environ=server.environment())
        self.assertEqual(result.document["answer"], "Entry is free.")
        sent = [entry.body for entry in server.request_log.entries]
        user = json.loads(sent[2]["messages"][1]["content"])
        lines = "".join(blocks("json request")).splitlines()
        self.assertEqual([json.loads(line) for line in lines], [sent[0], sent[1], user])
        self.assertEqual(set(sent[2]), {"model", "messages"})

    def test_the_replies_on_the_wire_are_taken(self) -> None:
        embeddings, rerank, chat = map(json.loads, "".join(blocks("json reply")).splitlines())
        self.assertEqual(len(rag.check_embeddings(embeddings, 3, "float")), 3)
        self.assertEqual(rag.check_rerank(rerank, 2), [(0, 0.9), (1, -3.5)])
        answer = rag.check_answer(rag.check_completion(chat), ["fees", "hours"])
        self.assertEqual(answer, {"answer": "Entry is free.", "source_ids": ["fees"]})

    def test_the_recipe_makes_a_knowledge_file_with_ids_that_stay(self) -> None:
        (recipe,) = blocks("python")
        docs = self.folder / "docs"
        (docs / "sub").mkdir(parents=True)
        (docs / "a.md").write_text(
            "# Bells\r\n\r\nOne bell.\n\n\n# Old\n## Towers ##\nTwo towers.\nHigh.\n", "utf-8"
        )
        (docs / "sub" / "ü.txt").write_text("\ufeffDrei Türme.\n\n \n\nDrei Türme.", "utf-8")
        (docs / "skip.html").write_text("<p>no</p>", "utf-8")
        (docs / ".hidden").mkdir()
        (docs / ".hidden" / "no.md").write_text("No.", "utf-8")
        (docs / "folder.md").mkdir()
        target = self.folder / "knowledge.jsonl"

        def make() -> list[rag.Record]:
            with mock.patch.object(sys, "argv", ["make_knowledge.py", str(docs), str(target)]):
                with redirect_stdout(io.StringIO()) as out:
                    exec(compile(recipe, "make_knowledge.py", "exec"), {})
            records = rag.read_knowledge(str(target))
            self.assertEqual(out.getvalue(), f"{len(records)} records in {target}\n")
            return records

        first = make()
        self.assertEqual(
            [(record["file"], record["title"], record["text"]) for record in first],
            [
                ("a.md", "Bells", "One bell."),
                ("a.md", "Towers", "Two towers.\nHigh."),
                ("sub/ü.txt", "sub/ü.txt", "Drei Türme."),
            ],
        )
        (docs / "a.md").write_text(
            "# Bells\n\nNo bell.\n\nOne bell.\n\n# Towers\nTwo towers.\nHigh.\n", "utf-8"
        )
        second = make()
        self.assertEqual(
            {record["id"] for record in first} - {record["id"] for record in second}, set()
        )
        self.assertEqual(len(second), 4)
        self.assertEqual(json.loads(json.dumps(first)), first)
