"""Clients with one fault each, and the findings of `check` that must name the fault.

They are standard_library.py with a few lines replaced.

    python -m tests.clients.faulty          run each faulty client in all scenarios
    python -m tests.clients.faulty NAME     be the faulty client with this name

The tests run each faulty client only in the scenarios that the table names.
"""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mock_server.check import Client, check
from mock_server.scenarios import TABLE
from mock_server.verdict import Ended

CLIENT = Path(__file__).with_name("standard_library.py")


@dataclass(frozen=True)
class FaultyClient:
    """A client with a fault: (old text, new text) for each edit, and {scenario: finding}."""

    name: str
    edits: tuple[tuple[str, str], ...]
    caught: Mapping[str, str]

    @property
    def source(self) -> str:
        """The source text of the client."""
        source = CLIENT.read_text("utf-8")
        for old, new in self.edits:
            if source.count(old) != 1:
                raise ValueError(f"{self.name}: {source.count(old)} times in the client: {old}")
            source = source.replace(old, new)
        return source


def faulty(name: str, old: str, new: str, /, *edits: str, **caught: str) -> FaultyClient:
    """A row of the table. The names of scenarios are written with underscores."""
    pairs = ((old, new), *zip(edits[::2], edits[1::2]))
    found = {scenario.replace("_", "-"): code for scenario, code in caught.items()}
    return FaultyClient(name, tuple(pairs), found)


def main_of(source: str) -> Any:
    """The function main() of a client with this source."""
    names: dict[str, Any] = {"__name__": "client", "__file__": str(CLIENT)}
    exec(compile(source, str(CLIENT), "exec"), names)
    return names["main"]


def in_process(source: str) -> Client:
    """A client for `check` that runs this source in this process."""
    main = main_of(source)

    def run(environ: Mapping[str, str]) -> Ended:
        stdout, stderr = io.StringIO(), io.StringIO()
        try:
            status = main([], environ, stdout, stderr)
        except Exception:  # as a command it would end with exit status 1
            status = 1
            stderr.write(traceback.format_exc())
        return Ended(status, stdout.getvalue().encode(), stderr.getvalue().encode())

    return run


