"""Models with recurrences and convolutions on a GPU: captured steps carry the states of their rows.

With the packages of `models/linear_kernels` installed the same tests run over their kernels.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from families import make_family
from gpu.together import answers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MODELS = (
    *("qwen3_next", "qwen3_5_moe", "granitemoehybrid", "nemotron_h", "lfm2_moe"),
    "kimi_linear",  # latents in the layers between
)
# Shorter than a convolution, about a period of the recurrence, and longer.
LENGTHS = (2, 63, 64, 150)
NUM_TOKENS = 24


@pytest.mark.parametrize("model_type", MODELS)
def test_captured_rows_carry_their_states(model_type: str, tmp_path: Path) -> None:
    """Rows of different length, captured and launch by launch; nothing falls back."""
    family = make_family(model_type, tmp_path / model_type)
    captured = answers(family, LENGTHS, num_tokens=NUM_TOKENS, strict=True)
    assert all(len(set(tokens)) > 2 for tokens in captured)
    eager = answers(family, LENGTHS, num_tokens=NUM_TOKENS, graphs=False)
    assert eager == captured
