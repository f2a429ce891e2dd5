"""What stands around the experts of a decode step, on a GPU at real sizes: right, and the same bits
however closely its kernels follow each other."""

from __future__ import annotations

import pytest
import torch

from hotset.kernels.dependent import dependent_launch
from hotset.kernels.products import MAX_TOKENS, launch_products
from hotset.kernels.products_dot import pays
from hotset.kernels.topk import launch_topk, softmax_topk_reference
from kernels.support import DEVICE, EPS32

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BF16 = torch.bfloat16
# (columns, rows of each matrix) of published models.
SHAPES = {
    "Qwen3-30B-A3B, q k v": (2048, (4096, 512, 512)),
    "Qwen3-30B-A3B, o": (4096, (2048,)),
    "router": (2048, (128,)),
    "gpt-oss, q k v": (2880, (4096, 512, 512)),
    "wide": (16384, (300,)),
}


def weights(columns: int, sizes: tuple[int, ...]) -> list[torch.Tensor]:
    made = [torch.randn(n, columns, device=DEVICE) / columns**0.5 for n in sizes]
    return [torch.nn.Parameter(w.to(BF16), requires_grad=False) for w in made]


@pytest.mark.parametrize("name", SHAPES)
def test_products_within_the_derived_bound(name: str) -> None:
    columns, sizes = SHAPES[name]
    matrices = weights(columns, sizes)
    x_TC = torch.randn(MAX_TOKENS, columns, device=DEVICE).to(BF16)
    together = launch_products(x_TC, matrices, [])
    for w_NC, y_TN in zip(matrices, together, strict=True):
        exact, size = x_TC.double() @ w_NC.double().T, x_TC.double().abs() @ w_NC.double().abs().T
        # C products and sums in FP32, then half a unit of the last place.
        bound = EPS32 * columns * size + torch.finfo(BF16).eps / 2 * exact.abs()
        assert ((y_TN.double() - exact).abs() <= bound).all()
        # Control: a sixteenth of the columns less is seen. (Of 16,384 columns one alone is worth
        # less than the bound, which grows with their number.)
        part = columns // 16
        less = exact - x_TC[:, :part].double() @ w_NC[:, :part].double().T
        assert ((y_TN.double() - less).abs() > bound).any()
    # Of one kernel: rows in registers for up to three tokens, and for few rows; else tensor cores.
    whole = pays(MAX_TOKENS, sizes, BF16)
    for tokens in ([0, 5, 2, 7], [7, 1, 6, 0, 3]) if whole else ([0], [MAX_TOKENS - 1]):
        fewer = launch_products(x_TC[tokens].contiguous(), matrices, [])
        assert all(torch.equal(a, y[tokens]) for a, y in zip(fewer, together, strict=True))


def test_routers_choose_as_the_library() -> None:
    # Whoever differs differs by 1/16, so that rounding reorders nothing; equals are many.
    logits = ((torch.randn(4096, 128, device=DEVICE) * 48).round() / 16).to(BF16)
    values, ids = launch_topk(logits, 8, softmax=True, normalise=True, dtype=BF16)
    want_values, want_ids = softmax_topk_reference(logits, 8, normalise=True, dtype=BF16)
    assert torch.equal(ids, want_ids)
    # Rounded once, of sums in two orders: one unit of the last place apart at most.
    torch.testing.assert_close(values, want_values, rtol=torch.finfo(BF16).eps, atol=0)


def test_a_chain_of_dependent_kernels_has_one_result() -> None:
    """Every kernel reads what the one before wrote, while its weights were read ahead of it."""
    matrices = weights(2048, (2048,))
    router = weights(2048, (128,))
    x_1C = torch.randn(1, 2048, device=DEVICE).to(BF16)

    def run(wait: bool) -> list[torch.Tensor]:
        y_1C, found = x_1C, []
        for _ in range(24):
            (y_1C,) = launch_products(y_1C, matrices, [])
            if wait:
                torch.cuda.synchronize()
            (logits,) = launch_products(y_1C, router, [])
            found += launch_topk(logits, 8, softmax=True, normalise=True)
        return found

    expected = run(wait=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(wait=False)
    for _ in range(50):
        for tensor in captured:
            tensor.zero_()
        graph.replay()
        assert all(map(torch.equal, captured, expected))
    assert dependent_launch(DEVICE)["DEPENDENT"] == (torch.cuda.get_device_capability() >= (9, 0))
