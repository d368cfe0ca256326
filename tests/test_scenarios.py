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
# Words of the one line on stderr, and the scenarios in which it has them.
MESSAGES = {
    "answered 200 without a result: ": """
        embeddings-data-absent rerank-results-absent answer-choices-absent message-200
        """,
    "the list of results is an object, not a list": "embeddings-data-object",
    "the reply is a list, not an object": "embeddings-reply-list",
    "19 vectors for 20 inputs": "embeddings-one-fewer",
    "result 20 has index 20, not one of 0 to 19": "embeddings-one-more",
    " is null, not an object": """
        embeddings-row-null rerank-row-null answer-choice-null answer-message-null
        answer-json-null
        """,
    "with API_EMBEDDING_BATCH=1 index 0 is right": """
        embeddings-index-all-zero embeddings-index-absent
        """,
    ", as an earlier one\n": """
        embeddings-other-index-absent embeddings-index-repeated rerank-index-repeated
        """,
    'has index "': "embeddings-index-string rerank-index-string",
    "has index 2.5, not one of 0 to 19": "embeddings-index-float",
    "has index 3.5, not one of 0 to 18": "rerank-index-float",
    "has index true, not one of 0 to 1": "embeddings-index-boolean rerank-index-boolean",
    "has index -1, not one of 0 to 1": "embeddings-index-negative rerank-index-negative",
    "has index 22, not one of 0 to 1": "embeddings-index-too-large rerank-index-too-large",
    "has index null, not one of 0 to 18": """
        rerank-index-absent rerank-index-zero-absent rerank-index-zero-null
        """,
    "has index 19, not one of 0 to 18": "rerank-document-not-sent",
    "result 7 has index 11, not one of 0 to 7": "embeddings-later-batch",
    "the embedding with index 2: it is null, not a list": "embeddings-vector-absent",
    "the embedding with index 2: it is a string, not a list": "embeddings-base64-unasked",
    "not all are numbers": """
        embeddings-vector-nested embeddings-number-null embeddings-number-string
        embeddings-number-boolean
        """,
    "it is empty, all zeros, or not finite": """
        embeddings-vector-empty embeddings-vector-zero embeddings-vector-too-long
        embeddings-number-1e999
        """,
    "the embedding with index 2: ": """
        embeddings-number-400-digits embeddings-base64-broken embeddings-base64-cut
        """,
    "it has 255 numbers, not 256": "embeddings-vector-shorter embeddings-later-batch-shorter",
    "is not JSON: it holds NaN": """
        embeddings-number-nan rerank-score-nan answer-nan json-nan-unread
        """,
    "is not JSON: it holds -Infinity": "embeddings-number-infinity",
    " is repeated": """
        embeddings-repeated-key answer-repeated-key answer-repeated-key-escaped
        json-repeated-key-equal json-repeated-key-inside
        """,
    "the list of results is null, not a list": "rerank-results-null",
    "the reply has not exactly one of `results` and `data`": "rerank-results-and-data",
    "has not exactly one score that is a finite number": """
        rerank-score-absent rerank-score-twice rerank-score-twice-equal
        rerank-score-null rerank-score-string rerank-score-boolean rerank-score-1e999
        """,
    "`choices` is a list of 0, not of exactly one": "answer-choices-empty",
    "`choices` is a list of 2, not of exactly one": "answer-choices-two",
    'not "stop": cut off; raise the token limit in API_CHAT_OPTIONS': """
        answer-finish-length answer-finish-length-upper-case answer-finish-max-tokens
        answer-finish-model-length
        """,
    '", not "stop"\n': """
        answer-finish-content-filter answer-finish-tool-calls answer-finish-eos
        answer-finish-end-turn answer-finish-longer answer-finish-other-case
        """,
    'finish_reason is null, not "stop"\n': "answer-finish-absent answer-finish-null",
    "the message has a refusal": "answer-refusal",
    "the message has a tool_calls": "answer-tool-call",
    "the message has a function_call": "answer-function-call",
    "the content is null, not a string": "answer-content-null",
    "the content is a list, not a string": "answer-content-parts",
    "the content is an object, not a string": "answer-content-object",
    "the model's text: it is not JSON: ": """
        answer-blank answer-byte-order-mark answer-no-break-space answer-line-break
        answer-in-reasoning answer-prose-before answer-prose-after answer-two-objects
        answer-cut-off answer-trailing-comma answer-nested-deeply answer-obeys-by-prose
        """,
    "it has a Markdown fence: API_RESPONSE_FORMAT": "answer-fence answer-fence-plain",
    "it has thinking: switch that off in API_CHAT_OPTIONS": """
        answer-think-block answer-think-end answer-draft
        """,
    "it has chat template markers": "answer-template-marks",
    "the answer: 'utf-8' codec can't encode character": "answer-half-surrogate",
    "the model's text: it is a list, not an object": "answer-list",
    "the model's text: it is a string, not an object": "answer-string",
    "the keys are not `answer` and `source_ids`": """
        answer-key-more answer-key-proto answer-key-fewer answer-keys-other-case
        answer-object-empty answer-null-alone answer-key-other-name
        """,
    "source_ids is null, not a list": "answer-null-ids-null answer-ids-null",
    "source_ids is a string, not a list": "answer-ids-string",
    "source_ids[0]: it is a number, not a string": "answer-id-number",
    "source_ids[1]: it is null, not a string": "answer-id-null",
    "source_ids[0]: it is an object, not a string": "answer-id-object",
    "source_ids[0]: it is a list, not a string": "answer-id-list",
    '" is not the id of a source that was sent': """
        answer-id-not-sent answer-id-one-not-sent answer-id-first-not-sent answer-id-empty
        answer-ids-joined answer-id-text answer-id-line-break answer-id-quotes
        answer-id-full-width answer-id-record-not-sent answer-id-title answer-id-position
        answer-id-shortened answer-id-other-case answer-id-white-space
        answer-id-white-space-before answer-id-brackets answer-obeys-by-id
        answer-null-id-not-sent
        """,
    "it repeats an earlier citation": "answer-id-repeated quotes-twice",
    "the answer: it cites no source": "answer-no-ids quotes-no-citation",
    "the answer: it is null, but sources are cited": "answer-null-with-ids quotes-null",
    "the answer: it is a number, not a string": "answer-number",
    "the answer: it is an object, not a string": "answer-object",
    "the answer: it is blank": "answer-empty answer-empty-no-ids answer-text-blank",
    'citations[0]: the quote is not in the text of "hours-': """
        quotes-digit quotes-word-dropped quotes-sign quotes-stitched quotes-ellipsis
        quotes-other-source quotes-title quotes-inside-a-word
        """,
    "has fewer than 3 words": "quotes-empty quotes-short",
    "the keys are not `answer` and `citations`": "quotes-source-ids",
    "sent with API_EMBEDDING_MODEL=mock-embedding, API_EMBEDDING_BATCH=32": """
        http-400 http-413 http-421 http-500 http-201 http-204
        """,
    "sent with API_RERANK_MODEL=mock-rerank, RAG_CANDIDATES=20": "http-201-rerank http-500-rerank",
    "sent with API_MODEL=mock-chat, API_RESPONSE_FORMAT=none, RAG_SOURCES=3": """
        http-201-answer http-500-answer http-500-good
        """,
    '[secret]"; check API_KEY, and': "http-401",
    "; check API_BASE_URL (most end in /v1) and the model; sent with API_": """
        http-404 http-404-rerank http-404-answer
        """,
    'answered 429: "too many requests"; ': "http-429 http-429-answer",
    'answered 503: "no worker is free"; ': "http-503",
    'answered 503: "the model is loading"; ': "http-503-answer",
    "; redirects are not followed; check API_BASE_URL": """
        redirect-same-host redirect-other-host redirect-to-get redirect-301 redirect-303
        redirect-answer
        """,
    'answered 200: "web page: Sign in"; it may come from a proxy': "html-200",
    'answered 403: "web page: Blocked"; it may come from a proxy': "html-403",
    'without a result: "the provider failed"': "error-200 error-200-beside-data error-200-answer",
    "an event stream": "event-stream-200",
    "v1/embeddings: 'utf-8' codec can't decode byte": "not-utf-8 not-utf-8-unread",
    "v1/embeddings: the reply is not JSON: ": """
        empty-200 not-json json-cut-off json-nested-deeply json-5000-digits json-two
        """,
    ": no reply: ": "body-cut-off gzip-broken hang-up hang-up-answer",
    'ReadTimeout "timed out"; API_TIMEOUT is the limit': "silence",
}
WORDS = {name: words for words, names in MESSAGES.items() for name in names.split()}
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
