"""The benchmark: its arithmetic, its tables, its service, and one tiny comparison. No times."""

from __future__ import annotations

import base64
import contextlib
import http.client
import io
import json
import math
import os
import tempfile
import unittest
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import rag
from tests import benchmark, benchmark_inside, benchmark_server
from tests.benchmark import Process, Report, Row, Sample, StagesOfRun, Verdict, Work
from tests.benchmark_inside import Ranking, Stage
from tests.benchmark_server import BenchmarkServer, Counts
from tests.support import run_rag


def sample(cpu_seconds: float) -> Sample:
    return Sample(cpu_seconds, 2 * cpu_seconds, 60_000_000, Counts(2, 13, 4_000, 275_000))


def rows() -> list[Row]:
    work = Work(12, ("plain", "float"), 3)
    cpu = {"plain": (1.0, 2.0, 4.0), "float": (0.5, 1.5, 2.0)}
    return benchmark.rows_of(work, {name: list(map(sample, cpu[name])) for name in cpu})


def report() -> Report:
    """A whole report, of made-up figures."""
    machine = {"system": "Linux x86_64", "cpus": 2, "python": "3.11.7", "openai": "3.57.0"}
    stages = (Stage("Python started", 0.05, 0.04), Stage("exit", 0.01, 0.01))
    rankings = [Ranking(1_000, 1_000, 30.0, 40_000_000), Ranking(100_000, 1_000, 36.0, 50_000_000)]
    return Report(
        date="2026-01-02T03:04+00:00",
        machine={**machine, "load_before": 0.5, "load_after": 1.5},
        rows=tuple(rows()),
        stages=(StagesOfRun(1_000, "float", stages), StagesOfRun(10_000, "cache", stages)),
        rankings=tuple(rankings),
        limits=tuple(benchmark.verdicts(rows(), rankings)),
    )


class TestFigures(unittest.TestCase):
    def test_a_row_has_medians_and_its_ratio_is_that_of_the_median_round(self) -> None:
        plain, own = rows()
        self.assertEqual((plain.cpu_seconds, plain.seconds, plain.cpu_ratio), (2.0, 4.0, 1.0))
        self.assertEqual((own.cpu_seconds, own.runs, own.inputs), (1.5, 3, 13))
        self.assertEqual((own.cpu_ratio, own.cpu_ratios), (0.5, (0.5, 0.75, 0.5)))

    def test_there_is_no_ratio_where_the_plain_script_did_not_run(self) -> None:
        (row,) = benchmark.rows_of(Work(10_000, ("cache",), 1), {"cache": [sample(1.0)]})
        self.assertEqual((row.cpu_ratio, row.cpu_ratios), (None, ()))

    def test_a_limit_is_met_missed_or_not_measured(self) -> None:
        rankings = [Ranking(1_000, 1_000, 36.0), Ranking(10_000, 10_000, 30.0)]
        cold, *others, speed, growth = benchmark.verdicts(rows(), rankings)
        self.assertEqual((cold.limit, cold.measured, cold.met), (0.75, 0.5, True))
        self.assertEqual({(each.measured, each.met) for each in others}, {(None, None)})
        self.assertEqual((speed.measured, speed.met), (36.0, False))
        self.assertEqual((growth.measured, growth.met), (30 / 36, True))
        *_, speed, growth = benchmark.verdicts([], [])
        self.assertEqual((speed.met, growth.met), (None, None))

    def test_every_limit_is_on_a_row_that_the_full_plan_measures(self) -> None:
        planned = {(work.records, name) for work in benchmark.FULL.work for name in work.clients}
        for limit in benchmark.LIMITS:
            self.assertIn((limit.records, limit.client), planned)
            self.assertTrue(hasattr(rows()[0], limit.figure), limit)

    def test_stages_are_made_whole_by_the_start_the_end_and_the_rest(self) -> None:
        told = {
            "start": {"name": "Python started", "seconds": 100.25, "cpu_seconds": 0.125},
            "stages": [{"name": "ranking", "seconds": 1.0, "cpu_seconds": 0.5}],
            "end": {"at": 102.0, "cpu": 1.0},
        }
        process = Process(f"{{}}\n{json.dumps(told)}\n", 1.25, 2.5, 0, 100.0, 102.5)
        expected = [
            Stage("Python started", 0.25, 0.125),
            Stage("ranking", 1.0, 0.5),
            Stage("the rest", 0.75, 0.375),
            Stage("exit", 0.5, 0.25),
        ]
        self.assertEqual(list(benchmark.stages_of(process)), expected)


