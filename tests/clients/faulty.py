"""Faults put into a client that keeps the contract, one at a time, and the findings that name them.

`python -m tests.clients.faulty` runs every fault in every scenario: each must be found where this
table says so. The tests run each fault in those scenarios only. `python -m tests.clients.faulty
NAME` is the client with that fault, as a command.
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
class Mutant:
    """A fault: texts of the client with what stands in their place; {scenario: finding}."""

    name: str
    edits: tuple[tuple[str, str], ...]
    caught: Mapping[str, str]

    @property
    def source(self) -> str:
        source = CLIENT.read_text("utf-8")
        for old, new in self.edits:
            if source.count(old) != 1:
                raise ValueError(f"{self.name}: {source.count(old)} times in the client: {old}")
            source = source.replace(old, new)
        return source


def mutant(name: str, old: str, new: str, /, *edits: str, **caught: str) -> Mutant:
    """A row of the table; the names of scenarios are written with underscores."""
    pairs = ((old, new), *zip(edits[::2], edits[1::2]))
    found = {scenario.replace("_", "-"): code for scenario, code in caught.items()}
    return Mutant(name, tuple(pairs), found)


def main_of(source: str) -> Any:
    """The function main() of a client with this source."""
    names: dict[str, Any] = {"__name__": "client", "__file__": str(CLIENT)}
    exec(compile(source, str(CLIENT), "exec"), names)
    return names["main"]


def in_process(source: str) -> Client:
    """The client of this source, run in this process."""
    main = main_of(source)

    def run(environ: Mapping[str, str]) -> Ended:
        stdout, stderr = io.StringIO(), io.StringIO()
        try:
            status = main([], environ, stdout, stderr)
        except Exception:  # a client may fail in any way, and Python then ends with 1
            status = 1
            stderr.write(traceback.format_exc())
        return Ended(status, stdout.getvalue().encode(), stderr.getvalue().encode())

    return run


MUTANTS = (
    # Embeddings.
    mutant(
        "vectors by position",
        "index = 0 if given is None else read_index(given, size)",
        "index = len(vectors)",
        plain_no_rerank="sources-not-best",
        embeddings_reversed="sources-not-best",
        embeddings_index_repeated="went-on",
        embeddings_index_negative="went-on",
    ),
    mutant(
        "dot product of vectors that are not scaled",
        "return [number / length for number in numbers]",
        "return numbers",
        embeddings_not_scaled="sources-not-best",
    ),
    mutant(
        "lowest similarity first",
        "key=lambda index: -scores[index])\n    return [records",
        "key=lambda index: scores[index])\n    return [records",
        plain="documents-not-nearest",
        plain_no_rerank="sources-not-best",
    ),
    mutant(
        "records in file order",
        "order = sorted(range(len(records)), key=lambda index: -scores[index])",
        "order = list(range(len(records)))",
        plain="documents-not-nearest",
        plain_no_rerank="sources-not-best",
    ),
    mutant(
        "an index in quotes is converted",
        'index = typed(value, int, "index")',
        "index = int(value)  # type: ignore[call-overload]",
        embeddings_index_string="went-on",
        rerank_index_float="went-on",
    ),
    mutant(
        "true is a number",
        "if type(value) is not kind:",
        "if not isinstance(value, kind):",
        rerank_index_boolean="went-on",
    ),
    mutant(
        "a zero vector is taken",
        'need(length > 0, "vector: empty or all zeros")',
        "length = length or 1.0",
        embeddings_vector_zero="went-on",
    ),
    mutant(
        "NaN is taken",
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
    mutant(
        "numbers in quotes are converted",
        'need(type(value) in (int, float), f"{name}: no number")',
        "pass",
        embeddings_number_string="went-on",
        rerank_score_string="went-on",
    ),
    mutant(
        "the dimensions are not compared",
        'need(len({len(vector) for vector in vectors}) == 1, "vectors of several dimensions")',
        "pass",
        "zip(vectors[0], vector, strict=True)",
        "zip(vectors[0], vector)",
        embeddings_vector_shorter="went-on",
        embeddings_later_batch_shorter="went-on",
    ),
    mutant(
        "only the first reply to embeddings is checked",
        "vectors += read_vectors(reply, len(batch))",
        'rows = reply["data"]  # type: ignore[index]\n        vectors += (\n'
        "            read_vectors(reply, len(batch))\n            if not start\n"
        '            else [read_vector(row["embedding"]) for row in rows]\n        )',
        embeddings_later_batch="went-on",
    ),
    mutant(
        "a missing index is the place",
        "index = 0 if given is None else read_index(given, size)",
        "index = len(vectors) if given is None else read_index(given, size)",
        embeddings_index_absent="went-on",
    ),
    mutant(
        "a text is embedded twice",
        "inputs = [question] + [passage(record) for record in records]",
        "inputs = [question] + [passage(record) for record in records] + [question]",
        plain="input-repeated",
    ),
    mutant(
        "the question is not embedded",
        "inputs = [question] + [passage(record) for record in records]",
        'inputs = ["a library"] + [passage(record) for record in records]',
        plain="question-not-embedded",
        plain_no_rerank="question-not-embedded",
    ),
    mutant(
        "only some records are embedded",
        "        records = read_records()\n",
        "        records = read_records()[:11]\n",
        plain="inputs-too-few",
    ),
    mutant(
        "one record is left out",
        "        records = read_records()\n",
        "        records = read_records()[1:]\n",
        plain="record-not-embedded",
    ),
    # Rerank.
    mutant(
        "a negative index counts from the end",
        'need(index >= 0, "index: negative")',
        "index = index + size if index < 0 else index",
        rerank_index_negative="went-on",
    ),
    mutant(
        "an index beyond the documents is cut to the last",
        'need(index < size, "index: too large")',
        "index = min(index, size - 1)",
        rerank_index_too_large="went-on",
        rerank_document_not_sent="went-on",
    ),
    mutant(
        "a failed reranker is swallowed",
        "            best = rerank(settings, question, best)\n",
        "            try:\n                best = rerank(settings, question, best)\n"
        "            except Refusal:\n                pass\n",
        http_404_rerank="went-on",
        rerank_score_null="went-on",
        rerank_results_absent="went-on",
    ),
    mutant(
        "echoed documents are trusted",
        "scores[index] = read_score(row)",
        'scores[index] = read_score(row)\n        echo = row.get("document") or {}\n'
        "        candidates[index] = {**candidates[index], **echo}",
        rerank_documents_echoed="source-not-known",
    ),
    mutant(
        "rows are taken in their order",
        "order = sorted(scores, key=lambda index: (-scores[index], index))",
        "order = list(scores)",
        rerank_unsorted="sources-not-best",
    ),
    mutant(
        "rows are bound by position",
        'index = read_index(row.get("index"), len(candidates))',
        "index = len(scores)",
        plain="sources-not-best",
        rerank_index_repeated="went-on",
    ),
    mutant(
        "documents without a row are filled up",
        "return [candidates[index] for index in order]\n\n\ndef read_content",
        "rest = [index for index in range(len(candidates)) if index not in order]\n"
        "    return [candidates[index] for index in [*order, *rest]]\n\n\ndef read_content",
        rerank_fewer_rows="source-not-ranked",
    ),
    mutant(
        "no reranking",
        "        if settings.rerank_model:\n",
        '        if settings.rerank_model == "none":\n',
        plain="stage-missing",
    ),
    mutant(
        "reranking without a model",
        "        if settings.rerank_model:\n",
        "        if True:\n",
        "    return settings\n",
        '    rerank_model = settings.embedding_model.replace("embedding", "rerank")\n'
        "    return settings._replace(rerank_model=rerank_model)\n",
        plain_no_rerank="rerank-unasked",
    ),
    mutant(
        "one request a document",
        '    for item in read_rows(post(settings.base_url + "/rerank", settings.key, body)):\n',
        '    url = settings.base_url + "/rerank"\n'
        '    post(url, settings.key, {**body, "documents": ["a"], "top_n": 1})\n'
        "    for item in read_rows(post(url, settings.key, body)):\n",
        plain="request-too-many",
    ),
    mutant(
        "the chat is asked before the reranker",
        "            best = rerank(settings, question, best)\n",
        "            ask(settings, question, best[:SOURCES])\n"
        "            best = rerank(settings, question, best)\n",
        plain="stage-order",
    ),
    mutant(
        "documents that were not embedded",
        '"documents": [passage(record) for record in candidates],',
        '"documents": [passage(record).upper() for record in candidates],',
        plain="document-not-embedded",
    ),
    mutant(
        "another question for the reranker",
        '"query": question,',
        '"query": question.rstrip("?"),',
        plain="question-differs",
    ),
    mutant(
        "the chat is asked without sources",
        "        if best:\n",
        "        if True:\n",
        rerank_nothing="chat-unasked",
    ),
    mutant(
        "both `results` and `data` are taken",
        'need(not ("results" in fields and "data" in fields), "both results and data")',
        "pass",
        rerank_results_and_data="went-on",
    ),
    # The sources.
    mutant(
        "more sources than there may be",
        "SOURCES = 4",
        "SOURCES = 11",
        "CANDIDATES = 8",
        "CANDIDATES = 18",
        plain="sources-too-many",
        plain_no_rerank="sources-too-many",
    ),
    mutant(
        "one source twice",
        "ask(settings, question, best[:SOURCES])",
        "ask(settings, question, [*best[:2], best[1]])",
        plain_no_rerank="source-repeated",
    ),
    mutant(
        "a source from elsewhere",
        "ask(settings, question, best[:SOURCES])",
        'ask(settings, question, [{"id": "web", "text": "The web says."}, *best[:2]])',
        plain="source-not-known",
        plain_no_rerank="source-not-known",
    ),
    mutant(
        "a source that is not the best",
        "ask(settings, question, best[:SOURCES])",
        "ask(settings, question, best[1 : SOURCES + 1])",
        plain_no_rerank="sources-not-best",
    ),
    mutant(
        "an extra key in a source",
        'task = json.dumps({"question": question, "sources": sources}, ensure_ascii=False)',
        'task = json.dumps({"question": question, "sources": [{**s, "n": 1} for s in sources]})',
        plain="request-refused",
    ),
    mutant(
        "an extra field in a request",
        'body: dict[str, object] = {"model": settings.chat_model, "messages": messages}',
        'body: dict[str, object] = {"model": settings.chat_model, "messages": messages, "k": 1}',
        plain="request-refused",
    ),
    mutant(
        "the key in a body",
        'body: dict[str, object] = {"model": settings.chat_model, "messages": messages}',
        'body: dict[str, object] = {"model": settings.chat_model, "messages": messages}\n'
        '    body["user"] = settings.key',
        plain="key-elsewhere",
    ),
    mutant(
        "the key in two headers",
        '"Authorization": f"Bearer {key}"',
        '"Authorization": f"Bearer {key}", "X-Api-Key": key',
        plain="key-elsewhere",
    ),
    mutant(
        "the key in the address",
        'connection.request("POST", parts.path,',
        'connection.request("POST", f"{parts.path}?key={key}",',
        plain="request-refused",
    ),
    mutant(
        "texts that are cut for the chat",
        "    task = json.dumps(",
        '    sources = [{**source, "text": source["text"][:30]} for source in sources]\n'
        "    task = json.dumps(",
        plain="source-differs",
    ),
    mutant(
        "the ids of other records",
        "    task = json.dumps(",
        "    shifted = [*sources[1:], sources[0]]\n"
        '    sources = [{**one, "id": other["id"]} for one, other in zip(sources, shifted)]\n'
        "    task = json.dumps(",
        plain="source-differs",
    ),
    mutant(
        "a key of its own",
        'settings = Settings(base_url.rstrip("/"), *others)',
        'settings = Settings(base_url.rstrip("/"), "mock-key-for-tests", *others[1:])',
        plain="request-refused",
    ),
    mutant(
        "a model of its own",
        'settings = Settings(base_url.rstrip("/"), *others)',
        'settings = Settings(base_url.rstrip("/"), others[0], "mock-chat", *others[2:])',
        plain="request-refused",
    ),
    mutant(
        "texts that are encoded twice",
        'task = json.dumps({"question": question, "sources": sources}, ensure_ascii=False)',
        'task = json.dumps({"question": question, "sources": sources}, ensure_ascii=False)\n'
        '    task = task.encode("utf-8").decode("latin-1")',
        rerank_other_script="source-not-known",
    ),
    mutant(
        "the key in another header",
        '"Authorization": f"Bearer {key}"',
        '"X-Api-Key": key',
        plain="request-refused",
    ),
    # The answer.
    mutant(
        "a Markdown fence is stripped",
        'fields = typed(parse_json(content), dict, "answer object")',
        'content = content.removeprefix("```json").removesuffix("```")\n'
        '    fields = typed(parse_json(content), dict, "answer object")',
        answer_fence="accepted",
    ),
    mutant(
        "an object is cut out of the text",
        'fields = typed(parse_json(content), dict, "answer object")',
        'content = content[content.find("{") : content.rfind("}") + 1]\n'
        '    fields = typed(parse_json(content), dict, "answer object")',
        answer_fence="accepted",
        answer_prose_before="accepted",
        answer_prose_after="accepted",
        answer_think_block="accepted",
        answer_list="accepted",
    ),
    mutant(
        "the last object wins",
        'fields = typed(parse_json(content), dict, "answer object")',
        "content = content[content.rfind('{\"answer') :]\n"
        '    fields = typed(parse_json(content), dict, "answer object")',
        answer_two_objects="accepted",
        answer_draft="accepted",
    ),
    mutant(
        "the last of repeated keys wins",
        'need(len(dict(pairs)) == len(pairs), "a repeated key")',
        "pass",
        embeddings_repeated_key="went-on",
        answer_repeated_key="accepted",
        answer_repeated_key_escaped="accepted",
    ),
    mutant(
        "any known id is accepted",
        'sent = {record["id"]: record for record in sources}',
        'sent = {record["id"]: record for record in read_records()}',
        answer_id_record_not_sent="accepted",
    ),
    mutant(
        "ids that were not sent are dropped",
        'need(all(item in sent for item in ids), "id: not sent")',
        "ids = [item for item in ids if item in sent]",
        answer_id_one_not_sent="accepted",
    ),
    mutant(
        "near ids are repaired",
        'need(all(item in sent for item in ids), "id: not sent")',
        "from difflib import get_close_matches as near\n\n"
        "    ids = [near(item, sent, 1, 0.8)[0] for item in ids]",
        answer_id_shortened="accepted",
        answer_id_white_space="accepted",
        answer_id_brackets="accepted",
    ),
    mutant(
        "ids are trimmed",
        'ids = [typed(item, str, "id") for item',
        'ids = [typed(item, str, "id").strip() for item',
        answer_id_white_space="accepted",
    ),
    mutant(
        "white space before ids is dropped",
        'ids = [typed(item, str, "id") for item',
        'ids = [typed(item, str, "id").lstrip() for item',
        answer_id_white_space_before="accepted",
    ),
    mutant(
        "the case of ids is ignored",
        'ids = [typed(item, str, "id") for item',
        'ids = [typed(item, str, "id").lower() for item',
        answer_id_other_case="accepted",
    ),
    mutant(
        "titles and places are taken for ids",
        'need(all(item in sent for item in ids), "id: not sent")',
        'names = {record.get("title", ""): record["id"] for record in sources}\n'
        '    names |= {str(i): record["id"] for i, record in enumerate(sources)}\n'
        "    ids = [names.get(item, item) for item in ids]\n"
        '    need(all(item in sent for item in ids), "id: not sent")',
        answer_id_title="accepted",
        answer_id_position="accepted",
    ),
    mutant(
        "an id twice",
        'need(len(set(ids)) == len(ids), "id: twice")',
        "pass",
        answer_id_repeated="accepted",
    ),
    mutant(
        "an answer without ids",
        'need(ids != [], "an answer without ids")',
        "pass",
        answer_no_ids="accepted",
    ),
    mutant(
        "null with ids",
        'need(ids == [], "null with ids")',
        "pass",
        answer_null_with_ids="accepted",
    ),
    mutant(
        "a blank answer",
        'need(typed(answer, str, "answer").strip() != "", "answer: blank")',
        "pass",
        answer_text_blank="accepted",
        answer_number="accepted",
        answer_object="accepted",
    ),
    mutant(
        "white space is refused",
        'fields = typed(parse_json(content), dict, "answer object")',
        'need(content == content.strip(), "white space")\n'
        '    fields = typed(parse_json(content), dict, "answer object")',
        answer_white_space="refused",
    ),
    mutant(
        "keys more or fewer",
        'need(fields.keys() == {"answer", "source_ids"}, "not exactly answer and source_ids")',
        "pass",
        answer_key_more="accepted",
        answer_key_proto="accepted",
    ),
    mutant(
        "the finish reason is ignored",
        'need(choice.get("finish_reason") == "stop", "finish_reason: not stop")',
        "pass",
        answer_finish_length="accepted",
        answer_finish_absent="accepted",
        answer_finish_content_filter="accepted",
    ),
    mutant(
        "the case of the finish reason is ignored",
        'choice.get("finish_reason") == "stop"',
        'str(choice.get("finish_reason")).lower() == "stop"',
        answer_finish_other_case="accepted",
    ),
    mutant(
        "other finish reasons are taken for stop",
        'choice.get("finish_reason") == "stop"',
        'choice.get("finish_reason") in ("stop", "eos", "end_turn")',
        answer_finish_eos="accepted",
        answer_finish_end_turn="accepted",
    ),
    mutant(
        "the first of two choices is taken",
        'need(len(choices) == 1, "not exactly one choice")',
        "pass",
        answer_choices_two="accepted",
    ),
    mutant(
        "a refusal is ignored",
        'need(message.get("refusal") in (None, ""), "a refusal")',
        "pass",
        answer_refusal="accepted",
    ),
    mutant(
        "a tool call is ignored",
        'need(message.get("tool_calls") in (None, []), "a tool call")',
        "pass",
        answer_tool_call="accepted",
    ),
    mutant(
        "parts of content are joined",
        'return typed(message.get("content"), str, "content")',
        'content = message.get("content")\n'
        '    parts = content if isinstance(content, list) else [{"text": content}]\n'
        '    return "".join(part["text"] for part in parts)',
        answer_content_parts="accepted",
    ),
    mutant(
        "an answer is taken out of the reasoning",
        'return typed(message.get("content"), str, "content")',
        'return typed(message.get("content") or message.get("reasoning_content"), str, "content")',
        answer_in_reasoning="accepted",
    ),
    # What is printed.
    mutant(
        "all sources are published",
        '"sources": [sent[item] for item in ids]',
        '"sources": list(sent.values()) if ids else []',
        plain="sources-not-cited",
    ),
    mutant(
        "sources are published in the order sent",
        '"sources": [sent[item] for item in ids]',
        '"sources": [record for record in sources if record["id"] in ids]',
        answer_cites_all="sources-not-cited",
    ),
    mutant(
        "only the first source is published",
        '"sources": [sent[item] for item in ids]',
        '"sources": [sent[item] for item in ids[:1]]',
        answer_cites_all="sources-not-cited",
    ),
    mutant(
        "output that is encoded twice",
        '    stdout.write(line + "\\n")\n',
        '    stdout.write(line.encode("utf-8").decode("latin-1") + "\\n")\n',
        answer_cites_all="answer-differs",
    ),
    mutant(
        "another text is published",
        '"sources": [sent[item] for item in ids]',
        '"sources": [{**sent[item], "text": sent[item]["text"][:9]} for item in ids]',
        plain="source-altered",
    ),
    mutant(
        "another answer is published",
        'return {"answer": answer, "sources"',
        'return {"answer": answer and f"Answer: {answer}", "sources"',
        plain="answer-differs",
    ),
    mutant(
        "an answer that is trimmed",
        'return {"answer": answer, "sources"'.replace("\\", ""),
        'return {"answer": answer and answer.strip(), "sources"'.replace("\\", ""),
        answer_cites_all="answer-differs",
    ),
    mutant(
        "words for an abstention",
        'return {"answer": answer, "sources"',
        'return {"answer": answer or "I do not know.", "sources"',
        plain_abstention="not-abstained",
    ),
    mutant(
        "an abstention with sources",
        '"sources": [sent[item] for item in ids]',
        '"sources": [sent[item] for item in ids] or sources',
        plain_abstention="not-abstained",
    ),
    mutant(
        "no answer is an abstention",
        '    fields = typed(parse_json(content), dict, "answer object")\n',
        '    fields = typed(parse_json(content), dict, "answer object")\n'
        '    fields = {"answer": None, "source_ids": [], **fields}\n',
        answer_object_empty="accepted",
        answer_null_alone="accepted",
    ),
    mutant(
        "a missing index is 0 for the reranker too",
        'index = read_index(row.get("index"), len(candidates))',
        'index = read_index(row.get("index") or 0, len(candidates))',
        rerank_index_zero_absent="went-on",
        rerank_index_zero_null="went-on",
    ),
    mutant(
        "an index is taken modulo the size",
        'need(index < size, "index: too large")',
        "index %= size",
        rerank_index_too_large="went-on",
        embeddings_index_too_large="went-on",
    ),
    mutant(
        "bytes that are not UTF-8 are replaced",
        'text = data.decode("utf-8")',
        'text = data.decode("utf-8", "replace")',
        not_utf_8_unread="went-on",
    ),
    mutant(
        "the first of two JSON texts is taken",
        "    return parse_json(text)\n\n\ndef post",
        "    value: object = json.JSONDecoder(object_pairs_hook=unique_keys).raw_decode(text)[0]\n"
        "    return value\n\n\ndef post",
        json_two="went-on",
    ),
    mutant(
        "the status of the chat is ignored",
        '    need(response.status == 200, f"status {response.status}")\n',
        '    need(response.status == 200 or "chat" in url, f"status {response.status}")\n',
        http_201_answer="accepted",
        http_500_good="accepted",
    ),
    mutant(
        "it always abstains",
        'return {"answer": answer, "sources": [sent[item] for item in ids]}',
        'return {"answer": None, "sources": []}',
        plain="abstained",
    ),
    mutant(
        "output before the end",
        "        records = read_records()\n",
        '        records = read_records()\n        stdout.write("Reading.\\n")\n',
        plain="stdout-no-document",
        http_500="stdout-not-empty",
    ),
    mutant(
        "exit status 0 on failure",
        "        return 1\n",
        "        return 0\n",
        http_500="exit-zero",
        answer_id_not_sent="exit-zero",
    ),
    mutant(
        "an error document on stdout",
        '        stderr.write(f"client: {stage}: {refusal}\\n")\n        return 1\n',
        '        stdout.write(json.dumps({"answer": None, "sources": [], "error": stage}))\n'
        "        return 0\n",
        http_500="accepted",
    ),
    mutant(
        "the key in the error text",
        'need(response.status == 200, f"status {response.status}")',
        'need(response.status == 200, f"status {response.status}: {data!r}")',
        http_401="key-printed",
    ),
    # Transport.
    mutant(
        "redirects are followed",
        '    need(response.status == 200, f"status {response.status}")\n',
        "    if response.status in (302, 307, 308):\n        from urllib.parse import urljoin\n\n"
        '        return post(urljoin(url, response.getheader("Location", "")), key, body)\n'
        '    need(response.status == 200, f"status {response.status}")\n',
        redirect_same_host="address-changed",
        redirect_other_host="address-changed",
        redirect_to_get="address-changed",
    ),
    mutant(
        "redirects are followed by GET",
        '    need(response.status == 200, f"status {response.status}")\n',
        "    if response.status == 302:\n        from urllib.parse import urljoin\n"
        "        from urllib.request import urlopen\n\n"
        '        urlopen(urljoin(url, response.getheader("Location", "")))\n'
        '    need(response.status == 200, f"status {response.status}")\n',
        redirect_to_get="address-changed",
    ),
    mutant(
        "it asks again",
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
    mutant(
        "it asks the model again",
        "            result = ask(settings, question, best[:SOURCES])\n",
        "            try:\n                result = ask(settings, question, best[:SOURCES])\n"
        "            except Refusal:\n                result = ask(settings, question, best[:1])\n",
        answer_fence="went-on",
        answer_id_not_sent="went-on",
    ),
    mutant(
        "any status below 300 is good",
        'need(response.status == 200, f"status {response.status}")',
        'need(response.status < 300, f"status {response.status}")',
        http_201="went-on",
    ),
    mutant(
        "no request at all",
        '        stage = "records"\n',
        '        need(False, "closed today")\n        stage = "records"\n',
        plain="no-request",
    ),
)


def main(argv: Sequence[str]) -> int:
    """The exit status of a mutant, or of the matrix: 1 if a mutant was missed."""
    if not argv:
        return matrix()
    sources = [mutant.source for mutant in MUTANTS if mutant.name == argv[0]]
    if not sources:
        print("no mutant has this name; there are:", *(each.name for each in MUTANTS), sep="\n  ")
        return 2
    return int(main_of(sources[0])([], os.environ, sys.stdout, sys.stderr))


def matrix() -> int:
    """Every mutant in every scenario."""
    missed = 0
    with ProcessPoolExecutor() as pool:
        for mutant, found in zip(MUTANTS, pool.map(codes, [each.source for each in MUTANTS])):
            wrong = [
                name for name, code in mutant.caught.items() if code not in found.get(name, [])
            ]
            missed += bool(wrong)
            print(f"{'MISSED' if wrong else 'found':<7} {mutant.name}", *wrong, flush=True)
    print(f"{len(MUTANTS) - missed} mutants found, {missed} missed")
    return 1 if missed else 0


def codes(source: str) -> dict[str, list[str]]:
    """{scenario: codes of its findings} for a client with this source."""
    scenarios = [scenario for scenario in TABLE if scenario.name != "silence"]  # waits 5 s each
    judged = check(in_process(source), scenarios)
    return {each.scenario.name: [one.code for one in each.findings] for each in judged}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
