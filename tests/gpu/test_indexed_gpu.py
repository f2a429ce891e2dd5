"""Indexers on a GPU at real sizes: scores, what they choose, and steps that are captured."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from families import make_family
from gpu.together import answers
from hotset.kernels.attention import AttentionKernels
from hotset.kernels.selection import choose
from kernels.attention_support import lay_out
from kernels.attention_support import oracle as attention_oracle
from kernels.index_support import make_index, oracle, seen
from kernels.latent_support import decode_latents, latent_rows, latent_shape
from parity.test_indexed import indexed_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BF16, TRITON = torch.bfloat16, AttentionKernels("triton")


@pytest.mark.parametrize("num_heads", [64, 32])
@pytest.mark.parametrize("shared", [False, True])
def test_scores_and_what_they_choose(num_heads: int, shared: bool) -> None:
    counts = (5000, 0, 2049, 31)
    index = make_index(counts, num_heads, 128, dtype=BF16, block_keys=32, shared=shared)
    scores_NP = TRITON.index_scores(*index.arguments)
    oracle(index).check(seen(index, scores_NP))
    on_host = choose(scores_NP.cpu(), index.counts_N.cpu(), 2048)
    assert torch.equal(choose(scores_NP, index.counts_N, 2048).cpu(), on_host)


@pytest.mark.parametrize("rope", [64, 0])
def test_tokens_of_a_prompt_attend_to_what_is_chosen(rope: int) -> None:
    """In blocks of one token, rows not cut."""
    rows = latent_rows(latent_shape((2048, 31, 2063), 64, 512, rope, BF16, block_tokens=1))
    attention_oracle(rows).check(decode_latents(TRITON, rows, lay_out(rows), many=True))


@pytest.mark.parametrize("model_type", ["deepseek_v32", "glm_moe_dsa", "glm5_next", "hy_v4"])
def test_captured_steps_choose(model_type: str, tmp_path: Path) -> None:
    """Rows of different length, of which some see more than may be chosen; captured and launch by
    launch, and nothing falls back."""
    family = make_family(model_type, tmp_path / model_type, config=indexed_config(model_type))
    lengths = (2, 11, 31, 150)
    captured = answers(family, lengths, num_tokens=24, strict=True)
    assert sum(len(set(tokens)) > 2 for tokens in captured) > 2
    assert answers(family, lengths, num_tokens=24, graphs=False) == captured
