"""The conformance check: correct clients pass, each fault is named, and no client hangs it."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import mock_server.__main__ as command_line
from mock_server.check import (
    Client,
    Judged,
    as_json,
    check,
    chosen,
    command_client,
    execute,
    explained,
    row,
)
from mock_server.contract import CONTRACT
from mock_server.request_log import Entry
from mock_server.scenarios import ANSWERS, REFUSES, SCENARIOS, TABLE, Scenario
from mock_server.server import MockServer
from mock_server.verdict import FAULT, NOT_JUDGED, RULES, UNSHOWN, Ended, Finding, judge, verdict
from tests.clients.faulty import CLIENT, FAULTY, FaultyClient, in_process
from tests.support import ROOT, RagTestCase, Result, run_rag

NODE = ROOT / "tests" / "clients" / "node.mjs"
SOURCE = CLIENT.read_text("utf-8")
ROW_CHECK = '        need("id" not in row, "")\n        index = read_index(row.get'
# The client in Python asks for neither base64 nor quotes.
NEVER_SERVED = [scenario.name for scenario in TABLE if scenario.asks]


def codes(judged: Judged) -> list[str]:
    return [finding.code for finding in judged.findings]


def own_records(*texts: str) -> str:
    """The source of the client with other records."""
    records = [{"id": f"r{i}", "text": text} for i, text in enumerate(texts)]
    return SOURCE.replace("records = read_records()\n", f"records = {records}\n")


def run_with(client: Client, *names: str, jobs: int = 1) -> list[Judged]:
    """The results of these scenarios, in table order."""
    results = check(client, chosen(names), jobs)
    return [judged for judged in results if judged.scenario.name in names]


def run_in(*names: str, source: str = SOURCE) -> list[Judged]:
    """The results of these scenarios for a client with this source."""
    return run_with(in_process(source), *names)


class TestCorrectClients(unittest.TestCase):
    def test_the_client_in_python_passes_in_every_scenario_that_it_meets(self) -> None:
        scenarios = [scenario for scenario in TABLE if scenario.name != "silence"]
        results = list(check(in_process(SOURCE), scenarios, jobs=2))
        results += run_in("silence", source=SOURCE.replace("TIMEOUT = 5.0", "TIMEOUT = 0.3"))
        expected = dict.fromkeys(NEVER_SERVED, ["not-served"])
        self.assertEqual(
            {each.scenario.name: codes(each) for each in results if each.findings}, expected
        )

    @unittest.skipUnless(shutil.which("node"), "there is no node")
    def test_the_client_in_javascript_passes_where_its_language_needs_care(self) -> None:
        names = (
            "plain plain-no-rerank plain-abstention rerank-nothing redirect-same-host http-421 "
            "answer-repeated-key answer-key-proto rerank-score-1e999"
        ).split()
        client = command_client(["node", str(NODE)], threading.Event())
        results = run_with(client, *names, jobs=2)
        self.assertEqual(
            {each.scenario.name: each.verdict for each in results}, dict.fromkeys(names, "passed")
        )

    def test_the_same_client_gets_the_same_verdict_however_many_jobs_there_are(self) -> None:
        names = ("plain", "http-500", "rerank-index-negative", "answer-fence", "rerank-nothing")
        scenarios = chosen(names)
        client = in_process(FAULTY[0].source)
        one, four = (
            json.dumps(as_json([], list(check(client, scenarios, jobs)))) for jobs in (1, 4)
        )
        ports = r"127.0.0.1:\d+"
        self.assertNotRegex(one, ports)
        self.assertEqual(one, four)


class TestFaultyClients(unittest.TestCase):
    def test_each_has_a_name_of_its_own(self) -> None:
        self.assertEqual(len({client.name for client in FAULTY}), len(FAULTY))

    def test_together_they_break_each_rule_that_such_a_client_can_break(self) -> None:
        found = {code for client in FAULTY for code in client.caught.values()}
        self.assertEqual(set(RULES) - found - set(UNSHOWN), {"hang", "quotes-differ"})

    def test_each_names_scenarios_that_exist(self) -> None:
        named = {name for client in FAULTY for name in client.caught}
        self.assertEqual(named - set(SCENARIOS), set())

    def check_client(self, client: FaultyClient) -> None:
        """Each scenario that the table names must fail with the finding that it names."""
        judged = run_in(*client.caught, source=client.source)
        results = {each.scenario.name: each for each in judged}
        for name, code in client.caught.items():
            self.assertIn(code, codes(results[name]), name)
            self.assertEqual(results[name].verdict, "failed", name)

    def test_as_a_command_it_is_the_client_with_that_fault(self) -> None:
        command = [sys.executable, "-m", "tests.clients.faulty", "exit status 0 on failure"]
        client = command_client(command, threading.Event())
        (judged,) = run_with(client, "http-500")
        self.assertEqual(codes(judged), ["exit-zero"])


def add_test(client: FaultyClient) -> None:
    """Add a test for a faulty client."""

    def test(self: TestFaultyClients) -> None:
        self.check_client(client)

    name = "".join(char if char.isalnum() else "_" for char in client.name)
    setattr(TestFaultyClients, f"test_found_{name}", test)


for each in FAULTY:
    add_test(each)


class TestRefusalsThatProveNothing(unittest.TestCase):
    """Small wrong programs, none of which may pass a refusal that it did not make."""

    def verdicts(self, client: Client) -> dict[str, set[str]]:
        """{verdict: the scenarios with it} for all scenarios, without the slow one."""
        scenarios = [each for each in chosen() if each.name != "silence"]
        found: dict[str, set[str]] = {"passed": set(), "failed": set(), "not judged": set()}
        for judged in check(client, scenarios):
            found[judged.verdict].add(judged.scenario.name)
        return found

    def test_a_client_that_ends_at_once_passes_nothing(self) -> None:
        found = self.verdicts(lambda environ: Ended(1, b"", b""))
        self.assertEqual(found, {"passed": set(), "failed": {"plain"}, "not judged": set()})

    def test_a_client_that_ends_after_good_embeddings_requests_passes_nothing(self) -> None:
        source = SOURCE.replace('            stage = "rerank"\n', '            need(False, "")\n')
        source = source.replace('            stage = "answer"\n', '            need(False, "")\n')
        found = self.verdicts(in_process(source))
        self.assertEqual(found["passed"], set())
        self.assertLessEqual({"http-500", "rerank-score-null", "quotes-digit"}, found["not judged"])
        self.assertLessEqual({"plain", "plain-no-rerank", "rerank-logits"}, found["failed"])

    def test_a_client_that_refuses_all_replies_of_a_stage_passes_only_earlier_refusals(
        self,
    ) -> None:
        for check_of, stages in (
            ("need(len(rows) == size,", set()),
            ('need("id" not in row,', {"embeddings"}),
            ("need(len(choices) == 1,", {"embeddings", "rerank"}),
        ):
            never = check_of[: check_of.index("(") + 1] + "False,"
            source = SOURCE.replace("        index = read_index(row.get", ROW_CHECK)
            found = self.verdicts(in_process(source.replace(check_of, never)))
            passed = [SCENARIOS[name] for name in found["passed"]]
            refusals = {each.stage for each in passed if each.expected == REFUSES}
            self.assertEqual(refusals, stages, check_of)

    def test_a_client_that_prints_a_fixed_answer_passes_no_refusal(self) -> None:
        good = in_process(SOURCE)
        with MockServer() as server:
            fixed = good(server.environment())

        def client(environ: Mapping[str, str]) -> Ended:
            good(environ)
            return fixed

        found = self.verdicts(client)
        refusing = {each.name for each in TABLE if each.expected == REFUSES}
        self.assertEqual(found["passed"] & refusing, set())
        self.assertIn("plain", found["passed"])

    def test_another_fault_counts_also_where_the_stage_was_not_reached(self) -> None:
        refusing = in_process(SOURCE.replace("need(len(rows) == size,", "need(False,"))

        def client(environ: Mapping[str, str]) -> Ended:
            ended = refusing(environ)
            key = environ["API_KEY"].encode() if "scenario" in environ["API_BASE_URL"] else b""
            return dataclasses.replace(ended, stderr=key)

        (judged,) = run_with(client, "http-500")
        self.assertEqual((codes(judged), judged.verdict), (["key-printed"], "failed"))


class TestQuotes(RagTestCase):
    """rag.py asks for quotes; here another end is put in the place of its own."""

    def found(self, name: str, change: Callable[[Result], Ended]) -> list[str]:
        scenario, server = SCENARIOS[name], self.serve()
        environ = {**server.environment(name), **scenario.settings}
        ended = change(run_rag(environ=environ))
        findings = judge(scenario, server.request_log.entries, ended=ended)
        return [finding.code for finding in findings]

    def published(self, **change: Any) -> Callable[[Result], Ended]:
        """An end with the document of a good run, whose quote has these changes."""
        server = self.serve()
        document = run_rag(environ={**server.environment(), "RAG_QUOTES": "1"}).document
        quotes = [{**document["quotes"][0], **change}]
        text = json.dumps({**document, "quotes": quotes})
        return lambda result: Ended(0, text.encode(), b"")

    def test_an_answer_from_a_refused_quote_is_found(self) -> None:
        for scenario in TABLE:
            if scenario.group == "quotes" and scenario.expected == REFUSES:
                found = self.found(scenario.name, self.published())
                self.assertEqual(found, ["accepted"], scenario.name)

    def test_the_refusal_of_a_quote_that_must_be_accepted_is_found(self) -> None:
        for name in ("quotes", "quotes-white-space", "quotes-curly", "quotes-combining"):
            found = self.found(name, lambda result: Ended(1, b"", b""))
            self.assertEqual(found, ["refused"], name)

    def test_a_quote_in_the_other_case_may_be_refused_or_published_as_the_record_has_it(
        self,
    ) -> None:
        self.assertEqual(self.found("quotes-other-case", lambda result: Ended(1, b"", b"")), [])
        self.assertEqual(self.found("quotes-other-case", self.published()), [])

    def test_published_quotes_that_are_not_slices_of_the_record_are_found(self) -> None:
        changes: list[dict[str, Any]] = [
            {"start": 1},
            {"end": 3},
            {"text": "On Saturday"},
            {"id": "hours-weekdays"},
            {"start": None},
        ]
        for change in changes:
            self.assertEqual(self.found("quotes", self.published(**change)), ["quotes-differ"])

    def test_published_quotes_may_have_no_sentence_mark_at_their_end(self) -> None:
        text = "On Saturday the library is open from 10:15 to 14:45"
        self.assertEqual(self.found("quotes", self.published(end=len(text), text=text)), [])

    def test_a_document_without_quotes_is_found(self) -> None:
        def without(result: Result) -> Ended:
            document = {name: result.document[name] for name in ("answer", "sources")}
            return Ended(0, json.dumps(document).encode(), b"")

        self.assertEqual(self.found("quotes", without), ["quotes-differ"])


class TestFindings(unittest.TestCase):
    def finding(self, faulty: str, scenario: str, code: str) -> Finding:
        (source,) = [each.source for each in FAULTY if each.name == faulty]
        (judged,) = run_in(scenario, source=source)
        (found,) = [each for each in judged.findings if each.code == code]
        return found

    def test_a_finding_has_what_was_expected_what_came_and_advice(self) -> None:
        found = self.finding("ids are trimmed", "answer-id-white-space", "accepted")
        self.assertEqual(found.scenario, "answer-id-white-space")
        self.assertEqual(found.severity, FAULT)
        self.assertEqual(
            found.title, "the client published an answer from a reply that it must refuse"
        )
        self.assertEqual(found.expected, "an exit status other than 0, and nothing on stdout")
        self.assertTrue(found.came.startswith("exit status 0, stdout"))
        self.assertIn(r"\"source_ids\": [\"hours-saturday \"]", found.nearest)
        self.assertIn('the ids sent were "hours-saturday", ', found.nearest)
        self.assertEqual(found.advice, "check each reply listed here before you use any part of it")

    def test_a_finding_names_the_wrong_way_of_ranking_that_gives_the_same_result(self) -> None:
        for faulty, scenario, code, way in (
            (
                "vectors by position",
                "plain-no-rerank",
                "sources",
                "with vectors bound by position, not by index",
            ),
            (
                "dot product of vectors that are not scaled",
                "embeddings-not-scaled",
                "sources",
                "by the dot product of vectors that are not scaled",
            ),
            (
                "lowest similarity first",
                "plain-no-rerank",
                "sources",
                "with the lowest similarity first",
            ),
            (
                "rows are taken in their order",
                "rerank-unsorted",
                "sources",
                "in the order of the rows",
            ),
            ("lowest similarity first", "plain", "documents", "with the lowest similarity first"),
        ):
            with self.subTest(faulty=faulty, scenario=scenario):
                codes = {"sources": "sources-not-best", "documents": "documents-not-nearest"}
                found = self.finding(faulty, scenario, codes[code])
                self.assertEqual(found.nearest, f"ranking {way} gives exactly these {code}")

    def test_two_texts_that_should_be_equal_are_both_shown(self) -> None:
        found = self.finding("another question for the reranker", "plain", "question-differs")
        self.assertEqual(
            found.came,
            '"When is the library open on Saturday" and "When is the library open on Saturday?"',
        )

    def test_a_request_that_the_mock_refused_is_shown_with_the_reason(self) -> None:
        found = self.finding("an extra field in a request", "plain", "request-refused")
        expected = "POST /v1/chat/completions, answered 400: unknown field 'k'"
        self.assertEqual(found.came, expected)

    def test_a_missing_stage_is_shown_with_how_the_client_ended(self) -> None:
        failing = SOURCE.replace(
            '            stage = "answer"\n', '            need(False, "no")\n'
        )
        (judged,) = run_in("plain", source=failing)
        (found,) = [each for each in judged.findings if each.code == "stage-missing"]
        self.assertEqual(
            found.came,
            "/embeddings -> /rerank, and no request to /chat/completions with the right key; "
            'exit status 1, stderr "client: rerank: no"',
        )

    def test_a_run_that_proves_nothing_is_not_judged(self) -> None:
        for code in UNSHOWN:
            self.assertEqual(
                verdict([Finding("s", NOT_JUDGED, code, "", "", "", "", "")]), NOT_JUDGED
            )
        self.assertEqual(verdict([]), "passed")

    def test_a_request_log_that_lost_requests_is_not_judged(self) -> None:
        (found,) = judge(SCENARIOS["plain"], [], dropped=3)
        self.assertEqual((found.code, found.severity), ("requests-lost", NOT_JUDGED))
        self.assertEqual(found.came, "3 requests lost")

    def test_an_order_that_a_wrong_way_gives_too_is_not_judged(self) -> None:
        one = own_records("Open on Saturday.", *(f"Part {i}." for i in range(12)))
        (judged,) = run_in(
            "embeddings-not-scaled", source=one.replace("SOURCES = 4", "SOURCES = 1")
        )
        self.assertEqual(codes(judged), ["order-not-told"])
        self.assertEqual(judged.verdict, NOT_JUDGED)

    def test_a_cited_record_that_the_client_does_not_have_is_not_judged(self) -> None:
        own = own_records(*(f"The library, part {i}." for i in range(12)))
        (judged,) = run_in("answer-id-record-not-sent", source=own)
        self.assertEqual(codes(judged), ["record-not-known"])
        (judged,) = run_in("plain", source=own)
        self.assertEqual(codes(judged), [])

    def test_a_client_that_does_not_get_the_fault_is_not_judged(self) -> None:
        (judged,) = run_in(
            "embeddings-later-batch", source=SOURCE.replace("BATCH = 8", "BATCH = 99")
        )
        self.assertEqual(codes(judged), ["not-served"])

    def test_a_published_text_may_be_any_json(self) -> None:
        odd = SOURCE.replace("[sent[item] for item", '[{**sent[item], "text": None} for item')
        (judged,) = run_in("plain", source=odd)
        self.assertEqual(codes(judged), ["source-altered"])
        self.assertEqual(judged.findings[0].came, '"hours-saturday": null')

    def test_a_request_that_has_no_reply_yet_is_not_judged(self) -> None:
        entry = Entry("POST", "/v1/embeddings", "", "right", body={"bad": 1})
        (found,) = judge(SCENARIOS["plain"], [entry])
        self.assertEqual(found.code, "no-request")

    def test_a_shorter_vector_does_not_become_all_zeros(self) -> None:
        own = own_records("bifm", *(f"Part {i}." for i in range(12)))
        own = own.replace(
            'QUESTION = "When is the library open on Saturday?"', 'QUESTION = "Which part."'
        )
        (judged,) = run_in("embeddings-later-batch-shorter", source=own)
        self.assertEqual(codes(judged), ["not-served"])

    def test_at_most_7_further_batches_may_be_under_way(self) -> None:
        def batch(number: int) -> Entry:
            return Entry(
                method="POST",
                path="/scenario/http-500/v1/embeddings",
                scenario="http-500",
                authorization="right",
                body={"model": "mock-embedding", "input": [f"text {number}"]},
                status=500,
            )

        for further, expected in ((0, []), (7, []), (8, ["went-on"])):
            entries = [batch(number) for number in range(1 + further)]
            findings = judge(SCENARIOS["http-500"], entries, ended=Ended(1, b"", b""))
            self.assertEqual([found.code for found in findings], expected, further)


def wait_for_end(process: int) -> None:
    """Wait until a process has ended, also if nobody has removed it from the process table."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        shown = subprocess.run(["ps", "-o", "stat=", "-p", str(process)], stdout=subprocess.PIPE)
        if shown.stdout.strip()[:1] in (b"", b"Z"):
            return
    raise AssertionError(f"process {process} is still there")


