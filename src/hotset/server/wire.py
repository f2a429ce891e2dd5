"""What the bodies of all wire formats share: strictness, sampling, texts, and JSON out.

A field that is not declared is refused by its name. One that is declared has an effect, or is of
no consequence to the answer and says so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Annotated, Any, ClassVar, Literal, Protocol, TypeVar

from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, model_validator

from hotset.core.errors import RequestError
from hotset.core.request import MAX_LOGIT_BIAS, MAX_PENALTY, MAX_TEMPERATURE, MAX_TOP_LOGPROBS

MAX_CHOICES = 16
MAX_STOPS = 16
# What parses lists and objects within each other, here and in templates, does so by recursion.
MAX_NESTING = 100
# Of one object. Every wrong one is an error of its own: a body of them would take half a minute.
MAX_NAMES = 10_000
# Lists and objects of a body: 8 MiB of small messages would take three seconds to check. A thousand
# turns of an agent with a hundred tools are about 10,000.
MAX_PARTS = 20_000

T = TypeVar("T")
# A list that is wrong by its first wrong entry, for the same reason.
Entries = Annotated[list[T], Field(fail_fast=True)]

Count = Annotated[int, Field(ge=1, lt=2**31)]
Penalty = Annotated[float, Field(ge=-MAX_PENALTY, le=MAX_PENALTY)]
TopLogprobs = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]
StopText = Annotated[str, Field(min_length=1, max_length=1000)]
Name = Annotated[str, Field(min_length=1, max_length=256)]
ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.:-]{1,128}$")]


def dump(data: object) -> bytes:
    """JSON in UTF-8; half a surrogate pair, which UTF-8 cannot hold, is written as an escape."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace")


class Json(JSONResponse):
    """A JSON response by `dump`."""

    def render(self, content: Any) -> bytes:
        return dump(content)


class Part(BaseModel):
    """A JSON object within a body: nothing unknown, no type taken for another. `null` means the
    same as leaving the field out: clients send back what they were given, with every field."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _null_is_nothing(cls, values: object) -> object:
        if not isinstance(values, dict) or None not in values.values():
            return values
        return {name: value for name, value in values.items() if value is not None}


class Body(Part):
    """A whole body.

    Attributes:
        NEUTRAL: fields that are not supported, with the values that ask for nothing.
    """

    NEUTRAL: ClassVar[Mapping[str, Sequence[object]]] = {}

    model: Name

    @model_validator(mode="before")
    @classmethod
    def _without_nothing(cls, values: object) -> object:
        if not isinstance(values, dict):
            return values
        _check_shape(values)
        try:
            json.dumps(values, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError("the body has half a surrogate pair, which is no text") from error
        return {
            name: value
            for name, value in values.items()
            if not _same(value, cls.NEUTRAL.get(name, ()))
        }


def _check_shape(value: object) -> None:
    """Refuses what takes too long to look at, and what recursion finds no end of.

    Raises:
        ValueError: which limit was passed.
    """
    level, num_parts = [value], 0
    for _ in range(MAX_NESTING):
        num_parts += len(level)
        if num_parts > MAX_PARTS:
            raise ValueError(
                f"there are more than {MAX_PARTS} lists and objects, which is the most"
            )
        objects = [part for part in level if isinstance(part, dict)]
        if any(len(part) > MAX_NAMES for part in objects):
            raise ValueError(f"an object has more than {MAX_NAMES} names, which is the most")
        lists = [part for part in level if isinstance(part, list)]
        within = chain(*(part.values() for part in objects), *lists)
        level = [part for part in within if isinstance(part, dict | list)]
        if not level:
            return
    raise ValueError(f"lists and objects are nested deeper than {MAX_NESTING}, which is the most")


def _same(value: object, neutral: Sequence[object]) -> bool:
    return any(type(value) is type(known) and value == known for known in neutral)


class Sampled(Body):
    """Sampling, under the names that OpenAI, vLLM and others have given it."""

    temperature: Annotated[float, Field(ge=0, le=MAX_TEMPERATURE)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-MAX_LOGIT_BIAS, le=MAX_LOGIT_BIAS)]] | None = (
        None
    )

    def sampling(self) -> dict[str, Any]:
        """What was given, by the names of `SamplingParams`.

        Raises:
            RequestError: a key of `logit_bias` that is no token id.
        """
        names = (
            *("temperature", "top_p", "min_p"),
            *("presence_penalty", "frequency_penalty", "repetition_penalty"),
        )
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if self.seed is not None:
            given["seed"] = self.seed % 2**63  # negative ones are seeds like others
        if self.top_k is not None:
            given["top_k"] = max(self.top_k, 0)  # vLLM's word for off is -1
        if self.logit_bias is not None:
            given["logit_bias"] = {_token(key): bias for key, bias in self.logit_bias.items()}
        return given


def _token(key: str) -> int:
    if not (key.isascii() and key.isdecimal() and len(key) < 10):
        raise RequestError(
            f"`logit_bias` has the key {key!r}, it must be a token id", option="logit_bias"
        )
    return int(key)


def effort(value: str | None, *, usual: str) -> dict[str, Any]:
    """How much to reason, as fields of `Ask`.

    Args:
        value: as it was given; `none` switches reasoning off, which is not said here.
        usual: what the API does without a word: a template that knows no levels has that one.
    """
    if value in (None, "none"):
        return {}
    field = "usual" if value == usual else "template"
    return {field: {"reasoning_effort": str(value)}}


class StreamOptions(Part):
    """`include_usage`: a last chunk with the counts of tokens."""

    include_usage: bool = False
    include_obfuscation: Literal[False] = False


def check_parts(value: object, known: Sequence[str], words: str) -> object:
    """A content, if it is no list or each of its parts has a known type.

    Args:
        words: what is said of any other type.

    Raises:
        ValueError: one has another type.
    """
    for number, part in enumerate(value if isinstance(value, list) else []):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in known:
            raise ValueError(f"`content[{number}].type` is {kind!r}: {words}")
    return value


class _HasText(Protocol):
    @property
    def text(self) -> str: ...


def joined(content: str | Sequence[_HasText]) -> str:
    """A content in one piece."""
    return content if isinstance(content, str) else "".join(part.text for part in content)


def stops(value: str | Sequence[str] | None) -> tuple[str, ...]:
    """One string, several, or none."""
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else tuple(value)


def json_object(text: str, *, name: str) -> dict[str, Any]:
    """The JSON object that a text holds; an empty text is an empty one.

    Raises:
        RequestError: it holds none, or a large one.
    """
    try:
        value = json.loads(text, parse_constant=_no_number) if text.strip() else {}
        _check_shape(value)
    except RecursionError as error:
        raise RequestError(f"`{name}` is nested too deep", option=name) from error
    except ValueError as error:
        raise RequestError(f"`{name}` is no JSON: {error}", option=name) from error
    if not isinstance(value, dict):
        raise RequestError(f"`{name}` must be a JSON object", option=name)
    return value


def _no_number(text: str) -> None:
    raise ValueError(f"`{text}` is no number")


def logprob(value: float) -> float:
    """JSON has no infinity; -9999 is what OpenAI's API writes instead."""
    return max(value, -9999.0)
