"""The benchmark: its figures, its table, its service, and one small comparison. No times."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import tempfile
import unittest
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import rag
from tests.benchmark import __main__ as benchmark
from tests.benchmark import ranking
from tests.benchmark.__main__ import OWN, RATIO, Row, Sample
from tests.benchmark.server import BenchmarkServer, embeddings, vector
from tests.support import RagTestCase, run_rag


class TestFigures(unittest.TestCase):
    def test_a_ratio_is_the_median_of_the_ratios_within_the_rounds(self) -> None:
        samples = {
            "plain": [Sample(cpu, 60, 13) for cpu in (1.0, 2.0, 4.0)],
            "float": [Sample(cpu, 50, 13) for cpu in (0.5, 1.5, 2.0)],
        }
        row = Row("work", 12, 250, "float", RATIO, 0.7, "plain")
        self.assertEqual(benchmark.figure(row, samples), 0.5)

    def test_any_other_figure_is_the_median_of_the_runs(self) -> None:
        samples = {"cache": [Sample(1, 60, 1), Sample(3, 40, 1), Sample(2, 50, 1)]}
        for name, expected in (("CPU seconds", 2), ("peak MB", 50), ("inputs", 1)):
            row = Row("work", 12, 250, "cache", name, 1)
            self.assertEqual(benchmark.figure(row, samples), expected)

    def test_every_row_names_clients_that_exist_and_is_measured_in_rounds(self) -> None:
        for row in benchmark.ROWS:
            self.assertLessEqual({row.client, row.compared}, {"", *benchmark.CLIENTS})
            self.assertEqual(row.compared != "", row.figure in (RATIO, OWN))
            self.assertTrue(row.records in benchmark.ROUNDS or not row.client)

    def test_the_table_marks_a_figure_over_its_limit(self) -> None:
        rows = [Row("cold", 12, 250, "float", RATIO, 0.7, "plain"), benchmark.ROWS[-1]]
        lines = benchmark.as_text(rows, [0.71, 30.25], "a machine").split("\n")
        self.assertEqual(lines[0], "a machine")
        self.assertRegex(lines[3], r"^ +12  cold +0.710 +0.7  CPU, of the plain script's  OVER$")
        self.assertRegex(lines[4], r"^ 100,000  ranking +30.2 +35  µs a vector$")


class TestCommand(unittest.TestCase):
    def main(self, *argv: str, **patched: Any) -> tuple[int, str, str]:
        stdout, stderr = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            with mock.patch.object(os, "wait4", None, create=True):  # Windows has none
                with mock.patch.object(benchmark, "figures", **patched):
                    status = benchmark.main(argv)
        return status, stdout.getvalue(), stderr.getvalue()

    def test_json_is_one_document_with_all_rows(self) -> None:
        values = [float(i) for i in range(len(benchmark.ROWS))]
        status, stdout, _ = self.main("--json", return_value=values)
        document = json.loads(stdout)
        self.assertEqual((status, [row["measured"] for row in document["rows"]]), (0, values))

    def test_a_run_that_fails_is_one_line(self) -> None:
        status, stdout, stderr = self.main(side_effect=benchmark.Failed("why"))
        self.assertEqual((status, stdout, stderr), (1, "", "benchmark: why\n"))


class TestService(unittest.TestCase):
    def test_vectors_have_1536_numbers_length_1_and_the_same_in_both_encodings(self) -> None:
        request = {"model": "m", "input": ["one", "two", "one"]}
        for encoding in ("float", "base64"):
            reply = json.loads(embeddings({**request, "encoding_format": encoding}))
            vectors = rag.check_embeddings(reply, 3, encoding)
            self.assertEqual(vectors, [vector(text) for text in request["input"]])
        self.assertEqual((len(vectors[0]), vectors[0] == vectors[1]), (1536, False))
        self.assertAlmostEqual(math.hypot(*vectors[0]), 1, places=7)

    def test_ranking_goes_through_rag(self) -> None:
        with mock.patch.object(rag, "rank", wraps=rag.rank) as rank:
            self.assertGreaterEqual(ranking.microseconds(10_000), 0)
        target, vectors, records, _ = rank.call_args.args
        self.assertEqual((len(vectors), len(records)), (10_000, 10_000))
        self.assertEqual(target, array("f", vector("question")))


class TestComparison(RagTestCase):
    @contextlib.contextmanager
    def service(self) -> Iterator[tuple[str, Path]]:
        with BenchmarkServer() as server, tempfile.TemporaryDirectory() as folder:
            yield server.address, Path(folder)

    @unittest.skipUnless(hasattr(os, "wait4"), "needs os.wait4()")
    def test_the_plain_script_and_rag_py_send_the_same_texts(self) -> None:
        with self.service() as (address, folder):
            for client, inputs in (("plain", 4), ("float", 4), ("cache", 4), ("cache", 1)):
                sample = benchmark.measured(client, (3, 250), address, folder)
                self.assertEqual(sample.inputs, inputs, client)
                self.assertGreater(sample.peak_mb, 10)

    @unittest.skipUnless(hasattr(os, "wait4"), "needs os.wait4()")
    def test_a_run_with_another_status_than_expected_fails(self) -> None:
        script = "import sys; print('why', file=sys.stderr); sys.exit(3)"
        with self.assertRaisesRegex(benchmark.Failed, "ended with status 3: why$"):
            benchmark.run(["-c", script], {}, 1)

    def test_a_failing_run_ends_in_the_batch_that_is_refused(self) -> None:
        records = [{"id": str(i), "title": f"Notice {i}", "text": "t"} for i in range(4995, 5010)]
        with self.service() as (address, _):
            for path, sent in (("/401/v1", 0), ("/429/v1", 5)):
                environ = {
                    "API_BASE_URL": f"{address}{path}", "API_KEY": "key", "API_MODEL": "m",
                    "API_EMBEDDING_MODEL": "e", "API_EMBEDDING_BATCH": "5",
                    "API_EMBEDDING_PARALLEL": "1", "RAG_KNOWLEDGE": self.file("k.json", records),
                }  # fmt: skip
                before = benchmark.inputs(address)
                result = run_rag("Why?", environ=environ)
                self.assert_one_line(result, 1, f"answered {path[1:4]}: ")
                self.assertEqual(benchmark.inputs(address) - before, sent)


if __name__ == "__main__":
    unittest.main()