class TestRequestsOfOthers(RagTestCase):
    """Requests without the right key, which another program can send to the same address."""

    def judged(self, name: str, *others: Entry) -> list[str]:
        """The codes for a good run of rag.py with these requests before it."""
        server = self.serve()
        result = run_rag(environ=server.environment(name))
        ended = Ended(result.status, result.stdout.encode(), result.stderr.encode())
        entries = [*others, *server.request_log.entries]
        return [found.code for found in judge(SCENARIOS[name], entries, ended=ended)]

    def test_they_do_not_count(self) -> None:
        image = Entry("GET", "/v1/favicon.ico", "", "missing", status=404, refused="no such path")
        wrong = Entry("POST", "/v1/embeddings", "", "wrong", status=401, refused="wrong API key")
        self.assertEqual(self.judged("plain", image, wrong), [])

    def test_they_count_if_no_request_has_the_right_key(self) -> None:
        entry = Entry("POST", "/v1/embeddings", "", "missing", status=401, refused="missing")
        codes = [found.code for found in judge(SCENARIOS["plain"], [entry])]
        self.assertEqual(codes, ["request-refused"])

    def test_they_count_after_a_redirect_because_libraries_remove_the_key_there(self) -> None:
        body = {"model": "mock-embedding", "input": ["a"]}
        path = "/scenario/redirect-301/v1/embeddings"
        first = Entry("POST", path, "redirect-301", "right", body=body, status=301)
        second = Entry("GET", "/v1/embeddings", "", "missing", status=405, refused="GET")
        found = judge(SCENARIOS["redirect-301"], [first, second], ended=Ended(1, b"", b""))
        self.assertEqual([each.code for each in found], ["address-changed"])


