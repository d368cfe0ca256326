"""The command line: usage, streams, exit status, signals, --explain."""

from __future__ import annotations

import contextlib
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
from mock_server.scenarios import CHAT, Reply, message, top
from tests.support import ROOT, RagTestCase, Terminal, own, paths, run_rag, text_of

TRICKY = "Ὥρες 开放时间 ساعات 🕙 \x1b[31m\x7f\x85\u202e\u200b\ufeff\ue000"
ESCAPED = "Ὥρες 开放时间 ساعات 🕙 \\u001b[31m\\u007f\\u0085\\u202e\\u200b\\ufeff\\ue000"


class TestUsage(RagTestCase):
    def test_a_usage_error_is_one_line_with_status_2_before_the_first_request(self) -> None:
        server = self.serve()
        knowledge = self.file("k.json", [{"id": "a", "text": "b"}])
        for argv, words in (
            (["one", "two"], "unrecognized arguments: two (put the question in quotation marks"),
            (["--floor", "2"], "unrecognized arguments: --floor"),
            (["--knowledge"], "argument --knowledge: expected one argument"),
            ([""], "ask a question"),
            ([" \n"], "ask a question"),
            (["--knowledge", knowledge], "ask a question; the sample one is for the sample file"),
            (["caf\udce9"], "'utf-8' codec can't encode character '\\udce9'"),
        ):
            with self.subTest(argv=argv):
                result = run_rag(*argv, environ=server.environment())
                self.assert_one_line(result, 2, f"rag.py: usage: {words}")
        self.assertEqual(paths(server), [])

    def test_without_a_question_the_sample_one_is_asked(self) -> None:
        server = self.serve()
        run_rag(environ=server.environment())
        self.assertIn(rag.SAMPLE_QUESTION, server.request_log.entries[0].body["input"])

    def test_a_question_can_begin_with_a_dash_behind_two_dashes(self) -> None:
        server = self.serve()
        run_rag("--", "-Saturday?", environ=server.environment())
        self.assertIn("-Saturday?", server.request_log.entries[0].body["input"])


class TestStreams(RagTestCase):
    def test_what_does_not_print_is_escaped_on_both_streams_and_scripts_stay_readable(self) -> None:
        record = {"id": "id-\ufeff", "text": f"{TRICKY} ten", TRICKY: TRICKY}
        content = json.dumps({"answer": TRICKY, "source_ids": [record["id"]]})
        server = self.serve(own(CHAT, message(content=content)))
        argv = ("ten?", "--explain", "--knowledge", self.file("k.json", [record]))
        result = run_rag(*argv, environ=server.environment("own"))
        self.assertEqual(result.document, {"answer": TRICKY, "sources": [record]})
        self.assertIn(f'"answer": "{ESCAPED}"', result.stdout)
        self.assertTrue(result.stdout.removesuffix("\n").isprintable())
        self.assertIn("id-\\ufeff", result.stderr)
        self.assertTrue(result.stderr.replace("\n", "").isprintable())

    def test_one_line_in_a_pipe_and_indented_on_a_terminal(self) -> None:
        environ = self.serve().environment()
        piped, on_terminal = run_rag(environ=environ), run_rag(environ=environ, stream=Terminal)
        self.assertEqual(piped.stdout.count("\n"), 1)
        self.assertTrue(on_terminal.stdout.startswith('{\n  "answer": "On Saturday'))
        self.assertEqual(on_terminal.document, piped.document)

    def test_a_failure_is_at_most_500_characters(self) -> None:
        environ = self.serve().environment()
        for argv in (["q", f"--knowledge={'y' * 400}\x1b"], ["q", f"--where={'x' * 600}"]):
            self.assert_one_line(run_rag(*argv, environ=environ), 2, "…")
        self.assert_one_line(run_rag("a", "\x1b" * 600, environ=environ), 2, "…")
        with mock.patch.object(rag, "document", side_effect=rag.RagError(f"usage: {'x' * 600}")):
            self.assert_failure(run_rag(environ={}), 2, f"rag.py: usage: {'x' * 480}…")

    def test_a_stream_that_was_closed_before_the_start_is_an_error_and_no_traceback(self) -> None:
        err = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
        with mock.patch.dict(os.environ, self.serve().environment(), clear=True):
            with contextlib.redirect_stdout(None):
                with contextlib.redirect_stderr(err):
                    self.assertEqual(rag.main([]), 1)
                with contextlib.redirect_stderr(None):
                    self.assertEqual((rag.main([]), rag.main(["a", "b"])), (1, 2))
        expected = "rag.py: publish: cannot write to stdout: it is closed\n"
        self.assertEqual(text_of(err), expected)


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
            with mock.patch.object(rag, "document", side_effect=rag.RagError(f"{stage}: why")):
                self.assert_failure(run_rag(environ={}), status, f"rag.py: {stage}: why")

    def test_an_abstention_is_published_with_its_reason_and_status_0(self) -> None:
        for scenario, variable, value, reason, last in (
            ("plain", "RAG_MIN_SIMILARITY", "1", "below_min_similarity", "/embeddings"),
            ("rerank-nothing", "RAG_SOURCES", "3", "reranker_kept_nothing", "/rerank"),
            ("plain-abstention", "RAG_SOURCES", "3", "sources_do_not_answer", CHAT),
        ):
            with self.subTest(reason=reason):
                server = self.serve()
                result = run_rag(environ={**server.environment(scenario), variable: value})
                self.assertEqual((result.status, result.stderr), (0, ""))
                published = (result.document["answer"], result.document["reason"])
                self.assertEqual(published, (None, reason))
                self.assertEqual(paths(server)[-1], last)

    def test_a_failure_after_a_good_stage_publishes_nothing(self) -> None:
        server = self.serve(own(CHAT, lambda *_: Reply(500, {"error": "gone"})))
        self.assert_one_line(run_rag(environ=server.environment("own")), 1, "rag.py: answer: ")


