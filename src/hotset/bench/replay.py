"""Routing of real text for a random model: a trace mapped onto its layers and experts.

A random router spreads tokens evenly and says nothing about caching; a trace does. Where the model
has more experts, more top-k or more layers than the trace, independent streams of it (different
texts) are put on disjoint ids, and deeper layers replay the trace's layers of further texts. What
that distorts, `Replay.note` says.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from hotset.core.errors import ConfigError
from hotset.core.geometry import ModelGeometry
from hotset.core.policy import FloatArray
from hotset.core.slot_pools import IntArray
from hotset.core.trace import Trace


@dataclass(frozen=True)
class Replay:
    """Routed ids for a model.

    Attributes:
        ids_TBLK: [T, B, L, K] int64, of T steps with B rows.
        note: how they were made, and what is not as in a real trace of this model.
        distortion: what makes figures others than they would be, for the rows; empty for nothing.
    """

    ids_TBLK: IntArray
    note: str
    distortion: str = ""

    def first_rows(self, num_rows: int) -> Replay:
        """The same for fewer rows."""
        return replace(self, ids_TBLK=self.ids_TBLK[:, :num_rows])


def map_trace(
    trace: Trace, geometry: ModelGeometry, *, num_tokens: int, num_rows: int = 1
) -> Replay:
    """Builds `num_tokens` steps of routing for a model whose layers are all alike.

    Each row replays other texts.

    Raises:
        ConfigError: the model's experts and top-k are not multiples of the trace's, or the trace
            is too short.
    """
    num_layers, layer = len(geometry.layers), geometry.layers[0]
    trace_experts, trace_layers = trace.max_experts, trace.num_layers
    streams, top_k = _streams(trace, geometry)
    texts = _texts([trace.ids_of(s) for s in trace.sequences], num_tokens)
    if len(texts) < num_rows:
        raise ConfigError(
            f"the trace has {len(texts)} texts of {num_tokens} tokens for {num_rows} rows",
            hint="take fewer steps, a smaller batch, or a longer trace",
        )
    ids_TBLK = np.empty((num_tokens, num_rows, num_layers, layer.top_k), dtype=np.int64)
    for row, index, stream in np.ndindex(num_rows, num_layers, streams):
        text = texts[(row + index // trace_layers * streams + stream) % len(texts)]
        part = text[:num_tokens, index % trace_layers] + stream * trace_experts
        ids_TBLK[:, row, index, stream * top_k : (stream + 1) * top_k] = part
    used = f"{streams} independent streams of {trace_experts} experts, top-{top_k}"
    note = f"{used}; layer l replays layer l mod {trace_layers} of another text"
    distortion = ""
    if unused := layer.num_experts - streams * trace_experts:
        distortion = f"{unused} of {layer.num_experts} experts never used"
        note += f"; {distortion}, so that the same slots hold more of what is"
    return Replay(ids_TBLK, note, distortion)


def map_profile(trace: Trace, geometry: ModelGeometry) -> FloatArray:
    """Uses per token of each expert, [L, E], of all texts of a trace, mapped as `map_trace` does.

    Raises:
        ConfigError: as there.
    """
    streams, _ = _streams(trace, geometry)
    prior_LE = np.zeros((len(geometry.layers), geometry.layers[0].num_experts))
    share_LE = trace.total_counts() / max(1, trace.num_tokens)
    for index, row in enumerate(prior_LE):
        row[: streams * trace.max_experts] = np.tile(share_LE[index % trace.num_layers], streams)
    return prior_LE


def never_again(geometry: ModelGeometry, *, num_tokens: int, num_rows: int = 1) -> Replay:
    """Routing in which every expert comes back as late as it can: in turn, by ascending id."""
    ids = [
        np.arange(num_tokens * num_rows * layer.top_k).reshape(num_tokens, num_rows, layer.top_k)
        % layer.num_experts
        for layer in geometry.layers
    ]
    return Replay(np.stack(ids, axis=2), "every expert in turn")


def by_chance(geometry: ModelGeometry, *, num_tokens: int, num_rows: int = 1) -> Replay:
    """Routing without favourites or memory, the same at every call: hits are the share of slots."""
    rng = np.random.default_rng(0)
    ids = [
        rng.random((num_tokens, num_rows, layer.num_experts)).argsort(axis=2)[..., : layer.top_k]
        for layer in geometry.layers
    ]
    note = "experts drawn by chance, each as likely as any"
    return Replay(np.stack(ids, axis=2), note, "experts by chance")


def _streams(trace: Trace, geometry: ModelGeometry) -> tuple[int, int]:
    """Streams of the trace that one layer replays, and the top-k of each."""
    layer, top_k = geometry.layers[0], trace.ids_TLK.shape[2]
    streams, rest = divmod(layer.top_k, top_k)
    if rest or streams * trace.max_experts > layer.num_experts:
        raise ConfigError(
            f"a trace with {trace.max_experts} experts, top-{top_k}, cannot be mapped onto "
            f"{layer.num_experts} experts, top-{layer.top_k}",
            hint="both must be multiples of the trace's, the top-k no more often than the experts",
        )
    return streams, top_k


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
        self._table_TBLK = torch.from_numpy(replay.ids_TBLK).to(device, copy=True)
        self._step = torch.zeros(1, dtype=torch.int64, device=device)
        self._now_1BLK = self._table_TBLK[:1].clone()

    def restart(self, replay: Replay) -> None:
        """The next step is the first of a replay of the same size."""
        self._table_TBLK.copy_(torch.from_numpy(replay.ids_TBLK))
        self._step.zero_()

    def advance(self) -> None:
        """Fetches the ids of the next step; goes round at the end."""
        torch.index_select(self._table_TBLK, 0, self._step, out=self._now_1BLK)
        self._step.add_(1).remainder_(len(self._table_TBLK))

    def ids(self, layer: int) -> torch.Tensor:
        """Ids of one layer for the running step, [B, K]."""
        return self._now_1BLK[0, :, layer]
