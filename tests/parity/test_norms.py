"""Norms of stock models that run in one launch: found by what they compute, and equal to stock."""

from __future__ import annotations

import copy
import importlib
from dataclasses import replace

import pytest
import torch
from torch import nn

from hotset.kernels.rms_norm import NormForm
from hotset.models import norms
from hotset.models.norms import find_form, fuse_norms
from tiny import auto_class, tiny_config

# Weight times what is rounded; a weight in FP32 before it is; one and a weight; no weight.
LLAMA, T5, GEMMA = NormForm(1e-6, rounds_first=True), NormForm(1e-6), NormForm(1e-6, offset=1.0)
KNOWN = {
    ("qwen3_moe", "Qwen3MoeRMSNorm"): LLAMA,
    ("deepseek_v3", "DeepseekV3RMSNorm"): LLAMA,
    ("gpt_oss", "GptOssRMSNorm"): T5,
    ("gemma4", "Gemma4RMSNorm"): T5,
    ("qwen3_next", "Qwen3NextRMSNorm"): GEMMA,
    ("qwen3_next", "Qwen3NextRMSNormGated"): None,  # takes a gate as well
    ("kimi_linear", "KimiLinearRMSNormGated"): None,  # needs one that it says may be left out
    ("cohere2_moe", "Cohere2MoeLayerNorm"): None,  # subtracts the mean
}
EPS32 = torch.finfo(torch.float32).eps


@pytest.mark.parametrize(("where", "form"), KNOWN.items(), ids=str)
def test_the_form_is_asked_of_the_module(where: tuple[str, str], form: NormForm | None) -> None:
    package, name = where
    modeling = importlib.import_module(f"transformers.models.{package}.modeling_{package}")
    module = getattr(modeling, name)(96).to(torch.bfloat16)
    before = module.weight.clone()
    assert find_form(module) == form
    assert torch.equal(module.weight, before)


@pytest.mark.parametrize(
    "module", [nn.LayerNorm(32), nn.Linear(32, 1), nn.SiLU(), nn.PReLU(), nn.Dropout(0.1)], ids=str
)
def test_what_is_no_norm_stays(module: nn.Module) -> None:
    assert find_form(module.to(torch.bfloat16)) is None
    assert fuse_norms(nn.Sequential(module)) == 0


def model_of(model_type: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    config = tiny_config(model_type)
    model: nn.Module = auto_class(config).from_config(config, dtype=dtype).eval()
    for name, weight in model.named_parameters():
        if "norm" in name:  # they begin as ones, or zeros
            nn.init.normal_(weight)
    return model


def with_larger_epsilon(module: nn.Module) -> NormForm | None:
    form = find_form(module)
    return form and replace(form, eps=1e-2)


# Norms of heads and latents, of one and a weight, weights in FP32, and gated ones that stay.
@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_next"])
def test_a_model_with_fused_norms(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In FP32 only the order of a sum differs, which is a rounding of size eps: it moves logits by
    about sqrt(eps) of their spread at most, where it moves a router's choice."""
    stock = model_of(model_type, torch.float32)
    fused, wrong = copy.deepcopy(stock), copy.deepcopy(stock)
    names = [type(m).__name__ for m in stock.modules()]
    expected = sum(name.endswith("RMSNorm") for name in names)
    assert fuse_norms(fused) == expected > 0
    assert [m for m in stock.modules() if type(m).__name__.startswith("Fused")] == []
    ids = torch.arange(3, 15)[None]
    with torch.no_grad():
        want = stock(input_ids=ids).logits
        got = fused(input_ids=ids).logits
        bound = EPS32**0.5 * float(want.std())
        assert float((got - want).abs().max()) <= bound
        # Control: another epsilon.
        monkeypatch.setattr(norms, "find_form", with_larger_epsilon)
        fuse_norms(wrong)
        assert float((wrong(input_ids=ids).logits - want).abs().max()) > bound


def test_a_compiler_sees_the_stock_code() -> None:
    """Whole, without a break, and one compilation for all modules of a kind."""
    stock = model_of("qwen3_moe", torch.bfloat16)
    fused = copy.deepcopy(stock)
    fuse_norms(fused)
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    found = [
        (ours, theirs)
        for ours, theirs in zip(fused.modules(), stock.modules(), strict=True)
        if type(ours).__name__ == "FusedQwen3MoeRMSNorm" and theirs.weight.numel() == 32
    ]
    assert len(found) > 2
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True):
        for ours, theirs in found:
            compiled = torch.compile(ours.forward, backend="eager", fullgraph=True, dynamic=False)
            assert torch.equal(compiled(x), theirs(x))


def test_another_dtype_than_the_weights_runs_as_stock_does() -> None:
    stock = model_of("qwen3_moe", torch.bfloat16)
    fused = copy.deepcopy(stock)
    fuse_norms(fused)
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    ours, theirs = fused.model.norm, stock.model.norm
    assert torch.equal(ours(x), theirs(x)) and ours(x).dtype == torch.float32
