"""Options: every wrong value is refused by name, with the value and what it must be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hotset.api import make_config
from hotset.cli.options import engine_config
from hotset.core.config import MAX_TOKENS, EngineConfig
from hotset.core.errors import ConfigError, RequestError
from hotset.core.request import SamplingParams, check_length, check_max_tokens
from hotset.core.units import parse_bytes

NAN = float("nan")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vram": 1.5}, "`vram` is 1.5, it must be whole bytes or a text such as `8GiB`"),
        ({"vram": True}, "`vram` is True, it must be whole bytes or a text such as `8GiB`"),
        ({"vram": -1}, "`vram` is -1, it must not be negative"),
        ({"vram": 2**63}, f"`vram` is `{2**63}`, the most is 8 EiB"),
        ({"ram": 0}, "`ram` is 0, the least is 1"),
        ({"context": "8"}, "`context` is '8', it must be a whole number or None"),
        ({"context": 2.5}, "`context` is 2.5, it must be a whole number or None"),
        ({"context": 1}, "`context` is 1, the least is 2"),
        ({"context": 10**23}, f"`context` is {10**23}, the most is {MAX_TOKENS}"),
        ({"prefill_chunk": 1.5}, "`prefill_chunk` is 1.5, it must be a whole number or None"),
        ({"prefill_chunk": 10**23}, f"`prefill_chunk` is {10**23}, the most is {MAX_TOKENS}"),
        ({"half_life": "x"}, "`half_life` is 'x', it must be a number or None"),
        ({"half_life": True}, "`half_life` is True, it must be a number or None"),
        ({"half_life": NAN}, "`half_life` is nan, the least is 0.1 steps"),
        ({"policy": 3}, "`policy` is 3, it must be a text or None"),
        ({"revision": 3}, "`revision` is 3, it must be a text or None"),
        ({"graphs": "no"}, "`graphs` is 'no', it must be True or False"),
        ({"strict": 1}, "`strict` is 1, it must be True or False"),
        ({"device": "tpu"}, "`device` is `tpu`"),
    ],
)
def test_a_wrong_value_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_options("m", **options)
    assert caught.value.message == message
    assert caught.value.option == next(iter(options))


def test_the_command_line_names_the_flag() -> None:
    for options, flag in (
        ({"prefill_chunk": 0}, "`--prefill-chunk` is 0"),
        ({"vram": "x"}, "`--v"),
    ):
        with pytest.raises(ConfigError, match=flag):
            engine_config("m", **options)


@pytest.mark.parametrize("model", [None, 3, b"pocket"])
def test_a_model_is_a_name(model: Any) -> None:
    with pytest.raises(ConfigError, match=r"`model` is .*, it must be a text"):
        EngineConfig.from_options(model)


@pytest.mark.parametrize(
    ("option", "nearest"), [("contxt", "context"), ("context_tokens", "context"), ("vrm", "vram")]
)
def test_an_unknown_option_gets_the_nearest_documented_name(option: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown option `{option}`") as caught:
        EngineConfig.from_options("m", **{option: 8})
    assert caught.value.hint == f"did you mean `{nearest}`?"


@pytest.mark.parametrize(("value", "meant"), [("bf16", "bfloat16"), ("FP16", "float16")])
def test_a_short_name_of_a_dtype_gets_the_long_one(value: str, meant: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_options("m", dtype=value)
    assert caught.value.hint == f"did you mean `{meant}`?"


@pytest.mark.parametrize(
    ("policy", "hint"), [("half-live", "did you mean `half-life`?"), ("", "one of half-life, ")]
)
def test_an_unknown_policy_is_refused_with_the_flag(policy: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=f"`--policy` is `{policy}`") as caught:
        engine_config("m", policy=policy)
    assert (caught.value.hint or "").startswith(hint)


def test_sound_values_are_kept() -> None:
    config = EngineConfig.from_options(
        "m", vram="1.5GiB", ram=1, context=2, half_life=4, graphs=False, dtype="float32"
    )
    assert (config.vram_bytes, config.ram_bytes, config.context_tokens) == (3 * 2**29, 1, 2)
    assert EngineConfig.from_options("m", half_life=np.float64(2)).half_life == 2


@pytest.mark.parametrize("text", ["٨GiB", "８GiB", "-1", "1e3", "", "8 parsecs", "nan", "inf"])  # noqa: RUF001
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="which is not a size"):
        parse_bytes(text)


def test_sizes_are_exact_up_to_the_limit() -> None:
    assert parse_bytes(str(2**63 - 1)) == 2**63 - 1
    with pytest.raises(ConfigError, match="the most is 8 EiB"):
        parse_bytes("9" * 400)


@pytest.mark.parametrize(
    "params",
    [
        *({"temperature": value} for value in (-1, NAN, 101, 1e-9, "x", True, None)),
        *({"top_p": value} for value in (0, -1, 1.1, NAN, "x")),
        *({"min_p": value} for value in (-0.1, 2, NAN, "x")),
        *({"top_k": value} for value in (-1, 1.5, True, 2**31)),
        *({"seed": value} for value in (-1, 2**63, 1.0, True)),
    ],
    ids=str,
)
def test_a_wrong_sampling_parameter_is_named(params: dict[str, Any]) -> None:
    ((name, value),) = params.items()
    with pytest.raises(RequestError, match=f"`{name}` is {value!r}, it must be") as caught:
        SamplingParams(**params)
    assert caught.value.option == name


@pytest.mark.parametrize("value", [0, -1, 1.0, True, "8"])
def test_max_tokens_is_a_whole_number_from_1_on(value: Any) -> None:
    with pytest.raises(RequestError, match="`max_tokens` is"):
        check_max_tokens(value)


def test_sound_requests_pass() -> None:
    SamplingParams(temperature=1, top_p=1, top_k=0, min_p=0, seed=2**63 - 1)
    check_max_tokens(None)
    check_max_tokens(1)


def test_a_model_may_be_a_path() -> None:
    assert make_config(Path("some") / "folder").model == "some/folder"


@pytest.mark.parametrize(
    ("num_prompt", "words"), [(1, "1 prompt token and 8 new"), (2, "2 prompt tokens and 8 new")]
)
def test_counts_are_worded(num_prompt: int, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        check_length(num_prompt, 8, 4)
