"""Routing of real text for a random model: a trace mapped onto its layers and experts.

A random router spreads tokens evenly and says nothing about caching; a trace does. Where the model
has more experts, more top-k or more layers than the trace, independent streams of it (different
texts) are put on disjoint ids, and deeper layers replay the trace's layers of further texts. What
that distorts is said by `describe`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from hotset.core.errors import ConfigError
from hotset.core.geometry import ModelGeometry
from hotset.core.slot_pools import IntArray
from hotset.core.trace import Trace


@dataclass(frozen=True)
class Replay:
    """Routed ids for a model.

    Attributes:
        ids_TLK: [T, L, K] int64.
        note: how they were made, and what is not as in a real trace of this model.
    """

    ids_TLK: IntArray
    note: str

    def counts(self, geometry: ModelGeometry) -> IntArray:
        """Tokens that used each expert, [L, E]."""
        num_experts = max(layer.num_experts for layer in geometry.layers)
        return np.stack(
            [
                np.bincount(ids.ravel(), minlength=num_experts)
                for ids in self.ids_TLK.transpose(1, 0, 2)
            ]
        )


def map_trace(trace: Trace, geometry: ModelGeometry, *, num_tokens: int) -> Replay:
    """Builds `num_tokens` steps of routing for a model whose layers are all alike.

    Raises:
        ConfigError: the model's experts and top-k are not multiples of the trace's, or the trace
            is too short.
    """
    num_layers, layer = len(geometry.layers), geometry.layers[0]
    trace_experts, trace_layers = trace.max_experts, trace.num_layers
    sequences = [trace.ids_of(s) for s in trace.sequences]
    top_k = sequences[0].shape[2]
    streams, rest = divmod(layer.top_k, top_k)
    if rest or streams * trace_experts > layer.num_experts:
        raise ConfigError(
            f"a trace with {trace_experts} experts, top-{top_k}, cannot be mapped onto "
            f"{layer.num_experts} experts, top-{layer.top_k}",
            hint="both must be multiples of the trace's, the top-k no more often than the experts",
        )
    texts = _texts(sequences, num_tokens)
    groups = layer.num_experts // trace_experts
    ids_TLK = np.empty((num_tokens, num_layers, layer.top_k), dtype=np.int64)
    for index in range(num_layers):
        for stream in range(streams):
            text = texts[(index // trace_layers * streams + stream) % len(texts)]
            part = text[:num_tokens, index % trace_layers] + stream * trace_experts
            ids_TLK[:, index, stream * top_k : (stream + 1) * top_k] = part
    used = f"{streams} independent streams of {trace_experts} experts, top-{top_k}"
    note = f"{used}; layer l replays layer l mod {trace_layers} of another text"
    if groups > streams:
        note += f"; {(groups - streams) * trace_experts} experts of each layer are never used"
    return Replay(ids_TLK, note)


def _texts(sequences: list[np.ndarray], num_tokens: int) -> list[np.ndarray]:
    """Neighbouring sequences joined until each is `num_tokens` long."""
    texts, open_parts, length = [], [], 0
    for sequence in sequences:
        open_parts.append(sequence)
        length += len(sequence)
        if length >= num_tokens:
            texts.append(np.concatenate(open_parts))
            open_parts, length = [], 0
    if not texts:
        raise ConfigError(f"the trace has {length} tokens, {num_tokens} are needed")
    return texts


class ReplayedRouting:
    """Ids of a replay, step by step, on the device, in place of the router's.

    Graph-safe: the ids of a step lie in one tensor of fixed address, and one launch at the start
    of a step fetches the next ones.

    Args:
        replay: what to route.
        device: of the model.
    """

    def __init__(self, replay: Replay, *, device: torch.device) -> None:
        self._table_TLK = torch.from_numpy(replay.ids_TLK).to(device)
        self._step = torch.zeros(1, dtype=torch.int64, device=device)
        self._now_1LK = self._table_TLK[:1].clone()

    def restart(self) -> None:
        """The next step is the first of the replay again."""
        self._step.zero_()

    def advance(self) -> None:
        """Fetches the ids of the next step; goes round at the end."""
        torch.index_select(self._table_TLK, 0, self._step, out=self._now_1LK)
        self._step.add_(1).remainder_(len(self._table_TLK))

    def ids(self, layer: int) -> torch.Tensor:
        """Ids of one layer for the running step, [1, K]."""
        return self._now_1LK[:, layer]
