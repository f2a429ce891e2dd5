"""Decoder layers compiled region by region: what surrounds experts and attention, fused.

A stock layer is a hundred small kernels in a decode step; compiled it is a dozen. Layers of one
kind share one compilation, since the parts that differ (experts, attention with its cache) are
opaque calls that break the graph. Compiled layers run only while they are `active`: what is
captured then into a CUDA graph stays, and prefill never meets them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hotset.models.layer_kinds import decoder_layers
from hotset.models.rewrites import Rewrites

# Batch sizes times layer kinds of the largest model; beyond it the compiler would go on without
# compiling, in silence.
_MOST_COMPILATIONS = 64


class CompiledLayers:
    """The decoder layers of a model, compiled when they first run, one shape at a time.

    Only what cannot change between runs is chosen by the compiler: left alone it times several
    forms of a reduction on the device, which differ in low bits.

    Args:
        model: a stock model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers = list(decoder_layers(model))
        # One pass object for all: the compiler takes another one for another backend, and would
        # compile every layer anew.
        # Its own dependent launch stays off: a generated kernel that loads nothing waits for
        # nothing and ends before its predecessor, and who comes behind it would read too early.
        options: dict[str, Any] = {
            "post_grad_custom_pre_pass": Rewrites(),
            "deterministic": True,
            # Whether products are padded may have been raced before, and kept on disk.
            "shape_padding": False,
        }
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


def end_compilers() -> None:
    """Ends the processes in which torch compiled kernels, one for each core and one above them.

    Left alone they stay, with hundreds of MiB that no plan knows, and one of them as long as this
    process or, where that is killed, longer. Compiling anything later starts new ones.
    """
    # Importing it starts nothing, but takes time that a CPU need not spend.
    from torch._inductor.async_compile import shutdown_compile_workers

    shutdown_compile_workers()
