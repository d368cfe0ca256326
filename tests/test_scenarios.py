"""rag.py against every row of the scenario table: exit status, streams, message and requests."""

from __future__ import annotations

import re
from typing import Any

from mock_server.scenarios import ABSTAINS, MAY_ABSTAIN, REFUSES, TABLE, Scenario
from tests.support import RagTestCase, Result, paths, run_rag

EXPECTED = {
    "answer-cites-all": ("自行车, 🚲 ﬁ", ["guest-book", "hours-weekdays", "hours-saturday"]),
    "quotes-white-space": ("It says so.", ["hours-saturday"]),
    "quotes-curly": ("It says so.", ["guest-book"]),
    "quotes-combining": ("It says so.", ["guest-book"]),
}
QUESTION = "When is the library open on Saturday?"


class TestScenarios(RagTestCase):
    def run_scenario(self, scenario: Scenario) -> Result:
        server = self.serve()
        environ = {**server.environment(scenario.name, scenario.rerank), **scenario.settings}
        result = run_rag(QUESTION, environ=environ)
        asked = scenario.requests
        if scenario.words or scenario.expected == MAY_ABSTAIN:
            asked = asked[: asked.index(scenario.path) + 1]
        self.assertEqual(paths(server), asked)
        self.assertNotIn(environ["API_KEY"], result.stdout + result.stderr)
        return result

    def check(self, scenario: Scenario) -> None:
        result = self.run_scenario(scenario)
        if scenario.words:
            self.assert_one_line(result, 1, f"rag.py: {scenario.stage}: ", scenario.words)
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

    def test_every_scenario_of_refusal_has_words_that_its_message_must_have(self) -> None:
        self.assertEqual(
            [each.name for each in TABLE if each.expected == REFUSES and not each.words], []
        )


def add_test(scenario: Scenario) -> None:
    def test(self: TestScenarios) -> None:
        self.check(scenario)

    name = re.sub(r"[^a-z0-9]+", "_", f"{scenario.name}: rag.py {scenario.does}")
    setattr(TestScenarios, f"test_{name}", test)


for row in TABLE:
    add_test(row)
