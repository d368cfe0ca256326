"""The command line: streams, statuses, signals, encodings; in a process only where it must be."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import unittest
from collections.abc import Mapping
from typing import Any
from unittest import mock

import rag
from mock_server.scenarios import ANSWERS, CHAT, REFUSES, Reply, Scenario, message, top
from tests.support import ROOT, RagTestCase, Result, Terminal, captured, content, paths, run_rag

TRICKY = "Ὥρες 开放时间 ساعات 🕙 \x1b[31m\x7f\x85\u202e\u200b\ufeff\ue000"
ESCAPED = "Ὥρες 开放时间 ساعات 🕙 \\u001b[31m\\u007f\\u0085\\u202e\\u200b\\ufeff\\ue000"


class TestUsage(RagTestCase):
    def test_usage_errors_are_one_line_with_status_2(self) -> None:
        server = self.serve()
        help_text = "(put the question in quotes; --help tells more)"
        own = self.file("k.json", [{"id": "a", "text": "b"}])
        for argv, line in (
            (["one", "two"], f"unrecognized arguments: two {help_text}"),
            (["--know", own], f"unrecognized arguments: --know {help_text}"),
            (["--knowledge"], f"argument --knowledge: expected one argument {help_text}"),
            ([""], "the question is blank, or not UTF-8"),
            ([" \n"], "the question is blank, or not UTF-8"),
            (["caf\udce9"], "the question is blank, or not UTF-8"),
            (["--where", "floor"], f'argument --where: "floor" is not FIELD=VALUE {help_text}'),
            (["--where", "=1"], f'argument --where: "=1" is not FIELD=VALUE {help_text}'),
            (["--knowledge", own], "ask a question: the sample one is for the sample file"),
        ):
            with self.subTest(argv=argv):
                result = run_rag(*argv, environ=server.environment())
                if argv[0] == "--know":
                    self.assert_one_line(result, 2, "rag.py: usage: ", help_text)
                else:
                    self.assert_failure(result, 2, f"rag.py: usage: {line}")
        self.assertEqual(paths(server), [])

    def test_without_arguments_the_sample_question_is_asked(self) -> None:
        server = self.serve()
        result = run_rag(environ=server.environment())
        self.assertEqual([each["id"] for each in result.document["sources"]], ["hours-saturday"])
        self.assertIn(rag.SAMPLE_QUESTION, json.dumps(server.request_log.entries[0].body))

    def test_a_question_may_begin_with_a_dash_behind_two_dashes(self) -> None:
        result = run_rag("--", "-Saturday?", environ=self.serve().environment())
        self.assertEqual(result.status, 0, result.stderr)


class TestStreams(RagTestCase):
    def run_tricky(self, **environ: str) -> Any:
        """A run in which a record, its id and the model hold characters that do not print."""
        record = {"id": f"id-{TRICKY[-2]}", "text": f"{TRICKY} ten", TRICKY: TRICKY}
        content = json.dumps({"answer": TRICKY, "source_ids": [record["id"]]})
        change = message(content=content)
        server = self.serve(Scenario("own", "own", "tricky text", ANSWERS, CHAT, change))
        path = self.file("k.json", [record])
        result = run_rag(
            "ten?", "--knowledge", path, "--explain", environ=server.environment("own")
        )
        return record, result

    def test_scripts_stay_readable_and_what_does_not_print_is_escaped_on_both_streams(self) -> None:
        record, result = self.run_tricky()
        self.assertEqual(result.document, {"answer": TRICKY, "sources": [record]})
        self.assertIn(f'"answer": "{ESCAPED}"', result.stdout)
        self.assertTrue(result.stdout.removesuffix("\n").isprintable())
        self.assertTrue(result.stderr.replace("\n", "").isprintable())

    def test_one_line_in_a_pipe_and_indented_on_a_terminal(self) -> None:
        server = self.serve()
        self.assertEqual(run_rag(environ=server.environment()).stdout.count("\n"), 1)
        shown = run_rag(environ=server.environment(), stream=Terminal).stdout
        self.assertTrue(shown.startswith('{\n  "answer": "On Saturday'))
        self.assertEqual(json.loads(shown), run_rag(environ=server.environment()).document)

    def test_a_failure_is_at_most_500_characters(self) -> None:
        path = self.file("k.json", [])
        long = [f"--where={'x' * 400}", f"--knowledge={'y' * 400}"]
        for argv in ([*long, "q"], ["a", "b" * 600], ["q", "--knowledge", f"{path}{'z' * 400}"]):
            self.assert_one_line(run_rag(*argv, environ=self.serve().environment()), 2)

    def run_to(self, stdout: io.TextIOWrapper) -> Result:
        """A run of which stdout is this stream."""
        err = io.TextIOWrapper(captured())
        with mock.patch.dict(os.environ, self.serve().environment(), clear=True):
            with mock.patch.object(sys, "stdout", stdout), mock.patch.object(sys, "stderr", err):
                status = rag.main([])
        return Result(status, "", content(err))

    @unittest.skipUnless(os.path.exists("/dev/full"), "needs a device that is always full")
    def test_stdout_that_is_full_is_an_error(self) -> None:
        with open("/dev/full", "w") as full:
            result = self.run_to(full)
        reason = "cannot write to stdout: No space left on device"
        self.assert_failure(result, 1, f"rag.py: publish: {reason}")

    @unittest.skipIf(os.name == "nt", "needs a POSIX pipe")
    def test_stdout_that_takes_only_a_part_is_an_error(self) -> None:
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        with open(reading, "rb") as pipe, open(writing, "w") as stream:
            with self.assertRaises(BlockingIOError):
                rag.write(stream, "ä" * 1_000_000)
            self.assertTrue(pipe.read(1))

    @unittest.skipIf(os.name == "nt", "needs a POSIX pipe")
    def test_stdout_that_nobody_reads_is_quiet(self) -> None:
        reading, writing = os.pipe()
        os.close(reading)
        with open(writing, "w") as stream:
            result = self.run_to(stream)
        self.assertEqual((result.status, result.stderr), (1, ""))

    def test_streams_that_python_never_had_are_no_traceback(self) -> None:
        with mock.patch.dict(os.environ, self.serve().environment(), clear=True):
            with mock.patch.object(sys, "stdout", None), mock.patch.object(sys, "stderr", None):
                self.assertEqual((rag.main([]), rag.main(["a", "b"])), (1, 2))


class TestExplain(RagTestCase):
    def test_there_is_a_line_a_stage_with_what_was_kept_and_what_it_cost(self) -> None:
        environ = {**self.serve().environment(), "RAG_MIN_SIMILARITY": "0.1", "RAG_CANDIDATES": "6"}
        result = run_rag("--explain", environ=environ)
        embeddings, rank, rerank, answer, end = result.stderr.split("\n")
        self.assertRegex(
            embeddings,
            r"\Aembeddings: mock-embedding, inputs 20, requests 1, dimensions 256, "
            r"\d+ tokens, \d+ ms\Z",
        )
        kept = (
            "hours-saturday 0.5690, printing 0.2981, hours-weekdays 0.1873, guest-book 0.1443, "
            "bicycles-zh 0.1151"
        )
        dropped = "below RAG_MIN_SIMILARITY: late-fee 0.0000"
        self.assertEqual(rank, f"rank: nearest of 19 records: {kept}; {dropped}")
        best = "hours-saturday 1.0000, hours-weekdays 0.3333, guest-book 0.3333"
        self.assertRegex(
            rerank, rf"\Arerank: mock-rerank, {best}, of 5 candidates, \d+ tokens, \d+ ms\Z"
        )
        self.assertRegex(answer, r"\Aanswer: mock-chat, cited 1 of 3 sources, \d+ tokens, \d+ ms\Z")
        self.assertEqual(end, "")
        for text in ("14:45", "When is", environ["API_KEY"]):
            self.assertNotIn(text, result.stderr)

    def test_without_it_stderr_is_empty(self) -> None:
        self.assertEqual(run_rag(environ=self.serve().environment()).stderr, "")

    def test_a_server_that_tells_no_tokens_is_no_error(self) -> None:
        server = self.serve()
        for usage in (
            None,
            7,
            {"total_tokens": None},
            {"total_tokens": "9"},
            {"total_tokens": int("9" * 600)},
            {},
        ):
            own = Scenario("own", "own", "odd usage", ANSWERS, CHAT, top(usage=usage))
            server = self.serve(own)
            result = run_rag("--explain", environ=server.environment("own"))
            self.assertIn("cited 1 of 3 sources, untold tokens, ", result.stderr)


def command(*argv: str) -> list[str]:
    return [sys.executable, str(ROOT / "rag.py"), *argv]


class TestProcess(RagTestCase):
    """What only a process of its own can show."""

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        kept = ("PATH", "SYSTEMROOT", "HOME")
        return {**{name: os.environ[name] for name in kept if name in os.environ}, **environ}

    def test_a_run_prints_one_document_in_utf_8_whatever_the_locale(self) -> None:
        locale = {
            "LC_ALL": "C",
            "PYTHONIOENCODING": "cp1252",
            "PYTHONUTF8": "0",
            "PYTHONCOERCECLOCALE": "0",
        }
        environ = self.environment({**self.serve().environment(), **locale})
        record = {"id": "a", "text": "Bicycles: 自行车停在北门 🚲."}
        argv = command("Where do bicycles go?", "--knowledge", self.file("k.json", [record]))
        done = subprocess.run(argv, env=environ, capture_output=True, timeout=60)
        self.assertEqual((done.returncode, done.stderr), (0, b""))
        self.assertEqual(json.loads(done.stdout.decode("utf-8"))["sources"], [record])
        self.assertIn("自行车停在北门 🚲".encode(), done.stdout)

    def test_a_failure_in_another_code_page_is_one_line_of_utf_8(self) -> None:
        environ = self.environment({"PYTHONIOENCODING": "cp1252", "PYTHONUTF8": "0"})
        done = subprocess.run(
            command("--knowledge", "图书馆.json", "?"), env=environ, capture_output=True, timeout=60
        )
        self.assertEqual((done.returncode, done.stdout), (2, b""))
        self.assertIn("rag.py: settings: not set: API_BASE_URL", done.stderr.decode("utf-8"))

    @unittest.skipIf(os.name == "nt", "needs POSIX signals")
    def test_ctrl_c_with_a_request_in_flight_ends_at_once_with_status_130(self) -> None:
        server = self.serve()
        environ = self.environment(server.environment("silence"))
        process = subprocess.Popen(
            command(),
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # A shell's background jobs, and what they start, ignore the signal.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        with process:
            while not server.request_log.entries and process.poll() is None:
                pass
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=5)
        self.assertEqual((process.returncode, out, err), (130, b"", b""))

    @unittest.skipIf(os.name == "nt", "needs a POSIX pipe")
    def test_a_reader_that_has_left_is_status_1_and_no_traceback(self) -> None:
        reading, writing = os.pipe()
        os.close(reading)
        with open(writing, "wb") as pipe:
            environ = self.environment(self.serve().environment())
            done = subprocess.run(
                command(), env=environ, stdout=pipe, stderr=subprocess.PIPE, timeout=60
            )
        self.assertEqual((done.returncode, done.stderr), (1, b""))

    def test_importing_rag_imports_no_sdk_and_prints_nothing(self) -> None:
        code = "import sys, rag; sys.exit('openai' in sys.modules)"
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, timeout=60
        )
        self.assertEqual((done.returncode, done.stdout, done.stderr), (0, b"", b""))


class TestStatus(RagTestCase):
    def test_the_stage_that_failed_gives_the_status(self) -> None:
        for stage, status in (
            ("usage", 2),
            ("settings", 2),
            ("knowledge", 2),
            ("embeddings", 1),
            ("rerank", 1),
            ("answer", 1),
        ):
            error = rag.RagError("why")
            error.stage = stage
            with mock.patch.object(rag, "document", side_effect=error):
                self.assert_failure(run_rag(environ={}), status, f"rag.py: {stage}: why")

    def test_a_server_that_answers_the_second_request_otherwise_publishes_nothing(self) -> None:
        reply = Reply(500, {"error": "gone"})
        own = Scenario("own", "own", "status 500", REFUSES, CHAT, lambda *_: reply)
        result = run_rag(environ=self.serve(own).environment("own"))
        self.assert_one_line(result, 1, "rag.py: answer: ", 'it said "gone"')
