"""Attention in parts, to stretches of the past and to the new tokens themselves, against FP64.

Each part is a stand-in in FP32 here, as torch's kernel for it needs a GPU; the merge is the real
one, in Triton's interpreter where there is none.
"""

from __future__ import annotations

import pytest
import torch

from hotset.kernels import attention_torch
from hotset.kernels.attention_merge import merge
from kernels.support import DEVICE
from kernels.test_attention_prefill import Prompt, excess, make

F32 = torch.float32

# With stretches from 2 tokens on, and new tokens filled up to multiples of 8.
CASES = {
    "two parts": Prompt(new=32, tokens=64, num_heads=4, num_kv_heads=2),
    "filled up": Prompt(new=33, tokens=97, num_heads=4, num_kv_heads=2),
    "many parts": Prompt(new=20, tokens=146, dtype=torch.bfloat16),
    "odd width": Prompt(new=5, tokens=7, key_dim=24, value_dim=24),
    "narrow values": Prompt(new=9, tokens=15, key_dim=24, value_dim=16, dtype=torch.float16),
    "no past": Prompt(new=17, tokens=17, dtype=torch.bfloat16),
}


def part(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, *, is_causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """What cuDNN gives: rounded attention, and logarithms of the sums in FP32."""
    assert q.shape[1] % 8 == 0 and (is_causal or k.shape[1] & (k.shape[1] - 1) == 0)
    group = q.shape[0] // k.shape[0]
    k, v = (x.float().repeat_interleave(group, dim=0) for x in (k, v))
    s_QTP = scale * (q.float() @ k.transpose(1, 2))
    if is_causal:
        unseen_TT = torch.ones(s_QTP.shape[1:], dtype=torch.bool, device=s_QTP.device).triu(1)
        s_QTP = s_QTP.masked_fill(unseen_TT, -torch.inf)
    out_QTD = torch.softmax(s_QTP, dim=-1) @ v
    return out_QTD.to(q.dtype).transpose(0, 1), torch.logsumexp(s_QTP, dim=-1)


@pytest.mark.parametrize("case", CASES)
def test_parts_are_the_whole(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the bound of `excess`: it allows each weight half a unit of the values' dtype, which
    the stand-in does not spend, and each part is rounded once more, by half a unit of it."""
    prompt = CASES[case]
    given = make(prompt)
    monkeypatch.setattr(attention_torch, "_with_log_sums", part)
    monkeypatch.setattr(attention_torch, "_prefers_cudnn", lambda q, k: True)
    monkeypatch.setattr(attention_torch, "NEW_TOKENS", 8)
    tensors = [given[name] for name in ("q_QTD", "k_HPD", "v_HPD")]
    got = attention_torch.prefill_attention(*tensors, scale=prompt.scale)
    assert got.shape == (prompt.new, prompt.num_heads, prompt.value_dim)
    assert excess(got, prompt, given) <= 1
    if prompt.tokens > prompt.new:  # control: a stretch of the past is left out
        given = make(prompt)
        tensors = [given["q_QTD"], *(given[name][:, 2:] for name in ("k_HPD", "v_HPD"))]
        wrong = attention_torch.prefill_attention(*tensors, scale=prompt.scale)
        assert excess(wrong, prompt, given) > 10


@pytest.mark.parametrize("num_tokens", [0, 2048, 6144, 129024, 131072])
def test_few_stretches_cover_the_past(num_tokens: int) -> None:
    found = list(attention_torch._stretches(num_tokens))
    assert [s.start for s in found] == [0, *(s.stop for s in found)][: len(found)]
    sizes = [s.stop - s.start for s in found]
    assert sum(sizes) == num_tokens and sizes == sorted(set(sizes), reverse=True)
    assert all(size & (size - 1) == 0 for size in sizes)


def test_weights_are_those_of_the_sums() -> None:
    """A part whose scores are far lower counts for nothing, whatever its values are."""
    noise = torch.Generator().manual_seed(0)
    a, b = (torch.randn(5, 3, 40, generator=noise).to(DEVICE) for _ in range(2))
    high, low = (torch.full((3, 5), value, device=DEVICE) for value in (500.0, -500.0))
    assert torch.equal(merge(a.clone(), high.clone(), b, low, dtype=F32), a)
    assert torch.equal(merge(a.clone(), low.clone(), b, high, dtype=F32), b)
    # Equal ones halve; sums of two and halves are exact within one unit.
    halves = merge(a.clone(), high.clone(), b, high, dtype=F32)
    assert torch.allclose(halves, (a + b) / 2, rtol=2 * torch.finfo(torch.float32).eps, atol=0)


def test_the_parts_may_lie_anyhow_in_memory() -> None:
    """By heads or by tokens; merged where the first one of the wanted dtype lies."""
    noise = torch.Generator().manual_seed(1)
    a, b = (torch.randn(7, 3, 16, generator=noise).to(DEVICE) for _ in range(2))
    logs = [torch.randn(3, 7, generator=noise).to(DEVICE) for _ in range(2)]
    want_QT = torch.logaddexp(*logs)
    by_head, other = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (a, b))
    together = logs[0].clone()
    want = merge(a.clone(), logs[0].clone(), b, logs[1], dtype=F32)
    got = merge(by_head, together, other, logs[1], dtype=F32)
    assert got.data_ptr() == by_head.data_ptr() and torch.equal(got, want)
    assert torch.allclose(together, want_QT, rtol=8 * torch.finfo(F32).eps, atol=1e-6)
    coarse = b.to(torch.bfloat16)
    second = merge(a.clone(), logs[0].clone(), coarse, logs[1], dtype=torch.bfloat16)
    assert second.data_ptr() == coarse.data_ptr()
    third = merge(second, logs[0].clone(), coarse.clone(), logs[1], dtype=F32)
    assert third.dtype == F32


def test_what_is_worth_a_plan() -> None:
    """By FLOPs, and by where the past ends."""

    def asked(new: int, past: int) -> bool:
        q_QTD = torch.empty(32, new, 128, device="meta")
        return attention_torch._is_worth_plans(
            q_QTD, torch.empty(4, past + new, 128, device="meta")
        )

    assert asked(4096, 0) and asked(4096, 61440) and asked(512, 16384)
    assert not asked(1024, 1024 * 2) and not asked(2048, 0)
    assert not asked(4096, 61440 + 32)


def test_other_devices_stay_whole() -> None:
    given = make(CASES["two parts"])
    q_QTD, k_HPD, v_HPD = (given[name].cpu() for name in ("q_QTD", "k_HPD", "v_HPD"))
    assert not attention_torch._prefers_cudnn(q_QTD, k_HPD)
    assert not attention_torch.takes(q_QTD, k_HPD, v_HPD)
