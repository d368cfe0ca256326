"""Answer: what the chat model is asked, and which replies are accepted."""

from __future__ import annotations

import itertools
import json
import unittest
from typing import Any

import rag
from mock_server.scenarios import ANSWERS, CHAT, Scenario, message
from tests.support import ROOT, RagTestCase, Result, bodies, paths, run_rag


def completion(**fields: Any) -> dict[str, Any]:
    choice = {"finish_reason": "stop", "message": {"role": "assistant", "content": "text"}}
    return {"choices": [{**choice, **fields}]}


def said(**fields: Any) -> dict[str, Any]:
    return completion(message={"role": "assistant", "content": "text", **fields})


class TestCheckCompletion(unittest.TestCase):
    def test_the_text_of_the_only_choice_is_returned(self) -> None:
        for reply in (
            completion(),
            said(tool_calls=[], refusal=None, function_call=None),
            said(refusal="", reasoning_content="a draft", reasoning="a draft"),
            {**completion(), "usage": None, "id": None},
        ):
            self.assertEqual(rag.check_completion(reply), "text")

    def test_replies_that_are_refused(self) -> None:
        for reply, expected in (
            ([], "the reply is a list, not an object"),
            ({"choices": None}, "`choices` is null, not a list"),
            ({"choices": {}}, "`choices` is an object, not a list"),
            ({"choices": []}, "`choices` is a list of 0, not of exactly one"),
            ({"choices": ["text"]}, "the choice is a string, not an object"),
            ({"choices": [1, 2]}, "`choices` is a list of 2, not of exactly one"),
            (completion(finish_reason=None), 'finish_reason is null, not "stop"'),
            (completion(finish_reason="Stop"), 'finish_reason is "Stop", not "stop"'),
            (completion(finish_reason="eos_token"), 'finish_reason is "eos_token", not "stop"'),
            (completion(finish_reason=["stop"]), 'finish_reason is ["stop"], not "stop"'),
            (completion(message=None), "the message is null, not an object"),
            (said(refusal="No."), "the message has a refusal"),
            (said(tool_calls=[{}]), "the message has a tool_calls"),
            (said(function_call={"name": "f"}), "the message has a function_call"),
            (said(content=None), "the content is null, not a string"),
            (said(content=[{"type": "text"}]), "the content is a list, not a string"),
        ):
            with self.subTest(reply=reply):
                with self.assertRaises(rag.RagError) as caught:
                    rag.check_completion(reply)
                self.assertEqual(str(caught.exception), expected)

    def test_a_token_limit_is_called_cut_off_however_it_is_spelled(self) -> None:
        for reason in "length LENGTH max_tokens MAX_TOKENS model_length token_limit".split():
            with self.subTest(reason=reason):
                with self.assertRaises(rag.RagError) as caught:
                    rag.check_completion(completion(finish_reason=reason, message=None))
                hint = "cut off; raise the token limit in API_CHAT_OPTIONS"
                words = f'finish_reason is "{reason}", not "stop": {hint}'
                self.assertEqual(str(caught.exception), words)


SENT = {"a": "A.", "B-2": "B.", "café": "C."}


