"""Tests of the recipe agent.py with pydantic-ai's scripted model."""

from __future__ import annotations

import importlib.util
import json
import threading
import unittest
from collections.abc import Iterable, Mapping
from email.message import Message
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar, TypeAlias

import rag
from mock_server.scenarios import EMBEDDINGS, RERANK
from tests.recipes.support import run_recipe
from tests.support import RagTestCase, Result, bodies, own, paths

if not importlib.util.find_spec("pydantic_ai"):
    raise unittest.SkipTest("needs the packages of tests/recipes/requirements.txt")

from pydantic_ai import ModelMessage, ModelResponse, TextPart, ToolCallPart
from pydantic_ai.models.function import AgentInfo, FunctionModel

from tests.recipes import agent

SATURDAY = rag.SAMPLE_QUESTION
SAMPLE = {record["id"]: record for record in rag.read_knowledge(str(rag.SAMPLE_KNOWLEDGE))}
ABSTENTION: dict[str, Any] = {"answer": None, "sources": [], "reason": "sources_do_not_answer"}
Step: TypeAlias = ModelResponse


def search(*queries: str) -> Step:
    """A response of the model that searches."""
    return Step([ToolCallPart("search", {"query": query}) for query in queries])


def cite(*ids: Any) -> Step:
    """A response of the model that cites."""
    return Step([ToolCallPart("cite", {"ids": [*ids]})])


def say(text: str, finish_reason: Any = "stop") -> Step:
    """A response of the model that answers."""
    return Step([TextPart(text)], finish_reason=finish_reason)


