"""Answer: what the chat model is asked, and which replies are taken."""

from __future__ import annotations

import json
import unittest
from typing import Any

import rag
from mock_server.scenarios import ANSWERS, CHAT, Change, Scenario, message
from tests.support import ROOT, RagTestCase, bodies, paths, run_rag


def completion(**fields: Any) -> dict[str, Any]:
    choice = {
        "index": 0,
        "finish_reason": "stop",
        "message": {"role": "assistant", "content": "text"},
    }
    return {"choices": [{**choice, **fields}]}


def said(**fields: Any) -> dict[str, Any]:
    return completion(message={"role": "assistant", "content": "text", **fields})


class TestCheckCompletion(unittest.TestCase):
    def test_the_text_of_the_only_choice_is_taken_whatever_stands_beside_it(self) -> None:
        for reply in (
            completion(),
            said(tool_calls=[], refusal=None, function_call=None),
            said(refusal="", reasoning_content="a draft", reasoning="a draft"),
            {**completion(), "usage": None, "id": None},
        ):
            self.assertEqual(rag.check_completion(reply), "text")

    def test_replies_that_are_refused(self) -> None:
        one = "not a list of exactly one object"
        for reply, expected in (
            ([], "the reply is a list of 0, not an object"),
            ({"choices": None}, f"`choices` is null, {one}"),
            ({"choices": {}}, f"`choices` is an object, {one}"),
            ({"choices": []}, f"`choices` is a list of 0, {one}"),
            ({"choices": ["text"]}, f"`choices` is a list of 1, {one}"),
            ({"choices": completion()["choices"] * 2}, f"`choices` is a list of 2, {one}"),
            (completion(finish_reason=None), 'finish_reason is null, not "stop"'),
            (completion(finish_reason="Stop"), 'finish_reason is "Stop", not "stop"'),
            (completion(finish_reason="eos"), 'finish_reason is "eos", not "stop"'),
            (completion(finish_reason="PIN 4711"), 'finish_reason is a string, not "stop"'),
            (completion(finish_reason=["stop"]), 'finish_reason is a list of 1, not "stop"'),
            (
                completion(finish_reason="length", message=None),
                'finish_reason is "length", not "stop"; '
                "it was cut off: allow more tokens in API_CHAT_OPTIONS",
            ),
            (completion(message=None), "the message is null, not an object"),
            (completion(message=["text"]), "the message is a list of 1, not an object"),
            (said(refusal="No."), "the model refuses to answer"),
            (said(tool_calls=[{}]), "the model calls a tool, and was offered none"),
            (said(function_call={"name": "f"}), "the model calls a tool, and was offered none"),
            (said(content=None), "the content is null, not a string"),
            (
                said(content=[{"type": "text", "text": "{}"}]),
                "the content is a list of 1, not a string",
            ),
            (said(content={"answer": None}), "the content is an object, not a string"),
        ):
            with self.subTest(expected=expected), self.assertRaises(rag.RagError) as caught:
                rag.check_completion(reply)
            self.assertEqual(str(caught.exception), expected)