class TestCheckAnswer(unittest.TestCase):
    def assert_refused(self, text: str, expected: str) -> None:
        """Check that the text is refused with a message that begins as expected."""
        with self.subTest(text=text):
            with self.assertRaises(rag.RagError) as caught:
                rag.check_answer(text, SENT)
            self.assertEqual(str(caught.exception)[: len(expected)], expected)

    def test_answers_and_abstentions_that_are_accepted(self) -> None:
        replies: tuple[Any, ...] = (
            {"answer": "At ten.", "source_ids": ["a"]},
            {"source_ids": ["café", "B-2", "a"], "answer": '{"not": "parsed"} ```'},
            {"answer": None, "source_ids": []},
        )
        for reply in replies:
            self.assertEqual(rag.check_answer(f"\n {json.dumps(reply)}\t", SENT), reply)

    def test_texts_that_are_not_one_json_object_are_refused(self) -> None:
        answer = '{"answer": "x", "source_ids": ["a"]}'
        for text, reason in (
            ("", "it is not JSON: Expecting value"),
            (answer[:-1], "it is not JSON: Expecting ',' delimiter"),
            (f"{answer}.", "it is not JSON: Extra data"),
            (f"\u00a0{answer}", "it is not JSON: Expecting value"),
            ('{"answer": null, "source_ids": [NaN]}', "it is not JSON: it holds NaN"),
            ('{"answer": null, "answer": "x"}', "it is not JSON: "),
            ("[" * 100_000, "it is not JSON: maximum recursion depth"),
            ('"x"', "it is a string, not an object"),
            (f"[{answer}]", "it is a list, not an object"),
        ):
            self.assert_refused(text, f"the model's text: {reason}")

    def test_what_stands_beside_the_json_object_is_named_with_the_setting_that_helps(self) -> None:
        answer = '{"answer": "x", "source_ids": ["a"]}'
        for text, found, setting in (
            (f"```json\n{answer}\n```", "Markdown fence", "API_RESPONSE_FORMAT"),
            (f"Sure:\n```\n{answer}\n```", "Markdown fence", "API_RESPONSE_FORMAT"),
            (f"<think>hm</think>{answer}", "thinking", "API_CHAT_OPTIONS"),
            (f"hm</think>{answer}", "thinking", "API_CHAT_OPTIONS"),
            (f"{answer}<|im_end|>", "chat template markers", "chat template"),
            (f"Here you are: {answer}", "", ""),
        ):
            with self.subTest(text=text):
                with self.assertRaises(rag.RagError) as caught:
                    rag.check_answer(text, SENT)
                hint = str(caught.exception).partition(" (char ")[2].partition(";")[2]
                self.assertIn(found, hint)
                self.assertIn(setting, hint)
                self.assertEqual(bool(found), bool(hint))

    def test_answers_that_are_refused(self) -> None:
        keys = "the keys are not `answer` and `source_ids`"
        first = "source_ids[0]: "
        sent = "is not the id of a source that was sent"
        for reply, expected in (
            ({}, keys),
            ({"answer": "x"}, keys),
            ({"answer": "x", "source_ids": ["a"], "note": ""}, keys),
            ({"Answer": "x", "source_ids": ["a"]}, keys),
            ({"answer": "x", "source_ids": "a"}, "source_ids is a string, not a list"),
            ({"answer": "x", "source_ids": None}, "source_ids is null, not a list"),
            ({"answer": "x", "source_ids": {"a": 1}}, "source_ids is an object, not a list"),
            ({"answer": "x", "source_ids": [1]}, f"{first}it is a number, not a string"),
            ({"answer": "x", "source_ids": [["a"]]}, f"{first}it is a list, not a string"),
            ({"answer": "x", "source_ids": ["A"]}, f'{first}"A" {sent}'),
            ({"answer": "x", "source_ids": ["a "]}, f'{first}"a " {sent}'),
            ({"answer": "x", "source_ids": ["[a]"]}, f'{first}"[a]" {sent}'),
            ({"answer": "x", "source_ids": ["cafe\u0301"]}, f'{first}"cafe\u0301" {sent}'),
            ({"answer": "x", "source_ids": ["a", "z\n"]}, f'source_ids[1]: "z\\n" {sent}'),
            ({"answer": "x", "source_ids": ["s" * 99]}, f'{first}"{"s" * 39}…" {sent}'),
            ({"answer": "x", "source_ids": ["\ud83d"]}, f'{first}"\\ud83d" {sent}'),
            (
                {"answer": "x", "source_ids": ["a", "a"]},
                "source_ids[1]: it repeats an earlier citation",
            ),
            (
                {"answer": None, "source_ids": ["a"]},
                "the answer: it is null, but sources are cited",
            ),
            ({"answer": "x", "source_ids": []}, "the answer: it cites no source"),
            ({"answer": " \n", "source_ids": ["a"]}, "the answer: it is blank"),
            ({"answer": "\u00a0\u3000", "source_ids": ["a"]}, "the answer: it is blank"),
            ({"answer": 10, "source_ids": ["a"]}, "the answer: it is a number, not a string"),
            ({"answer": False, "source_ids": []}, "the answer: it is a bool, not a string"),
            ({"answer": "\ud83d", "source_ids": ["a"]}, "the answer: 'utf-8' codec can't encode"),
        ):
            self.assert_refused(json.dumps(reply), expected)


RECORDS = {
    record["id"]: record for record in json.loads((ROOT / "knowledge.json").read_text("utf-8"))
}
GOOD = json.dumps({"answer": "At ten.", "source_ids": ["hours-saturday"]})


