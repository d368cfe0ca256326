"""The rules for requests: pure functions that check them as a strict service does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mock_server import models

MAX_INPUTS = 2048


class Refused(Exception):
    """A request that is answered with this HTTP status and message; `param` is the wrong field."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param = status, message, param


def error_body(message: str, param: str | None = None) -> dict[str, Any]:
    """The body of an error, in the form that OpenAI uses."""
    return {
        "error": {"message": message, "type": "invalid_request_error", "param": param, "code": None}
    }


def parse(data: bytes) -> Any:
    """Parse a request body. Raise Refused if it is not JSON in UTF-8."""
    try:
        return models.plain_data(data.decode("utf-8"))
    except ValueError:
        raise Refused(400, "the body is not JSON in UTF-8") from None


def check(path: str, request: Any, suffix: str = "") -> None:
    """Raise Refused, with the first wrong field, unless the request is good.

    `suffix` is appended to the name of each model.
    """
    if not isinstance(request, dict):
        raise Refused(400, "the body is not a JSON object")
    model, required, optional, check_fields = ENDPOINTS[path]
    for name in request:
        if name not in required and name not in optional:
            raise Refused(400, f"unknown field '{name}'", name)
    for name in required:
        if name not in request:
            raise Refused(400, f"missing field '{name}'", name)
    for name, value in request.items():
        if value is None:
            raise Refused(400, f"field '{name}' is null; leave it out", name)
    if request["model"] != model + suffix:
        raise Refused(404, f"unknown model; this endpoint serves '{model}{suffix}'", "model")
    check_fields(request)


def check_embeddings(request: Mapping[str, Any]) -> None:
    inputs = models.inputs_of(request)
    if not isinstance(inputs, list) or not all(isinstance(text, str) for text in inputs):
        raise Refused(400, "'input' must be a string or a list of strings (no token ids)", "input")
    if not inputs or not all(text.strip() for text in inputs):
        raise Refused(400, "'input' is empty, or holds an empty text", "input")
    if len(inputs) > MAX_INPUTS:
        raise Refused(
            400, f"'input' holds {len(inputs)} texts; at most {MAX_INPUTS} are allowed", "input"
        )
    if request.get("encoding_format", "float") not in ("float", "base64"):
        raise Refused(400, "'encoding_format' must be 'float' or 'base64'", "encoding_format")


def check_rerank(request: Mapping[str, Any]) -> None:
    query, documents = models.query_of(request), models.documents_of(request)
    if not isinstance(query, str) or not query.strip():
        raise Refused(400, "'query' must be a string that is not empty", "query")
    if not isinstance(documents, list) or not documents:
        raise Refused(400, "'documents' must be a list that is not empty", "documents")
    if not all(isinstance(text, str) and text.strip() for text in documents):
        raise Refused(400, "'documents' must hold strings that are not empty", "documents")
    top_n = models.top_n_of(request)
    if type(top_n) is not int or not 1 <= top_n <= len(documents):
        raise Refused(400, f"'top_n' must be a whole number from 1 to {len(documents)}", "top_n")
    if type(request.get("return_documents", False)) is not bool:
        raise Refused(400, "'return_documents' must be true or false", "return_documents")


def check_chat(request: Mapping[str, Any]) -> None:
    messages = request["messages"]
    if not isinstance(messages, list) or not messages:
        raise Refused(400, "'messages' must be a list that is not empty", "messages")
    for i, message in enumerate(messages):
        name = f"messages[{i}]"
        if not isinstance(message, dict) or set(message) != {"role", "content"}:
            raise Refused(
                400, f"'{name}' must be an object with exactly 'role' and 'content'", name
            )
        if message["role"] not in ("system", "developer", "user", "assistant"):
            raise Refused(400, f"'{name}.role' is unknown", f"{name}.role")
        if not isinstance(message["content"], str):
            raise Refused(400, f"'{name}.content' must be a string", f"{name}.content")
    fault = fault_of_question(models.asked_of(request))
    if fault:
        form = 'the JSON of {"question", "sources": [{"id", "title"?, "text"}]}, all strings'
        raise Refused(400, f"the last user message must be {form}: {fault}", "messages")
    for name, served in (("n", 1), ("stream", False)):
        value = request.get(name, served)
        if type(value) is not type(served) or value != served:  # in Python True == 1
            raise Refused(400, f"'{name}' is not served: one whole answer a request", name)
    if not isinstance(request.get("response_format", {}), dict):
        raise Refused(400, "'response_format' must be an object", "response_format")


def fault_of_question(asked: Any) -> str:
    """The first difference from {"question", "sources"}; "" if there is none."""
    if asked is None:
        return "no user message is a JSON object with these two keys"
    for name in asked:
        if name not in ("question", "sources"):
            return f"unknown key '{name}'"
    if not isinstance(asked["question"], str):
        return "'question' is not a string"
    if not isinstance(asked["sources"], list):
        return "'sources' is not a list"
    faults = (fault_of_source(source) for source in asked["sources"])
    return next((f"sources[{i}]: {fault}" for i, fault in enumerate(faults) if fault), "")


def fault_of_source(source: Any) -> str:
    """The first difference from {"id", "title"?, "text"}; "" if there is none."""
    if not isinstance(source, dict):
        return "not an object"
    for name in ("id", "text"):
        if name not in source:
            return f"no '{name}'"
    for name, value in source.items():
        if name not in ("id", "title", "text"):
            return f"unknown key '{name}'"
        if not isinstance(value, str):
            return f"'{name}' is not a string; leave out a title that is not there"
    return ""


CHAT_OPTIONS = (
    "response_format temperature top_p seed stop max_tokens max_completion_tokens n stream "
    "presence_penalty frequency_penalty reasoning_effort user"
).split()

# path: (model, required fields, optional fields, check of their values)
ENDPOINTS = {
    "/embeddings": (
        models.EMBEDDING_MODEL,
        ("model", "input"),
        ("encoding_format",),
        check_embeddings,
    ),
    "/rerank": (
        models.RERANK_MODEL,
        ("model", "query", "documents"),
        ("top_n", "return_documents"),
        check_rerank,
    ),
    "/chat/completions": (models.CHAT_MODEL, ("model", "messages"), CHAT_OPTIONS, check_chat),
}
REPLIES = {
    "/embeddings": models.embeddings,
    "/rerank": models.rerank,
    "/chat/completions": models.chat,
}
