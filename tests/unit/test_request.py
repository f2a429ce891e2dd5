"""What a request may ask of sampling: limits, names in messages, ids against a vocabulary."""

from __future__ import annotations

from typing import Any

import pytest

from hotset.core.errors import RequestError
from hotset.core.request import SamplingParams

NAN = float("nan")


@pytest.mark.parametrize(
    "params",
    [
        *({"presence_penalty": value} for value in (-2.1, 2.1, NAN, True, "1", None)),
        *({"frequency_penalty": value} for value in (-2.1, 2.1, NAN)),
        *({"repetition_penalty": value} for value in (0, -1, 2.1, NAN)),
        *({"logprobs": value} for value in (-1, 21, 1.0, True)),
    ],
    ids=str,
)
def test_a_wrong_parameter_is_named(params: dict[str, Any]) -> None:
    ((name, value),) = params.items()
    with pytest.raises(RequestError, match=f"`{name}` is {value!r}, it must be") as caught:
        SamplingParams(**params)
    assert caught.value.option == name


@pytest.mark.parametrize(
    "bias", [None, [1], {"7": 1}, {-1: 1}, {1.0: 1}, {True: 1}, {3: 101}, {3: NAN}, {3: "1"}]
)
def test_a_wrong_bias_is_named(bias: Any) -> None:
    with pytest.raises(RequestError, match="`logit_bias` is") as caught:
        SamplingParams(logit_bias=bias)
    assert caught.value.option == "logit_bias"


def test_the_ends_of_the_ranges_are_allowed() -> None:
    for sign in (-1, 1):
        SamplingParams(
            presence_penalty=2 * sign, frequency_penalty=-2 * sign, logit_bias={0: 100 * sign}
        )
    assert SamplingParams(repetition_penalty=2, logprobs=20).changes_logits
    assert not SamplingParams(temperature=1, top_k=3, logprobs=0).changes_logits


def test_bias_of_ids_that_a_model_does_not_have() -> None:
    params = SamplingParams(logit_bias={9: 1.0})
    params.check_vocab(10)
    with pytest.raises(RequestError, match="token id 9, the vocabulary has 9"):
        params.check_vocab(9)