class TestAsk(RagTestCase):
    def ask(self, *texts: str, **environ: str) -> tuple[Result, list[Any]]:
        """Return a run in which the model writes these texts in turn, and the chat requests."""
        turns = itertools.chain(texts, itertools.repeat("no further text"))

        def change(good: Any, request: Any) -> Any:
            return message(content=next(turns))(good, request)

        server = self.serve(Scenario("turns", "own", "own", ANSWERS, CHAT, change))
        result = run_rag("--explain", environ={**server.environment("turns"), **environ})
        return result, bodies(server, CHAT)

    def test_the_request_is_a_fixed_system_message_and_the_question_with_its_sources(self) -> None:
        _, (body,) = self.ask(GOOD)
        system, user = body["messages"]
        self.assertEqual(system, {"role": "system", "content": rag.PROMPT + rag.ID_KEYS})
        names = ("hours-saturday", "hours-weekdays", "guest-book")
        shown = ("id", "title", "text")
        sources = [{key: RECORDS[name].get(key) for key in shown} for name in names]
        sources = [{key: each[key] for key in shown if each[key]} for each in sources]
        self.assertEqual(user["role"], "user")
        expected = {"question": rag.SAMPLE_QUESTION, "sources": sources}
        self.assertEqual(json.loads(user["content"]), expected)

    def test_only_the_options_of_api_chat_options_are_added(self) -> None:
        for options in ({}, {"temperature": 0, "seed": 3}):
            _, (body,) = self.ask(GOOD, API_CHAT_OPTIONS=json.dumps(options))
            self.assertEqual(set(body), {"model", "messages", *options})

    def test_the_prompt_holds_nothing_that_a_weak_model_could_return_as_its_answer(self) -> None:
        for prompt in (rag.PROMPT + rag.ID_KEYS, rag.PROMPT + rag.QUOTE_KEYS):
            self.assertNotIn("{", prompt)
            self.assertIn("JSON", prompt)  # some services ask for the word with json_object
            self.assertIn("untrusted data", prompt)

    def test_the_default_is_one_request(self) -> None:
        result, sent = self.ask("no JSON", GOOD)
        self.assertEqual((len(sent), result.status, result.stdout), (1, 1, ""))
        self.assertIn("rag.py: answer: the model's text: ", result.stderr)

    def test_a_rejected_reply_is_asked_for_again_by_the_same_request(self) -> None:
        unknown = json.dumps({"answer": "At nine.", "source_ids": ["nowhere"]})
        result, sent = self.ask("```\n{}\n```", unknown, GOOD, RAG_ATTEMPTS="3")
        self.assertEqual(result.document["answer"], "At ten.")
        self.assertEqual(sent, sent[:1] * 3)
        self.assertIn("answer: reply 1 rejected: the model's text: ", result.stderr)
        self.assertIn('answer: reply 2 rejected: source_ids[0]: "nowhere"', result.stderr)

    def test_the_last_rejection_ends_the_run(self) -> None:
        result, sent = self.ask("one", "two", GOOD, RAG_ATTEMPTS="2")
        self.assertEqual((len(sent), result.status, result.stdout), (2, 1, ""))
        self.assertIn("rag.py: answer: ", result.stderr)

    def test_an_incomplete_reply_is_not_asked_for_again(self) -> None:
        server = self.serve()
        environ = {**server.environment("answer-finish-length"), "RAG_ATTEMPTS": "5"}
        self.assert_one_line(run_rag(environ=environ), 1, 'finish_reason is "length"')
        self.assertEqual(paths(server), ["/embeddings", "/rerank", CHAT])

    def test_of_what_the_model_wrote_only_a_refused_id_is_shown(self) -> None:
        secret = RECORDS["hours-weekdays"]["text"]
        for text, shown in (
            (f"I think: {secret}", 0),
            (json.dumps({"answer": secret, "source_ids": []}), 0),
            (json.dumps({"answer": "x", "source_ids": [secret]}), 39),
            (f'{{"{secret}": 1}}', 0),
        ):
            with self.subTest(text=text):
                result, _ = self.ask(text)
                self.assertEqual(result.status, 1)
                self.assertIn(secret[:shown], result.stderr)
                self.assertNotIn(secret[: shown + 5], result.stderr)

    def test_json_object_is_asked_for(self) -> None:
        _, (body,) = self.ask(GOOD, API_RESPONSE_FORMAT="json_object")
        self.assertEqual(body["response_format"], {"type": "json_object"})

    def test_json_schema_allows_the_two_keys_the_ids_that_were_sent_and_the_abstention(
        self,
    ) -> None:
        _, (body,) = self.ask(GOOD, API_RESPONSE_FORMAT="json_schema", RAG_SOURCES="2")
        ids = ["hours-saturday", "hours-weekdays"]
        expected = {
            "type": "object",
            "properties": {
                "answer": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "source_ids": {"type": "array", "items": {"type": "string", "enum": ids}},
            },
            "required": ["answer", "source_ids"],
            "additionalProperties": False,
        }
        form = body["response_format"]
        self.assertEqual((form["type"], form["json_schema"]["strict"]), ("json_schema", True))
        self.assertEqual(form["json_schema"]["schema"], expected)

    def test_records_are_published_whole_in_the_order_cited(self) -> None:
        cited = ["guest-book", "hours-saturday"]
        result, _ = self.ask(json.dumps({"answer": "Both.", "source_ids": cited}))
        self.assertEqual(result.document["sources"], [RECORDS[name] for name in cited])

    def test_a_record_that_was_not_sent_cannot_be_cited(self) -> None:
        result, _ = self.ask(json.dumps({"answer": "x", "source_ids": ["map-room"]}))
        self.assertIn('"map-room" is not the id of a source that was sent', result.stderr)
