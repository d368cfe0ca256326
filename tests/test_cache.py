"""RAG_CACHE: the same answers with and without it, whatever happens to the file or the process."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import sqlite3
import stat
import struct
import subprocess
import sys
import threading
import unittest
import urllib.request
import zlib
from typing import Any
from unittest import mock

import rag
from mock_server import models
from mock_server.endpoints import ENDPOINTS
from mock_server.scenarios import EMBEDDINGS, Change, Reply
from mock_server.server import MAX_CONNECTIONS, MockServer
from tests.support import ROOT, RagTestCase, Result, bodies, own, run_rag

QUESTION = "What holds shelf 7?"
RECORDS = [{"id": f"r{i}", "text": f"Shelf {i} holds the volume {i * i}."} for i in range(30)]
# The table of a cache as all versions of rag.py have written it.
TABLE = "CREATE TABLE vectors (key BLOB PRIMARY KEY, vector BLOB, checksum INTEGER)"


def ranks(result: Result) -> list[str]:
    """Return the lines of --explain with similarities."""
    return [line for line in result.stderr.split("\n") if line.startswith("rank:")]


class CacheTestCase(RagTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.server = self.serve()
        self.path = self.folder / "vectors.db"
        self.knowledge = self.file("k.json", RECORDS)

    def ask(self, *argv: str, **environ: str) -> Result:
        """Run with the cache. The request log then holds the requests of this run only."""
        self.server.request_log.clear("")
        given = {"RAG_CACHE": str(self.path), "API_EMBEDDING_BATCH": "8"}
        argv = (QUESTION, "--knowledge", self.knowledge, *argv)
        return run_rag(*argv, environ={**self.server.environment(), **given, **environ})

    def ask_changed(self, change: Change) -> Result:
        """Run with the cache, with changed replies to the embedding requests."""
        with mock.patch.object(self.server, "scenarios", {"own": own(EMBEDDINGS, change)}):
            return self.ask(API_BASE_URL=self.server.base_url("own"))

    def assert_embedded(self, *texts: str) -> None:
        """Exactly the question and these texts were embedded."""
        self.assertEqual(sorted(self.inputs()), sorted([QUESTION, *texts]))

    def inputs(self) -> list[str]:
        """Return all texts that were embedded."""
        return [text for body in bodies(self.server, EMBEDDINGS) for text in body["input"]]

    def database(self, *statements: str) -> list[Any]:
        """Execute statements on the file, and return the rows of the last one."""
        database = sqlite3.connect(self.path, isolation_level=None)
        try:
            return [database.execute(each).fetchall() for each in statements][-1]
        finally:
            database.close()

    def rows(self) -> list[tuple[bytes, bytes, int]]:
        return self.database("SELECT key, vector, checksum FROM vectors")


TEXTS = [record["text"] for record in RECORDS]


class TestResults(CacheTestCase):
    def test_similarities_are_the_same_to_the_last_digit_with_and_without_it(self) -> None:
        for encoding in ("float", "base64"):
            lines = []
            for cache in ("", str(self.path), str(self.path)):
                with mock.patch.object(rag, "scores", lambda kept: repr([s for _, s in kept])):
                    settings = {"RAG_CACHE": cache, "API_EMBEDDING_ENCODING": encoding}
                    result = self.ask("--explain", RAG_CANDIDATES="30", **settings)
                lines.append(ranks(result))
            self.assertEqual(lines[0][0].count(", "), 29)
            self.assertEqual(lines[1:], lines[:1] * 2)
            self.path.unlink()

    def test_a_full_cache_embeds_the_question_only(self) -> None:
        first = self.ask()
        self.assert_embedded(*TEXTS)
        self.assertEqual(self.ask(), first)
        self.assert_embedded()

    def test_an_edited_record_costs_one_embedding(self) -> None:
        self.ask()
        changed = [{**RECORDS[0], "text": "Shelf 0 is empty."}, *RECORDS[1:]]
        self.ask("--knowledge", self.file("changed.json", changed))
        self.assert_embedded("Shelf 0 is empty.")
        self.ask()
        self.assert_embedded()

    def test_what_shapes_a_vector_embeds_all_again_and_going_back_none(self) -> None:
        _, required, optional, check = ENDPOINTS[EMBEDDINGS]
        row = ("other", required, (*optional, "user", "dimensions"), check)
        same = (models.EMBEDDING_MODEL, *row[1:])
        options = '{"user": "a", "dimensions": 256}'
        self.ask()
        for accepted, variable, value in (
            (row, "API_EMBEDDING_MODEL", "other"),
            (same, "API_DOCUMENT_PREFIX", "passage: "),
            (same, "API_EMBEDDING_OPTIONS", options),
        ):
            with self.subTest(variable=variable):
                with mock.patch.dict(ENDPOINTS, {EMBEDDINGS: accepted}):
                    self.ask(**{variable: value})
                self.assertEqual(len(self.inputs()), 31)
        for variable, value in (
            ("API_QUERY_PREFIX", ""),
            ("API_BASE_URL", f"{self.server.base_url()}/"),
            ("API_EMBEDDING_OPTIONS", "{}"),
            ("API_EMBEDDING_OPTIONS", '{"dimensions": 256, "user": "a"}'),
        ):
            with self.subTest(variable=variable, value=value):
                with mock.patch.dict(ENDPOINTS, {EMBEDDINGS: same}):
                    self.ask(**{variable: value})
                self.assert_embedded()
        self.server = self.serve()
        self.ask()
        self.assert_embedded(*TEXTS)

    def test_a_question_is_never_kept(self) -> None:
        path = self.file("same.json", [*RECORDS, {"id": "same", "text": QUESTION}])
        for texts in (TEXTS, []):
            self.ask("--knowledge", path)
            self.assert_embedded(*texts)
        self.assertEqual(len(self.rows()), 30)

    def test_equal_records_are_kept_once(self) -> None:
        path = self.file("twins.json", [*RECORDS, {**RECORDS[3], "id": "twin"}])
        for texts in (TEXTS, []):
            self.ask("--knowledge", path)
            self.assert_embedded(*texts)

    def test_vectors_of_another_length_are_embedded_again(self) -> None:
        def shorter(good: Any, request: Any) -> Any:
            data = [{**row, "embedding": row["embedding"][:100]} for row in good["data"]]
            return {**good, "data": data}

        # The same keys for both addresses, as with a service that replaces a model.
        with mock.patch.object(rag, "cache_key", lambda text, settings: text.encode()):
            self.ask()
            self.assertEqual(self.ask_changed(shorter).status, 0)
            self.assert_embedded(*TEXTS)
        self.assertEqual({len(vector) for _, vector, _ in self.rows()}, {400})

    def test_explain_says_how_many_vectors_came_from_it(self) -> None:
        self.ask()
        line = r"(?m)^embeddings: .*\b1 inputs, 30 .*from the cache"
        self.assertRegex(self.ask("--explain").stderr, line)


class TestFile(CacheTestCase):
    def assert_refused(self, reason: str) -> None:
        """The run ends before the first request, and the file stays as it is."""
        before = self.path.read_bytes() if self.path.is_file() else b""
        result = self.ask()
        self.assert_one_line(result, 2, "rag.py: settings: RAG_CACHE ", f": {reason}")
        self.assertTrue(result.stderr.endswith("; name another file\n"), result.stderr)
        self.assertEqual(self.inputs(), [])
        self.assertEqual(self.path.read_bytes() if self.path.is_file() else b"", before)

    @unittest.skipIf(os.name == "nt", "needs POSIX permissions")
    def test_it_is_private_to_the_user_whatever_the_umask(self) -> None:
        before = os.umask(0)
        try:
            self.ask()
        finally:
            os.umask(before)
        self.assertEqual(stat.S_IMODE(self.path.stat().st_mode), 0o600)
        self.assertEqual({each.name for each in self.folder.iterdir()}, {"k.json", "vectors.db"})

    def test_it_holds_no_text_and_no_question(self) -> None:
        self.ask()
        data = self.path.read_bytes()
        for text in ("Shelf", "volume", QUESTION, "mock-key", "127.0.0.1", "mock-embedding"):
            self.assertNotIn(text.encode(), data)

    def test_a_cache_of_an_earlier_version_is_used(self) -> None:
        database = sqlite3.connect(self.path)
        database.execute(TABLE)
        for text in TEXTS:
            parts = [f"{self.server.base_url()}/embeddings", "mock-embedding", text]
            key = hashlib.sha256(json.dumps(parts).encode()).digest()
            vector = struct.pack("256f", *models.vector(text))
            row = (key, vector, zlib.crc32(key + vector))
            database.execute("INSERT INTO vectors VALUES (?, ?, ?)", row)
        database.commit()
        database.close()
        before = self.rows()
        self.assertEqual(self.ask().document["sources"], [RECORDS[7]])
        self.assert_embedded()
        self.path.unlink()
        self.ask()
        self.assertEqual(sorted(self.rows()), sorted(before))

    def test_deleting_it_is_safe(self) -> None:
        first = self.ask()
        self.path.unlink()
        self.assertEqual(self.ask(), first)
        self.assert_embedded(*TEXTS)

    def test_what_is_no_cache_is_left_as_it_is(self) -> None:
        self.path.write_bytes(b"my notes, which are precious" * 100)
        self.assert_refused("file is not a database")
        for statement in (
            "CREATE TABLE customers (name TEXT)",
            "CREATE TABLE vectors (name TEXT)",
            f"{TABLE}; CREATE TABLE customers (name TEXT)",
            f"{TABLE}; CREATE TRIGGER t AFTER INSERT ON vectors BEGIN SELECT 1; END",
        ):
            with self.subTest(statement=statement):
                self.path.unlink()
                self.database(*statement.split("; ", 1))
                self.assert_refused("it holds other data")

    def test_a_path_that_is_no_file_is_refused(self) -> None:
        self.path.mkdir()
        self.assert_refused("unable to open database file")
        self.path = self.folder / "none" / "vectors.db"
        self.assert_refused("No such file or directory")

    def test_an_empty_file_becomes_a_cache(self) -> None:
        self.path.touch()
        self.assertEqual(self.ask().status, 0)
        self.assertEqual(len(self.rows()), len(RECORDS))

    def test_a_complete_one_that_cannot_be_written_works_and_another_is_an_error(self) -> None:
        first = self.ask()
        connect = sqlite3.connect

        def read_only(path: str, **_: Any) -> sqlite3.Connection:
            return connect(f"file:{path}?mode=ro", isolation_level=None, uri=True)

        more = self.file("more.json", [*RECORDS, {"id": "new", "text": "A new shelf."}])
        with mock.patch("sqlite3.connect", read_only):
            self.assertEqual(self.ask(), first)
            result = self.ask("--knowledge", more)
        self.assert_one_line(result, 1, "rag.py: embeddings: RAG_CACHE ", "readonly database")

    def test_a_disk_that_is_full_is_one_line_and_what_was_kept_stays(self) -> None:
        self.database(TABLE)
        connect = sqlite3.connect

        def small(path: str, **_: Any) -> sqlite3.Connection:
            database = connect(path, isolation_level=None)
            database.execute("PRAGMA max_page_count = 8")
            return database

        with mock.patch("sqlite3.connect", small):
            result = self.ask()
        self.assert_one_line(result, 1, "rag.py: embeddings: RAG_CACHE ", "disk is full")
        kept = len(self.rows())
        self.assertIn(kept, range(1, 30))
        self.ask()
        self.assert_embedded(*TEXTS[kept:])

    def test_one_that_another_process_has_locked_is_one_line_that_says_so(self) -> None:
        self.database(TABLE)
        connect = sqlite3.connect
        other = connect(self.path, isolation_level=None)
        self.addCleanup(other.close)
        other.execute("BEGIN IMMEDIATE")

        def impatient(path: str, **_: Any) -> sqlite3.Connection:
            return connect(path, isolation_level=None, timeout=0)

        with mock.patch("sqlite3.connect", impatient):
            result = self.ask()
        reason = "database is locked; if it is damaged, delete it"
        self.assert_failure(result, 1, f"rag.py: embeddings: RAG_CACHE {self.path}: {reason}")

    def test_sqlite3_is_needed_with_a_cache_only(self) -> None:
        with mock.patch.dict(sys.modules, {"sqlite3": None}):
            self.assertEqual(self.ask(RAG_CACHE=" ").status, 0)
            self.assert_refused("import of sqlite3 halted")


class TestFailures(CacheTestCase):
    def test_what_had_arrived_before_a_failure_is_kept(self) -> None:
        def change(good: Any, request: Any) -> Any:
            return Reply(503, b"{}") if TEXTS[-1] in request["input"] else good

        with mock.patch.object(rag, "cache_key", lambda text, settings: text.encode()):
            result = self.ask_changed(change)
            self.assert_one_line(result, 1, "answered 503")
            kept = {key.decode() for key, _, _ in self.rows()}
            self.assertGreaterEqual(kept, {*TEXTS[:7]})
            self.assertNotIn(TEXTS[-1], kept)
            self.ask()
        self.assert_embedded(*[text for text in TEXTS if text not in kept])

    def test_a_batch_with_a_bad_vector_is_not_kept(self) -> None:
        def change(good: Any, request: Any) -> Any:
            return {"data": [{**good["data"][0], "embedding": [0.0] * 256}, *good["data"][1:]]}

        self.assertEqual(self.ask_changed(change).status, 1)
        self.assertEqual(self.rows(), [])


class TestDamage(CacheTestCase):
    """Whatever is in the file: the right answer or one line that names it."""

    def setUp(self) -> None:
        super().setUp()
        self.good = self.ask("--explain", RAG_CANDIDATES="30")
        self.original = self.path.read_bytes()

    def check(self, damaged: bytes) -> int:
        """Run with a damaged file, and return the exit status."""
        self.path.write_bytes(damaged)
        for name in ("vectors.db-journal", "vectors.db-wal"):
            (self.folder / name).unlink(missing_ok=True)
        result = self.ask("--explain", RAG_CANDIDATES="30")
        if result.status:
            self.assertEqual(result.stdout, "")
            line = result.stderr.split("\n")[-2]
            self.assertRegex(line, r"\Arag\.py: (settings|embeddings): RAG_CACHE .+; .+")
        else:
            self.assertEqual(result.stdout, self.good.stdout)
            self.assertEqual(ranks(result), ranks(self.good))
        return result.status

    def test_it_may_be_cut_off_anywhere(self) -> None:
        size = len(self.original)
        statuses = [self.check(self.original[: size * i // 20]) for i in range(20)]
        self.assertEqual(statuses[0], 0)  # an empty file is a new cache
        self.assertIn(2, statuses)

    def test_any_bytes_may_be_changed(self) -> None:
        chance = random.Random(20260101)
        statuses = []
        for changes in [1] * 30 + [50] * 20:
            damaged = bytearray(self.original)
            for _ in range(changes):
                damaged[chance.randrange(len(damaged))] = chance.randrange(256)
            statuses.append(self.check(bytes(damaged)))
        self.assertIn(0, statuses)

    def test_a_bit_of_the_schema_may_be_flipped(self) -> None:
        # sqlite3 raises UnicodeDecodeError here, which is none of its own exceptions.
        schema = self.original.index(b"CREATE TABLE")
        for place in (schema - 15, schema + 2, schema + 39):
            damaged = bytearray(self.original)
            damaged[place] ^= 0x80
            self.assertEqual(self.check(bytes(damaged)), 2)

    def test_a_vector_whose_checksum_is_wrong_is_embedded_again_and_put_right(self) -> None:
        last = "(SELECT vector FROM vectors WHERE key = (SELECT max(key) FROM vectors))"
        for change in (
            "vector = zeroblob(1024)",
            "checksum = checksum + 1",
            "vector = 'text'",
            "vector = NULL",
            "vector = X'010203', checksum = 0",
            f"vector = {last}",
        ):
            with self.subTest(change=change):
                where = "WHERE key = (SELECT min(key) FROM vectors)"
                self.database(f"UPDATE vectors SET {change} {where}")
                self.assertEqual(self.ask().stdout, self.good.stdout)
                self.assertEqual(len(self.inputs()), 2)
                self.ask()
                self.assert_embedded()


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
    def test_four_may_fill_it_at_the_same_time(self) -> None:
        processes = [self.start(self.server) for _ in range(4)]
        results = [process.communicate() for process in processes]
        self.assertEqual({err for _, err in results}, {b""})
        self.assertEqual(len({out for out, _ in results}), 1)
        self.assertEqual(len(self.rows()), len(RECORDS))


class TestKills(ProcessTestCase):
    """A run of 300 records in 10 batches is killed, and another must go on where it stopped.

    Two moments are tried here; with EVERY_KILL set in the environment it is all of them.
    """

    def setUp(self) -> None:
        super().setUp()
        many = [{"id": f"r{i}", "text": f"Shelf {i} holds the volume {i * i}."} for i in range(300)]
        self.knowledge = self.file("many.json", many)
        self.watch(silent_from=11)

        def change(good: Any, request: Any) -> Any:
            number = next(self.numbers)
            self.arrived.release()
            return good if number < self.silent_from else Reply(ending="silence")

        self.server = self.serve(own(EMBEDDINGS, change))
        out, _ = self.start(self.server, "own").communicate()
        self.expected, self.vectors = json.loads(out), sorted(self.rows())
        self.assertEqual(len(self.vectors), 300)

    def watch(self, silent_from: int) -> None:
        """Count embedding requests anew; none gets a reply from that number on."""
        self.numbers, self.arrived = itertools.count(1), threading.Semaphore(0)
        self.silent_from = silent_from

    def kill_run(self, request: int, committed: bool) -> None:
        """Kill a run as a request arrives that gets no reply; or once those before are kept."""
        self.path.unlink()
        self.database(TABLE)  # so that the rows can be counted at any moment
        self.server.request_log.clear("")
        self.watch(silent_from=request)
        process = self.start(self.server, "own")
        for _ in range(request):
            self.assertTrue(self.arrived.acquire(timeout=60))
        # After the first batch, batches are sent in groups of four. Those before are committed.
        at_least = 31 + 32 * 4 * ((request - 2) // 4) if request > 1 else 0
        while committed and len(self.rows()) < at_least:
            self.assertIsNone(process.poll())
        process.kill()
        process.communicate()

    def settle(self) -> None:
        """Wait until the server has read all that a killed process had sent."""
        url = f"http://127.0.0.1:{self.server.server_port}/_mock/requests"
        urllib.request.urlopen(url, timeout=60).close()  # it is accepted after those requests
        for _ in range(MAX_CONNECTIONS):
            self.server.places.acquire()
        self.server.places.release(MAX_CONNECTIONS)

    def check_kill(self, request: int, committed: bool) -> None:
        self.kill_run(request, committed)
        kept = self.rows()
        self.assertLessEqual(set(kept), set(self.vectors))
        self.settle()
        self.server.request_log.clear("")
        self.watch(silent_from=11)
        out, err = self.start(self.server, "own").communicate()
        self.assertEqual((json.loads(out), err), (self.expected, b""))
        self.assertEqual(len(self.inputs()), 301 - len(kept))
        self.assertEqual(sorted(self.rows()), self.vectors)

    def test_a_run_that_is_killed_loses_at_most_the_batches_under_way(self) -> None:
        every = [(request, committed) for request in range(1, 11) for committed in (False, True)]
        for request, committed in every if "EVERY_KILL" in os.environ else [(3, False), (9, True)]:
            with self.subTest(request=request, committed=committed):
                self.check_kill(request, committed)