class TestCommands(unittest.TestCase):
    def python(self, code: str, seconds: float = 20.0) -> Ended:
        environ = {**os.environ, "API_KEY": "k"}
        return execute([sys.executable, "-c", code], environ, threading.Event(), seconds)

    def test_streams_and_status_are_those_of_the_command(self) -> None:
        code = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(7)"
        self.assertEqual(
            self.python(code), Ended(7, f"out{os.linesep}".encode(), f"err{os.linesep}".encode())
        )

    def test_its_standard_input_is_empty(self) -> None:
        self.assertEqual(self.python("print(repr(input()))").status, 1)

    def test_a_command_that_does_not_end_is_killed_with_its_child_process(self) -> None:
        code = (
            "import subprocess, sys, time\n"
            "print('begun', flush=True)\n"
            "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
            "time.sleep(600)\n"
        )
        before = time.monotonic()
        ended = self.python(code, seconds=0.5)
        self.assertIsNone(ended.status)
        self.assertLess(time.monotonic() - before, 60)
        (judged,) = run_with(lambda environ: ended, "plain")
        self.assertEqual(codes(judged), ["no-request", "hang"])

    @unittest.skipUnless(shutil.which("ps"), "needs process groups, and ps")
    def test_a_process_that_a_command_leaves_behind_is_ended(self) -> None:
        child = "import sys, time; print('begun', flush=True); time.sleep(600)"
        code = (
            "import subprocess, sys\n"
            f"command = [sys.executable, '-c', {child!r}]\n"
            "process = subprocess.Popen(command, stdout=subprocess.PIPE)\n"
            "process.stdout.readline()\n"
            "print(process.pid)\n"
        )
        ended = self.python(code)
        self.assertEqual(ended.status, 0)
        wait_for_end(int(ended.stdout))

    def test_a_command_that_prints_without_end_is_killed(self) -> None:
        with mock.patch("mock_server.check.MAX_OUTPUT", 1000):
            ended = self.python("while True: print('x' * 10_000)")
        self.assertIsNone(ended.status)
        self.assertEqual(len(ended.stdout), 1000)

    def test_it_gets_the_five_variables_and_no_settings_of_the_caller(self) -> None:
        mine = {"API_KEY": "mine", "RAG_SOURCES": "9", "OPENAI_ORG_ID": "o", "HTTP_PROXY": "p"}
        code = "import json, os; print(json.dumps(dict(os.environ)))"
        with mock.patch.dict(os.environ, {**mine, "KEPT": "yes"}):
            client = command_client([sys.executable, "-c", code], threading.Event())
            environ = json.loads(client({"API_KEY": "theirs", "API_MODEL": "m"}).stdout)
        self.assertEqual((environ["API_KEY"], environ["API_MODEL"]), ("theirs", "m"))
        self.assertEqual(environ["KEPT"], "yes")
        self.assertEqual(environ["NO_PROXY"], "127.0.0.1,localhost,::1")
        self.assertEqual({"RAG_SOURCES", "OPENAI_ORG_ID", "HTTP_PROXY"} & set(environ), set())

    def test_a_scenario_sets_the_further_variables_that_it_needs(self) -> None:
        seen: list[Mapping[str, str]] = []

        def client(environ: Mapping[str, str]) -> Ended:
            seen.append(environ)
            return in_process(SOURCE.replace("TIMEOUT = 5.0", "TIMEOUT = 0.3"))(environ)

        run_with(client, "silence", "embeddings-reversed")
        by_name = {each["API_BASE_URL"].split("/")[-2]: each for each in seen}
        self.assertEqual(by_name["silence"]["API_TIMEOUT"], "0.3")
        self.assertEqual(by_name["silence"]["API_RERANK_MODEL"], "mock-rerank-of-the-check")
        self.assertEqual(by_name["embeddings-reversed"]["API_RERANK_MODEL"], "")
        self.assertNotIn("API_TIMEOUT", by_name["embeddings-reversed"])

    def test_keys_and_run_ids_cannot_be_guessed(self) -> None:
        seen: list[Mapping[str, str]] = []

        def client(environ: Mapping[str, str]) -> Ended:
            seen.append(environ)
            return in_process(SOURCE)(environ)

        for _ in range(2):
            run_with(client, "plain-no-rerank")
        self.assertEqual(len({each["API_KEY"] for each in seen}), 2)
        runs = [re.findall("/run/([A-Za-z0-9_-]{43})/", each["API_BASE_URL"]) for each in seen]
        self.assertEqual(len({run for (run,) in runs}), len(seen))


