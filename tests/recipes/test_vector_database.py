"""Tests of the recipe vector_database.py with a real Chroma server."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import threading
import unittest
import zlib
from collections.abc import Mapping
from typing import Any, ClassVar
from unittest import mock

import rag
from mock_server.scenarios import CHAT, EMBEDDINGS, RERANK, Change, Scenario
from mock_server.server import MockServer
from tests.recipes.support import Chroma, run_recipe
from tests.support import ROOT, RagTestCase, Result, bodies, paths, run_rag

if not importlib.util.find_spec("chromadb"):
    raise unittest.SkipTest("needs the packages of tests/recipes/requirements.txt")

from tests.recipes import vector_database

QUESTIONS = [
    row["question"]
    for row in json.loads((ROOT / "tests/evaluate/questions.json").read_text("utf-8"))
]
SATURDAY = rag.SAMPLE_QUESTION
SAMPLE = rag.read_knowledge(str(rag.SAMPLE_KNOWLEDGE))


def inputs(server: MockServer) -> list[str]:
    """The texts that were sent to be embedded, without the question of each run."""
    sent = [text for body in bodies(server, EMBEDDINGS) for text in body["input"]]
    return [text for text in sent if text not in QUESTIONS]


class DatabaseTestCase(RagTestCase):
    """A test case with a mock server and a collection of its own, on the Chroma of its class."""

    chroma: ClassVar[Chroma]

    @classmethod
    def setUpClass(cls) -> None:
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.chroma = Chroma(folder.name)
        cls.addClassCleanup(cls.chroma.stop)

    def setUp(self) -> None:
        super().setUp()
        self.server = self.serve()

    def environ(self, **settings: str) -> dict[str, str]:
        """The settings. The run is part of the base URL, so the collection is the test's own."""
        run = f"{zlib.crc32(self.id().encode()):x}"
        return {**self.server.environment(run=run), "CHROMA_URL": self.chroma.url, **settings}

    def recipe(self, *argv: str, **settings: str) -> Result:
        """Run the recipe with these settings changed."""
        return run_recipe(vector_database.document, *argv, environ=self.environ(**settings))

    def build(self, records: Any, **settings: str) -> Result:
        """Store records, and ask the sample question."""
        path = self.file("knowledge.json", records)
        result = self.recipe("--build", "--knowledge", path, SATURDAY, **settings)
        self.assertEqual((result.status, result.stderr), (0, ""))
        return result

    def change_embeddings(self, change: Change) -> None:
        """From now on change the replies of the plain scenario to embedding requests."""
        scenario = Scenario("plain", "own", "", "", EMBEDDINGS, change)
        self.server.scenarios = {**self.server.scenarios, "plain": scenario}

    def table(self, **settings: str) -> Any:
        """The collection, as the recipe opens it."""
        environ = self.environ(**settings)
        return vector_database.open_table(self.chroma.url, rag.read_settings(environ))


class TestAnswers(DatabaseTestCase):
    def assert_equal_answers(self, *where: str, records: Any = SAMPLE, **settings: str) -> None:
        """For each question the recipe publishes what rag.py publishes."""
        self.build(records, **settings)
        path = self.file("knowledge.json", records)
        environ = {**self.environ(**settings), "RAG_CACHE": str(self.folder / "cache")}
        del environ["CHROMA_URL"]
        for question in QUESTIONS:
            with self.subTest(question):
                expected = run_rag("--knowledge", path, *where, question, environ=environ)
                self.assertEqual(expected.status, 0, expected.stderr)
                self.assertEqual(self.recipe(*where, question, **settings), expected)

    def test_the_answers_are_those_of_rag_py(self) -> None:
        self.assert_equal_answers()

    def test_the_answers_without_a_reranker_are_those_of_rag_py(self) -> None:
        self.assert_equal_answers(API_RERANK_MODEL="")

    def test_a_threshold_is_applied_to_the_similarity_of_the_database(self) -> None:
        self.assert_equal_answers(RAG_MIN_SIMILARITY="0.3")

    def test_records_below_the_threshold_are_not_sent(self) -> None:
        self.build(SAMPLE)
        self.server.request_log.entries.clear()
        result = self.recipe(SATURDAY, RAG_MIN_SIMILARITY="0.9")
        self.assertEqual(
            result.document, {"answer": None, "sources": [], "reason": "below_min_similarity"}
        )
        self.assertEqual(paths(self.server), [EMBEDDINGS])

    def test_records_of_equal_similarity_are_in_the_order_of_their_ids(self) -> None:
        records = [{"id": name, "text": "The same text."} for name in "cadb"]
        self.build(records, API_RERANK_MODEL="")
        [body] = bodies(self.server, CHAT)
        sources = json.loads(body["messages"][-1]["content"])["sources"]
        self.assertEqual([source["id"] for source in sources], ["a", "b", "c"])


