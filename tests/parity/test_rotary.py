"""Rotary embeddings of stock models in one launch: found by what they compute, with its bits."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import pytest
import torch
from torch import nn

from hotset.kernels.rotary import RotaryForm
from hotset.models import rotary
from hotset.models.rotary import find_forms, fuse_rotary
from tiny import auto_class, tiny_config

HALVES, FP32_HALVES = RotaryForm(), RotaryForm(wide=True)
PAIRS = "neighbours"
# (package, function) -> forms by (angles of the same dtype, as many columns as elements)
KNOWN: dict[tuple[str, str], dict[tuple[bool, bool], RotaryForm]] = {
    ("qwen3_moe", "apply_rotary_pos_emb"): {(True, True): HALVES},
    ("qwen3_moe", "rotate_half"): {},
    ("glm4_moe", "apply_rotary_pos_emb"): {(True, True): HALVES, (True, False): HALVES},
    ("gpt_oss", "apply_rotary_pos_emb"): {(True, False): RotaryForm(angles="single")},
    ("gemma4", "apply_rotary_pos_emb"): {(True, True): HALVES},
    ("gemma4", "apply_multidimensional_rope"): {},
    ("flex_olmo", "apply_rotary_pos_emb"): {(True, True): HALVES, (False, True): FP32_HALVES},
    ("deepseek_v3", "apply_rotary_pos_emb_interleave"): {
        (True, True): RotaryForm(PAIRS, "halves", "first")
    },
    ("ernie4_5_moe", "apply_rotary_pos_emb"): dict.fromkeys(
        ((True, True), (False, True)), RotaryForm(PAIRS, PAIRS, "first", wide=True)
    ),
    ("cohere2_moe", "apply_rotary_pos_emb"): dict.fromkeys(
        ((True, True), (False, True)), RotaryForm(PAIRS, PAIRS, PAIRS, wide=True)
    ),
    ("deepseek_v2", "apply_rotary_emb"): {},  # complex angles
}


@pytest.mark.parametrize(("where", "forms"), KNOWN.items(), ids=map(".".join, KNOWN))
def test_the_form_is_asked_of_the_function(
    where: tuple[str, str], forms: dict[tuple[bool, bool], RotaryForm]
) -> None:
    package, name = where
    modeling = importlib.import_module(f"transformers.models.{package}.modeling_{package}")
    found = find_forms(getattr(modeling, name))
    assert {(case.is_same, case.is_whole): form for case, form in found.items()} == forms


def model_of(model_type: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    config = tiny_config(model_type)
    model: nn.Module = auto_class(config).from_config(config, dtype=dtype).eval()
    return model


class Calls:
    """Counts launches, and lets them go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self._rotate = 0, rotary.rotate
        monkeypatch.setattr(rotary, "rotate", self)

    def __call__(self, *args: Any, **how: Any) -> torch.Tensor:
        self.count += 1
        return self._rotate(*args, **how)


# Halves, part of a head, one column a pair, neighbours of latents, FP32, one tensor at a time.
@pytest.mark.parametrize(
    ("model_type", "launches_a_layer"),
    [
        ("qwen3_moe", 2),
        ("glm4_moe", 2),
        ("gpt_oss", 2),
        ("deepseek_v3", 2),
        ("ernie4_5_moe", 2),
        ("gemma4", 2),
    ],
)
def test_a_model_with_fused_rotary_embeddings(
    model_type: str, launches_a_layer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = model_of(model_type, torch.bfloat16)
    fused = copy.deepcopy(stock)
    before = [type(module) for module in stock.modules()]
    num_layers = fuse_rotary(fused)
    assert num_layers > 0 and [type(module) for module in stock.modules()] == before
    ids, calls = torch.arange(3, 15)[None], Calls(monkeypatch)
    with torch.no_grad():
        want = stock(input_ids=ids).logits
        assert calls.count == 0
        assert torch.equal(fused(input_ids=ids).logits, want)
        assert calls.count == launches_a_layer * num_layers
        # Control: angles of other positions.
        moved = fused(input_ids=ids, position_ids=torch.arange(12)[None] * 2).logits
        assert not torch.equal(moved, want)


def test_a_model_without_them_stays() -> None:
    model = model_of("nemotron_h", torch.bfloat16)
    assert fuse_rotary(model) == 0


@pytest.mark.parametrize("inlined", [False, True])
def test_a_compiler_sees_the_stock_code(inlined: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole, without a break, and one compilation for all layers of a kind."""
    stock = model_of("qwen3_moe", torch.bfloat16)
    fused, calls = copy.deepcopy(stock), Calls(monkeypatch)
    fuse_rotary(fused)
    x = torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    angles = stock.model.rotary_emb(x, torch.arange(5)[None])

    def attend(layer: nn.Module) -> torch.Tensor:
        out: torch.Tensor = layer.self_attn(x, position_embeddings=angles, attention_mask=None)[0]
        return out

    def compiled(layer: nn.Module) -> torch.Tensor:
        how: dict[str, Any] = {"backend": "eager", "fullgraph": True, "dynamic": False}
        if inlined:
            whole: torch.Tensor = torch.compile(attend, **how)(layer)
            return whole
        layer.self_attn.forward = torch.compile(layer.self_attn.forward, **how)
        out = attend(layer)
        del layer.self_attn.forward
        return out

    torch._dynamo.reset()
    limits = torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True)
    with torch.no_grad(), limits:
        for ours, theirs in zip(fused.model.layers, stock.model.layers, strict=True):
            want = attend(theirs)
            assert torch.equal(compiled(ours), want) and calls.count == 0
            assert torch.equal(attend(ours), want) and calls.count == 2
            calls.count = 0


def test_what_was_not_shown_runs_as_stock_does(monkeypatch: pytest.MonkeyPatch) -> None:
    modeling = importlib.import_module("transformers.models.qwen3_moe.modeling_qwen3_moe")
    stock, calls = modeling.apply_rotary_pos_emb, Calls(monkeypatch)
    fused = rotary._fused(stock, find_forms(stock))
    source = torch.Generator().manual_seed(0)
    q, k = torch.randn(1, 4, 3, 16, generator=source), torch.randn(1, 2, 3, 16, generator=source)
    cos, sin = torch.randn(2, 1, 3, 16, generator=source)
    same = fused(q, k, cos, sin), stock(q, k, cos, sin)
    assert calls.count == 2 and all(map(torch.equal, *same))
    mixed = fused(q.bfloat16(), k.bfloat16(), cos, sin), stock(q.bfloat16(), k.bfloat16(), cos, sin)
    assert calls.count == 2 and all(map(torch.equal, *mixed))
    with pytest.raises(RuntimeError, match="size of tensor"):
        fused(q, k, cos[..., :8], sin[..., :8])
