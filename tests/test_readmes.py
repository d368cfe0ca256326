"""The READMEs: their commands are run on a terminal and print what is shown; samples are valid."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mock_server.contract import CONTRACT
from mock_server.scenarios import ANSWERS, CHAT, EMBEDDINGS, RERANK, Scenario
from tests.clients.faulty import CLIENT, in_process
from tests.support import ROOT, RagTestCase, bodies, run_rag

NAMES = ("README.md", "mock_server/README.md", "tests/README.md")
READMES = {name: (ROOT / name).read_text("utf-8") for name in NAMES if (ROOT / name).exists()}
INSTALL = "python3 -m venv .venv && . .venv/bin/activate && pip install openai && "
TESTS = "python -m unittest"  # `.ci/run` runs it, and the installation


def blocks(name: str, language: str) -> list[str]:
    """The code blocks of a README with this language."""
    pattern = rf"^```{language}\n(.*?)^```$"
    return re.findall(pattern, READMES.get(name, ""), re.DOTALL | re.MULTILINE)


def commands(name: str) -> list[tuple[str, str]]:
    """(command, what it prints) of each console block of a README."""
    found = []
    for block in blocks(name, "console"):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            found.append((command.removeprefix(INSTALL), output))
    return [(command, output) for command, output in found if command != TESTS]


def normalized(text: str) -> str:
    """The text without what differs from run to run."""
    return re.sub(r"\d+ ms|\d+\.\d+ s\b", "N s", text.replace("\r\n", "\n"))


def on_terminal(command: str, environ: Mapping[str, str]) -> str:
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
            except OSError:  # on Linux: nobody has the other side open any more
                part = b""
            if not part:
                break
            shown += part
        process.wait(timeout=60)
    return shown.decode("utf-8")


@unittest.skipIf(os.name == "nt", "needs a POSIX terminal and shell")
class TestConsole(unittest.TestCase):
    def check(self, name: str) -> None:
        """Each command of a README prints what is shown."""
        with tempfile.TemporaryDirectory() as folder:
            python = Path(folder) / "python"
            python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
            python.chmod(0o755)
            environ = {"PATH": f"{folder}:{os.environ['PATH']}", "HOME": folder}
            for command, output in commands(name):
                with self.subTest(command=command):
                    if "curl" in command and not shutil.which("curl"):
                        self.skipTest("there is no curl")
                    shown = on_terminal(command, environ)
                    self.assertEqual(normalized(shown), normalized(output))


def add_test(name: str) -> None:
    """Add a test for a README."""

    def test(self: TestConsole) -> None:
        self.check(name)

    title = re.sub(r"\W", "_", name)
    setattr(TestConsole, f"test_the_commands_of_{title}_print_what_is_shown", test)


for each in READMES:
    add_test(each)


class TestText(RagTestCase):
    def test_the_first_command_goes_from_a_clone_to_an_answer(self) -> None:
        first = blocks("README.md", "console")[0].split("\n")[0]
        self.assertTrue(first.startswith(f"$ {INSTALL}python -m mock_server run -- python rag.py "))

    def test_each_setting_is_named_in_the_readme_and_no_other(self) -> None:
        variable = r"\b(?:API|RAG)_[A-Z_]*[A-Z]"
        known = set(re.findall(variable, run_rag("--help", environ={}).stdout))
        self.assertEqual(known - set(re.findall(variable, READMES["README.md"])), set())
        for name, text in READMES.items():
            self.assertEqual(set(re.findall(variable, text)) - known, set(), name)

    def test_the_contract_is_the_one_that_is_judged(self) -> None:
        self.assertEqual(blocks("mock_server/README.md", "text"), [f"{CONTRACT}\n"])

    def test_the_sample_of_a_questions_file_is_valid(self) -> None:
        from tests.evaluate.questions import read_questions

        samples = [text for name in READMES for text in blocks(name, "json questions")]
        for sample in samples:
            path = self.file("q.json", sample)
            records = [{"id": "hours"}, {"id": "fees"}]
            self.assertEqual(len(read_questions(path, records)), 3)

    def test_the_sample_of_a_knowledge_file_is_valid(self) -> None:
        (sample,) = blocks("README.md", "json")
        environ = {**self.serve().environment(), "RAG_KNOWLEDGE": self.file("my.json", sample)}
        result = run_rag("What does entry cost?", environ=environ)
        self.assertEqual(result.document["answer"], "Entry is free.")


class TestOnTheWire(RagTestCase):
    """The bodies in mock_server/README.md, sent by and served to the client in Python."""

    def run_client(self, *served: Scenario) -> tuple[Any, Any]:
        """The document that is printed, and the server, for the question of the README."""
        user = self.bodies("request")[2]
        records = sorted(user["sources"], key=lambda record: -len(record))  # as they were embedded
        source = CLIENT.read_text("utf-8")
        source = source.replace("records = read_records()\n", f"records = {records}\n")
        source = re.sub(r"^QUESTION = .*$", f"QUESTION = {user['question']!r}", source, flags=re.M)
        server = self.serve(*served)
        name = served[0].name if served else "plain"
        ended = in_process(source)(server.environment(name))
        self.assertEqual((ended.status, ended.stderr), (0, b""))
        return json.loads(ended.stdout), server

    def bodies(self, kind: str) -> list[Any]:
        """The JSON lines of this kind."""
        text = "".join(blocks("mock_server/README.md", f"json {kind}"))
        return [json.loads(line) for line in text.splitlines()]

    def test_the_requests_are_those_that_are_sent(self) -> None:
        document, server = self.run_client()
        embeddings, rerank, user = self.bodies("request")
        self.assertEqual(bodies(server, EMBEDDINGS), [embeddings])
        self.assertEqual(bodies(server, RERANK), [rerank])
        (chat,) = bodies(server, CHAT)
        self.assertEqual(set(chat), {"model", "messages"})
        self.assertEqual(json.loads(chat["messages"][-1]["content"]), user)
        self.assertEqual([document], self.bodies("printed"))

    def test_the_replies_are_accepted(self) -> None:
        for path, reply in zip((EMBEDDINGS, RERANK, CHAT), self.bodies("reply"), strict=True):
            own = Scenario("own", "own", "own", ANSWERS, path, lambda *_, reply=reply: reply)
            document, _ = self.run_client(own)
            self.assertEqual([document], self.bodies("printed"), path)