class TestBuild(DatabaseTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.build(SAMPLE)
        self.assertEqual(inputs(self.server), [*map(rag.passage, SAMPLE)])
        self.server.request_log.entries.clear()

    def test_records_that_are_stored_are_not_embedded_again(self) -> None:
        self.build(SAMPLE)
        self.assertEqual(inputs(self.server), [])

    def test_a_question_embeds_only_the_question(self) -> None:
        self.recipe(SATURDAY)
        [body] = bodies(self.server, EMBEDDINGS)
        self.assertEqual(body["input"], [SATURDAY])

    def test_an_edited_record_costs_one_embedding_and_is_published(self) -> None:
        edited = {**SAMPLE[1], "text": "On Saturday the library is open from 9:00 to 12:00."}
        result = self.build([SAMPLE[0], edited, *SAMPLE[2:]])
        self.assertEqual(inputs(self.server), [rag.passage(edited)])
        self.assertEqual(result.document["sources"], [edited])

    def test_an_added_record_costs_one_embedding(self) -> None:
        added = {"id": "cafe", "text": "The cafe has tea."}
        self.build([*SAMPLE, added])
        self.assertEqual(inputs(self.server), [rag.passage(added)])
        self.assertEqual(self.table().count(), len(SAMPLE) + 1)

    def test_a_removed_record_disappears_without_a_request(self) -> None:
        self.build([record for record in SAMPLE if record["id"] != "hours-saturday"])
        self.assertEqual(inputs(self.server), [])
        for body in bodies(self.server, RERANK):
            self.assertNotIn(rag.passage(SAMPLE[1]), body["documents"])
        self.assertEqual(self.table().get(ids=["hours-saturday"])["ids"], [])

    def test_edits_removals_and_additions_in_one_build_cost_only_what_is_new(self) -> None:
        edited, added = {**SAMPLE[2], "text": "It is closed."}, {"id": "cafe", "text": "Tea."}
        records = [added, SAMPLE[1], edited, *SAMPLE[4:]]
        self.build(records)
        self.assertEqual(sorted(inputs(self.server)), sorted(map(rag.passage, [edited, added])))
        wanted = sorted(record["id"] for record in records)
        self.assertEqual(sorted(self.table().get(include=[])["ids"]), wanted)

    def test_another_order_of_the_records_costs_nothing(self) -> None:
        self.build(SAMPLE[::-1])
        self.assertEqual(inputs(self.server), [])

    def test_a_field_that_only_the_filter_reads_is_stored_again(self) -> None:
        self.build([{**SAMPLE[0], "audience": "staff"}, *SAMPLE[1:]])
        names = self.table().get(where={"meets": {"$contains": "audience=public"}})["ids"]
        self.assertNotIn(SAMPLE[0]["id"], names)

    def test_a_record_without_its_former_field_is_not_found_by_it(self) -> None:
        bare = {name: value for name, value in SAMPLE[0].items() if name != "audience"}
        self.build([bare, *SAMPLE[1:]])
        names = self.table().get(where={"meets": {"$contains": "audience=public"}})["ids"]
        self.assertNotIn(bare["id"], names)

    def test_what_shapes_a_vector_gets_a_collection_of_its_own(self) -> None:
        changes = [
            {},
            {"API_EMBEDDING_MODEL": "another"},
            {"API_EMBEDDING_OPTIONS": '{"dimensions": 9}'},
            {"API_DOCUMENT_PREFIX": "passage: "},
            {"API_BASE_URL": self.server.base_url()},
        ]
        names = {self.table(**change).name for change in changes}
        self.assertEqual(len(names), len(changes))

    def test_a_collection_keeps_its_records_while_another_prefix_is_in_use(self) -> None:
        self.build(SAMPLE, API_DOCUMENT_PREFIX="passage: ")
        self.assertEqual(inputs(self.server), ["passage: " + rag.passage(each) for each in SAMPLE])
        self.assertEqual(self.recipe(SATURDAY).document["sources"], [SAMPLE[1]])

    def test_what_does_not_shape_a_vector_keeps_the_collection(self) -> None:
        self.build(SAMPLE, API_EMBEDDING_BATCH="3", API_QUERY_PREFIX="query: ", RAG_SOURCES="2")
        self.assertEqual(bodies(self.server, EMBEDDINGS)[0]["input"], ["query: " + SATURDAY])

    def test_vectors_of_another_length_are_refused_by_the_database(self) -> None:
        def shorter(good: Any, request: Mapping[str, Any]) -> Any:
            rows = [{**row, "embedding": [1.0] * 128} for row in good["data"]]
            return {**good, "data": rows}

        self.change_embeddings(shorter)
        result = self.recipe(SATURDAY)
        self.assert_one_line(result, 1, "recipe: database: ", "dimension of 256, got 128")
        self.assertEqual(paths(self.server), [EMBEDDINGS])


class TestInterruption(DatabaseTestCase):
    def test_a_build_that_was_killed_is_reported_and_completed_by_the_next(self) -> None:
        reached, release, stored = threading.Event(), threading.Event(), 6

        def stalled(good: Any, request: Mapping[str, Any]) -> Any:
            if request["input"] == [rag.passage(SAMPLE[stored])]:
                reached.set()
                release.wait(60)
            return good

        plain = self.server.scenarios
        self.change_embeddings(stalled)
        # One record in a request and one request at a time: two records are stored at a time.
        one = {"API_EMBEDDING_BATCH": "1", "API_EMBEDDING_PARALLEL": "1"}
        command = [sys.executable, "-m", "tests.recipes.vector_database", "--build", SATURDAY]
        environ = {**os.environ, **self.environ(**one)}
        with subprocess.Popen(command, cwd=ROOT, env=environ) as process:
            self.assertTrue(reached.wait(60))
            process.kill()
        release.set()
        self.server.scenarios = plain
        self.server.request_log.entries.clear()

        count = f"{stored} of {len(SAMPLE)} records are stored; use --build"
        self.assert_failure(self.recipe(SATURDAY), 1, f"recipe: database: {count}")
        self.assertEqual(paths(self.server), [])

        result = self.build(SAMPLE)
        self.assertEqual(inputs(self.server), [*map(rag.passage, SAMPLE[stored:])])
        self.assertEqual(result.document["sources"], [SAMPLE[1]])

    def test_a_record_whose_edit_was_interrupted_is_not_found_with_its_old_text(self) -> None:
        self.build(SAMPLE)
        edited = {**SAMPLE[1], "audience": "staff", "text": "On Saturday the library is closed."}
        path = self.file("edited.json", [SAMPLE[0], edited, *SAMPLE[2:]])
        plain = self.server.scenarios
        self.change_embeddings(lambda good, request: {"data": []})
        failed = self.recipe("--build", "--knowledge", path, SATURDAY)
        self.assert_one_line(failed, 1, "recipe: embeddings: ")
        self.server.scenarios = plain
        self.server.request_log.entries.clear()

        count = f"{len(SAMPLE) - 1} of {len(SAMPLE)} records are stored; use --build"
        self.assert_failure(self.recipe(SATURDAY), 1, f"recipe: database: {count}")
        self.assertEqual(paths(self.server), [])

        result = self.recipe("--build", "--knowledge", path, SATURDAY)
        self.assertEqual(inputs(self.server), [rag.passage(edited)])
        self.assertEqual(result.document["sources"], [edited])

    def test_a_question_before_the_first_build_is_refused(self) -> None:
        line = "recipe: database: 0 of 0 records are stored; use --build"
        self.assert_failure(self.recipe(SATURDAY), 1, line)
        self.assertEqual(paths(self.server), [])


class TestFilter(DatabaseTestCase):
    fields: ClassVar[list[tuple[str, Any]]] = [
        ("team", "north"),
        ("team", ["north", "south"]),
        ("team", []),
        ("team", None),
        ("year", 2025),
        ("year", 2025.5),
        ("open", True),
        ("place", {"floor": 1}),
        ("places", [{"floor": 1}, 2, None]),
        ("label", "a=b"),
        ("label", ""),
        ("$odd", "x"),
        ("team", "north "),
        ("team", "NORTH"),
    ]

    def test_no_request_contains_a_record_that_the_filter_excludes(self) -> None:
        self.build(SAMPLE)
        self.server.request_log.entries.clear()
        for question in QUESTIONS:
            self.recipe("--where", "audience=public", question)
        sent = json.dumps([entry.body for entry in self.server.request_log.entries])
        staff = [record for record in SAMPLE if record["audience"] != "public"]
        self.assertTrue(staff)
        for record in staff:
            self.assertNotIn(json.dumps(record["text"]), sent)
            self.assertNotIn(record["id"], sent)

    def test_the_filter_is_part_of_the_query(self) -> None:
        from chromadb.api.models.Collection import Collection

        self.build(SAMPLE)
        with mock.patch.object(Collection, "query", autospec=True, side_effect=KeyError) as query:
            self.recipe("--where", "audience=public", "--where", "id=wifi", SATURDAY)
        [call] = query.call_args_list
        wanted = [{"meets": {"$contains": name}} for name in ("audience=public", "id=wifi")]
        for condition in wanted:
            self.assertIn(condition, call.kwargs["where"]["$and"])

    def test_each_value_is_found_by_the_conditions_that_rag_py_accepts(self) -> None:
        values = [
            value
            for _, field in self.fields
            for value in (field, *(field if isinstance(field, list) else []))
        ]
        texts = {value if isinstance(value, str) else json.dumps(value) for value in values}
        records = [
            {"id": f"record-{i}", "text": f"Text {i}.", name: value}
            for i, (name, value) in enumerate(self.fields)
        ]
        self.build(records)
        table = self.table()
        for name in sorted({name for name, _ in self.fields}):
            for text in sorted(texts):
                with self.subTest(f"{name}={text}"):
                    condition = f"{name}={text}"
                    found = table.get(where={"meets": {"$contains": condition}})["ids"]
                    wanted = [
                        record["id"]
                        for record in records
                        if name in record and rag.holds(record[name], text)
                    ]
                    self.assertEqual(sorted(found), sorted(wanted))

    def test_all_conditions_must_be_met(self) -> None:
        self.build(SAMPLE)
        where = ("--where", "audience=public", "--where", "id=wifi")
        result = self.recipe(*where, "Where does the wireless network's password stand?")
        self.assertEqual([source["id"] for source in result.document["sources"]], ["wifi"])

    def test_a_filter_that_no_record_meets_is_an_error(self) -> None:
        self.build(SAMPLE)
        self.server.request_log.entries.clear()
        for condition in ("audience=nobody", "audience=publi", "nothing=public", "audience"):
            with self.subTest(condition):
                line = f'recipe: database: no record has "{condition}" (see --where)'
                self.assert_failure(self.recipe("--where", condition, SATURDAY), 1, line)
        self.assertEqual(paths(self.server), [EMBEDDINGS])


class TestService(RagTestCase):
    def test_a_service_that_stopped_after_the_build_is_one_line(self) -> None:
        server, chroma = self.serve(), Chroma(str(self.folder / "vectors"))
        self.addCleanup(chroma.stop)
        environ = {**server.environment(), "CHROMA_URL": chroma.url}
        built = run_recipe(vector_database.document, "--build", SATURDAY, environ=environ)
        self.assertEqual(built.status, 0, built.stderr)
        server.request_log.entries.clear()
        chroma.stop()
        result = run_recipe(vector_database.document, SATURDAY, environ=environ)
        self.assert_one_line(
            result, 1, f"recipe: database: {chroma.url}: ", "CHROMA_URL", "`chroma run --path"
        )
        self.assertEqual(paths(server), [])

    def test_the_records_outlive_the_service(self) -> None:
        server, folder = self.serve(), str(self.folder / "vectors")
        answers = []
        for argv in (["--build", SATURDAY], [SATURDAY]):
            chroma = Chroma(folder)
            try:
                environ = {**server.environment(), "CHROMA_URL": chroma.url}
                answers.append(run_recipe(vector_database.document, *argv, environ=environ))
            finally:
                chroma.stop()
        self.assertEqual(answers[0], answers[1])
        self.assertEqual(answers[0].status, 0, answers[0].stderr)

    def test_a_service_that_is_not_chroma_is_one_line(self) -> None:
        server = self.serve()
        url = f"http://127.0.0.1:{server.server_port}"
        environ = {**server.environment(), "CHROMA_URL": url}
        result = run_recipe(vector_database.document, SATURDAY, environ=environ)
        self.assert_one_line(result, 1, f"recipe: database: {url}: ", "CHROMA_URL")

    def test_a_bad_address_is_refused_before_any_request(self) -> None:
        server = self.serve()
        for url in ("127.0.0.1:8000", "ftp://127.0.0.1", "http://user:word@127.0.0.1:8000"):
            with self.subTest(url):
                environ = {**server.environment(), "CHROMA_URL": url}
                result = run_recipe(vector_database.document, SATURDAY, environ=environ)
                self.assert_one_line(result, 2, "recipe: settings: CHROMA_URL must be an http(s)")


class TestReplies(RagTestCase):
    """What the database returns is checked: no rerank or chat request follows a bad reply."""

    good: ClassVar[dict[str, Any]] = {
        "ids": ["a", "b"],
        "documents": [
            '{"id": "a", "text": "One.", "team": "x"}',
            '{"id": "b", "text": "Two.", "team": "x"}',
        ],
        "distances": [0.25, 0.5],
    }

    def search(self, where: list[str], count: Any = 2, **changes: Any) -> rag.Ranking:
        """Search a table that returns the good reply with these changes."""
        reply = {name: [column] for name, column in {**self.good, **changes}.items()}
        table = mock.Mock(metadata={"records": 2})
        table.count.return_value, table.query.return_value = count, reply
        settings = rag.read_settings(self.serve().environment())
        with rag.open_run(settings) as run:
            return vector_database.search("A question?", where, table, run)

    def test_the_similarity_is_one_minus_the_distance(self) -> None:
        self.assertEqual(
            [(record["id"], score) for record, score in self.search([])], [("a", 0.75), ("b", 0.5)]
        )

    def test_rows_are_sorted_by_similarity(self) -> None:
        ranking = self.search([], distances=[0.5, 0.25])
        self.assertEqual([record["id"] for record, _ in ranking], ["b", "a"])

    def test_a_rounded_distance_gives_a_similarity_of_at_most_one(self) -> None:
        ranking = self.search([], distances=[-0.0000002, 2.0000002])
        self.assertEqual([score for _, score in ranking], [1.0, -1.0])

    def test_a_bad_reply_is_refused(self) -> None:
        a, b = self.good["documents"]
        cases: list[tuple[str, list[str], dict[str, Any], str]] = [
            ("another id", [], {"ids": ["a", "c"]}, "row c holds the record b"),
            ("an id twice", [], {"ids": ["a", "a"], "documents": [a, a]}, "2 rows for 2"),
            ("a row less", [], {"ids": ["a"], "documents": [a], "distances": [0]}, "1 rows for 2"),
            ("an id less", [], {"ids": ["a"]}, "zip"),
            ("no rows", [], {"ids": [], "documents": [], "distances": []}, "0 rows for 2"),
            ("no JSON", [], {"documents": [a, "b"]}, "row b is not JSON"),
            ("no record", [], {"documents": [a, '{"id": "b"}']}, "text is null"),
            ("no text", [], {"documents": [a, None]}, "row b is not JSON"),
            ("not a number", [], {"distances": [0.25, float("nan")]}, "the distance nan"),
            ("too far", [], {"distances": [0.25, 2.5]}, "the distance 2.5"),
            ("negative", [], {"distances": [-0.5, 0.5]}, "the distance -0.5"),
            ("no distance", [], {"distances": [0.25, None]}, "NoneType"),
            ("excluded", ["team=y"], {}, 'no record has "team=y"'),
            ("one excluded", ["id=a"], {}, "1 records that meet --where"),
            ("more rows", ["team=x"], {"count": 1}, "1 of 2 records"),
            ("another count", [], {"count": 3}, "3 of 2 records are stored; use --build"),
        ]
        for name, where, changes, words in cases:
            with self.subTest(name):
                with self.assertRaisesRegex(rag.RagError, "^database: .*" + words):
                    self.search(where, **changes)


if __name__ == "__main__":
    unittest.main()
