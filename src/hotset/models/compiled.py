"""Decoder layers compiled region by region: what surrounds experts and attention, fused.

A stock layer is a hundred small kernels in a decode step; compiled it is a dozen. Layers of one
kind share one compilation, since the parts that differ (experts, attention with its cache) are
opaque calls that break the graph. Compiled layers run only while they are `active`: what is
captured then into a CUDA graph stays, and prefill never meets them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import fx, nn

from hotset.kernels.topk import accepts, topk
from hotset.models.layer_kinds import decoder_layers

# Batch sizes times layer kinds of the largest model; beyond it the compiler would go on without
# compiling, in silence.
_MOST_COMPILATIONS = 64


class CompiledLayers:
    """The decoder layers of a model, compiled when they first run, one shape at a time.

    Only what cannot change between runs is chosen by the compiler: no autotuning.

    Args:
        model: a stock model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers = list(decoder_layers(model))
        # One pass object for all: the compiler takes another one for another backend, and would
        # compile every layer anew.
        options: dict[str, Any] = {"post_grad_custom_post_pass": _ShortTopK()}
        self._compiled = [
            torch.compile(layer.forward, dynamic=False, options=options) for layer in self._layers
        ]

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within the block the model runs its compiled layers, behind it what it ran before."""
        before = [layer.forward for layer in self._layers]
        limits = torch._dynamo.config.patch(
            recompile_limit=_MOST_COMPILATIONS, fail_on_recompile_limit_hit=True
        )
        with limits:
            self._set(self._compiled)
            try:
                yield
            finally:
                self._set(before)

    def _set(self, forwards: list[Any]) -> None:
        for layer, forward in zip(self._layers, forwards, strict=True):
            layer.forward = forward


class _ShortTopK(torch._inductor.custom_graph_pass.CustomGraphPass):
    """Replaces the library's top-k of short rows by ours, whatever router it stands in."""

    def __call__(self, graph: fx.Graph) -> None:
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.topk.default):
            given = dict(zip(("self", "k", "dim", "largest", "sorted"), node.args, strict=False))
            x, k, dim = cast(fx.Node, given["self"]), cast(int, given["k"]), given.get("dim", -1)
            largest, ordered = given.get("largest", True), given.get("sorted", True)
            value = x.meta["val"]
            last = dim in (-1, value.dim() - 1)
            if last and largest and ordered and accepts(value.shape[-1], k, value.dtype):
                with graph.inserting_before(node):
                    ours = graph.call_function(topk._opoverload, (x, k))
                ours.meta = node.meta
                node.replace_all_uses_with(ours)
                graph.erase_node(node)

    def uuid(self) -> object:
        """Part of the compiler's cache key: changes whenever this pass does."""
        return torch._inductor.custom_graph_pass.get_hash_for_files((__file__,))
