"""Attention of a prompt against FP64: windows, caps, sinks, widths, and where a prompt goes on.

Both implementations run everywhere; the Triton one in its interpreter where there is no GPU, with
few programs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from hotset.kernels import attention_reference, attention_torch
from hotset.kernels.attention import AttentionKernels
from kernels.support import DEVICE, EPS32

BOTH = pytest.mark.parametrize("name", ["reference", "triton"])


@dataclass(frozen=True)
class Prompt:
    """Shapes of a layer, and how many of the tokens are new."""

    new: int = 40
    tokens: int = 70
    num_heads: int = 2
    num_kv_heads: int = 1
    key_dim: int = 32
    value_dim: int = 32
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    dtype: torch.dtype = torch.float32
    scale: float = 0.3


CASES = {
    "whole": Prompt(new=70),
    "continued": Prompt(num_heads=4, num_kv_heads=2),
    "one token": Prompt(new=1),
    "first token": Prompt(new=1, tokens=1),
    "window": Prompt(new=65, tokens=97, window=17),
    "window of one": Prompt(new=33, tokens=33, window=1),
    "window of a tile": Prompt(new=64, tokens=160, window=32),
    "window longer than all": Prompt(window=500),
    "softcap": Prompt(softcap=4.0),
    "sinks": Prompt(sinks=True),
    "all at once": Prompt(new=50, tokens=75, window=20, softcap=3.0, sinks=True),
    "unequal widths": Prompt(key_dim=24, value_dim=16),
    "values wider": Prompt(key_dim=16, value_dim=40),
    "bf16": Prompt(new=130, tokens=200, dtype=torch.bfloat16),
    "fp16, all": Prompt(
        new=20, tokens=150, window=50, softcap=9.0, sinks=True, dtype=torch.float16
    ),
}


def make(prompt: Prompt, seed: int = 0) -> dict[str, Any]:
    source = torch.Generator().manual_seed(seed)

    def noise(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=source).to(prompt.dtype).to(DEVICE)

    return {
        "q_QTD": noise(prompt.num_heads, prompt.new, prompt.key_dim),
        "k_HPD": noise(prompt.num_kv_heads, prompt.tokens, prompt.key_dim),
        "v_HPD": noise(prompt.num_kv_heads, prompt.tokens, prompt.value_dim),
        "sinks_Q": noise(prompt.num_heads) if prompt.sinks else None,
    }


def run(name: str, prompt: Prompt, given: dict[str, Any]) -> torch.Tensor:
    return AttentionKernels(name).prefill(
        given["q_QTD"],
        given["k_HPD"],
        given["v_HPD"],
        scale=prompt.scale,
        window=prompt.window,
        softcap=prompt.softcap,
        sinks_Q=given["sinks_Q"],
    )


def excess(got_TQD: torch.Tensor, prompt: Prompt, given: dict[str, Any]) -> float:
    """Largest |error| / bound over all queries and heads.

    As in `attention_support`: a score errs by sqrt(D) eps scale sum |q||k| and a few eps of itself,
    and so does the logarithm of its weight. Weights meet 16-bit values as one number of that dtype:
    half a unit of each. With n keys the two sums err by sqrt(n) eps of their magnitudes, and the
    running maximum rescales them once a tile of 32 keys. Rounded once.
    """
    half_unit = torch.finfo(prompt.dtype).eps / 2
    rounded = half_unit if prompt.dtype != torch.float32 else 0.0
    least = 2.0**-25 if prompt.dtype == torch.float16 else 0.0
    worst = 0.0
    group = prompt.num_heads // prompt.num_kv_heads
    for t in range(prompt.new):
        last = prompt.tokens - prompt.new + t
        first = 0 if prompt.window is None else max(0, last - prompt.window + 1)
        for head in range(prompt.num_heads):
            q_D = given["q_QTD"][head, t].double()
            k_PD, v_PD = (
                given[key][head // group, first : last + 1].double() for key in ("k_HPD", "v_HPD")
            )
            s_P = prompt.scale * (k_PD @ q_D)
            ds_P = EPS32 * prompt.key_dim**0.5 * prompt.scale * (k_PD.abs() @ q_D.abs())
            if prompt.softcap is not None:
                s_P = prompt.softcap * torch.tanh(s_P / prompt.softcap)
            if given["sinks_Q"] is not None:
                s_P = torch.cat((s_P, given["sinks_Q"][head, None].double()))
                ds_P = torch.cat((ds_P, ds_P.new_zeros(1)))
                v_PD = torch.cat((v_PD, v_PD.new_zeros(1, v_PD.shape[1])))
            w_P = torch.exp(s_P - s_P.max())
            want_D = w_P @ v_PD / w_P.sum()
            tiles = len(w_P) / 32 + 1
            r_P = ds_P + EPS32 * (8 + 8 * s_P.abs() + 2 * s_P.max().abs() + 2 * tiles) + rounded
            reach_PD = v_PD.abs() + want_D.abs()
            error = (w_P * r_P + least) @ reach_PD + EPS32 * len(w_P) ** 0.5 * (w_P @ reach_PD)
            bound = error / w_P.sum() + half_unit * want_D.abs() + 1e-300
            off = (got_TQD[t, head].double() - want_D).abs()
            worst = max(worst, float((off / bound).max()))
    return worst


@BOTH
@pytest.mark.parametrize("case", CASES)
def test_against_the_formula(name: str, case: str) -> None:
    prompt = CASES[case]
    given = make(prompt)
    got = run(name, prompt, given)
    assert got.shape == (prompt.new, prompt.num_heads, prompt.value_dim)
    assert got.dtype == prompt.dtype
    assert excess(got, prompt, given) <= 1


def test_torchs_kernel_with_values_padded_to_the_width_of_keys() -> None:
    """On a CPU it is another one of torch's, with the same interface."""
    prompt = CASES["unequal widths"]
    given = make(prompt)
    tensors = (given["q_QTD"], given["k_HPD"], given["v_HPD"])
    got = attention_torch.prefill_attention(*tensors, scale=prompt.scale)
    assert got.shape == (prompt.new, prompt.num_heads, prompt.value_dim)
    assert excess(got, prompt, given) <= 1


