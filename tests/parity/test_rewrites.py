"""What is put in place of the library's operators: recognised in stock modules, equal to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._inductor.decomposition import select_decomp_table
from torch.func import functional_call, functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from hotset.kernels.product_parts import MAX_MATRICES
from hotset.kernels.products import MAX_TOKENS
from hotset.models.rewrites import Rewrites
from tiny import auto_class, tiny_config

PRODUCTS, ROUTER, TOPK = (
    getattr(torch.ops.hotset, name).default for name in ("products", "softmax_topk", "topk")
)
BF16 = torch.bfloat16


def rewritten(function: Callable[..., Any], *tensors: torch.Tensor) -> fx.GraphModule:
    """The graph that the compiler hands to its passes, every tensor an input of it, after ours."""
    trace = make_fx(
        functionalize(function), decomposition_table=select_decomp_table(), tracing_mode="fake"
    )
    module = trace(*tensors)
    Rewrites()(module.graph)
    module.graph.lint()
    module.recompile()
    return module


def found(module: fx.GraphModule, target: object) -> list[fx.Node]:
    return [node for node in module.graph.nodes if node.target is target]


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


def spread(num_tokens: int, num_experts: int) -> torch.Tensor:
    """Logits of which whoever differs differs by 1/16, so that rounding reorders nothing."""
    return (randn(num_tokens, num_experts).float() * 48).round().to(BF16) / 16


def router(norm: bool = True, dtype: torch.dtype = BF16) -> Callable[..., Any]:
    def route(logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values, ids = torch.topk(functional.softmax(logits, dtype=torch.float32, dim=-1), 4, dim=-1)
        if norm:
            values /= values.sum(dim=-1, keepdim=True)
        return values.to(dtype), ids

    return route


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_a_router_becomes_one_launch(norm: bool, dtype: torch.dtype) -> None:
    logits = spread(3, 32)
    module = rewritten(router(norm, dtype), logits)
    (node,) = found(module, ROUTER)
    assert node.args[1:] == (4, norm, dtype)
    assert not found(module, torch.ops.aten.exp.default) and not found(module, TOPK)
    (values, ids), (stock_values, stock_ids) = module(logits), router(norm, dtype)(logits)
    assert torch.equal(ids, stock_ids) and torch.equal(values, stock_values)


def test_what_is_not_quite_a_router_stays() -> None:
    def all_kept(logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
        p = functional.softmax(logits, dtype=torch.float32, dim=-1)
        return (*torch.topk(p, 4, dim=-1), p)

    def in_bf16(logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.topk(functional.softmax(logits, dim=-1).float(), 4, dim=-1)

    def sums_of_others(logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values, ids = torch.topk(functional.softmax(logits, dtype=torch.float32, dim=-1), 4, dim=-1)
        return values / values[..., :3].sum(dim=-1, keepdim=True), ids

    logits = spread(3, 32)
    for stays, launches in ((in_bf16, TOPK), (all_kept, TOPK), (sums_of_others, ROUTER)):
        module = rewritten(stays, logits)
        (node,) = found(module, TOPK) + found(module, ROUTER)
        assert node.target is launches and True not in node.args
        for ours, stock in zip(module(logits), stays(logits), strict=True):
            # Taken apart, a softmax is the same up to the order of its sum.
            torch.testing.assert_close(ours, stock, rtol=32 * 2.0**-23, atol=0)


@pytest.mark.parametrize("largest", [True, False])
def test_top_k_of_other_rows(largest: bool) -> None:
    def pick(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.topk(x.sigmoid().float(), 3, dim=-1, largest=largest)

    assert len(found(rewritten(pick, spread(2, 16)), TOPK)) == largest


def test_products_of_one_input_share_a_launch() -> None:
    def project(x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(functional.linear(x, w) for w in weights)

    x, weights = randn(2, 1, 64), [randn(n, 64, seed=n) for n in (8, 4, 3, 5, 16)]
    module = rewritten(project, x, *weights)
    shared = [len(node.args[1]) for node in found(module, PRODUCTS)]
    assert shared == [MAX_MATRICES, 1] and not found(module, torch.ops.aten.mm.default)
    exact = project(x.double(), *(w.double() for w in weights))
    for ours, right in zip(module(x, *weights), exact, strict=True):
        # 64 products and sums in FP32, far below half a unit of BF16's last place.
        bound = torch.finfo(BF16).eps * right.abs() + 64 * 2.0**-23 * 64
        assert ours.shape == right.shape and ((ours.double() - right).abs() <= bound).all()


def test_a_product_of_a_product() -> None:
    """As the low-rank gates of a model have it: the second one's input has been replaced."""

    def project(x: torch.Tensor, down: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return functional.linear(functional.linear(x, down), up)

    x, down, up = randn(2, 64), randn(8, 64, seed=1), randn(64, 8, seed=2)
    module = rewritten(project, x, down, up)
    first, second = found(module, PRODUCTS)
    assert second.args[0].args[0] is first and not found(module, torch.ops.aten.mm.default)
    # Both round to BF16, the first one's sum in another order: by its last place at most, which is
    # eps of each of 8 numbers, and the second one's by its own.
    right = project(x, down, up)
    bound = torch.finfo(BF16).eps * (functional.linear(x, down).abs() @ up.abs().T + right.abs())
    assert ((module(x, down, up) - right).abs() <= bound).all()


def test_products_with_a_bias_are_apart_from_those_without() -> None:
    def project(
        x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        return functional.linear(x, w, b), functional.linear(x, v), functional.linear(x, v, b)

    module = rewritten(project, randn(1, 64), randn(8, 64), randn(8), randn(8, 64, seed=1))
    assert [len(node.args[2]) for node in found(module, PRODUCTS)] == [2, 0]


@pytest.mark.parametrize(
    ("x", "w"),
    [
        (randn(MAX_TOKENS + 1, 64), randn(8, 64)),  # a prompt's
        (randn(1, 60), randn(8, 60)),  # rows that begin anywhere
        (randn(1, 64), randn(8, 128)[:, ::2]),  # not as weights are kept
        (randn(1, 64), randn(64, 8).T),
    ],
)
def test_other_products_stay(x: torch.Tensor, w: torch.Tensor) -> None:
    assert not found(rewritten(functional.linear, x, w), PRODUCTS)


def test_a_product_with_what_was_just_computed_stays() -> None:
    def gram(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, w * 2)

    assert not found(rewritten(gram, randn(1, 64), randn(8, 64)), PRODUCTS)


@pytest.mark.parametrize(
    ("model_type", "fused"),
    [
        *[(name, True) for name in ("qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "qwen3_next")],
        # Sigmoids with a correction, and a softmax behind the top-k.
        *[(name, False) for name in ("deepseek_v3", "gpt_oss")],
    ],
)
def test_routers_of_the_library(model_type: str, fused: bool) -> None:
    model = auto_class(tiny_config(model_type)).from_config(tiny_config(model_type)).to(BF16).eval()
    names = ("TopKRouter", "TopkRouter")
    gate = next(m for m in model.modules() if type(m).__name__.endswith(names))
    params = {name: p.detach() for name, p in (*gate.named_parameters(), *gate.named_buffers())}

    def run(x: torch.Tensor, *values: torch.Tensor) -> Any:
        return functional_call(gate, dict(zip(params, values, strict=True)), (x,))

    x = randn(2, model.config.get_text_config().hidden_size)
    module = rewritten(run, x, *params.values())
    assert bool(found(module, ROUTER)) == fused
    assert isinstance(gate, nn.Module)
    for ours, stock in zip(module(x, *params.values()), run(x, *params.values()), strict=True):
        # Rounded once, in two orders: one unit of BF16's last place apart at most.
        torch.testing.assert_close(ours, stock, rtol=2 * torch.finfo(BF16).eps, atol=1e-6)