class TestCheckAnswer(unittest.TestCase):
    SENT = ("a", "B-2", "café")

    def test_answers_and_abstentions_that_are_taken(self) -> None:
        replies: tuple[Any, ...] = (
            {"answer": "At ten.", "source_ids": ["a"]},
            {"source_ids": ["café", "B-2", "a"], "answer": '{"not": "parsed"} ```'},
            {"answer": None, "source_ids": []},
        )
        for reply in replies:
            self.assertEqual(rag.check_answer(f"\n {json.dumps(reply)}\t", self.SENT), reply)

    def test_texts_that_are_refused(self) -> None:
        text = "the model's text"
        keys = "the keys are not `answer` and `source_ids`"
        sent = "which is not the id of a source that was sent"
        for replied, expected in (
            ("", f"{text}: empty (line 1, column 1)"),
            (
                '{"answer": "x", "source_ids": ["a"]',
                f"{text}: not JSON: Expecting ',' delimiter (line 1, column 36)",
            ),
            (
                '{"answer": "x", "source_ids": ["a"]}.',
                f"{text}: not JSON: Extra data (line 1, column 37)",
            ),
            ("\u00a0{}", f"{text}: not JSON: Expecting value (line 1, column 1)"),
            ('{"answer": null, "answer": "x", "source_ids": []}', f"{text}: a repeated key"),
            ('"x"', f"{text} is a string, not an object"),
            ("[]", f"{text} is a list of 0, not an object"),
            ({}, keys),
            ({"answer": "x"}, keys),
            ({"answer": "x", "source_ids": ["a"], "note": ""}, keys),
            ({"Answer": "x", "source_ids": ["a"]}, keys),
            ({"answer": "x", "source_ids": "a"}, "source_ids is a string, not a list"),
            ({"answer": "x", "source_ids": None}, "source_ids is null, not a list"),
            ({"answer": "x", "source_ids": {"a": 1}}, "source_ids is an object, not a list"),
            ({"answer": "x", "source_ids": [1]}, "source_ids[0] is 1, not a string"),
            (
                {"answer": "x", "source_ids": ["a", ["a"]]},
                "source_ids[1] is a list of 1, not a string",
            ),
            ({"answer": "x", "source_ids": ["A"]}, f'source_ids[0] is "A", {sent}'),
            ({"answer": "x", "source_ids": ["b-2"]}, f'source_ids[0] is "b-2", {sent}'),
            ({"answer": "x", "source_ids": ["a "]}, f'source_ids[0] is "a ", {sent}'),
            ({"answer": "x", "source_ids": ["[a]"]}, f'source_ids[0] is "[a]", {sent}'),
            (
                {"answer": "x", "source_ids": ["cafe\u0301"]},
                f'source_ids[0] is "cafe\u0301", {sent}',
            ),
            ({"answer": "x", "source_ids": ["a", "z\n"]}, f'source_ids[1] is "z\\n", {sent}'),
            ({"answer": "x", "source_ids": ["s" * 99]}, f'source_ids[0] is "{"s" * 22}…", {sent}'),
            (
                {"answer": "x", "source_ids": ["a", "a"]},
                'source_ids[1] is "a", for the second time',
            ),
            ({"answer": None, "source_ids": ["a"]}, "the answer is null, and yet it cites sources"),
            ({"answer": "x", "source_ids": []}, "the answer cites no source"),
            ({"answer": " \n", "source_ids": ["a"]}, "the answer is blank"),
            ({"answer": 10, "source_ids": ["a"]}, "the answer is 10, not a string or null"),
            (
                {"answer": ["x"], "source_ids": ["a"]},
                "the answer is a list of 1, not a string or null",
            ),
        ):
            with self.subTest(replied=replied), self.assertRaises(rag.RagError) as caught:
                rag.check_answer(
                    replied if isinstance(replied, str) else json.dumps(replied), self.SENT
                )
            self.assertEqual(str(caught.exception), expected)


GOOD = json.dumps({"answer": "At ten.", "source_ids": ["hours-saturday"]})


