"""Attention in two parts, to the past and to the new tokens themselves, against FP64.

Each part is a stand-in in FP32 here, as torch's kernel for it needs a GPU; the merge is the real
one, in Triton's interpreter where there is none.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hotset.kernels import attention_torch
from hotset.kernels.attention_merge import merge
from kernels.support import DEVICE
from kernels.test_attention_prefill import Prompt, excess, make

CASES = {
    "fp32": Prompt(new=33, tokens=70, num_heads=4, num_kv_heads=2),
    "bf16": Prompt(new=20, tokens=90, dtype=torch.bfloat16),
    "odd width": Prompt(new=5, tokens=6, key_dim=24, value_dim=24),
    "one past token": Prompt(new=17, tokens=18, dtype=torch.float16),
}


def part(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, *, is_causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """What cuDNN gives: rounded attention, and logarithms of the sums in FP32."""
    group = q.shape[1] // k.shape[1]
    k, v = (x[0].float().repeat_interleave(group, dim=0) for x in (k, v))
    s_QTP = scale * (q[0].float() @ k.transpose(1, 2))
    if is_causal:
        unseen_TT = torch.ones(s_QTP.shape[1:], dtype=torch.bool, device=s_QTP.device).triu(1)
        s_QTP = s_QTP.masked_fill(unseen_TT, -torch.inf)
    out_QTD = torch.softmax(s_QTP, dim=-1) @ v
    return out_QTD.to(q.dtype).transpose(0, 1), torch.logsumexp(s_QTP, dim=-1)


@pytest.mark.parametrize("case", CASES)
def test_two_parts_are_the_whole(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the bound of `excess`: it allows each weight half a unit of the values' dtype, which
    the stand-in does not spend, and each part is rounded once more, by half a unit of it."""
    prompt = CASES[case]
    given = make(prompt)
    monkeypatch.setattr(attention_torch, "_with_log_sums", part)
    q, k, v = (given[name][None] for name in ("q_QTD", "k_HPD", "v_HPD"))
    got = attention_torch._in_two(q, k, v, prompt.scale)
    assert got.shape == (prompt.new, prompt.num_heads, prompt.value_dim)
    assert excess(got, prompt, given) <= 1
    # Control: without the past.
    alone = part(q, *(x[:, :, -prompt.new :] for x in (k, v)), prompt.scale, is_causal=True)[0]
    assert excess(alone, prompt, given) > 10


def test_weights_are_those_of_the_sums() -> None:
    """A part whose scores are far lower counts for nothing, whatever its values are."""
    noise = torch.Generator().manual_seed(0)
    a, b = (torch.randn(5, 3, 40, generator=noise).to(DEVICE) for _ in range(2))
    high, low = (torch.full((3, 5), value, device=DEVICE) for value in (500.0, -500.0))
    assert torch.equal(merge(a.clone(), high, b, low), a)
    assert torch.equal(merge(a.clone(), low, b, high), b)
    # Equal ones halve; sums of two and halves are exact within one unit.
    halves = merge(a.clone(), high, b, high)
    assert torch.allclose(halves, (a + b) / 2, rtol=2 * torch.finfo(torch.float32).eps, atol=0)


def test_the_parts_may_lie_anyhow_in_memory() -> None:
    """By heads or by tokens; merged where the first one lies."""
    noise = torch.Generator().manual_seed(1)
    a, b = (torch.randn(7, 3, 16, generator=noise).to(DEVICE) for _ in range(2))
    logs = [torch.randn(3, 7, generator=noise).to(DEVICE) for _ in range(2)]
    want = merge(a.clone(), logs[0], b, logs[1])
    by_head = a.transpose(0, 1).contiguous().transpose(0, 1)
    got = merge(by_head, logs[0], b.transpose(0, 1).contiguous().transpose(0, 1), logs[1])
    assert got.data_ptr() == by_head.data_ptr() and torch.equal(got, want)


def test_short_prompts_and_other_devices_stay_whole() -> None:
    prompt = replace(CASES["bf16"], new=300, tokens=1000)
    given = make(prompt)
    q, k, v = (given[name][None].cpu() for name in ("q_QTD", "k_HPD", "v_HPD"))
    assert not attention_torch._pays_in_two(q, k[:, :, :700], v[:, :, :700], prompt.scale)
    few = q[:, :, : attention_torch.SPLIT_NEW_TOKENS - 1]
    assert not attention_torch._pays_in_two(few, k, v, prompt.scale)
