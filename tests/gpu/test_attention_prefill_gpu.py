"""Attention of long prompts on a GPU, where torch's kernels do it: whole, and in parts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hotset.kernels import attention_torch
from hotset.kernels.attention import AttentionKernels
from kernels.test_attention_prefill import Prompt, excess, make

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BF16 = torch.bfloat16
PROMPTS = {
    "Qwen3-30B-A3B": Prompt(2048, 16384, 32, 4, 128, 128, dtype=BF16, scale=128**-0.5),
    "filled up": Prompt(1500, 15836, 32, 4, 128, 128, dtype=BF16, scale=128**-0.5),
    "odd lengths": Prompt(1337, 4242, 8, 2, 128, 128, dtype=BF16, scale=128**-0.5),
    "latents": Prompt(2048, 8192, 32, 32, 192, 128, dtype=BF16, scale=192**-0.5),
    "FP16": Prompt(4096, 10240, 64, 8, 64, 64, dtype=torch.float16, scale=64**-0.5),
    "no past": Prompt(5000, 5000, 32, 4, 128, 128, dtype=BF16, scale=128**-0.5),
    "few new tokens": Prompt(20, 3000, 32, 4, 128, 128, dtype=BF16, scale=128**-0.5),
}
# Queries that are compared: at both ends, and inside and at the edges of tiles.
SAMPLED = (0, 1, 63, 128, 511, 1024)


def sampled_excess(got_TQD: torch.Tensor, prompt: Prompt, given: dict[str, torch.Tensor]) -> float:
    """`excess` of some queries of the first and the last head, each for itself."""
    worst = 0.0
    group = prompt.num_heads // prompt.num_kv_heads
    for t in {*(t for t in SAMPLED if t < prompt.new), prompt.new - 1}:
        keys = slice(0, prompt.tokens - prompt.new + t + 1)
        one = replace(prompt, new=1, tokens=keys.stop, num_heads=1, num_kv_heads=1)
        for head in (0, prompt.num_heads - 1):
            kv_head = slice(head // group, head // group + 1)
            alone = {
                "q_QTD": given["q_QTD"][head : head + 1, t : t + 1],
                "k_HPD": given["k_HPD"][kv_head, keys],
                "v_HPD": given["v_HPD"][kv_head, keys],
                "sinks_Q": None,
            }
            worst = max(worst, excess(got_TQD[t : t + 1, head : head + 1], one, alone))
    return worst


@pytest.mark.parametrize("name", PROMPTS)
def test_within_the_derived_bound(name: str) -> None:
    """Merged parts are rounded once more each, which `excess` has room for: it allows half a unit
    of each weight, and sums of many such errors are far smaller than their bound."""
    prompt = PROMPTS[name]
    given = make(prompt)
    attend = AttentionKernels("triton").prefill
    tensors = (given["q_QTD"], given["k_HPD"], given["v_HPD"])
    got = attend(*tensors, scale=prompt.scale)
    assert sampled_excess(got, prompt, given) <= 1
    for _ in range(3):  # by shapes alone, time after time
        assert torch.equal(attend(*tensors, scale=prompt.scale), got)
    # Control: without the first hundred keys.
    given["k_HPD"][:, :100] = 0
    wrong = attend(*tensors, scale=prompt.scale)
    assert not torch.equal(wrong, got) and sampled_excess(got, prompt, given) > 1


def test_a_hopper_gpu_takes_long_prompts_in_parts() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("elsewhere torch may choose otherwise")
    for name, in_parts in (("Qwen3-30B-A3B", True), ("no past", True), ("few new tokens", False)):
        given = make(PROMPTS[name])
        tensors = (given["q_QTD"], given["k_HPD"], given["v_HPD"])
        assert attention_torch._prefers_cudnn(*tensors[:2])
        assert attention_torch.takes(*tensors) == in_parts, name