FAULTY = (
    # Embeddings.
    faulty(
        "vectors by position",
        "index = 0 if given is None else read_index(given, size)",
        "index = len(vectors)",
        plain_no_rerank="sources-not-best",
        embeddings_reversed="sources-not-best",
        embeddings_index_repeated="went-on",
        embeddings_index_negative="went-on",
    ),
    faulty(
        "dot product of vectors that are not scaled",
        "return [number / length for number in numbers]",
        "return numbers",
        embeddings_not_scaled="sources-not-best",
    ),
    faulty(
        "lowest similarity first",
        "key=lambda index: -scores[index])\n    return [records",
        "key=lambda index: scores[index])\n    return [records",
        plain="documents-not-nearest",
        plain_no_rerank="sources-not-best",
    ),
    faulty(
        "records in file order",
        "order = sorted(range(len(records)), key=lambda index: -scores[index])",
        "order = list(range(len(records)))",
        plain="documents-not-nearest",
        plain_no_rerank="sources-not-best",
    ),
    faulty(
        "an index as a string is converted",
        'index = typed(value, int, "index")',
        "index = int(value)  # type: ignore[call-overload]",
        embeddings_index_string="went-on",
        rerank_index_float="went-on",
    ),
    faulty(
        "true is a number",
        "if type(value) is not kind:",
        "if not isinstance(value, kind):",
        rerank_index_boolean="went-on",
    ),
    faulty(
        "a zero vector is accepted",
        'need(length > 0, "vector: empty or all zeros")',
        "length = length or 1.0",
        embeddings_vector_zero="went-on",
    ),
    faulty(
        "NaN is accepted",
        'raise Refusal("NaN or Infinity")',
        "return float(name)",
        'need(math.isfinite(number), f"{name}: not finite")',
        "pass",
        'need(math.isfinite(length), "vector: too long")',
        "pass",
        'need(length > 0, "vector: empty or all zeros")',
        "pass",
        embeddings_number_nan="went-on",
        embeddings_number_infinity="went-on",
        rerank_score_nan="went-on",
    ),
    faulty(
        "numbers as strings are converted",
        'need(type(value) in (int, float), f"{name}: no number")',
        "pass",
        embeddings_number_string="went-on",
        rerank_score_string="went-on",
    ),
    faulty(
        "the dimensions are not compared",
        'need(len({len(vector) for vector in vectors}) == 1, "vectors of several dimensions")',
        "pass",
        "zip(vectors[0], vector, strict=True)",
        "zip(vectors[0], vector)",
        embeddings_vector_shorter="went-on",
        embeddings_later_batch_shorter="went-on",
    ),
    faulty(
        "only the first reply to embeddings is checked",
        "vectors += read_vectors(reply, len(batch))",
        'rows = reply["data"]  # type: ignore[index]\n        vectors += (\n'
        "            read_vectors(reply, len(batch))\n            if not start\n"
        '            else [read_vector(row["embedding"]) for row in rows]\n        )',
        embeddings_later_batch="went-on",
    ),
    faulty(
        "a missing index is the position",
        "index = 0 if given is None else read_index(given, size)",
        "index = len(vectors) if given is None else read_index(given, size)",
        embeddings_index_absent="went-on",
    ),
    faulty(
        "a text is embedded twice",
        "inputs = [question] + [passage(record) for record in records]",
        "inputs = [question] + [passage(record) for record in records] + [question]",
        plain="input-repeated",
    ),
    faulty(
        "the question is not embedded",
        "inputs = [question] + [passage(record) for record in records]",
        'inputs = ["a library"] + [passage(record) for record in records]',
        plain="question-not-embedded",
        plain_no_rerank="question-not-embedded",
    ),
    faulty(
        "only some records are embedded",
        "        records = read_records()\n",
        "        records = read_records()[:11]\n",
        plain="inputs-too-few",
    ),
    faulty(
        "one record is left out",
        "        records = read_records()\n",
        "        records = read_records()[1:]\n",
        plain="record-not-embedded",
    ),
    # Rerank.
    faulty(
        "a negative index counts from the end",
        'need(index >= 0, "index: negative")',
        "index = index + size if index < 0 else index",
        rerank_index_negative="went-on",
    ),
    faulty(
        "an index beyond the documents is cut to the last",
        'need(index < size, "index: too large")',
        "index = min(index, size - 1)",
        rerank_index_too_large="went-on",
        rerank_document_not_sent="went-on",
    ),
    faulty(
        "a failed reranker is ignored",
        "            best = rerank(settings, question, best)\n",
        "            try:\n                best = rerank(settings, question, best)\n"
        "            except Refusal:\n                pass\n",
        http_404_rerank="went-on",
        rerank_score_null="went-on",
        rerank_results_absent="went-on",
    ),
    faulty(
        "echoed documents are trusted",
        "scores[index] = read_score(row)",
        'scores[index] = read_score(row)\n        echo = row.get("document") or {}\n'
        "        candidates[index] = {**candidates[index], **echo}",
        rerank_documents_echoed="source-not-known",
    ),
    faulty(
        "rows are taken in their order",
        "order = sorted(scores, key=lambda index: (-scores[index], index))",
        "order = list(scores)",
        rerank_unsorted="sources-not-best",
    ),
    faulty(
        "rows are bound by position",
        'index = read_index(row.get("index"), len(candidates))',
        "index = len(scores)",
        plain="sources-not-best",
        rerank_index_repeated="went-on",
    ),
    faulty(
        "documents without a row are appended",
        "return [candidates[index] for index in order]\n\n\ndef read_content",
        "rest = [index for index in range(len(candidates)) if index not in order]\n"
        "    return [candidates[index] for index in [*order, *rest]]\n\n\ndef read_content",
        rerank_fewer_rows="source-not-ranked",
    ),
    faulty(
        "no reranking",
        "        if settings.rerank_model:\n",
        '        if settings.rerank_model == "none":\n',
        plain="stage-missing",
    ),
    faulty(
        "reranking without a model",
        "        if settings.rerank_model:\n",
        "        if True:\n",
        "    return settings\n",
        '    rerank_model = settings.embedding_model.replace("embedding", "rerank")\n'
        "    return settings._replace(rerank_model=rerank_model)\n",
        plain_no_rerank="rerank-unasked",
    ),
    faulty(
        "one request a document",
        '    for item in read_rows(post(settings.base_url + "/rerank", settings.key, body)):\n',
        '    url = settings.base_url + "/rerank"\n'
        '    post(url, settings.key, {**body, "documents": ["a"], "top_n": 1})\n'
        "    for item in read_rows(post(url, settings.key, body)):\n",
        plain="request-too-many",
    ),
    faulty(
        "the chat is asked before the reranker",
        "            best = rerank(settings, question, best)\n",
        "            ask(settings, question, best[:SOURCES])\n"
        "            best = rerank(settings, question, best)\n",
        plain="stage-order",
    ),
    faulty(
        "documents that were not embedded",
        '"documents": [passage(record) for record in candidates],',
        '"documents": [passage(record).upper() for record in candidates],',
        plain="document-not-embedded",
    ),
    faulty(
        "another question for the reranker",
        '"query": question,',
        '"query": question.rstrip("?"),',
        plain="question-differs",
    ),
    faulty(
        "the chat is asked without sources",
        "        if best:\n",
        "        if True:\n",
        rerank_nothing="chat-unasked",
    ),
    faulty(
        "both `results` and `data` are accepted",
        'need(not ("results" in fields and "data" in fields), "both results and data")',
        "pass",
        rerank_results_and_data="went-on",
    ),
    # The sources.
    faulty(
        "more sources than allowed",
        "SOURCES = 4",
        "SOURCES = 11",
        "CANDIDATES = 8",
        "CANDIDATES = 18",
        plain="sources-too-many",
        plain_no_rerank="sources-too-many",
    ),
    faulty(
        "one source twice",
        "ask(settings, question, best[:SOURCES])",
        "ask(settings, question, [*best[:2], best[1]])",
        plain_no_rerank="source-repeated",
    ),
    faulty(
        "a source from elsewhere",
        "ask(settings, question, best[:SOURCES])",
        'ask(settings, question, [{"id": "web", "text": "The web says."}, *best[:2]])',
        plain="source-not-known",
        plain_no_rerank="source-not-known",
    ),
    faulty(
        "a source that is not the best",
        "ask(settings, question, best[:SOURCES])",
        "ask(settings, question, best[1 : SOURCES + 1])",
        plain_no_rerank="sources-not-best",
    ),
    faulty(
        "an extra key in a source",
        'task = json.dumps({"question": question, "sources": sources}, ensure_ascii=False)',
        'task = json.dumps({"question": question, "sources": [{**s, "n": 1} for s in sources]})',
        plain="request-refused",
    ),
    faulty(
        "an extra field in a request",
        'body: dict[str, object] = {"model": settings.chat_model, "messages": messages}',
        'body: dict[str, object] = {"model": settings.chat_model, "messages": messages, "k": 1}',
        plain="request-refused",
    ),
    faulty(
        "the key in a body",
        'body: dict[str, object] = {"model": settings.chat_model, "messages": messages}',
        'body: dict[str, object] = {"model": settings.chat_model, "messages": messages}\n'
        '    body["user"] = settings.key',
        plain="key-elsewhere",
    ),
    faulty(
        "the key in two headers",
        '"Authorization": f"Bearer {key}"',
        '"Authorization": f"Bearer {key}", "X-Api-Key": key',
        plain="key-elsewhere",
    ),
    faulty(
        "the key in the address",
        'connection.request("POST", parts.path,',
        'connection.request("POST", f"{parts.path}?key={key}",',
        plain="request-refused",
    ),
    faulty(
        "texts that are cut for the chat",
        "    task = json.dumps(",
        '    sources = [{**source, "text": source["text"][:30]} for source in sources]\n'
        "    task = json.dumps(",
        plain="source-differs",
    ),
    faulty(
        "the ids of other records",
        "    task = json.dumps(",
        "    shifted = [*sources[1:], sources[0]]\n"
        '    sources = [{**one, "id": other["id"]} for one, other in zip(sources, shifted)]\n'
        "    task = json.dumps(",
        plain="source-differs",
    ),
    faulty(
        "a key of its own",
        'settings = Settings(base_url.rstrip("/"), *others)',
        'settings = Settings(base_url.rstrip("/"), "mock-key-for-tests", *others[1:])',
        plain="request-refused",
    ),
    faulty(
        "a model of its own",
        'settings = Settings(base_url.rstrip("/"), *others)',
        'settings = Settings(base_url.rstrip("/"), others[0], "mock-chat", *others[2:])',
        plain="request-refused",
    ),
    faulty(
        "texts that are encoded twice",
        'task = json.dumps({"question": question, "sources": sources}, ensure_ascii=False)',
        'task = json.dumps({"question": question, "sources": sources}, ensure_ascii=False)\n'
        '    task = task.encode("utf-8").decode("latin-1")',
        rerank_other_script="source-not-known",
    ),
    faulty(
        "the key in another header",
        '"Authorization": f"Bearer {key}"',
        '"X-Api-Key": key',
        plain="request-refused",
    ),
    # The answer.
    faulty(
        "a Markdown fence is stripped",
        'fields = typed(parse_json(content), dict, "answer object")',
        'content = content.removeprefix("```json").removesuffix("```")\n'
        '    fields = typed(parse_json(content), dict, "answer object")',
        answer_fence="accepted",
    ),
    faulty(
        "an object is cut from the text",
        'fields = typed(parse_json(content), dict, "answer object")',
        'content = content[content.find("{") : content.rfind("}") + 1]\n'
        '    fields = typed(parse_json(content), dict, "answer object")',
        answer_fence="accepted",
        answer_prose_before="accepted",
        answer_prose_after="accepted",
        answer_think_block="accepted",
        answer_list="accepted",
    ),
    faulty(
        "the last object wins",
        'fields = typed(parse_json(content), dict, "answer object")',
        "content = content[content.rfind('{\"answer') :]\n"
        '    fields = typed(parse_json(content), dict, "answer object")',
        answer_two_objects="accepted",
        answer_draft="accepted",
    ),
    faulty(
        "the last of repeated keys wins",
        'need(len(dict(pairs)) == len(pairs), "a repeated key")',
        "pass",
        embeddings_repeated_key="went-on",
        answer_repeated_key="accepted",
        answer_repeated_key_escaped="accepted",
    ),
    faulty(
        "any known id is accepted",
        'sent = {record["id"]: record for record in sources}',
        'sent = {record["id"]: record for record in read_records()}',
        answer_id_record_not_sent="accepted",
    ),
    faulty(
        "ids that were not sent are dropped",
        'need(all(item in sent for item in ids), "id: not sent")',
        "ids = [item for item in ids if item in sent]",
        answer_id_one_not_sent="accepted",
    ),
    faulty(
        "similar ids are repaired",
        'need(all(item in sent for item in ids), "id: not sent")',
        "from difflib import get_close_matches as near\n\n"
        "    ids = [near(item, sent, 1, 0.8)[0] for item in ids]",
        answer_id_shortened="accepted",
        answer_id_white_space="accepted",
        answer_id_brackets="accepted",
    ),
    faulty(
        "ids are trimmed",
        'ids = [typed(item, str, "id") for item',
        'ids = [typed(item, str, "id").strip() for item',
        answer_id_white_space="accepted",
    ),
    faulty(
        "white space before ids is removed",
        'ids = [typed(item, str, "id") for item',
        'ids = [typed(item, str, "id").lstrip() for item',
        answer_id_white_space_before="accepted",
    ),
    faulty(
        "the case of ids is ignored",
        'ids = [typed(item, str, "id") for item',
        'ids = [typed(item, str, "id").lower() for item',
        answer_id_other_case="accepted",
    ),
    faulty(
        "titles and positions are taken for ids",
        'need(all(item in sent for item in ids), "id: not sent")',
        'names = {record.get("title", ""): record["id"] for record in sources}\n'
        '    names |= {str(i): record["id"] for i, record in enumerate(sources)}\n'
        "    ids = [names.get(item, item) for item in ids]\n"
        '    need(all(item in sent for item in ids), "id: not sent")',
        answer_id_title="accepted",
        answer_id_position="accepted",
    ),
    faulty(
        "an id twice",
        'need(len(set(ids)) == len(ids), "id: twice")',
        "pass",
        answer_id_repeated="accepted",
    ),
    faulty(
        "an answer without ids",
        'need(ids != [], "an answer without ids")',
        "pass",
        answer_no_ids="accepted",
    ),
    faulty(
        "null with ids",
        'need(ids == [], "null with ids")',
        "pass",
        answer_null_with_ids="accepted",
    ),
    faulty(
        "a blank answer",
        'need(typed(answer, str, "answer").strip() != "", "answer: blank")',
        "pass",
        answer_text_blank="accepted",
        answer_number="accepted",
        answer_object="accepted",
    ),
    faulty(
        "white space is refused",
        'fields = typed(parse_json(content), dict, "answer object")',
        'need(content == content.strip(), "white space")\n'
        '    fields = typed(parse_json(content), dict, "answer object")',
        answer_white_space="refused",
    ),
    faulty(
        "the keys are not checked",
        'need(fields.keys() == {"answer", "source_ids"}, "not exactly answer and source_ids")',
        "pass",
        answer_key_more="accepted",
        answer_key_proto="accepted",
    ),
    faulty(
        "the finish reason is ignored",
        'need(choice.get("finish_reason") == "stop", "finish_reason: not stop")',
        "pass",
        answer_finish_length="accepted",
        answer_finish_absent="accepted",
        answer_finish_content_filter="accepted",
    ),
    faulty(
        "the case of the finish reason is ignored",
        'choice.get("finish_reason") == "stop"',
        'str(choice.get("finish_reason")).lower() == "stop"',
        answer_finish_other_case="accepted",
    ),
    faulty(
        "other finish reasons are taken for stop",
        'choice.get("finish_reason") == "stop"',
        'choice.get("finish_reason") in ("stop", "eos", "end_turn")',
        answer_finish_eos="accepted",
        answer_finish_end_turn="accepted",
    ),
    faulty(
        "the first of two choices is taken",
        'need(len(choices) == 1, "not exactly one choice")',
        "pass",
        answer_choices_two="accepted",
    ),
    faulty(
        "a refusal is ignored",
        'need(message.get("refusal") in (None, ""), "a refusal")',
        "pass",
        answer_refusal="accepted",
    ),
    faulty(
        "an empty refusal is a refusal",
        'need(message.get("refusal") in (None, ""), "a refusal")',
        'need(message.get("refusal") is None, "a refusal")',
        answer_refusal_empty="refused",
    ),
    faulty(
        "an error beside good data is ignored",
        'need(type(reply) is not dict or reply.get("error") is None, "an error")',
        "pass",
        error_200_beside_data="went-on",
        error_200_answer="accepted",
    ),
    faulty(
        "a tool call is ignored",
        'need(message.get("tool_calls") in (None, []), "a tool call")',
        "pass",
        answer_tool_call="accepted",
    ),
    faulty(
        "parts of content are joined",
        'return typed(message.get("content"), str, "content")',
        'content = message.get("content")\n'
        '    parts = content if isinstance(content, list) else [{"text": content}]\n'
        '    return "".join(part["text"] for part in parts)',
        answer_content_parts="accepted",
    ),
    faulty(
        "the answer is taken from the reasoning",
        'return typed(message.get("content"), str, "content")',
        'return typed(message.get("content") or message.get("reasoning_content"), str, "content")',
        answer_in_reasoning="accepted",
    ),
    # What is printed.
    faulty(
        "all sources are published",
        '"sources": [sent[item] for item in ids]',
        '"sources": list(sent.values()) if ids else []',
        plain="sources-not-cited",
    ),
    faulty(
        "sources are published in the order sent",
        '"sources": [sent[item] for item in ids]',
        '"sources": [record for record in sources if record["id"] in ids]',
        answer_cites_all="sources-not-cited",
    ),
    faulty(
        "only the first source is published",
        '"sources": [sent[item] for item in ids]',
        '"sources": [sent[item] for item in ids[:1]]',
        answer_cites_all="sources-not-cited",
    ),
    faulty(
        "output that is encoded twice",
        '    stdout.write(line + "\\n")\n',
        '    stdout.write(line.encode("utf-8").decode("latin-1") + "\\n")\n',
        answer_cites_all="answer-differs",
    ),
    faulty(
        "another text is published",
        '"sources": [sent[item] for item in ids]',
        '"sources": [{**sent[item], "text": sent[item]["text"][:9]} for item in ids]',
        plain="source-altered",
    ),
    faulty(
        "another answer is published",
        'return {"answer": answer, "sources"',
        'return {"answer": answer and f"Answer: {answer}", "sources"',
        plain="answer-differs",
    ),
    faulty(
        "an answer that is trimmed",
        'return {"answer": answer, "sources"',
        'return {"answer": answer and answer.strip(), "sources"',
        answer_cites_all="answer-differs",
    ),
    faulty(
        "a sentence instead of an abstention",
        'return {"answer": answer, "sources"',
        'return {"answer": answer or "I do not know.", "sources"',
        plain_abstention="not-abstained",
    ),
    faulty(
        "an abstention with sources",
        '"sources": [sent[item] for item in ids]',
        '"sources": [sent[item] for item in ids] or sources',
        plain_abstention="not-abstained",
    ),
    faulty(
        "a missing answer is an abstention",
        '    fields = typed(parse_json(content), dict, "answer object")\n',
        '    fields = typed(parse_json(content), dict, "answer object")\n'
        '    fields = {"answer": None, "source_ids": [], **fields}\n',
        answer_object_empty="accepted",
        answer_null_alone="accepted",
    ),
    faulty(
        "a missing index is 0 for the reranker too",
        'index = read_index(row.get("index"), len(candidates))',
        'index = read_index(row.get("index") or 0, len(candidates))',
        rerank_index_zero_absent="went-on",
        rerank_index_zero_null="went-on",
    ),
    faulty(
        "an index is taken modulo the size",
        'need(index < size, "index: too large")',
        "index %= size",
        rerank_index_too_large="went-on",
        embeddings_index_too_large="went-on",
    ),
    faulty(
        "bytes that are not UTF-8 are replaced",
        'text = data.decode("utf-8")',
        'text = data.decode("utf-8", "replace")',
        not_utf_8_unread="went-on",
    ),
    faulty(
        "the first of two JSON texts is taken",
        "    return parse_json(text)\n\n\ndef post",
        "    value: object = json.JSONDecoder(object_pairs_hook=unique_keys).raw_decode(text)[0]\n"
        "    return value\n\n\ndef post",
        json_two="went-on",
    ),
    faulty(
        "the status of the chat is ignored",
        '    need(response.status == 200, f"status {response.status}")\n',
        '    need(response.status == 200 or "chat" in url, f"status {response.status}")\n',
        http_201_answer="accepted",
        http_500_good="accepted",
    ),
    faulty(
        "always abstains",
        'return {"answer": answer, "sources": [sent[item] for item in ids]}',
        'return {"answer": None, "sources": []}',
        plain="abstained",
    ),
    faulty(
        "output before the end",
        "        records = read_records()\n",
        '        records = read_records()\n        stdout.write("Reading.\\n")\n',
        plain="stdout-no-document",
        http_500="stdout-not-empty",
    ),
    faulty(
        "exit status 0 on failure",
        "        return 1\n",
        "        return 0\n",
        http_500="exit-zero",
        answer_id_not_sent="exit-zero",
    ),
    faulty(
        "an error document on stdout",
        '        stderr.write(f"client: {stage}: {refusal}\\n")\n        return 1\n',
        '        stdout.write(json.dumps({"answer": None, "sources": [], "error": stage}))\n'
        "        return 0\n",
        http_500="accepted",
    ),
    faulty(
        "the key in the error text",
        'need(response.status == 200, f"status {response.status}")',
        'need(response.status == 200, f"status {response.status}: {data!r}")',
        http_401="key-printed",
    ),
    # Transport.
    faulty(
        "redirects are followed",
        '    need(response.status == 200, f"status {response.status}")\n',
        "    if response.status in (302, 307, 308):\n        from urllib.parse import urljoin\n\n"
        '        return post(urljoin(url, response.getheader("Location", "")), key, body)\n'
        '    need(response.status == 200, f"status {response.status}")\n',
        redirect_same_host="address-changed",
        redirect_other_host="address-changed",
        redirect_to_get="address-changed",
    ),
    faulty(
        "redirects are followed by GET",
        '    need(response.status == 200, f"status {response.status}")\n',
        "    if response.status == 302:\n        from urllib.parse import urljoin\n"
        "        from urllib.request import urlopen\n\n"
        '        urlopen(urljoin(url, response.getheader("Location", "")))\n'
        '    need(response.status == 200, f"status {response.status}")\n',
        redirect_to_get="address-changed",
    ),
    faulty(
        "failed requests are sent again",
        '    need(response.status == 200, f"status {response.status}")\n',
        "    if response.status >= 421 and again:\n        return post(url, key, body, False)\n"
        '    need(response.status == 200, f"status {response.status}")\n',
        "def post(url: str, key: str, body: dict[str, object]) -> object:",
        "def post(url: str, key: str, body: dict[str, object], again: bool = True) -> object:",
        http_421="request-repeated",
        http_429="request-repeated",
        http_500="request-repeated",
        http_500_answer="request-repeated",
    ),
    faulty(
        "the model is asked again",
        "            result = ask(settings, question, best[:SOURCES])\n",
        "            try:\n                result = ask(settings, question, best[:SOURCES])\n"
        "            except Refusal:\n                result = ask(settings, question, best[:1])\n",
        answer_fence="went-on",
        answer_id_not_sent="went-on",
    ),
    faulty(
        "any status below 300 is accepted",
        'need(response.status == 200, f"status {response.status}")',
        'need(response.status < 300, f"status {response.status}")',
        http_201="went-on",
    ),
    faulty(
        "no request at all",
        '        stage = "records"\n',
        '        need(False, "closed today")\n        stage = "records"\n',
        plain="no-request",
    ),
)


