"""Chunks that stop at every layer's experts: their order, the hook between layers, and errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from hotset.models.seam import bind_experts
from hotset.runtime.blocks import Block
from hotset.runtime.prefill import run_together

NUM_LAYERS = 3


class Chain:
    """A model of experts only: each layer's output is the next one's input. Keeps a diary."""

    def __init__(self) -> None:
        self.modules = [nn.Identity() for _ in range(NUM_LAYERS)]
        self.diary: list[tuple[Any, ...]] = []
        for module in self.modules:
            bind_experts(module, self._alone)

    def _alone(self, x_TH: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        self.diary.append(("alone",))
        return x_TH + 1

    def forward(self, name: int, num_tokens: int = 2) -> Callable[[], torch.Tensor]:
        def run() -> torch.Tensor:
            x_TH = torch.full((num_tokens, 4), float(name))
            ids_TK = torch.zeros(num_tokens, 1, dtype=torch.int64)
            for layer, module in enumerate(self.modules):
                self.diary.append(("attend", layer, name))
                experts: Any = module._hotset_experts
                x_TH = experts(x_TH, ids_TK, ids_TK.float())
            return x_TH

        return run

    def experts(self, layer: int, blocks: Sequence[Block]) -> list[torch.Tensor]:
        self.diary.append(("experts", layer, *(block.num_tokens for block in blocks)))
        return [block.x_TH * 2 for block in blocks]


def test_layers_run_outermost_and_chunks_in_order() -> None:
    chain = Chain()
    out = run_together(
        [chain.forward(1), chain.forward(2, 5)],
        chain.modules,
        chain.experts,
        between_layers=lambda: chain.diary.append(("between",)),
    )
    assert [float(x_TH[0, 0]) for x_TH in out] == [8.0, 16.0]
    expected: list[tuple[Any, ...]] = []
    for layer in range(NUM_LAYERS):
        expected += [("attend", layer, 1), ("attend", layer, 2), ("between",)]
        expected += [("experts", layer, 2, 5)]
    assert chain.diary == expected


def test_a_forward_within_the_hook_runs_its_own_experts() -> None:
    """As a decode step does, which binds the experts to itself and back."""
    from hotset.models.seam import experts_bound

    chain, inner = Chain(), []

    def between() -> None:
        with experts_bound(chain.modules, [chain._alone] * NUM_LAYERS):
            inner.append(float(chain.forward(10)()[0, 0]))

    out = run_together([chain.forward(1)], chain.modules, chain.experts, between_layers=between)
    assert float(out[0][0, 0]) == 8.0
    assert inner == [10.0 + NUM_LAYERS] * NUM_LAYERS


@pytest.mark.parametrize("where", ["forward", "experts", "hook"])
def test_an_error_ends_every_chunk(where: str) -> None:
    """Chunks that wait undo what they have set, and the modules are as before."""
    chain, ended = Chain(), []

    def guarded(name: int) -> Callable[[], torch.Tensor]:
        def run() -> torch.Tensor:
            try:
                if where == "forward" and name == 2:
                    raise ValueError(where)
                return chain.forward(name)()
            finally:
                ended.append(name)

        return run

    def fail(*_: object) -> Any:
        raise ValueError(where)

    with pytest.raises(ValueError, match=where):
        run_together(
            [guarded(1), guarded(2), guarded(3)],
            chain.modules,
            fail if where == "experts" else chain.experts,
            between_layers=fail if where == "hook" else None,
        )
    assert sorted(ended) == ([1, 2] if where == "forward" else [1, 2, 3])
    assert chain.modules[0]._hotset_experts == chain._alone
