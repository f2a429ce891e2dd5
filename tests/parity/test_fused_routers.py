"""Routers of stock models in one launch: found by what they compute, with the choices of stock."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import pytest
import torch
from torch import nn

from hotset.models import routers
from hotset.models.kinds import kind_of
from hotset.models.routers import RouterForm, find_form, fuse_routers
from tiny import auto_class, tiny_config

# (package, class) -> whether weights are divided by their sum, and stay in FP32
KNOWN: dict[tuple[str, str], tuple[bool, bool] | None] = {
    ("qwen3_moe", "Qwen3MoeTopKRouter"): (False, False),  # by the default of its config
    ("qwen3_5_moe", "Qwen3_5MoeTopKRouter"): (True, False),
    ("mixtral", "MixtralTopKRouter"): (True, True),
    ("deepseek_v3", "DeepseekV3TopkRouter"): None,  # sigmoids and groups
    ("gpt_oss", "GptOssTopKRouter"): None,  # has a bias
    ("granitemoe", "GraniteMoeTopKRouter"): None,  # its logits are in FP32
}
SIZES = {"hidden_size": 32, "num_experts_per_tok": 6}


def router_of(package: str, name: str, num_experts: int) -> nn.Module:
    modeling = importlib.import_module(f"transformers.models.{package}.modeling_{package}")
    config = tiny_config(package)
    config = config.get_text_config()
    for field, value in SIZES.items():
        setattr(config, field, value)
    for field in ("num_experts", "num_local_experts", "n_routed_experts"):
        if hasattr(config, field):
            setattr(config, field, num_experts)
    router: nn.Module = getattr(modeling, name)(config).to(torch.bfloat16)
    return router


@pytest.mark.parametrize(("where", "known"), KNOWN.items(), ids=map(".".join, KNOWN))
def test_the_form_is_asked_of_the_module(
    where: tuple[str, str], known: tuple[bool, bool] | None
) -> None:
    router = router_of(*where, num_experts=48)
    nn.init.normal_(router.weight)
    before = router.weight.clone()
    assert find_form(router) == (None if known is None else RouterForm(6, *known))
    assert torch.equal(router.weight, before)


@pytest.mark.parametrize("module", [nn.Linear(32, 8, bias=False), nn.Embedding(8, 32)], ids=str)
def test_what_is_no_router_stays(module: nn.Module) -> None:
    assert find_form(module.to(torch.bfloat16)) is None


@pytest.mark.parametrize("where", [w for w, known in KNOWN.items() if known], ids=".".join)
def test_choices_and_weights_are_those_of_stock(where: tuple[str, str]) -> None:
    """Logits lie within 30 of each other: their differences are rounded by 30 eps, and exp, sums
    and divisions by some eps more. Then both may be rounded, to neighbours. Where logits are equal
    the order of the library's top-k is its own, so choices are compared by their logits."""
    stock = router_of(*where, num_experts=48)
    nn.init.normal_(stock.weight, std=0.3, generator=torch.Generator().manual_seed(1))
    fused = nn.Sequential(copy.deepcopy(stock))
    assert fuse_routers(fused) == 1
    x = torch.randn(1, 40, 32, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    with torch.no_grad():
        got, want = fused(x), stock(x)
    assert [one.dtype for one in got] == [one.dtype for one in want]
    assert torch.equal(got[0], want[0])
    bound = 64 * torch.finfo(torch.float32).eps + torch.finfo(want[1].dtype).eps
    assert bool(((got[1] - want[1]).abs() <= bound * want[1]).all())
    assert torch.equal(got[0].gather(1, got[2]), want[0].gather(1, want[2]))
    assert float(want[0].max() - want[0].min()) < 30
    # Control: weights that are divided by their sum, or not.
    form = find_form(stock)
    assert form is not None
    wrong = routers._fused(type(stock), RouterForm(6, not form.normalise, form.wide))
    fused[0].__class__ = wrong
    with torch.no_grad():
        assert float(((fused(x)[1] - want[1]).abs() / want[1]).max()) > 0.05


def test_a_compiler_sees_the_stock_code() -> None:
    """Whole, without a break, and one compilation for all modules of a kind."""
    torch.manual_seed(0)
    config = tiny_config("qwen3_moe")
    stock = auto_class(config).from_config(config, dtype=torch.bfloat16).eval()
    fused: Any = copy.deepcopy(stock)
    assert fuse_routers(fused) == config.num_hidden_layers
    x = torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    torch._dynamo.reset()
    limits = torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True)
    with torch.no_grad(), limits:
        for ours, theirs in zip(fused.model.layers, stock.model.layers, strict=True):
            gate = torch.compile(
                ours.mlp.gate.forward, backend="eager", fullgraph=True, dynamic=False
            )
            assert all(map(torch.equal, gate(x), theirs.mlp.gate(x)))


def test_kinds_differ_where_settings_or_dtypes_do() -> None:
    plain, other = nn.RMSNorm(8, eps=1e-6), nn.RMSNorm(8, eps=1e-5)
    assert kind_of(plain) == kind_of(nn.RMSNorm(8, eps=1e-6))
    kinds = {kind_of(plain), kind_of(other), kind_of(nn.RMSNorm(8, eps=1e-6).bfloat16())}
    assert len(kinds) == 3
