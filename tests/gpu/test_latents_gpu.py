"""Attention over latents on a GPU at real sizes: right, blind to placement, captured in a step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from families import make_family
from gpu.together import answers
from hotset.kernels.attention import AttentionKernels
from hotset.models import latents
from hotset.models.latents import attend_expanded
from kernels.attention_support import lay_out, oracle
from kernels.latent_support import decode_latents, latent_rows, latent_shape

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BF16, TRITON = torch.bfloat16, AttentionKernels("triton")
SHAPES = {
    "DeepSeek-V3": latent_shape((1, 1000, 0, 4097), 128, 512, 64, BF16, block_tokens=32),
    "DeepSeek-V2-Lite": latent_shape((3000,), 16, 512, 64, BF16, block_tokens=32),
    "GLM-4.7-Flash": latent_shape((8192, 31), 20, 512, 64, BF16, block_tokens=32),
    "Mistral 4": latent_shape((700, 5), 32, 256, 64, BF16, block_tokens=32),
    "HY-V4": latent_shape((2500, 0, 31), 32, 512, 64, BF16, block_tokens=32, sinks=True),
    "fp32": latent_shape((900, 31), 20, 512, 64, block_tokens=32),
}


@pytest.mark.parametrize("name", SHAPES)
def test_within_the_derived_bound(name: str) -> None:
    rows = latent_rows(SHAPES[name])
    oracle(rows).check(decode_latents(TRITON, rows, lay_out(rows)))


def test_bits_are_of_the_row_alone() -> None:
    rows = latent_rows(SHAPES["DeepSeek-V3"])
    expected = decode_latents(TRITON, rows, lay_out(rows))
    for seed, other in enumerate((rows, rows.with_shape(spare_blocks=900)), start=1):
        assert torch.equal(decode_latents(TRITON, other, lay_out(other, seed=seed)), expected)
    for row, length in enumerate(rows.shape.lengths):
        if length:
            alone = rows.only(row)
            got = decode_latents(TRITON, alone, lay_out(alone))
            assert torch.equal(got, expected[row : row + 1])
    rows.q_BQD[-1] += 0.5  # control
    assert not torch.equal(decode_latents(TRITON, rows, lay_out(rows)), expected)


def test_a_prompts_heads_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """192 and 128 columns a head, in 16 bits against FP64.

    Stock's own form (keys, values, weights and outputs rounded to BF16) errs by some roundings of
    2^-9 of values of order 1: 8 of them are allowed. The control leaves the rotary part out.
    """
    source = torch.Generator("cuda").manual_seed(0)

    def noise(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=source, device="cuda")

    num_heads, new, tokens, scale = 16, 300, 700, 192**-0.5
    q, c, r = noise(num_heads, new, 192), noise(tokens, 512), noise(tokens, 64)
    weight = noise(num_heads, 256, 512) * 512**-0.5
    rounded = [tensor.to(BF16) for tensor in (q, c, r, weight)]
    q_64, c_64, r_64, w_64 = (tensor.double() for tensor in rounded)
    both = torch.einsum("pr,qer->qpe", c_64, w_64)
    keys = torch.cat((both[..., :128], r_64.expand(num_heads, -1, -1)), dim=2)
    late = (
        torch.arange(tokens, device="cuda")
        > torch.arange(tokens - new, tokens, device="cuda")[:, None]
    )
    scores = (scale * q_64 @ keys.transpose(1, 2)).masked_fill(late, -torch.inf)
    want = (scores.softmax(-1) @ both[..., 128:]).transpose(0, 1)
    for limit in (latents.EXPANDED_BYTES, 1):
        monkeypatch.setattr(latents, "EXPANDED_BYTES", limit)
        got = attend_expanded(*rounded, kernels=TRITON, scale=scale)
        assert float((got.double() - want).abs().max()) <= 8 * 2.0**-9
    rounded[2] = torch.zeros_like(rounded[2])
    wrong = attend_expanded(*rounded, kernels=TRITON, scale=scale)
    assert float((wrong.double() - want).abs().max()) > 20 * 8 * 2.0**-9


@pytest.mark.parametrize("model_type", ["deepseek_v3", "deepseek_v2", "glm4_moe_lite", "mistral4"])
def test_captured_steps_read_latents(model_type: str, tmp_path: Path) -> None:
    """Rows of different length, captured and launch by launch; nothing falls back."""
    family = make_family(model_type, tmp_path / model_type)
    lengths = (2, 31, 64, 150)
    captured = answers(family, lengths, num_tokens=24, strict=True)
    # A random model may repeat itself; not every one of its answers does.
    assert sum(len(set(tokens)) > 2 for tokens in captured) > 2
    assert answers(family, lengths, num_tokens=24, graphs=False) == captured