class TestTables(unittest.TestCase):
    def test_columns_are_aligned_the_first_to_the_left_and_numbers_to_the_right(self) -> None:
        lines = benchmark.aligned([["name", "s"], ["a", "10.25"], ["longer", ""]], 1)
        self.assertEqual(lines, ["name        s", "a       10.25", "longer"])

    def test_the_tables_show_rows_stages_rankings_and_limits(self) -> None:
        text = benchmark.text_of(report())
        for line in (
            r"2026-01-02.*, Linux x86_64, 2 CPUs, Python 3.11.7, openai 3.57.0, load 0.5 before.*",
            r"records +client +runs +CPU s +ratio +least-most +wall s +peak MB +requests .*",
            r"12 +plain +3 +2.00 +1.000 +4.00 +60 +2 +13 +0.004 +0.275",
            r"12 +float +3 +1.50 +0.500 +0.500-0.750 +3.00 +60 +2 +13 +0.004 +0.275",
            r"stage +1,000 float +10,000 cache",
            r"Python started +50 / 40 +50 / 40",
            r" *1,000 +30.0 +40 +all",
            r" *100,000 +36.0 +50 +1,000, shared: little memory",
            r"cold run, 12 records, float +yes +0.75 +0.5 +of the plain script's CPU",
            r"10,000 records, base64 +not measured +150 +MB at the peak",
            r"ranking +NO +35 +36 +µs a vector, at the slowest",
        ):
            self.assertRegex(text, rf"(?m)^{line}$")

    def test_the_json_form_is_one_document_with_all_of_it(self) -> None:
        data = json.loads(benchmark.json_of(report()))
        self.assertEqual(
            list(data), ["date", "machine", "rows", "stages", "rankings", "limits"], data
        )
        self.assertEqual(data["rows"][1]["cpu_ratios"], [0.5, 0.75, 0.5])
        self.assertEqual(data["stages"][0]["stages"][1]["name"], "exit")
        self.assertEqual({Verdict(**each).met for each in data["limits"]}, {True, False, None})

    def test_the_command_prints_either_form_and_a_failed_run_is_one_line(self) -> None:
        for argv, opening in (["--quick"], "2026-"), (["--json"], "{"):
            with mock.patch.object(benchmark, "measure", return_value=report()):
                self.assertEqual(self.main(*argv)[0], 0)
                self.assertTrue(self.main(*argv)[1].startswith(opening))
        with mock.patch.object(benchmark, "measure", side_effect=benchmark.Failed("why")):
            self.assertEqual(self.main(), (1, "", "benchmark: why\n"))

    def main(self, *argv: str) -> tuple[int, str, str]:
        stdout, stderr = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            with mock.patch.object(os, "wait4", None, create=True):  # Windows has none
                status = benchmark.main(argv)
        return status, stdout.getvalue(), stderr.getvalue()


class TestService(unittest.TestCase):
    def post(self, server: BenchmarkServer, path: str, body: Any) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", server.server_port)
        with contextlib.closing(connection):
            connection.request("POST", path, json.dumps(body))
            response = connection.getresponse()
            return response.status, json.load(response)

    def test_vectors_have_1536_numbers_length_1_and_the_same_in_both_encodings(self) -> None:
        request = {"model": "m", "input": ["one", "two", "one"]}
        numbers, packed = (
            json.loads(benchmark_server.embeddings({**request, "encoding_format": name}))["data"]
            for name in ("float", "base64")
        )
        for i, text in enumerate(request["input"]):
            expected = benchmark_server.vector(text)
            self.assertEqual((len(expected), numbers[i]["index"], packed[i]["index"]), (1536, i, i))
            self.assertAlmostEqual(math.hypot(*expected), 1, places=7)
            self.assertEqual(array("f", numbers[i]["embedding"]), expected)
            self.assertEqual(rag.check_vector(packed[i]["embedding"], "base64", "here"), expected)
            self.assertEqual(len(base64.b64decode(packed[i]["embedding"])), 4 * 1536)
        self.assertNotEqual(numbers[0]["embedding"], numbers[1]["embedding"])

    def test_numbers_are_written_with_at_most_9_digits_as_services_write_them(self) -> None:
        text = benchmark_server.encoded("a text", in_base64=False).decode().strip("[]")
        digits = [len(each.split("e")[0].strip("-0.").replace(".", "")) for each in text.split(",")]
        self.assertLessEqual(max(digits), 9)
        self.assertGreater(sum(digits) / len(digits), 8)

    def test_it_answers_counts_and_refuses_what_it_does_not_serve(self) -> None:
        with BenchmarkServer() as server:
            asked = {"question": "?", "sources": [{"id": "a", "text": "A."}, {"id": "b"}]}
            messages = [{"role": "user", "content": json.dumps(asked)}]
            chat = {"model": "m", "messages": messages}
            status, reply = self.post(server, "/v1/chat/completions", chat)
            content = rag.check_completion(reply)
            self.assertEqual((status, json.loads(content)["source_ids"]), (200, ["a"]))
            embed = {"model": "m", "input": ["x", "y"]}
            self.assertEqual(self.post(server, "/v1/embeddings", embed)[0], 200)
            self.assertEqual(self.post(server, "/v1/rerank", {})[0], 400)
            self.assertEqual(self.post(server, "/v1/embeddings", {"model": "m"})[0], 400)
            counts = benchmark.counted(server.address)
            self.assertEqual((counts.requests, counts.inputs), (2, 2))
            self.assertEqual(counts.sent_bytes, len(json.dumps(chat) + json.dumps(embed)))
            self.assertGreater(counts.received_bytes, 2 * 1536 * 9)
        self.assertEqual(counts - Counts(1, 1) + Counts(0, 1), replace(counts, requests=1))


