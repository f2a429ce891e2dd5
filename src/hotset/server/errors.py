"""From typed errors to HTTP: status, and the body that OpenAI's and Anthropic's clients expect.

Knows nothing of requests; which of the two bodies a path wants is asked here too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from hotset.core.errors import ContextLengthError, HotsetError, RequestError
from hotset.server.field_errors import reason_of

_TOO_LONG = "context_length_exceeded"

ANTHROPIC_PATHS = "/v1/messages"

# A status that is not here: `api_error` from 500 on, `invalid_request_error` below.
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
# What a prompt is called on a path.
_PROMPTS = {
    "/v1/chat/completions": "messages",
    "/v1/completions": "prompt",
    "/v1/responses": "input",
}
# And an answer's schema.
_SCHEMAS = {
    "/v1/chat/completions": "response_format",
    "/v1/completions": "response_format",
    "/v1/responses": "text.format",
}


@dataclass(frozen=True)
class Problem:
    """One error as HTTP says it.

    Attributes:
        status: HTTP status.
        message: one sentence, with a hint where there is one.
        param: the parameter that is wrong, as a path: `messages[0].role`.
        code: a word for programs.
        anthropic: the message for Anthropic's clients, where they look for words of its own.
        retry_after_seconds: when to come again.
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_seconds: int | None = None
    anthropic: str | None = None

    @property
    def headers(self) -> dict[str, str]:
        seconds = self.retry_after_seconds
        return {} if seconds is None else {"Retry-After": str(seconds)}

    def body(self, path: str) -> dict[str, Any]:
        """The JSON object for that path's clients."""
        if path.startswith(ANTHROPIC_PATHS):
            kind = "api_error" if self.status >= 500 else "invalid_request_error"
            kind = _ANTHROPIC_TYPES.get(self.status, kind)
            message = self.anthropic or self.message
            return {"type": "error", "error": {"type": kind, "message": message}}
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = _OPENAI_TYPES.get(self.status, kind)
        param = _PROMPTS.get(path) if self.code == _TOO_LONG else self.param
        param = _SCHEMAS.get(path) if param == "schema" else param
        error = {"message": self.message, "type": kind, "param": param, "code": self.code}
        return {"error": error}


class HttpError(HotsetError):
    """A refusal that HTTP has a status of its own for."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


def problem_of(error: Exception) -> Problem:
    """What a client is told of an error.

    A `RequestError` is the client's; any other typed error is the server's, told in words; what is
    not typed is a bug of ours, and its words stay in the log.
    """
    if isinstance(error, HttpError):
        return error.problem
    if isinstance(error, ContextLengthError):
        return _too_long(error)
    if isinstance(error, RequestError):
        return Problem(400, _one_line(error), param=error.option)
    if isinstance(error, HotsetError):
        return Problem(500, _one_line(error), code="engine_error")
    return Problem(500, "internal error; the server's log has it", code="internal_error")


def _too_long(error: ContextLengthError) -> Problem:
    """In words that clients of either API look for, to shorten a conversation by themselves."""
    prompt, new, limit = error.num_prompt, error.num_new, error.context_tokens
    anthropic = f"prompt is too long: {prompt} tokens > {limit} maximum"
    if new is not None and prompt < limit:
        anthropic = (
            f"input length and `max_tokens` exceed context limit: {prompt} + {new} > {limit}, "
            "decrease input length or `max_tokens` and try again"
        )
    message = f"this model's maximum context length is {limit} tokens: {_one_line(error)}"
    return Problem(400, message, code=_TOO_LONG, anthropic=anthropic)


def failed_in_a_step(error: HotsetError) -> HttpError:
    """What a client is told of a request that was taken, and failed later.

    A `RequestError` is not its fault then: something else took the memory, and the next one may
    have it.
    """
    status = 503 if isinstance(error, RequestError) else 500
    return HttpError(Problem(status, _one_line(error), code="step_failed"))


def problem_of_status(status: int, detail: str, cause: BaseException | None = None) -> Problem:
    """A status that the framework chose: no such path, wrong method, a body it cannot read.

    Args:
        cause: what it met, where it says so.
    """
    if isinstance(cause, HttpError):
        return cause.problem
    if isinstance(cause, UnicodeDecodeError):
        return Problem(400, "the body is no JSON: it is not UTF-8", code="invalid_json")
    if isinstance(cause, RecursionError):
        return Problem(400, "the body is no JSON: it is nested too deep", code="invalid_json")
    words = HTTPStatus(status).phrase if status in set(HTTPStatus) else "error"
    return Problem(status, detail or words)


def problem_of_type(content_type: str | None) -> Problem | None:
    """What is wrong with a body that does not call itself JSON; `None` where it does.

    Such bodies are not read: a page of another site can send one without asking.
    """
    kind = (content_type or "").partition(";")[0].strip().lower()
    if kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json")):
        return None
    given = f"is `{kind}`" if kind else "is missing"
    return Problem(415, f"the header `Content-Type` {given}, it must be `application/json`")


def problem_of_fields(errors: Sequence[Mapping[str, Any]], body: object) -> Problem:
    """What is wrong with a body, by the one of pydantic's errors that knows the field best.

    A field that may have several types has an error for each: that of the type it has is not about
    types. Among such ones, the deepest.
    """
    error = max(errors, key=lambda entry: (not _is_about_types(entry), len(entry["loc"])))
    param = _path(error, body)
    if error["type"] == "json_invalid":
        reason = error.get("ctx", {}).get("error", "it cannot be parsed")
        return Problem(400, f"the body is no JSON: {reason}", code="invalid_json")
    if error["type"] == "extra_forbidden":
        return Problem(
            400, f"`{param}` is not supported", param=param, code="unsupported_parameter"
        )
    if error["type"] == "missing":
        return Problem(
            400, f"`{param}` is missing" if param else "the body is missing", param=param
        )
    reason = reason_of(error)
    is_sentence = error["type"] == "value_error"
    named = reason if is_sentence else f"`{param or 'body'}` {reason}"
    return Problem(400, named, param=param)


def _is_about_types(error: Mapping[str, Any]) -> bool:
    return str(error["type"]).endswith("_type")


def _path(error: Mapping[str, Any], body: object) -> str | None:
    """A field's place as clients write it. Of pydantic's parts, those that the body has, and the
    one that is missing: the others are names of types."""
    path, value = "", body
    missing = len(error["loc"]) - 1 if error["type"] == "missing" else None
    for number, part in enumerate(error["loc"]):
        if isinstance(part, int):
            value = value[part] if isinstance(value, list) and part < len(value) else None
            path += f"[{part}]"
        elif isinstance(value, dict) and (part in value or number == missing):
            value = value.get(part)
            path += f".{part}" if path else part
    return path or None


def _one_line(error: HotsetError) -> str:
    return error.message if error.hint is None else f"{error.message}; {error.hint}"