@dataclasses.dataclass(frozen=True)
class Printed:
    status: Any
    stdout: str
    stderr: str


GOOD_CLIENT = in_process(SOURCE)


def call(*argv: str, client: Any = GOOD_CLIENT) -> Printed:
    """The command line, where every command is this client."""
    stdout, stderr = io.StringIO(), io.StringIO()
    with mock.patch("mock_server.__main__.command_client", lambda command, stop: client):
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            try:
                status: Any = command_line.main(argv)
            except SystemExit as error:
                status = error.code
    return Printed(status, stdout.getvalue(), stderr.getvalue())


class TestCommandLine(unittest.TestCase):
    def test_what_passed_is_counted_and_shown_with_verbose_only(self) -> None:
        printed = call("check", "--scenario", "plain", "--scenario", "http-500", "--", "x")
        left_out = len(TABLE) - 2
        total = f"2 passed, 0 failed, 0 not judged, {left_out} left out\n"
        self.assertEqual(printed, Printed(0, total, ""))
        argv = ("--verbose", "--scenario", "http-500", "--", "x")
        self.assertEqual(
            call("check", *argv).stdout,
            "SCENARIO  A CORRECT CLIENT       VERDICT\n"
            "plain     answers                passed\n"
            "http-500  refuses at embeddings  passed\n"
            "\n"
            f"{total}",
        )

    def test_a_client_that_fails_gets_its_findings_and_exit_status_1(self) -> None:
        (source,) = [each.source for each in FAULTY if each.name == "exit status 0 on failure"]
        argv = ("--scenario", "http-500", "--scenario", "http-503", "--scenario", "plain")
        printed = call("check", *argv, "--", "x", client=in_process(source))
        self.assertEqual(printed.status, 1)
        table, findings, end = printed.stdout.split("\n\n")
        self.assertEqual(
            table.split("\n")[1:],
            [
                "http-500  refuses at embeddings  failed  exit-zero",
                "http-503  refuses at embeddings  failed  exit-zero",
            ],
        )
        self.assertEqual(
            findings.split("\n"),
            [
                "exit-zero (fault): the client failed with exit status 0",
                "  in        http-500: status 500 for every request to /embeddings",
                "            http-503: status 503 for every request to /embeddings",
                "  expected  an exit status other than 0",
                '  came      exit status 0, stdout ""',
                "  advice    exit with 1 when a stage fails",
            ],
        )
        again = "To see one alone: python -m mock_server check --scenario http-500 -- x\n"
        total = f"1 passed, 2 failed, 0 not judged, {len(TABLE) - 3} left out\n"
        self.assertEqual(end, f"{again}{total}")

    def test_the_report_begins_with_a_plain_run_that_failed(self) -> None:
        broken = in_process(SOURCE.replace("need(len(choices) == 1,", "need(False,"))
        for scenario, plain in (("http-500", "plain"), ("embeddings-reversed", "plain-no-rerank")):
            printed = call("check", "--scenario", scenario, "--", "x", client=broken)
            first, _, row = printed.stdout.split("\n")[:3]
            self.assertEqual(first, f"The client fails in the scenario {plain}: fix this first.")
            self.assertRegex(row, f"^{plain} +answers +failed  refused$")

    def test_what_was_not_judged_is_shown_and_is_not_a_failure(self) -> None:
        printed = call("check", "--scenario", "embeddings-base64", "--", "x")
        self.assertEqual(printed.status, 0)
        self.assertIn("not judged  not-served\n", printed.stdout)
        self.assertIn("not-served (not judged): the client did not get", printed.stdout)
        total = f"1 passed, 0 failed, 1 not judged, {len(TABLE) - 2} left out"
        self.assertTrue(printed.stdout.endswith(f"\n{total}\n"))

    def test_as_json_it_is_one_document(self) -> None:
        argv = (
            "--json",
            "--scenario",
            "plain",
            "--scenario",
            "embeddings-base64",
            "--",
            "a",
            "b c",
        )
        printed = call("check", *argv)
        document = json.loads(printed.stdout)
        scenarios = document.pop("scenarios")
        counts = {"passed": 1, "failed": 0, "not_judged": 1, "left_out": len(TABLE) - 2}
        self.assertEqual(document, {"command": ["a", "b c"], **counts})
        requests = ["/embeddings"] * 3 + ["/rerank", "/chat/completions"]
        expected = {
            "name": "plain",
            "group": "plain",
            "serves": "correct replies",
            "expected": "answers",
            "verdict": "passed",
            "requests": requests,
            "exit_status": 0,
            "findings": [],
        }
        self.assertEqual(scenarios[0], expected)
        (finding,) = scenarios[1]["findings"]
        self.assertEqual(list(finding), [field.name for field in dataclasses.fields(Finding)])

    def test_scenarios_are_chosen_by_name_and_group_with_the_plain_runs_they_need(self) -> None:
        def names(**options: list[str]) -> list[str]:
            return [each.name for each in chosen(**options)]

        self.assertEqual(names(), [each.name for each in TABLE])
        self.assertEqual(names(names=["http-500"]), ["plain", "http-500"])
        self.assertEqual(
            names(names=["embeddings-reversed"]), ["plain-no-rerank", "embeddings-reversed"]
        )
        self.assertEqual(
            names(names=["http-500"], groups=["plain"]),
            ["plain", "plain-no-rerank", "plain-abstention", "http-500"],
        )
        without = names(groups=["plain", "quotes"], without=["plain"])
        self.assertEqual([without[0], without[1]], ["plain", "quotes"])

    def test_what_a_json_library_decides_can_be_left_out(self) -> None:
        lenient = in_process(
            SOURCE.replace('need(len(dict(pairs)) == len(pairs), "a repeated key")', "pass")
        )
        group = [each.name for each in TABLE if each.group == "json-library"]
        self.assertEqual(len(group), 5)
        argv = ("--group", "json-library", "--group", "plain", "--", "x")
        printed = call("check", "--json", *argv, client=lenient)
        failed = [
            each["name"]
            for each in json.loads(printed.stdout)["scenarios"]
            if each["verdict"] == "failed"
        ]
        self.assertEqual((printed.status, failed), (1, group))
        printed = call("check", "--without", "json-library", *argv, client=lenient)
        total = f"3 passed, 0 failed, 0 not judged, {len(TABLE) - 3} left out"
        expected = f"{total} (without json-library)\n"
        self.assertEqual((printed.status, printed.stdout), (0, expected))

    def test_a_client_that_sends_nothing_is_run_once(self) -> None:
        runs: list[Mapping[str, str]] = []

        def client(environ: Mapping[str, str]) -> Ended:
            runs.append(environ)
            return Ended(0, b"hello", b"")

        printed = call("check", "--", "x", client=client)
        self.assertEqual((printed.status, len(runs)), (1, 1))
        self.assertIn("no-request (fault): the client sent no request\n", printed.stdout)
        self.assertIn("  came      exit status 0\n", printed.stdout)
        rest = f"{len(TABLE) - 1} left out (the first run sent no request, so no other was started)"
        self.assertTrue(printed.stdout.endswith(f"\n0 passed, 1 failed, 0 not judged, {rest}\n"))

    def test_a_command_that_cannot_be_started_is_127_and_one_line(self) -> None:
        client = command_client(["no-such-command"], threading.Event())
        printed = call("check", "--json", "--", "no-such-command", client=client)
        self.assertEqual((printed.status, printed.stdout), (127, ""))
        line = "mock_server: cannot run no-such-command: No such file or directory\n"
        self.assertEqual(printed.stderr, line)

    def test_usage_errors_are_2(self) -> None:
        for argv, words in (
            (("check",), "COMMAND"),
            (("check", "--jobs", "0", "--", "x"), "'0' is not a whole number from 1 to 64"),
            (("check", "--jobs", "two", "--", "x"), "'two' is not a whole number from 1 to 64"),
            (("check", "--group", "none", "--", "x"), "invalid choice: 'none'"),
            (("check", "--scenario", "http-50", "--", "x"), "similar names: http-503"),
        ):
            with self.subTest(argv=argv):
                printed = call(*argv)
                self.assertEqual((printed.status, printed.stdout), (2, ""))
                self.assertIn(words, printed.stderr)

    def test_its_help_has_the_contract(self) -> None:
        printed = call("check", "--help")
        self.assertEqual(printed.status, 0)
        self.assertIn(CONTRACT, printed.stdout)

    @unittest.skipUnless(shutil.which("ps"), "needs POSIX signals, and ps")
    def test_a_signal_ends_the_command_and_its_child_process(self) -> None:
        for number, status in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
            with self.subTest(signal=number), tempfile.TemporaryDirectory() as folder:
                note = Path(folder) / "pid"
                child = f"import os, pathlib, time; pathlib.Path({str(note)!r})"
                child += ".write_text(str(os.getpid()) + '.'); time.sleep(600)"
                code = "import subprocess, sys, time; "
                code += f"subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(600)"
                process = subprocess.Popen(
                    [
                        sys.executable,
                        "-m",
                        "mock_server",
                        "check",
                        "--",
                        sys.executable,
                        "-c",
                        code,
                    ],
                    cwd=ROOT,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    # A shell's background jobs, and what they start, ignore the signal.
                    preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
                )
                while not (note.exists() and note.read_text().endswith(".")):
                    self.assertIsNone(process.poll())
                process.send_signal(number)
                _, err = process.communicate(timeout=15)
                self.assertEqual((process.returncode, err), (status, b""))
                wait_for_end(int(note.read_text()[:-1]))

    @unittest.skipUnless(Path("/dev/full").exists(), "there is no full device")
    def test_a_full_stdout_is_reported_and_a_closed_one_is_not(self) -> None:
        argv = [sys.executable, "-m", "mock_server", "check", "--scenario", "plain", "--", "true"]
        with open("/dev/full", "wb") as full:
            done = subprocess.run(argv, cwd=ROOT, stdout=full, stderr=subprocess.PIPE)
        self.assertEqual(done.returncode, 1)
        self.assertEqual(done.stderr, b"mock_server: No space left on device\n")
        reading, writing = os.pipe()
        os.close(reading)
        with open(writing, "wb") as closed:
            done = subprocess.run(argv, cwd=ROOT, stdout=closed, stderr=subprocess.PIPE)
        self.assertEqual((done.returncode, done.stderr), (1, b""))

    def test_a_full_or_missing_stderr_does_not_disturb_the_requests(self) -> None:
        for stream in (mock.Mock(write=mock.Mock(side_effect=OSError)), None):
            with mock.patch.object(sys, "stderr", stream):
                command_line.tell("POST /v1/embeddings 200")

    def test_characters_that_stdout_cannot_encode_are_escaped(self) -> None:
        source = own_records("图书馆", *(f"Part {i}." for i in range(12)))
        failing = source.replace("SOURCES = 4", "SOURCES = 13").replace(
            "CANDIDATES = 8", "CANDIDATES = 13"
        )
        stdout = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
        with mock.patch("mock_server.__main__.command_client", lambda *_: in_process(failing)):
            with mock.patch.object(sys, "stdout", stdout):
                argv = ["check", "--json", "--scenario", "plain", "--", "图书馆"]
                self.assertEqual(command_line.main(argv), 1)
                argv = ["check", "--scenario", "plain", "--", "图书馆"]
                self.assertEqual(command_line.main(argv), 1)
        shown = stdout.buffer.getvalue()
        self.assertIn(rb"check --scenario plain -- '\u56fe\u4e66\u9986'", shown)

    def test_ctrl_c_kills_the_commands_that_still_run(self) -> None:
        stops: list[threading.Event] = []

        def client_of(command: Any, stop: threading.Event) -> Any:
            stops.append(stop)
            return mock.Mock(side_effect=KeyboardInterrupt)

        with mock.patch("mock_server.__main__.command_client", client_of):
            with contextlib.redirect_stdout(io.StringIO()):
                with self.assertRaises(KeyboardInterrupt):
                    command_line.main(["check", "--", "x"])
        self.assertTrue(stops[0].is_set())