class TestComparison(unittest.TestCase):
    def setUp(self) -> None:
        name = tempfile.TemporaryDirectory()
        self.addCleanup(name.cleanup)
        self.folder = Path(name.name)
        self.server = BenchmarkServer().__enter__()
        self.addCleanup(self.server.__exit__)

    def environment(self, client: str) -> dict[str, str]:
        return benchmark.environment(client, 3, self.server.address, self.folder)

    @unittest.skipUnless(hasattr(os, "wait4"), "os.wait4() tells what a process took")
    def test_a_tiny_comparison_has_a_row_a_client_and_a_failed_run_has_a_reason(self) -> None:
        printed: list[Any] = []

        def run(arguments: Any, environ: Any) -> Process:
            process = real(arguments, environ)
            printed.append(json.loads(process.stdout))
            return process

        real, told = benchmark.run, list[str]()
        with mock.patch.object(benchmark, "run", run):
            work = Work(3, ("plain", "float"), 1)
            plain, own = benchmark.compare(work, self.server.address, self.folder, told.append)
        self.assertEqual(printed[0], printed[1])  # the same job
        self.assertEqual(len(told), 2)
        for row in (plain, own):
            self.assertEqual((row.runs, row.requests, row.inputs), (1, 2, 4))
            self.assertGreater(row.peak_bytes, 10e6)
            self.assertGreater(row.received_bytes, 4 * 1536 * 9)
        with self.assertRaisesRegex(benchmark.Failed, "^-c .* ended with status 3: why$"):
            benchmark.run(["-c", "import sys; print('why', file=sys.stderr); sys.exit(3)"], {})

    def test_a_full_cache_leaves_the_question_to_embed(self) -> None:
        for inputs in (4, 1):
            before = benchmark.counted(self.server.address)
            result = run_rag(benchmark.QUESTION, environ=self.environment("cache"))
            self.assertEqual((result.status, result.stderr), (0, ""))
            counts = benchmark.counted(self.server.address) - before
            self.assertEqual((counts.requests, counts.inputs), (2, inputs))

    def test_every_stage_of_a_run_is_timed_and_rag_is_left_as_it_was(self) -> None:
        stages: list[Stage] = []
        before = dict(vars(rag))
        with benchmark_inside.watched(rag, stages):
            result = run_rag(benchmark.QUESTION, environ=self.environment("base64"))
        self.assertEqual(result.status, 0, result.stderr)
        names = [each.name for each in stages]
        self.assertEqual(names, list(benchmark_inside.FUNCTIONS.values()))
        self.assertEqual(vars(rag), before)

    def test_ranking_goes_through_rag_with_some_vectors_shared(self) -> None:
        measured = benchmark_inside.ranking(5, 2, 3)
        self.assertEqual((measured.vectors, measured.distinct), (5, 2))
        self.assertGreaterEqual(measured.microseconds, 0)
        self.assertGreater(benchmark_inside.free_bytes(), 0)


if __name__ == "__main__":
    unittest.main()
