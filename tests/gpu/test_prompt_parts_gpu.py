"""What prompts do beside attention and experts, on a GPU: the bits and choices of stock code."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import pytest
import torch

from hotset.models import rotary
from hotset.models.norms import fuse_norms
from hotset.models.routers import fuse_routers
from tiny import auto_class, tiny_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# (package, function) -> heads of queries and keys, width, columns of angles
SHAPES = {
    ("qwen3_moe", "apply_rotary_pos_emb"): (32, 4, 128, 128),
    ("glm4_moe", "apply_rotary_pos_emb"): (96, 8, 128, 64),
    ("gpt_oss", "apply_rotary_pos_emb"): (64, 8, 64, 32),
    ("deepseek_v3", "apply_rotary_pos_emb_interleave"): (128, 1, 64, 64),
    ("ernie4_5_moe", "apply_rotary_pos_emb"): (20, 4, 128, 128),
}


@pytest.fixture
def turned(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """Shapes of what the kernel was launched for."""
    shapes: list[torch.Size] = []
    rotate = rotary.rotate

    def noted(x: torch.Tensor, *args: Any, **how: Any) -> torch.Tensor:
        shapes.append(x.shape)
        return rotate(x, *args, **how)

    monkeypatch.setattr(rotary, "rotate", noted)
    return shapes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("where", SHAPES, ids=".".join)
@pytest.mark.parametrize("num_tokens", [1, 999])
def test_rotary_embeddings_have_the_bits_of_stock(
    where: tuple[str, str], num_tokens: int, dtype: torch.dtype, turned: list[torch.Size]
) -> None:
    modeling = importlib.import_module(f"transformers.models.{where[0]}.modeling_{where[0]}")
    stock = getattr(modeling, where[1])
    fused = rotary._fused(stock, rotary.find_forms(stock))
    num_q, num_k, dim, columns = SHAPES[where]
    source = torch.Generator("cuda").manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=source, device="cuda").to(dtype)

    q, k = (random(1, num_tokens, heads, dim).transpose(1, 2) for heads in (num_q, num_k))
    cos, sin = random(1, num_tokens, columns), random(1, num_tokens, columns)
    want = stock(q, k, cos, sin)
    assert all(map(torch.equal, fused(q, k, cos, sin), want))
    assert turned == [q.shape, k.shape]
    # Control: cosines for sines.
    assert not torch.equal(fused(q, k, sin, cos)[0], want[0])


@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral", "deepseek_v3", "gemma4"])
def test_a_model_with_all_of_it(model_type: str, turned: list[torch.Size]) -> None:
    """In FP32 a norm's sum in another order is a rounding of size eps, which moves logits by about
    sqrt(eps) of their spread where it moves a router's choice; rotary embeddings move no bit."""
    torch.manual_seed(0)
    config = tiny_config(model_type)
    stock = auto_class(config).from_config(config, dtype=torch.float32).eval().cuda()
    fused, ids = copy.deepcopy(stock), torch.arange(3, 15, device="cuda")[None]
    assert rotary.fuse_rotary(fused) > 0
    with torch.no_grad():
        want = stock(input_ids=ids).logits
        assert torch.equal(fused(input_ids=ids).logits, want) and turned
        assert fuse_norms(fused) > 0
        assert (fuse_routers(fused) > 0) == (model_type in ("qwen3_moe", "mixtral"))
        got = fused(input_ids=ids).logits
    assert float((got - want).abs().max()) <= 2**-11.5 * float(want.std())
