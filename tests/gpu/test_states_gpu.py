"""Models with recurrences and convolutions on a GPU: captured steps carry the states of their rows.

With the packages of `models/linear_kernels` installed the same tests run over their kernels.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from families import Family, make_family, text
from hotset.core.config import EngineConfig
from hotset.core.units import GIB
from hotset.runtime.engine import Engine
from hotset.runtime.requests import Request
from scheduling import Answers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MODELS = ("qwen3_next", "qwen3_5_moe", "granitemoehybrid", "nemotron_h", "lfm2_moe")
# Shorter than a convolution, about a period of the recurrence, and longer.
LENGTHS = (2, 63, 64, 150)
NUM_TOKENS = 24


def answers(family: Family, **options: Any) -> list[list[int]]:
    """Greedy tokens of several prompts that are answered together."""
    config = EngineConfig(
        model=str(family.folder),
        device="cuda",
        vram_bytes=4 * GIB,
        context_tokens=256,
        max_batch=len(LENGTHS),
        **options,
    )
    with Engine(family.source, config) as engine:
        assert engine.decoding is not None, engine.geometry.attention_reason
        got = Answers()
        with engine.scheduling(max_waiting=len(LENGTHS)) as scheduler:
            numbers = [
                scheduler.submit(Request(prompt_ids=text(n, seed=n), max_tokens=NUM_TOKENS))
                for n in LENGTHS
            ]
            got.run(scheduler)
        assert engine.store.audit() == []
    return [got.tokens[number] for number in numbers]


@pytest.mark.parametrize("model_type", MODELS)
def test_captured_rows_carry_their_states(model_type: str, tmp_path: Path) -> None:
    """Rows of different length, captured and launch by launch."""
    family = make_family(model_type, tmp_path / model_type)
    captured = answers(family)
    assert all(len(set(tokens)) > 2 for tokens in captured)
    assert answers(family, graphs=False) == captured