def main(argv: Sequence[str]) -> int:
    """Run one faulty client, or all of them, and return the exit status."""
    if not argv:
        return run_all()
    sources = [each.source for each in FAULTY if each.name == argv[0]]
    if not sources:
        print("there is no such client; there are:", *(each.name for each in FAULTY), sep="\n  ")
        return 2
    return int(main_of(sources[0])([], os.environ, sys.stdout, sys.stderr))


def run_all() -> int:
    """Run all faulty clients in all scenarios. Return 1 if a fault was missed, else 0."""
    missed = 0
    with ProcessPoolExecutor() as pool:
        for client, found in zip(FAULTY, pool.map(codes, [each.source for each in FAULTY])):
            wrong = [
                name for name, code in client.caught.items() if code not in found.get(name, [])
            ]
            missed += bool(wrong)
            print(f"{'MISSED' if wrong else 'found':<7} {client.name}", *wrong, flush=True)
    print(f"{len(FAULTY) - missed} faulty clients found, {missed} missed")
    return 1 if missed else 0


def codes(source: str) -> dict[str, list[str]]:
    """{scenario: codes of its findings} for a client with this source."""
    scenarios = [scenario for scenario in TABLE if scenario.name != "silence"]  # takes 5 s
    judged = check(in_process(source), scenarios)
    return {each.scenario.name: [one.code for one in each.findings] for each in judged}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
