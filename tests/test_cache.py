"""RAG_CACHE: the same answers with and without it, whatever happens to the file or the process."""

from __future__ import annotations

import itertools
import json
import os
import random
import sqlite3
import stat
import subprocess
import sys
import threading
import unittest
import urllib.request
from typing import Any
from unittest import mock

import rag
from mock_server.scenarios import ANSWERS, EMBEDDINGS, REFUSES, Reply, Scenario
from mock_server.server import MAX_CONNECTIONS, MockServer
from tests.support import ROOT, RagTestCase, Result, bodies, run_rag

QUESTION = "What holds shelf 7?"
RECORDS = [{"id": f"r{i}", "text": f"Shelf {i} holds the volume {i * i}."} for i in range(30)]
ADVICE = "its folder must exist; the file itself may be deleted at any time"


def inputs(server: MockServer) -> list[str]:
    """All texts that were embedded, in the order sent."""
    return [text for body in bodies(server, "/embeddings") for text in body["input"]]


class CacheTestCase(RagTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.server = self.serve()
        self.path = self.folder / "vectors.db"
        self.knowledge = self.file("k.json", RECORDS)

    def ask(self, *argv: str, server: MockServer | None = None, **environ: str) -> Result:
        """A run with the cache. Its embedding requests are the only ones in the request log."""
        server = server or self.server
        server.request_log.clear("")
        given = {**server.environment(), "RAG_CACHE": str(self.path), "API_EMBEDDING_BATCH": "8"}
        argv = argv or (QUESTION, "--knowledge", self.knowledge)
        return run_rag(*argv, environ={**given, **environ})

    def rows(self) -> list[tuple[bytes, bytes, int]]:
        database = sqlite3.connect(self.path)
        try:
            return database.execute("SELECT key, vector, checksum FROM vectors").fetchall()
        finally:
            database.close()


class TestResults(CacheTestCase):
    def test_similarities_are_the_same_to_the_last_digit_with_and_without_it(self) -> None:
        for encoding in ("float", "base64"):
            lines: list[list[str]] = []
            for cache in ("", str(self.path), str(self.path)):
                with mock.patch.object(rag, "scores", lambda kept: repr([s for _, s in kept])):
                    result = self.ask(
                        *(QUESTION, "--knowledge", self.knowledge, "--explain"),
                        RAG_CACHE=cache,
                        API_EMBEDDING_ENCODING=encoding,
                        RAG_CANDIDATES="30",
                    )
                lines.append(
                    [line for line in result.stderr.split("\n") if line.startswith("rank:")]
                )
            self.assertEqual(lines[0][0].count(","), 29)
            self.assertEqual(lines[1:], lines[:1] * 2)
            self.path.unlink()

    def test_a_full_cache_embeds_the_question_only(self) -> None:
        first = self.ask()
        self.assertEqual(len(inputs(self.server)), 31)
        again = self.ask()
        self.assertEqual(inputs(self.server), [QUESTION])
        self.assertEqual(again, first)
        other = self.ask("What holds shelf 8?", "--knowledge", self.knowledge)
        self.assertEqual(inputs(self.server), ["What holds shelf 8?"])
        self.assertEqual(other.document["sources"][0]["id"], "r8")

    def test_an_edited_record_costs_one_embedding(self) -> None:
        self.ask()
        changed = [{**RECORDS[0], "text": "Shelf 0 is empty."}, *RECORDS[1:]]
        self.ask(QUESTION, "--knowledge", self.file("changed.json", changed))
        self.assertEqual(inputs(self.server), [QUESTION, "Shelf 0 is empty."])
        self.ask()
        self.assertEqual(inputs(self.server), [QUESTION])

    def test_another_model_server_or_prefix_embeds_all_again_and_going_back_none(self) -> None:
        self.ask()
        second = self.serve()
        with mock.patch("mock_server.models.EMBEDDING_MODEL", "other"):
            table = "mock_server.endpoints.ENDPOINTS"
            from mock_server import endpoints

            entry = ("other", *endpoints.ENDPOINTS["/embeddings"][1:])
            with mock.patch.dict(table, {"/embeddings": entry}):
                self.ask(API_EMBEDDING_MODEL="other")
                self.assertEqual(len(inputs(self.server)), 31)
        self.ask(server=second)
        self.assertEqual(len(inputs(second)), 31)
        self.ask(API_DOCUMENT_PREFIX="passage: ")
        self.assertEqual(len(inputs(self.server)), 31)
        self.ask(API_QUERY_PREFIX="query: ")
        self.assertEqual(inputs(self.server), [f"query: {QUESTION}"])
        self.ask()
        self.assertEqual(inputs(self.server), [QUESTION])

    def test_a_slash_at_the_end_of_the_base_url_is_no_other_server(self) -> None:
        self.ask()
        self.ask(API_BASE_URL=f"{self.server.base_url()}/")
        self.assertEqual(inputs(self.server), [QUESTION])

    def test_a_record_that_reads_like_the_question_is_embedded_once_with_it(self) -> None:
        path = self.file("same.json", [*RECORDS, {"id": "same", "text": QUESTION}])
        for expected in (31, 1):
            result = self.ask(QUESTION, "--knowledge", path)
            self.assertEqual(len(inputs(self.server)), expected)
            self.assertEqual(result.status, 0)

    def test_equal_records_are_embedded_once(self) -> None:
        path = self.file("twins.json", [*RECORDS, {**RECORDS[3], "id": "twin"}])
        for expected in (31, 1):
            self.ask(QUESTION, "--knowledge", path)
            self.assertEqual(len(inputs(self.server)), expected)

    def test_vectors_of_another_length_are_embedded_again(self) -> None:
        self.ask()

        def shorter(good: Any, request: Any) -> Any:
            data = [{**row, "embedding": row["embedding"][:100]} for row in good["data"]]
            return {**good, "data": data}

        own = Scenario("own", "own", "own", ANSWERS, EMBEDDINGS, shorter, rerank=False)
        server = self.serve(own)
        keyed = mock.patch.object(rag, "cache_key", lambda text, run: text.encode())
        with keyed:  # the same keys for both servers: one whose model was changed behind its name
            self.ask()
            result = self.ask(server=server, API_BASE_URL=server.base_url("own"))
        self.assertEqual(sorted(inputs(server)), sorted([QUESTION, *(r["text"] for r in RECORDS)]))
        self.assertEqual(result.status, 0)
        self.assertEqual({len(vector) for _, vector, _ in self.rows()}, {1024, 400})

    def test_explain_tells_how_many_inputs_were_sent(self) -> None:
        self.ask()
        result = self.ask(QUESTION, "--knowledge", self.knowledge, "--explain")
        line = "inputs 1, requests 1, dimensions 256, 30 from RAG_CACHE, "
        self.assertIn(f"embeddings: mock-embedding, {line}", result.stderr)


class TestFile(CacheTestCase):
    def assert_settings_error(self, result: Result, reason: str) -> None:
        shown = str(self.path) if len(str(self.path)) <= 100 else f"{str(self.path)[:99]}…"
        self.assert_failure(result, 2, f"rag.py: settings: RAG_CACHE {shown}{reason}")
        self.assertEqual(inputs(self.server), [])

    @unittest.skipIf(os.name == "nt", "needs POSIX permissions")
    def test_it_is_private_to_the_user_whatever_the_umask(self) -> None:
        before = os.umask(0)
        try:
            self.ask()
        finally:
            os.umask(before)
        self.assertEqual(stat.S_IMODE(self.path.stat().st_mode), 0o600)
        self.assertEqual(
            [each.name for each in self.folder.iterdir() if "db" in each.name], ["vectors.db"]
        )

    def test_it_holds_no_text_and_no_question(self) -> None:
        self.ask()
        data = self.path.read_bytes()
        for text in ("Shelf", "volume", QUESTION, "mock-key", "127.0.0.1", "mock-embedding"):
            self.assertNotIn(text.encode(), data)
        self.assertEqual(len(self.rows()), len(RECORDS))

    def test_a_row_has_the_digest_the_float32_numbers_and_the_checksum_of_both(self) -> None:
        import hashlib
        import struct
        import zlib

        from mock_server import models

        self.ask()
        url = f"{self.server.base_url()}/embeddings"
        text = RECORDS[4]["text"]
        origin = json.dumps([url, "mock-embedding", text])
        key = hashlib.sha256(origin.encode()).digest()
        (row,) = [row for row in self.rows() if row[0] == key]
        self.assertEqual(row[1], struct.pack("256f", *models.vector(text)))
        self.assertEqual(row[2], zlib.crc32(row[0] + row[1]))

    def test_deleting_it_is_safe(self) -> None:
        first = self.ask()
        self.path.unlink()
        self.assertEqual(self.ask(), first)
        self.assertEqual(len(inputs(self.server)), 31)

    def test_a_missing_folder_is_an_error_that_says_so(self) -> None:
        self.path = self.folder / "none" / "vectors.db"
        self.assert_settings_error(self.ask(), f": No such file or directory; {ADVICE}")

    def test_a_folder_is_no_cache(self) -> None:
        self.path.mkdir()
        self.assert_settings_error(self.ask(), " is no regular file")

    def test_a_file_that_is_no_database_is_left_as_it_is(self) -> None:
        self.path.write_bytes(b"my notes, which are precious" * 100)
        self.assert_settings_error(self.ask(), f": file is not a database; {ADVICE}")
        self.assertEqual(self.path.read_bytes(), b"my notes, which are precious" * 100)

    def test_a_database_of_other_data_is_left_as_it_is(self) -> None:
        database = sqlite3.connect(self.path)
        database.execute("CREATE TABLE customers (name TEXT)")
        database.close()
        before = self.path.read_bytes()
        self.assert_settings_error(self.ask(), " holds other data")
        self.assertEqual(self.path.read_bytes(), before)

    def test_a_table_of_the_same_name_with_other_columns_is_one_line(self) -> None:
        database = sqlite3.connect(self.path)
        database.execute("CREATE TABLE vectors (name TEXT)")
        database.close()
        self.assert_settings_error(self.ask(), " holds other data")

    def test_a_trigger_of_a_stranger_is_never_run(self) -> None:
        self.ask()
        database = sqlite3.connect(self.path)
        database.execute("CREATE TRIGGER t AFTER INSERT ON vectors BEGIN SELECT 1; END")
        database.close()
        self.assert_settings_error(self.ask(), " holds other data")

    @unittest.skipUnless(hasattr(os, "mkfifo"), "there are no named pipes")
    def test_a_named_pipe_is_no_cache(self) -> None:
        os.mkfifo(self.path)
        self.assert_settings_error(self.ask(), " is no regular file")

    def test_deleting_it_during_a_run_does_not_disturb_the_run(self) -> None:
        keep = rag.keep

        def keep_and_delete(vectors: Any, run: rag.Run) -> None:
            keep(vectors, run)
            self.path.unlink(missing_ok=True)

        with mock.patch.object(rag, "keep", keep_and_delete):
            self.assertEqual(self.ask().status, 0)

    def test_an_empty_file_becomes_a_cache(self) -> None:
        self.path.touch()
        self.assertEqual(self.ask().status, 0)
        self.assertEqual(len(self.rows()), len(RECORDS))

    def test_names_that_mean_something_to_sqlite_are_names_of_files(self) -> None:
        for name in (":memory:", "file:x?mode=memory", "a b#c%20d"):
            self.path = self.folder / name
            with mock.patch("os.getcwd", return_value=str(self.folder)):
                self.assertEqual(self.ask().status, 0)
            self.assertGreater(self.path.stat().st_size, 0)

    def test_a_blank_value_is_no_cache(self) -> None:
        self.assertEqual(self.ask(RAG_CACHE=" ").status, 0)
        self.assertEqual([each.name for each in self.folder.iterdir()], ["k.json"])

    def test_the_safety_of_the_schema_is_on(self) -> None:
        cache = rag.open_cache(str(self.path))
        self.assertEqual(cache.execute("PRAGMA trusted_schema").fetchone(), (0,))
        cache.close()

    @unittest.skipIf(os.name == "nt" or os.geteuid() == 0, "needs a user whom permissions bind")
    def test_a_complete_one_that_cannot_be_written_works(self) -> None:
        first = self.ask()
        self.path.chmod(0o400)
        self.folder.chmod(0o500)
        try:
            self.assertEqual(self.ask(), first)
        finally:
            self.folder.chmod(0o700)

    def test_a_complete_one_opened_to_read_only_works_and_an_incomplete_one_is_an_error(
        self,
    ) -> None:
        first = self.ask()
        with mock.patch("os.access", return_value=False):
            self.assertEqual(self.ask(), first)
            more = self.file("more.json", [*RECORDS, {"id": "new", "text": "A new shelf."}])
            result = self.ask(QUESTION, "--knowledge", more)
        self.assert_one_line(
            result, 1, "rag.py: embeddings: RAG_CACHE ", "attempt to write a readonly database"
        )

    def test_a_disk_that_is_full_is_one_line_and_what_was_kept_stays(self) -> None:
        cache = rag.open_cache(str(self.path))
        cache.close()
        connect = sqlite3.connect

        def small(*args: Any, **options: Any) -> Any:
            database = connect(*args, **options)
            database.execute("PRAGMA max_page_count = 8")
            return database

        with mock.patch("sqlite3.connect", small):
            result = self.ask()
        self.assert_one_line(
            result, 1, "rag.py: embeddings: RAG_CACHE ", "database or disk is full"
        )
        self.assertIn(len(self.rows()), range(1, 30))
        self.assertEqual(self.ask().status, 0)
        self.assertEqual(len(self.rows()), len(RECORDS))

    def test_a_python_without_sqlite3_is_one_line(self) -> None:
        with mock.patch.dict(sys.modules, {"sqlite3": None}):
            result = self.ask()
        line = "rag.py: settings: RAG_CACHE cannot be used: this Python was built without sqlite3"
        self.assert_failure(result, 2, line)

    def test_sqlite3_is_not_loaded_without_a_cache(self) -> None:
        with mock.patch.dict(sys.modules, {"sqlite3": None}):
            self.assertEqual(self.ask(RAG_CACHE="").status, 0)


class TestFailures(CacheTestCase):
    def test_what_had_arrived_before_a_failure_is_kept(self) -> None:
        last = RECORDS[-1]["text"]

        def change(good: Any, request: Any) -> Any:
            return Reply(503, b"{}") if last in request["input"] else good

        server = self.serve(Scenario("own", "own", "own", REFUSES, EMBEDDINGS, change))
        with mock.patch.object(rag, "cache_key", lambda text, run: text.encode()):
            result = self.ask(server=server, API_BASE_URL=server.base_url("own"))
            self.assert_one_line(result, 1, "answered 503")
            kept = {key.decode() for key, _, _ in self.rows()}
            self.assertGreaterEqual(kept, {record["text"] for record in RECORDS[:7]})
            self.assertNotIn(last, kept)
            self.ask()
        missing = {record["text"] for record in RECORDS} - kept
        self.assertEqual({*inputs(self.server)}, {QUESTION, *missing})

    def test_a_batch_with_a_bad_vector_is_not_kept(self) -> None:
        def change(good: Any, request: Any) -> Any:
            data = [{**row, "embedding": [0.0] * 256} for row in good["data"][:1]]
            return {**good, "data": [*data, *good["data"][1:]]}

        server = self.serve(Scenario("own", "own", "own", REFUSES, EMBEDDINGS, change))
        result = self.ask(server=server, API_BASE_URL=server.base_url("own"))
        self.assertEqual(result.status, 1)
        self.assertEqual(self.rows(), [])

    def test_at_most_4_later_batches_are_under_way_and_the_first_goes_alone(self) -> None:
        """The server holds every reply until as many requests are there as may be."""
        lock, arrived = threading.Condition(), [0, 0, 0]  # now, most at a time, in all

        def change(good: Any, request: Any) -> Any:
            with lock:
                arrived[0] += 1
                arrived[1] = max(arrived[:2])
                arrived[2] += 1
                lock.notify_all()
                if QUESTION not in request["input"]:
                    wanted = min(arrived[2] + 3, 9)
                    lock.wait_for(lambda: arrived[1] >= 4 or arrived[2] >= wanted, 20)
                elif arrived[2] > 1:
                    return Reply(500, b"{}")
                arrived[0] -= 1
            return good

        server = self.serve(Scenario("own", "own", "own", ANSWERS, EMBEDDINGS, change))
        own = {"API_BASE_URL": server.base_url("own"), "API_EMBEDDING_BATCH": "4"}
        result = self.ask(server=server, RAG_CACHE="", **own)
        self.assertEqual((result.status, result.stderr), (0, ""))
        self.assertEqual(arrived, [0, 4, 8])


class TestDamage(CacheTestCase):
    """Whatever is in the file: the right answer or one line, never a wrong vector, no traceback."""

    def check(self, damaged: bytes, good: Result) -> int:
        self.path.write_bytes(damaged)
        for name in ("vectors.db-journal", "vectors.db-wal"):
            (self.folder / name).unlink(missing_ok=True)
        result = self.ask(QUESTION, "--knowledge", self.knowledge, "--explain", RAG_CANDIDATES="30")
        if result.status == 0:
            self.assertEqual(result.stdout, good.stdout)
            ranks = [
                [line for line in each.stderr.split("\n") if line.startswith("rank:")]
                for each in (result, good)
            ]
            self.assertEqual(ranks[0], ranks[1])
        else:
            self.assertEqual(result.stdout, "")
            self.assertRegex(
                result.stderr, r"\Arag\.py: (settings|embeddings): RAG_CACHE [^\n]+\n\Z"
            )
        return result.status

    def start(self) -> tuple[Result, bytes]:
        argv = (QUESTION, "--knowledge", self.knowledge, "--explain")
        good = self.ask(*argv, RAG_CANDIDATES="30")
        return good, self.path.read_bytes()

    def test_it_may_be_cut_off_anywhere(self) -> None:
        good, original = self.start()
        size = len(original)
        statuses = [self.check(original[: size * i // 50], good) for i in range(50)]
        self.assertEqual(statuses[0], 0)  # an empty file is a new cache
        self.assertIn(2, statuses)

    def test_any_bytes_may_be_changed(self) -> None:
        good, original = self.start()
        chance = random.Random(20260101)
        statuses = []
        for changes in [1] * 50 + [50] * 25:
            damaged = bytearray(original)
            for _ in range(changes):
                damaged[chance.randrange(len(damaged))] = chance.randrange(256)
            statuses.append(self.check(bytes(damaged), good))
        self.assertIn(0, statuses)

    def test_a_vector_whose_checksum_is_wrong_is_embedded_again_and_put_right(self) -> None:
        good = self.ask()
        for change in (
            "vector = zeroblob(1024)",
            "checksum = checksum + 1",
            "vector = 'text'",
            "vector = NULL",
            "vector = X'010203', checksum = 0",
            "vector = (SELECT vector FROM vectors WHERE key = (SELECT max(key) FROM vectors))",
        ):
            with self.subTest(change=change):
                database = sqlite3.connect(self.path)
                with database:
                    first = "key = (SELECT min(key) FROM vectors)"
                    database.execute(f"UPDATE vectors SET {change} WHERE {first}")
                database.close()
                self.assertEqual(self.ask(), good)
                self.assertEqual(len(inputs(self.server)), 2)
                self.ask()
                self.assertEqual(inputs(self.server), [QUESTION])


class ProcessTestCase(CacheTestCase):
    """Each run is a process of its own."""

    def start(self, server: MockServer, scenario: str = "plain") -> subprocess.Popen[bytes]:
        environ = {
            "PATH": os.environ["PATH"],
            **server.environment(scenario, rerank=False),
            "RAG_CACHE": str(self.path),
        }
        return subprocess.Popen(
            [sys.executable, str(ROOT / "rag.py"), QUESTION, "--knowledge", self.knowledge],
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )


class TestProcesses(ProcessTestCase):
    def test_eight_may_fill_it_at_the_same_time(self) -> None:
        processes = [self.start(self.server) for _ in range(8)]
        results = [process.communicate() for process in processes]
        self.assertEqual({err for _, err in results}, {b""})
        self.assertEqual(len({out for out, _ in results}), 1)
        self.assertEqual(len(self.rows()), len(RECORDS))


class TestKills(ProcessTestCase):
    """A run of 500 records in 16 batches is killed, and another must go on where it stopped.

    Two moments are tried here; with EVERY_KILL set in the environment it is all of them.
    """

    def setUp(self) -> None:
        super().setUp()
        many = [{"id": f"r{i}", "text": f"Shelf {i} holds the volume {i * i}."} for i in range(500)]
        self.knowledge = self.file("many.json", many)
        self.watch(silent_from=17)

        def change(good: Any, request: Any) -> Any:
            number = next(self.numbers)
            self.arrived.release()
            return good if number < self.silent_from else Reply(ending="silence")

        own = Scenario("own", "own", "own", ANSWERS, EMBEDDINGS, change, rerank=False)
        self.server = server = self.serve(own)
        out, _ = self.start(server, "own").communicate()
        self.expected, self.vectors = json.loads(out), sorted(self.rows())
        self.assertEqual(len(self.vectors), 500)

    def watch(self, silent_from: int) -> None:
        """Counts embedding requests anew; none gets a reply from that number on."""
        self.numbers, self.arrived = itertools.count(1), threading.Semaphore(0)
        self.silent_from = silent_from

    def kill_run(self, request: int, committed: bool) -> None:
        """Kills a run as a request arrives that gets no reply; or once those before are kept."""
        self.path.unlink()
        rag.open_cache(str(self.path)).close()  # so that the rows can be counted at any moment
        self.server.request_log.clear("")
        self.watch(silent_from=request)
        process = self.start(self.server, "own")
        for _ in range(request):
            self.assertTrue(self.arrived.acquire(timeout=60))
        at_least = 31 + 32 * (request - 2) if request > 1 else 0
        while committed and len(self.rows()) < at_least:
            self.assertIsNone(process.poll())
        process.kill()
        process.communicate()

    def settle(self) -> None:
        """Waits until the server has read all that a killed process had sent."""
        url = f"http://127.0.0.1:{self.server.server_port}/_mock/requests"
        urllib.request.urlopen(url, timeout=60).close()  # it comes behind them
        for _ in range(MAX_CONNECTIONS):
            self.server.places.acquire()
        self.server.places.release(MAX_CONNECTIONS)

    def check_kill(self, request: int, committed: bool) -> None:
        self.kill_run(request, committed)
        kept = self.rows()
        self.assertLessEqual(set(kept), set(self.vectors))
        self.settle()
        self.server.request_log.clear("")
        self.watch(silent_from=17)
        out, err = self.start(self.server, "own").communicate()
        self.assertEqual((json.loads(out), err), (self.expected, b""))
        self.assertEqual(len(inputs(self.server)), 501 - len(kept))
        self.assertEqual(sorted(self.rows()), self.vectors)

    def test_a_run_that_is_killed_loses_at_most_the_batches_under_way(self) -> None:
        every = [(request, committed) for request in range(1, 17) for committed in (False, True)]
        for request, committed in every if "EVERY_KILL" in os.environ else [(3, False), (9, True)]:
            with self.subTest(request=request, committed=committed):
                self.check_kill(request, committed)


class TestProgress(CacheTestCase):
    def test_it_is_shown_on_a_terminal_only_and_only_for_more_than_one_batch(self) -> None:
        from tests.support import Terminal

        environ = {**self.server.environment(), "RAG_CACHE": ""}
        argv = (QUESTION, "--knowledge", self.knowledge)
        result = run_rag(*argv, environ={**environ, "API_EMBEDDING_BATCH": "16"}, stream=Terminal)
        shown = result.stderr.split("\r")
        self.assertEqual(
            [line.split(",")[0] for line in shown[:2]],
            ["embedded 16 of 31 texts", "embedded 31 of 31 texts"],
        )
        self.assertRegex(shown[1], r"\Aembedded 31 of 31 texts, \d+ a second *\Z")
        self.assertEqual(shown[2:], [" " * 50, ""])
        narrow = {**environ, "API_EMBEDDING_BATCH": "16", "COLUMNS": "20"}
        result = run_rag(*argv, environ=narrow, stream=Terminal)
        lines = ["embedded 16 of 31 t", "embedded 31 of 31 t", " " * 19, ""]
        self.assertEqual(result.stderr.split("\r"), lines)
        for more, stream in (({"API_EMBEDDING_BATCH": "31"}, Terminal), ({}, None)):
            given = {} if stream is None else {"stream": stream}
            self.assertEqual(run_rag(*argv, environ={**environ, **more}, **given).stderr, "")
