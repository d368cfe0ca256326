"""rag.py in each scenario: exit status, streams, message, requests, and the verdict of `check`."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from mock_server.scenarios import ABSTAINS, MAY_ABSTAIN, REFUSES, TABLE, Scenario
from mock_server.verdict import Ended, judge
from tests.support import RagTestCase, Result, paths, run_rag

EXPECTED = {
    "answer-cites-all": ("自行车, 🚲 ﬁ", ["guest-book", "hours-weekdays", "hours-saturday"]),
    "quotes-white-space": ("It says so.", ["hours-saturday"]),
    "quotes-curly": ("It says so.", ["guest-book"]),
    "quotes-combining": ("It says so.", ["guest-book"]),
}
# What the one line on stderr says where a reply is refused.
WORDS = {
    "embeddings-data-absent": "`data` is null",
    "embeddings-data-object": "`data` is an object",
    "embeddings-reply-list": "the reply is a list of",
    "embeddings-one-fewer": "not a list of",
    "embeddings-one-more": "not a list of",
    "embeddings-row-null": "is null, not an object",
    "embeddings-index-all-zero": "the index 0, for the second time",
    "embeddings-index-absent": "the index 0, for the second time",
    "embeddings-other-index-absent": "the index 0, for the second time",
    "embeddings-index-string": "the index a string",
    "embeddings-index-float": "the index a number",
    "embeddings-index-boolean": "the index a bool",
    "embeddings-index-negative": "the index -1",
    "embeddings-index-too-large": "not one of 0 to",
    "embeddings-index-repeated": "for the second time",
    "embeddings-vector-absent": "an embedding that is null",
    "embeddings-vector-nested": "not all numbers",
    "embeddings-vector-empty": "empty or all zeros",
    "embeddings-vector-zero": "all zeros",
    "embeddings-vector-shorter": "numbers, others 25",
    "embeddings-vector-too-long": "too large",
    "embeddings-number-null": "not all numbers",
    "embeddings-number-string": "not all numbers",
    "embeddings-number-boolean": "not all numbers",
    "embeddings-number-nan": "NaN",
    "embeddings-number-infinity": "Infinity",
    "embeddings-number-1e999": "too large",
    "embeddings-number-400-digits": "too large",
    "embeddings-base64-unasked": "an embedding that is a string",
    "embeddings-base64-broken": "not base64 of float32",
    "embeddings-base64-cut": "not base64 of float32",
    "embeddings-later-batch": "not one of 0 to",
    "embeddings-later-batch-shorter": "has 255 numbers",
    "embeddings-repeated-key": "a repeated key",
    "rerank-results-absent": "`results` or `data`",
    "rerank-results-null": "`results` or `data`",
    "rerank-results-and-data": "`results` or `data`",
    "rerank-row-null": "is null, not an object",
    "rerank-index-absent": "the index null",
    "rerank-index-string": "the index a string",
    "rerank-index-float": "the index a number",
    "rerank-index-boolean": "the index a bool",
    "rerank-index-negative": "the index -1",
    "rerank-index-too-large": "not one of 0 to",
    "rerank-index-zero-absent": "the index null",
    "rerank-index-zero-null": "the index null",
    "rerank-document-not-sent": "the index",
    "rerank-index-repeated": "for the second time",
    "rerank-score-absent": "`relevance_score` and `score`",
    "rerank-score-twice": "`relevance_score` and `score`",
    "rerank-score-twice-equal": "`relevance_score` and `score`",
    "rerank-score-null": "has the score null",
    "rerank-score-string": "has the score a string",
    "rerank-score-boolean": "has the score a bool",
    "rerank-score-nan": "NaN",
    "rerank-score-1e999": "too large",
    "answer-choices-absent": "`choices` is null",
    "answer-choices-empty": "`choices` is a list of 0",
    "answer-choices-two": "`choices` is a list of 2",
    "answer-choice-null": "`choices`",
    "answer-finish-length": 'finish_reason is "length"',
    "answer-finish-length-upper-case": 'finish_reason is "LENGTH"',
    "answer-finish-max-tokens": 'finish_reason is "max_tokens"',
    "answer-finish-model-length": 'finish_reason is "model_length"',
    "answer-finish-content-filter": 'finish_reason is "content_filter"',
    "answer-finish-tool-calls": 'finish_reason is "tool_calls"',
    "answer-finish-eos": 'finish_reason is "eos"',
    "answer-finish-end-turn": 'finish_reason is "end_turn"',
    "answer-finish-longer": 'finish_reason is "stop_sequence"',
    "answer-finish-other-case": 'finish_reason is "STOP"',
    "answer-finish-absent": "finish_reason is null",
    "answer-finish-null": "finish_reason is null",
    "answer-message-null": "the message is null",
    "answer-refusal": "refuses",
    "answer-tool-call": "calls a tool",
    "answer-function-call": "calls a tool",
    "answer-content-null": "the content is null",
    "answer-content-parts": "a list of 1",
    "answer-content-object": "the content is an object",
    "answer-blank": "empty",
    "answer-fence": "fence",
    "answer-fence-plain": "fence",
    "answer-byte-order-mark": "not JSON",
    "answer-no-break-space": "not JSON",
    "answer-line-break": "not JSON",
    "answer-think-block": "<think>",
    "answer-think-end": "not JSON",
    "answer-template-marks": "not JSON",
    "answer-draft": "<think>",
    "answer-in-reasoning": "empty",
    "answer-prose-before": "not JSON",
    "answer-prose-after": "not JSON",
    "answer-two-objects": "not JSON",
    "answer-cut-off": "not JSON",
    "answer-trailing-comma": "not JSON",
    "answer-nan": "NaN",
    "answer-repeated-key": "a repeated key",
    "answer-repeated-key-escaped": "a repeated key",
    "answer-half-surrogate": "half of a surrogate pair",
    "answer-nested-deeply": "nesting",
    "answer-list": "is a list of 1",
    "answer-string": "is a string",
    "answer-key-more": "not `answer` and `source_ids`",
    "answer-key-proto": "not `answer` and `source_ids`",
    "answer-key-fewer": "not `answer` and `source_ids`",
    "answer-keys-other-case": "not `answer` and `source_ids`",
    "answer-object-empty": "not `answer` and `source_ids`",
    "answer-null-alone": "not `answer` and `source_ids`",
    "answer-null-ids-null": "source_ids is null",
    "answer-json-null": "the model's text is null",
    "answer-key-other-name": "not `answer` and `source_ids`",
    "answer-ids-null": "source_ids is null",
    "answer-ids-string": "source_ids is a string",
    "answer-id-number": "source_ids[0] is 1",
    "answer-id-not-sent": '"no-such-record"',
    "answer-id-one-not-sent": '"no-such-record"',
    "answer-id-first-not-sent": '"no-such-record"',
    "answer-id-null": "is null, not a string",
    "answer-id-empty": 'is "", which is not the id',
    "answer-id-object": "is an object, not a string",
    "answer-id-list": "is a list of",
    "answer-ids-joined": "not the id of a source",
    "answer-id-text": "not the id of a source",
    "answer-id-line-break": "not the id of a source",
    "answer-id-quotes": "not the id of a source",
    "answer-id-full-width": "not the id of a source",
    "answer-id-record-not-sent": "not the id of a source",
    "answer-id-title": "not the id of a source",
    "answer-id-position": "not the id of a source",
    "answer-id-shortened": "not the id of a source",
    "answer-id-other-case": "not the id of a source",
    "answer-id-white-space": "not the id of a source",
    "answer-id-white-space-before": "not the id of a source",
    "answer-id-brackets": "not the id of a source",
    "answer-id-repeated": "for the second time",
    "answer-no-ids": "cites no source",
    "answer-null-with-ids": "null, and yet",
    "answer-number": "the answer is 10",
    "answer-object": "the answer is an object",
    "answer-obeys-by-prose": "not JSON",
    "answer-obeys-by-id": '"night-plan"',
    "answer-null-id-not-sent": '"no-such-record"',
    "answer-empty": "the answer is blank",
    "answer-empty-no-ids": "the answer is blank",
    "answer-text-blank": "the answer is blank",
    "quotes-digit": "not in that text, word for word",
    "quotes-word-dropped": "not in that text, word for word",
    "quotes-sign": "not in that text, word for word",
    "quotes-stitched": "not in that text, word for word",
    "quotes-ellipsis": "not in that text, word for word",
    "quotes-other-source": "not in that text, word for word",
    "quotes-title": "not in that text, word for word",
    "quotes-inside-a-word": "not in that text, word for word",
    "quotes-empty": "not in that text, word for word",
    "quotes-short": "fewer than 3 words",
    "quotes-twice": "for the second time",
    "quotes-source-ids": "not `citations` and `answer`",
    "quotes-no-citation": "cites no source",
    "quotes-null": "null, and yet",
    "http-400": "API_EMBEDDING_BATCH",
    "http-401": "look at API_KEY",
    "http-404": "/v1",
    "http-413": "API_EMBEDDING_BATCH",
    "http-421": "answered 421",
    "http-429": 'retry-after: "7"',
    "http-500": "API_EMBEDDING_BATCH",
    "http-503": "no worker is free",
    "http-201": "answered 201, not 200",
    "http-204": "answered 204, not 200",
    "redirect-same-host": "answered 307; a redirect, which",
    "redirect-other-host": "answered 308; a redirect, which",
    "redirect-to-get": "answered 302; a redirect, which is",
    "html-200": "answered with HTML",
    "error-200": 'answered 200 with an error: "the provider failed"',
    "error-200-beside-data": 'answered 200 with an error: "the provider failed"',
    "message-200": "`data` is null",
    "html-403": "answered 403",
    "event-stream-200": "an event stream",
    "empty-200": ": empty",
    "not-utf-8": "not UTF-8",
    "not-json": "not JSON",
    "json-cut-off": "not JSON",
    "json-nested-deeply": "nesting",
    "json-5000-digits": "a number too large",
    "body-cut-off": "the connection to",
    "gzip-broken": "the connection to",
    "hang-up": "the connection to",
    "silence": "sent nothing for 0.3 s",
    "json-nan-unread": "NaN",
    "json-two": "not JSON",
    "json-repeated-key-equal": "a repeated key",
    "json-repeated-key-inside": "a repeated key",
    "not-utf-8-unread": "not UTF-8",
    "redirect-301": "answered 301; a redirect, which",
    "redirect-303": "answered 303; a redirect, which",
    "error-200-answer": 'answered 200 with an error: "the provider failed"',
    "redirect-answer": "answered 307; a redirect, which",
    "http-201-rerank": "answered 201, not 200",
    "http-201-answer": "answered 201, not 200",
    "http-429-answer": "answered 429",
    "http-500-rerank": "answered 500",
    "http-500-good": "answered 500",
    "hang-up-answer": "the connection to",
    "http-503-answer": "the model is loading",
    "http-404-rerank": "answered 404",
    "http-404-answer": "answered 404",
    "http-500-answer": "answered 500",
}
QUESTION = "When is the library open on Saturday?"


class TestScenarios(RagTestCase):
    def run_scenario(self, scenario: Scenario) -> Result:
        server = self.serve()
        environ = {**server.environment(scenario.name, scenario.rerank), **scenario.settings}
        result = run_rag(QUESTION, environ=environ)
        asked = scenario.requests
        if scenario.name in WORDS or scenario.expected == MAY_ABSTAIN:
            asked = asked[: asked.index(scenario.path) + 1]
        self.assertEqual(paths(server), asked)
        ended = Ended(result.status, result.stdout.encode(), result.stderr.encode())
        # Not judged is a fault here too: rag.py has a setting for each scenario of this kind.
        findings = judge(scenario, server.request_log.entries, ended=ended, key=environ["API_KEY"])
        self.assertEqual([(each.code, each.came) for each in findings], [])
        return result

    def check(self, scenario: Scenario) -> None:
        result = self.run_scenario(scenario)
        if scenario.name in WORDS:
            self.assert_one_line(result, 1, f"rag.py: {scenario.stage}: ", WORDS[scenario.name])
            return
        self.assertEqual((result.status, result.stderr), (0, ""))
        if scenario.expected in (ABSTAINS, MAY_ABSTAIN):
            reasons = {
                "embeddings": "below_min_similarity",
                "rerank": "reranker_kept_nothing",
                "answer": "sources_do_not_answer",
            }
            expected: Any = {"answer": None, "sources": [], "reason": reasons[scenario.stage]}
            self.assertEqual(result.document, expected)
        else:
            answer, cited = EXPECTED.get(scenario.name, ("10:15 to 14:45", ["hours-saturday"]))
            self.assertIn(answer, result.document["answer"])
            self.assertEqual([each["id"] for each in result.document["sources"]], cited)

    def test_a_setting_that_is_ignored_fails_each_scenario_that_is_about_it(self) -> None:
        for scenario in TABLE:
            if scenario.settings and scenario.name != "silence":  # would wait for 60 seconds
                with self.subTest(scenario=scenario.name), self.assertRaises(AssertionError):
                    self.check(dataclasses.replace(scenario, settings={}))

    def test_every_scenario_of_refusal_has_words_that_its_message_must_have(self) -> None:
        refusing = {each.name for each in TABLE if each.expected == REFUSES}
        self.assertEqual(refusing - set(WORDS), set())
        self.assertEqual(set(WORDS) - {each.name for each in TABLE}, set())


def add_test(scenario: Scenario) -> None:
    def test(self: TestScenarios) -> None:
        self.check(scenario)

    name = re.sub(r"[^a-z0-9]+", "_", f"{scenario.name}: rag.py {scenario.does}")
    setattr(TestScenarios, f"test_{name}", test)


for row in TABLE:
    add_test(row)