def in_turn(*texts: str) -> Change:
    """The chat model says one text after the other: the number of messages tells the turn."""
    return lambda good, request: message(content=texts[len(request["messages"]) // 2 - 1])(
        good, request
    )


class TestAsk(RagTestCase):
    def ask(self, *texts: str, **environ: str) -> tuple[list[Any], Any]:
        server = self.serve(
            Scenario("turns", "own", "texts in turn", ANSWERS, CHAT, in_turn(*texts))
        )
        result = run_rag("--explain", environ={**server.environment("turns"), **environ})
        return bodies(server, "/chat/completions"), result

    def test_the_request_is_a_fixed_system_message_and_the_question_with_its_sources(self) -> None:
        (body,), _ = self.ask(GOOD)
        self.assertEqual(set(body), {"model", "messages"})
        self.assertEqual(body["messages"][0], {"role": "system", "content": rag.PROMPT})
        records = {
            each["id"]: each for each in json.loads((ROOT / "knowledge.json").read_text("utf-8"))
        }
        sources = [
            {name: records[each][name] for name in ("id", "title", "text") if name in records[each]}
            for each in ("hours-saturday", "hours-weekdays", "guest-book")
        ]
        asked = json.loads(body["messages"][1]["content"])
        self.assertEqual(asked, {"question": rag.SAMPLE_QUESTION, "sources": sources})
        self.assertEqual([message["role"] for message in body["messages"]], ["system", "user"])

    def test_the_prompt_asks_for_json_and_holds_nothing_that_could_pass_as_an_answer(self) -> None:
        self.assertIn("JSON", rag.PROMPT)
        self.assertIn("untrusted data", rag.PROMPT)
        self.assertNotIn("{", rag.PROMPT)

    def test_the_default_is_one_attempt(self) -> None:
        sent, result = self.ask("no JSON", GOOD)
        self.assertEqual(len(sent), 1)
        self.assertEqual(result.status, 1)
        self.assertIn(
            "rag.py: answer: reply 1 of 1 rejected: the model's text: not JSON", result.stderr
        )
        self.assertIn("API_RESPONSE_FORMAT or more RAG_ATTEMPTS may help", result.stderr)

    def test_a_rejected_reply_goes_back_with_the_reason_and_each_try_is_checked_alike(self) -> None:
        wrong = json.dumps({"answer": "At nine.", "source_ids": ["nowhere"]})
        sent, result = self.ask("```\n{}\n```", wrong, GOOD, RAG_ATTEMPTS="3")
        self.assertEqual(result.document["answer"], "At ten.")
        reasons = (
            "the model's text: wrapped in a Markdown fence (line 1, column 1)",
            'source_ids[0] is "nowhere", which is not the id of a source that was sent',
        )
        for i, (text, reason) in enumerate(zip(("```\n{}\n```", wrong), reasons)):
            added = sent[2]["messages"][2 + 2 * i : 4 + 2 * i]
            again = f"That was rejected: {reason}. Reply again, with the JSON object only."
            self.assertEqual(
                added, [{"role": "assistant", "content": text}, {"role": "user", "content": again}]
            )
            self.assertIn(f"answer: reply {i + 1} of 3 rejected: {reason}\n", result.stderr)
        self.assertEqual(
            [body["messages"] for body in sent], [sent[2]["messages"][:size] for size in (2, 4, 6)]
        )

    def test_the_last_rejection_ends_the_run(self) -> None:
        sent, result = self.ask("one", "two", GOOD, RAG_ATTEMPTS="2")
        self.assertEqual((len(sent), result.status, result.stdout), (2, 1, ""))
        self.assertIn("rag.py: answer: reply 2 of 2 rejected: ", result.stderr)

    def test_an_incomplete_reply_is_not_asked_for_again(self) -> None:
        server = self.serve()
        environ = {**server.environment("answer-finish-length"), "RAG_ATTEMPTS": "5"}
        self.assert_one_line(run_rag(environ=environ), 1, 'finish_reason is "length"')
        self.assertEqual(paths(server), ["/embeddings", "/rerank", "/chat/completions"])

    def test_what_the_model_wrote_is_not_shown_but_for_the_start_of_an_id_that_was_refused(
        self,
    ) -> None:
        record = json.loads((ROOT / "knowledge.json").read_text("utf-8"))[1]["text"]
        for text in (
            f"I think: {record}",
            json.dumps({"answer": record, "source_ids": [record]}),
            f'{{"{record}": 1}}',
        ):
            _, result = self.ask(text)
            self.assertEqual(result.status, 1)
            self.assertNotIn(record[:24], result.stderr)

    def test_chat_options_are_merged_into_the_request(self) -> None:
        (body,), _ = self.ask(GOOD, API_CHAT_OPTIONS='{"temperature": 0, "max_tokens": 300}')
        self.assertEqual((body["temperature"], body["max_tokens"]), (0, 300))
        self.assertEqual(set(body), {"model", "messages", "temperature", "max_tokens"})

    def test_json_object_is_asked_for(self) -> None:
        (body,), _ = self.ask(GOOD, API_RESPONSE_FORMAT="json_object")
        self.assertEqual(body["response_format"], {"type": "json_object"})

    def test_json_schema_allows_the_two_keys_the_ids_that_were_sent_and_the_abstention(
        self,
    ) -> None:
        (body,), _ = self.ask(GOOD, API_RESPONSE_FORMAT="json_schema", RAG_SOURCES="2")
        ids = ["hours-saturday", "hours-weekdays"]
        schema = {
            "type": "object",
            "properties": {
                "answer": {"type": ["string", "null"]},
                "source_ids": {"type": "array", "items": {"type": "string", "enum": ids}},
            },
            "required": ["answer", "source_ids"],
            "additionalProperties": False,
        }
        named = {"name": "cited_answer", "strict": True, "schema": schema}
        self.assertEqual(body["response_format"], {"type": "json_schema", "json_schema": named})

    def test_several_citations_are_published_whole_in_the_order_cited(self) -> None:
        cited = ["guest-book", "hours-saturday"]
        _, result = self.ask(json.dumps({"answer": "Both.", "source_ids": cited}))
        records = {
            each["id"]: each for each in json.loads((ROOT / "knowledge.json").read_text("utf-8"))
        }
        expected = {"answer": "Both.", "sources": [records[each] for each in cited]}
        self.assertEqual(result.document, expected)

    def test_a_known_record_that_was_not_sent_cannot_be_cited(self) -> None:
        _, result = self.ask(json.dumps({"answer": "x", "source_ids": ["map-room"]}))
        self.assertIn('source_ids[0] is "map-room", which is not the id of a source', result.stderr)