class TestExplain(RagTestCase):
    def test_each_stage_says_what_was_kept_and_what_it_cost_and_shows_no_text(self) -> None:
        environ = {**self.serve().environment(), "RAG_MIN_SIMILARITY": "0.1", "RAG_CANDIDATES": "6"}
        lines = run_rag("--explain", environ=environ).stderr
        for words in (
            r"^knowledge: .*\b19\b",
            r'^POST /embeddings: mock-embedding, usage {.*"total_tokens": \d+}, \d+\.\d{3} s$',
            r"^embeddings: .*\b20 inputs, .*\b256 dimensions",
            r"^rank: .* hours-saturday 0\.5690, printing .*; .* late-fee 0\.0000$",
            r"^POST /rerank: mock-rerank, ",
            r"^rerank: .*\b5 .*hours-saturday 1\.0000, hours-weekdays 0\.3333, ",
            r"^POST /chat/completions: mock-chat, ",
            r"^answer: .*\b1 of 3 sources",
        ):
            self.assertRegex(lines, f"(?m){words}")
        for text in ("14:45", "When is", environ["API_KEY"]):
            self.assertNotIn(text, lines)

    def test_a_server_that_tells_no_tokens_or_odd_ones_is_no_error(self) -> None:
        odd: tuple[Any, ...] = (None, 7, "x", [], {"total_tokens": "9"}, {"n": 9**600})
        for usage in odd:
            with self.subTest(usage=usage):
                server = self.serve(own(CHAT, top(usage=usage)))
                result = run_rag("--explain", environ=server.environment("own"))
                self.assertEqual(result.status, 0)
                self.assertIn("POST /chat/completions: mock-chat, ", result.stderr)

    def test_progress_is_shown_on_a_terminal_and_for_more_than_one_batch(self) -> None:
        environ = self.serve().environment()
        for batch, stream, shown in (
            ("8", Terminal, True),
            ("8", io.TextIOWrapper, False),
            ("20", Terminal, False),
        ):
            result = run_rag(environ={**environ, "API_EMBEDDING_BATCH": batch}, stream=stream)
            self.assertEqual("embedded 20 of 20 texts" in result.stderr, shown)
            self.assertEqual(bool(result.stderr), shown)


def command(*argv: str) -> list[str]:
    return [sys.executable, str(ROOT / "rag.py"), *argv]


class TestProcess(RagTestCase):
    """What only a process of its own can show."""

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        kept = ("PATH", "SYSTEMROOT", "HOME")
        return {**{name: os.environ[name] for name in kept if name in os.environ}, **environ}

    def test_both_streams_are_utf_8_whatever_the_locale(self) -> None:
        locale = {
            "LC_ALL": "C",
            "PYTHONIOENCODING": "cp1252",
            "PYTHONUTF8": "0",
            "PYTHONCOERCECLOCALE": "0",
        }
        environ = self.environment({**self.serve().environment(), **locale})
        record = {"id": "自行车", "text": "Bicycles: 自行车停在北门 🚲."}
        path = self.file("k.json", [record])
        argv = command("Where do bicycles go?", "--explain", "--knowledge", path)
        done = subprocess.run(argv, env=environ, capture_output=True, timeout=60)
        self.assertIn("自行车停在北门 🚲".encode(), done.stdout)
        self.assertIn("自行车 0.".encode(), done.stderr)

    @unittest.skipIf(os.name == "nt", "needs POSIX signals")
    def test_ctrl_c_with_requests_under_way_ends_at_once_with_status_130(self) -> None:
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

    @unittest.skipUnless(os.path.exists("/dev/full"), "needs a device that is always full")
    def test_stdout_that_is_full_or_that_nobody_reads_is_one_line_and_status_1(self) -> None:
        environ = self.environment(self.serve().environment())
        reading, pipe = os.pipe()
        os.close(reading)
        for output, reason in (
            (pipe, "Broken pipe"),
            (os.open("/dev/full", os.O_WRONLY), "No space left on device"),
        ):
            with self.subTest(reason=reason), open(output, "wb") as stdout:
                done = subprocess.run(
                    command(), env=environ, stdout=stdout, stderr=subprocess.PIPE, timeout=60
                )
                expected = f"rag.py: publish: cannot write to stdout: {reason}\n"
                self.assertEqual((done.returncode, done.stderr.decode()), (1, expected))

    def test_importing_rag_imports_no_sdk_and_prints_nothing(self) -> None:
        code = "import sys, rag; sys.exit('openai' in sys.modules)"
        argv = [sys.executable, "-c", code]
        done = subprocess.run(argv, cwd=ROOT, capture_output=True, timeout=60)
        self.assertEqual((done.returncode, done.stdout, done.stderr), (0, b"", b""))
