"""From typed errors to HTTP: status, and the body that OpenAI's and Anthropic's clients expect.

Knows nothing of requests; which of the two bodies a path wants is asked here too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from hotset.core.errors import ContextLengthError, HotsetError, RequestError

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
# Names of branches that pydantic puts into the path of an error, which are no parameters.
_BRANCHES = frozenset({"body", "str", "int", "float", "bool", "list", "dict"})


@dataclass(frozen=True)
class Problem:
    """One error as HTTP says it.

    Attributes:
        status: HTTP status.
        message: one sentence, with a hint where there is one.
        param: the parameter that is wrong, as a path: `messages[0].role`.
        code: a word for programs.
        retry_after_seconds: when to come again.
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_seconds: int | None = None

    @property
    def headers(self) -> dict[str, str]:
        seconds = self.retry_after_seconds
        return {} if seconds is None else {"Retry-After": str(seconds)}

    def body(self, path: str) -> dict[str, Any]:
        """The JSON object for that path's clients."""
        if path.startswith(ANTHROPIC_PATHS):
            kind = "api_error" if self.status >= 500 else "invalid_request_error"
            kind = _ANTHROPIC_TYPES.get(self.status, kind)
            return {"type": "error", "error": {"type": kind, "message": self.message}}
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = _OPENAI_TYPES.get(self.status, kind)
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
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
        return Problem(400, _one_line(error), code="context_length_exceeded")
    if isinstance(error, RequestError):
        return Problem(400, _one_line(error), param=error.option)
    if isinstance(error, HotsetError):
        return Problem(500, _one_line(error), code="engine_error")
    return Problem(500, "internal error; the server's log has it", code="internal_error")


def failed_in_a_step(error: HotsetError) -> HttpError:
    """What a client is told of a request that was taken, and failed later.

    A `RequestError` is not its fault then: something else took the memory, and the next one may
    have it.
    """
    status = 503 if isinstance(error, RequestError) else 500
    return HttpError(Problem(status, _one_line(error), code="step_failed"))


def problem_of_status(status: int, detail: str) -> Problem:
    """A status that the framework chose: no such path, wrong method, a body it cannot read."""
    words = HTTPStatus(status).phrase if status in set(HTTPStatus) else "error"
    return Problem(status, detail or words)


def problem_of_fields(errors: Sequence[Mapping[str, Any]]) -> Problem:
    """What is wrong with a body, by the deepest of pydantic's errors: it knows the field best."""
    error = max(errors, key=lambda entry: len(entry["loc"]))
    param = _path(error["loc"])
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
    message = str(error["msg"]).removeprefix("Value error, ")
    named = message if "`" in message else f"`{param or 'body'}`: {message}"
    return Problem(400, named, param=param)


def _path(parts: Sequence[str | int]) -> str | None:
    path = ""
    for part in parts:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part not in _BRANCHES and part.isidentifier():
            path += f".{part}" if path else part
    return path or None


def _one_line(error: HotsetError) -> str:
    return error.message if error.hint is None else f"{error.message}; {error.hint}"