@BOTH
def test_strided_keys_and_queries(name: str) -> None:
    """As a model hands them over: heads and tokens in another order in memory."""
    prompt = CASES["continued"]
    given = make(prompt)
    strided = {
        key: given[key].transpose(0, 1).contiguous().transpose(0, 1)
        for key in ("q_QTD", "k_HPD", "v_HPD")
    }
    assert torch.equal(run(name, prompt, given | strided), run(name, prompt, given))


@BOTH
@pytest.mark.parametrize(
    "mistake",
    [
        {"window": 18},
        {"window": 16},
        {"softcap": 3.5},
        {"scale": 0.31},
        {"tokens": 0},  # keys one place off
    ],
    ids=str,
)
def test_the_control_mistakes_are_caught(name: str, mistake: dict[str, Any]) -> None:
    prompt = replace(CASES["window"], softcap=3.0)
    given = make(prompt)
    used = given
    if "tokens" in mistake:
        used = given | {key: given[key].roll(1, dims=1) for key in ("k_HPD", "v_HPD")}
    assert excess(run(name, replace(prompt, **mistake), used), prompt, given) > 10


@BOTH
def test_the_control_a_sink_that_is_left_out_is_caught(name: str) -> None:
    prompt = CASES["sinks"]
    given = make(prompt)
    assert excess(run(name, prompt, given | {"sinks_Q": None}), prompt, given) > 10


def test_blocks_of_queries_are_no_part_of_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference holds few scores at a time; how many changes at most the order of a product."""
    prompt = CASES["all at once"]
    given = make(prompt)
    whole = run("reference", prompt, given)
    monkeypatch.setattr(attention_reference, "SCORES_BYTES", 4 * prompt.num_heads * 7 * 75)
    parts = run("reference", prompt, given)
    assert excess(parts, prompt, given) <= 1
    assert torch.allclose(whole, parts, rtol=0, atol=1e-5)
