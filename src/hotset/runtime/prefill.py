"""A prompt in chunks with the layers outermost: the experts of a layer run once for all chunks.

Each chunk is a stock forward of its own, in a greenlet that stops where the model calls a layer's
experts. When every chunk has come to a layer, its experts run for all of them, and so each missing
record crosses the link once for the whole prompt. Between layers others may use the device. Knows
forwards and layers; nothing of caches, attention or text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from greenlet import GreenletExit, getcurrent, greenlet
from torch import nn

from hotset.models.seam import experts_bound
from hotset.runtime.blocks import Block

# Called between two layers. Nothing of what it queues may still be unaccounted for when it
# returns: a prompt moves slots.
BetweenLayers = Callable[[], None]

# (layer, blocks of tokens) -> the experts' output of each block, [T, H]
RunExperts = Callable[[int, Sequence[Block]], Sequence[torch.Tensor]]


@dataclass(frozen=True)
class _Arrival:
    """A chunk waits for the experts of a layer."""

    layer: int
    block: Block


def run_together(
    forwards: Sequence[Callable[[], Any]],
    modules: Sequence[nn.Module],
    experts: RunExperts,
    *,
    between_layers: BetweenLayers | None = None,
) -> list[Any]:
    """Runs the forwards of a prompt's chunks side by side, layer by layer.

    At every layer an earlier chunk goes before a later one, so attention finds in the cache what a
    chunk after the other would have put there.

    Args:
        forwards: of the chunks, in the order of the text.
        modules: the experts modules, by layer.
        experts: computes a layer for all chunks.
        between_layers: called before each layer's experts, with all chunks at rest.

    Returns:
        What the forwards returned.
    """
    hub = getcurrent()

    def park(layer: int, *routed: torch.Tensor) -> Any:
        assert getcurrent() is not hub, "experts called from outside the chunks"
        return hub.switch(_Arrival(layer, Block(*routed)))

    chunks = [greenlet(forward) for forward in forwards]
    with experts_bound(modules, [partial(park, layer) for layer in range(len(modules))]):
        try:
            states = [chunk.switch() for chunk in chunks]
            while not chunks[0].dead:
                layer = states[0].layer
                assert all(state.layer == layer for state in states)
                if between_layers is not None:
                    between_layers()
                outputs = experts(layer, [state.block for state in states])
                # What came in is not needed any more, and may be large.
                del states
                states = [
                    chunk.switch(output) for chunk, output in zip(chunks, outputs, strict=True)
                ]
            return states
        finally:
            for chunk in chunks:  # those that stopped halfway undo what they have set
                if not chunk.dead:
                    chunk.throw(GreenletExit)