class Script:
    """A scripted model: it gives its responses in order, and the last one again and again."""

    def __init__(self, *steps: Step) -> None:
        self.steps = steps
        self.requests: list[list[ModelMessage]] = []
        self.info: AgentInfo | None = None

    def __call__(self, messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        self.requests.append([*messages])
        self.info = info
        return self.steps[min(len(self.requests), len(self.steps)) - 1]

    def told(self, number: int) -> str:
        """What the model was told last before its response with this number (from 0)."""
        parts: Iterable[Any] = self.requests[number][-1].parts
        return "\n".join(str(part.content) for part in parts)


class AgentTestCase(RagTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.server = self.serve()

    def run_agent(self, *steps: Step, argv: Iterable[str] = (), **settings: str) -> Result:
        """Run the recipe with a scripted model, which is kept as self.script."""
        self.script = Script(*steps)
        document = partial(agent.document, FunctionModel(self.script))
        environ = {**self.server.environment(rerank=False), **settings}
        return run_recipe(document, *argv, SATURDAY, environ=environ)


class TestDocument(AgentTestCase):
    def test_an_answer_has_the_records_that_were_cited_in_their_order(self) -> None:
        result = self.run_agent(
            search("Saturday"),
            search("Sundays"),
            cite("hours-closed", "hours-saturday"),
            say("So."),
        )
        sources = [SAMPLE["hours-closed"], SAMPLE["hours-saturday"]]
        self.assertEqual((result.status, result.stderr), (0, ""))
        self.assertEqual(result.document, {"answer": "So.", "sources": sources})

    def test_an_answer_that_is_declared_ungrounded_is_an_abstention(self) -> None:
        result = self.run_agent(search("Saturday"), cite(), say("I do not know."))
        self.assertEqual((result.status, result.document), (0, ABSTENTION))

    def test_the_last_call_of_cite_counts(self) -> None:
        first = (search("Saturday"), cite("hours-weekdays"))
        for ids in ([], ["hours-saturday"]):
            with self.subTest(str(ids)):
                result = self.run_agent(*first, cite(*ids), say("So."), RAG_SOURCES="100")
                self.assertEqual(len(self.script.requests), 4, "each citation is accepted")
                self.assertEqual(result.document["sources"], [SAMPLE[name] for name in ids])

    def test_a_search_after_the_citation_does_not_change_it(self) -> None:
        steps = (search("Saturday"), cite("hours-saturday"), search("Sundays"), say("So."))
        self.assertEqual(self.run_agent(*steps).document["sources"], [SAMPLE["hours-saturday"]])

    def test_several_searches_in_one_response_are_all_found(self) -> None:
        result = self.run_agent(
            search("Saturday", "printed page"), cite("printing", "hours-saturday"), say("So.")
        )
        self.assertEqual(len(result.document["sources"]), 2)


class TestSearch(AgentTestCase):
    steps = (search("open on Saturday"), cite("hours-saturday"), say("So."))

    def test_the_records_are_embedded_once_and_each_query_alone(self) -> None:
        self.run_agent(search("Saturday"), search("Sundays"), cite(), say("So."))
        sent = [body["input"] for body in bodies(self.server, EMBEDDINGS)]
        passages = [rag.passage(record) for record in SAMPLE.values()]
        self.assertEqual(sent, [passages, ["Saturday"], ["Sundays"]])

    def test_the_prefixes_are_put_before_queries_and_passages(self) -> None:
        self.run_agent(*self.steps, API_QUERY_PREFIX="query: ", API_DOCUMENT_PREFIX="passage: ")
        first, second = (body["input"] for body in bodies(self.server, EMBEDDINGS))
        self.assertTrue(all(text.startswith("passage: ") for text in first))
        self.assertEqual(second, ["query: open on Saturday"])

    def test_a_cache_saves_the_embeddings_of_the_records(self) -> None:
        for _ in range(2):
            self.server.request_log.entries.clear()
            result = self.run_agent(*self.steps, RAG_CACHE=str(self.folder / "cache"))
            self.assertEqual((result.status, result.stderr), (0, ""))
        sent = [text for body in bodies(self.server, EMBEDDINGS) for text in body["input"]]
        self.assertLessEqual(len(sent), 2)

    def test_the_model_sees_id_title_and_text_and_no_other_field(self) -> None:
        self.run_agent(*self.steps, RAG_SOURCES="1")
        self.assertEqual(self.script.told(1), str([rag.visible(SAMPLE["hours-saturday"])]))

    def test_a_search_returns_as_many_records_as_the_settings_allow(self) -> None:
        self.run_agent(*self.steps, RAG_SOURCES="5")
        self.assertEqual(self.script.told(1).count("'id'"), 5)

    def test_records_below_the_threshold_are_not_returned(self) -> None:
        result = self.run_agent(search("Saturday"), cite(), say("So."), RAG_MIN_SIMILARITY="0.99")
        self.assertEqual(self.script.told(1), "[]")
        self.assertEqual(result.document, ABSTENTION)

    def test_a_rerank_model_orders_the_candidates_of_each_search(self) -> None:
        self.run_agent(*self.steps, API_RERANK_MODEL="mock-rerank", RAG_CANDIDATES="4")
        [body] = bodies(self.server, RERANK)
        self.assertEqual((body["query"], len(body["documents"])), ("open on Saturday", 4))
        self.assertEqual(paths(self.server), [EMBEDDINGS, RERANK])

    def test_a_record_that_the_filter_excludes_can_neither_be_found_nor_cited(self) -> None:
        steps = (search("spare key to the map room"), cite("staff-map-key"), cite(), say("So."))
        argv = ("--where", "audience=public")
        result = self.run_agent(*steps, argv=argv, RAG_SOURCES="100")
        self.assertEqual(result.document, ABSTENTION)
        told = "".join(map(self.script.told, range(len(self.script.requests))))
        self.assertIn("map-room", told)
        self.assertNotIn("staff-map-key", told)

    def test_a_blank_query_goes_back_to_the_model(self) -> None:
        result = self.run_agent(search(" "), *self.steps)
        self.assertEqual(result.status, 0, result.stderr)
        self.assertIn("blank", self.script.told(1))


class TestCitations(AgentTestCase):
    def test_an_id_that_no_search_returned_goes_back_to_the_model(self) -> None:
        cases = {
            "unknown": cite("hours-sunday"),
            "not found yet": cite("staff-map-key"),
            "one of two": cite("hours-saturday", "hours-sunday"),
            "another case": cite("Hours-Saturday"),
            "twice": cite("hours-saturday", "hours-saturday"),
            "no string": cite(1),
        }
        for name, wrong in cases.items():
            with self.subTest(name):
                result = self.run_agent(
                    search("open on Saturday"), wrong, cite("hours-saturday"), say("So.")
                )
                self.assertEqual(result.status, 0, result.stderr)
                self.assertEqual(result.document["sources"], [SAMPLE["hours-saturday"]])
                self.assertEqual(len(self.script.requests), 4)

    def test_the_model_is_told_which_ids_it_can_cite(self) -> None:
        self.run_agent(search("Saturday"), cite("x"), cite(), say("So."), RAG_SOURCES="1")
        self.assertIn("['hours-saturday']", self.script.told(2))

    def test_a_wrong_id_does_not_change_an_earlier_citation(self) -> None:
        steps = (search("Saturday"), cite("hours-saturday"), cite("x"), say("So."))
        self.assertEqual(self.run_agent(*steps).document["sources"], [SAMPLE["hours-saturday"]])

    def test_an_answer_without_a_citation_goes_back_to_the_model(self) -> None:
        steps = (search("Saturday"), say("So."), cite("hours-saturday"), say("So."))
        result = self.run_agent(*steps)
        self.assertEqual(result.document["sources"], [SAMPLE["hours-saturday"]])
        self.assertIn("Call `cite`", self.script.told(2))

    def test_a_citation_of_an_earlier_run_is_unknown_in_the_next(self) -> None:
        self.run_agent(search("Saturday"), cite("hours-saturday"), say("So."))
        result = self.run_agent(cite("hours-saturday"), say("So."))
        self.assert_one_line(result, 1, "recipe: answer: ")


class TestRefusals(AgentTestCase):
    def test_a_model_that_never_cites_is_refused_at_the_limit(self) -> None:
        result = self.run_agent(search("Saturday"), say("So."))
        self.assert_one_line(result, 1, "recipe: answer: ", "request_limit of 8")
        self.assertEqual(len(self.script.requests), 8)

    def test_a_model_that_always_cites_wrongly_is_refused_at_the_limit(self) -> None:
        result = self.run_agent(search("Saturday"), cite("x"))
        self.assert_one_line(result, 1, "recipe: answer: ", "request_limit of 8")

    def test_a_model_that_never_stops_searching_is_refused_at_the_limit(self) -> None:
        result = self.run_agent(search("Saturday"))
        self.assert_one_line(result, 1, "recipe: answer: ", "request_limit of 8")
        self.assertEqual(len(bodies(self.server, EMBEDDINGS)), 1 + 5)

    def test_the_limit_on_searches_leaves_room_to_cite(self) -> None:
        steps = [search("Saturday")] * 6
        result = self.run_agent(*steps, cite("hours-saturday"), say("So."))
        self.assertEqual(result.document["sources"], [SAMPLE["hours-saturday"]])
        self.assertIn("No search is left", self.script.told(6))

    def test_many_searches_in_one_response_are_limited(self) -> None:
        result = self.run_agent(search(*map(str, range(100))))
        self.assert_one_line(result, 1, "recipe: answer: ", "tool_calls_limit of 16")

    def test_a_blank_answer_is_refused(self) -> None:
        steps = (search("Saturday"), cite("hours-saturday"))
        for text in ("", " \n"):
            with self.subTest(repr(text)):
                self.assert_one_line(self.run_agent(*steps, say(text)), 1, "recipe: answer: ")

    def test_an_answer_that_was_cut_off_is_refused(self) -> None:
        steps = (search("Saturday"), cite("hours-saturday"), say("On Satur", "length"))
        line = "recipe: answer: the model did not end its reply"
        self.assert_failure(self.run_agent(*steps), 1, line)

    def test_a_tool_that_does_not_exist_ends_in_one_line(self) -> None:
        result = self.run_agent(Step([ToolCallPart("publish", {})]))
        self.assert_one_line(result, 1, "recipe: answer: ")

    def test_an_error_of_the_embedding_service_is_one_line(self) -> None:
        good = self.server.environment(rerank=False)
        settings = {
            "API_EMBEDDING_BASE_URL": self.server.base_url("http-500"),
            "API_EMBEDDING_KEY": good["API_KEY"],
        }
        self.assertIn("http-500", self.server.scenarios)
        result = self.run_agent(search("Saturday"), **settings)
        self.assert_one_line(result, 1, "recipe: ")

    def test_an_error_of_a_search_is_one_line(self) -> None:
        def refused(good: Any, request: Mapping[str, Any]) -> Any:
            return {} if "Saturday" in (request.get("query"), *request.get("input", [])) else good

        for path in (EMBEDDINGS, RERANK):
            with self.subTest(path):
                self.server = self.serve(own(path, refused))
                url = self.server.base_url("own")
                settings = {"API_BASE_URL": url, "API_RERANK_MODEL": "mock-rerank"}
                result = self.run_agent(search("Saturday"), **settings)
                self.assert_one_line(result, 1, "recipe: answer: ", f"{path} answered 200 without")
                self.assertEqual(len(self.script.requests), 1)

    def test_a_question_is_needed(self) -> None:
        environ = self.server.environment()
        self.assert_failure(
            run_recipe(agent.document, environ=environ), 2, "recipe: usage: ask a question"
        )
        self.assertEqual(paths(self.server), [])


class TestModel(AgentTestCase):
    def test_the_model_gets_two_tools_and_the_prompt(self) -> None:
        self.run_agent(search("Saturday"), cite(), say("So."))
        assert self.script.info is not None
        self.assertEqual(
            [tool.name for tool in self.script.info.function_tools], ["search", "cite"]
        )
        self.assertEqual(self.script.info.instructions, agent.PROMPT)


class Chat(BaseHTTPRequestHandler):
    """A chat service that calls tools, which the mock server does not do."""

    replies: ClassVar[list[tuple[int, dict[str, str], Any]]]
    requests: ClassVar[list[tuple[str, Message[str, str], Any]]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.requests.append((self.path, self.headers, body))
        status, headers, reply = self.replies[min(len(self.requests), len(self.replies)) - 1]
        data = json.dumps(reply).encode()
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Write nothing."""


def completion(finish_reason: str = "tool_calls", **message: Any) -> Any:
    """A reply of a chat service, with its status and headers."""
    choice = {"index": 0, "finish_reason": finish_reason, "message": message}
    fields = {"id": "1", "object": "chat.completion", "created": 1, "model": "own"}
    return 200, {"Content-Type": "application/json"}, {**fields, "choices": [choice]}


def call(name: str, **arguments: Any) -> Any:
    """A reply that calls a tool."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    tool_call = {"id": f"call-{name}", "type": "function", "function": function}
    return completion(role="assistant", content=None, tool_calls=[tool_call])


class TestService(RagTestCase):
    """The chat model of the settings, with a service that speaks HTTP."""

    def run_with(self, *replies: Any, **settings: str) -> Result:
        """Run the recipe with a chat service that gives these replies, the last again and again."""
        Chat.replies, Chat.requests = [*replies], []
        service = ThreadingHTTPServer(("127.0.0.1", 0), Chat)
        thread = threading.Thread(target=service.serve_forever, args=(0.01,))
        thread.start()
        server = self.serve()
        environ = {
            **server.environment(rerank=False),
            "API_BASE_URL": f"http://127.0.0.1:{service.server_port}/v1",
            "API_KEY": "the-key-of-the-chat-service",
            "API_EMBEDDING_BASE_URL": server.base_url(),
            "API_EMBEDDING_KEY": server.environment()["API_KEY"],
            **settings,
        }
        try:
            return run_recipe(agent.document, SATURDAY, environ=environ)
        finally:
            service.shutdown()
            thread.join()
            service.server_close()

    def test_a_service_that_searches_cites_and_answers(self) -> None:
        result = self.run_with(
            call("search", query="Saturday"),
            call("cite", ids=["hours-saturday"]),
            completion("stop", role="assistant", content="So."),
        )
        self.assertEqual((result.status, result.stderr), (0, ""))
        self.assertEqual(result.document, {"answer": "So.", "sources": [SAMPLE["hours-saturday"]]})

    def test_the_request_is_made_from_the_settings(self) -> None:
        self.run_with(
            (500, {}, {}),
            API_MODEL="another-model",
            API_CHAT_OPTIONS='{"temperature": 0, "own": [1]}',
            API_HEADERS='{"X-Own": "a value"}',
        )
        [(path, headers, body)] = Chat.requests
        self.assertEqual(path, "/v1/chat/completions")
        self.assertEqual(headers["Authorization"], "Bearer the-key-of-the-chat-service")
        self.assertEqual(headers["X-Own"], "a value")
        self.assertEqual(body["model"], "another-model")
        self.assertEqual((body["temperature"], body["own"]), (0, [1]))
        self.assertEqual([tool["function"]["name"] for tool in body["tools"]], ["search", "cite"])

    def test_a_failed_request_is_one_line_without_the_key(self) -> None:
        said = {"message": "no such key: the-key-of-the-chat-service"}
        result = self.run_with((401, {}, {"error": said}))
        self.assert_one_line(result, 1, "recipe: answer: ", "401", "no such key: [secret]")

    def test_a_failed_request_is_sent_again_as_often_as_the_settings_say(self) -> None:
        self.run_with((500, {"Retry-After-Ms": "1"}, {}), API_RETRIES="2")
        self.assertEqual(len(Chat.requests), 3)

    def test_a_redirect_is_not_followed(self) -> None:
        result = self.run_with((307, {"Location": "/v1/elsewhere"}, {}))
        self.assert_one_line(result, 1, "recipe: answer: ", "307")
        self.assertEqual([path for path, _, _ in Chat.requests], ["/v1/chat/completions"])

    def test_an_answer_that_the_service_cut_off_is_refused(self) -> None:
        result = self.run_with(
            call("search", query="Saturday"),
            call("cite", ids=["hours-saturday"]),
            completion("length", role="assistant", content="On Satur"),
        )
        self.assert_failure(result, 1, "recipe: answer: the model did not end its reply")


if __name__ == "__main__":
    unittest.main()