class TestControl(RagTestCase):
    """The addresses for other test suites."""

    def get(self, server: Any, path: str) -> Any:
        import http.client

        connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
        with contextlib.closing(connection):
            connection.request("GET", path)
            return json.loads(connection.getresponse().read())

    def test_the_scenarios_are_the_table(self) -> None:
        shown = self.get(self.serve(), "/_mock/scenarios")
        self.assertEqual([each["name"] for each in shown], [each.name for each in TABLE])
        expected = {
            "name": "rerank-nothing",
            "group": "variants",
            "serves": "no row",
            "expected": "abstains",
            "stage": "rerank",
            "rerank": True,
            "requests": ["/embeddings", "/rerank"],
        }
        self.assertIn(expected, shown)

    def test_a_report_is_the_verdict_on_the_requests_of_a_run(self) -> None:
        server = self.serve()
        passed = {"scenario": "http-500", "verdict": "passed", "findings": []}
        run_rag(environ=server.environment("http-500", run="one"))
        run_rag(environ={**server.environment(run="two"), "RAG_SOURCES": "11"})
        one = self.get(server, "/run/one/_mock/report")
        self.assertEqual(one, {**passed, "requests": ["/embeddings"]})
        two = self.get(server, "/run/two/_mock/report")
        self.assertEqual(two["verdict"], "failed")
        self.assertEqual([each["code"] for each in two["findings"]], ["sources-too-many"])
        self.assertEqual(two["requests"], ["/embeddings", "/rerank", "/chat/completions"])

    def test_a_report_without_requests_says_that_none_came(self) -> None:
        report = self.get(self.serve(), "/_mock/report")
        self.assertEqual([each["code"] for each in report["findings"]], ["no-request"])

    def test_in_a_report_an_unknown_scenario_is_a_refused_request(self) -> None:
        server = self.serve()
        environ = {**server.environment(), "API_BASE_URL": server.base_url("none")}
        run_rag(environ=environ)
        report = self.get(server, "/_mock/report")
        self.assertEqual([each["code"] for each in report["findings"]], ["request-refused"])


class TestRow(unittest.TestCase):
    def test_a_row_has_the_codes_of_its_findings_and_no_space_at_its_end(self) -> None:
        scenario = Scenario("own", "plain", "correct replies", ANSWERS)
        judged = Judged(scenario, [], 0, [])
        self.assertEqual(row(judged, (5, 9)), "own    answers    passed")
        finding = Finding("own", FAULT, "hang", "t", "e", "c\x1b", "", "a")
        failed = Judged(scenario, [], None, [finding, finding])
        self.assertEqual(row(failed, (5, 9)), "own    answers    failed  hang hang")
        self.assertIn(r"  came      c\x1b", list(explained([failed])))
