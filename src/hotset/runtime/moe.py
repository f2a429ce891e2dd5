"""Runs the experts of one MoE layer: the function that the seam calls.

Picks where bytes are read (slot, arena in place, staging ring), never how they are computed: the
kernel and its reduction order depend on the token count alone.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from hotset.experts.store import ExpertStore
from hotset.kernels.dispatch import Kernels
from hotset.kernels.grouping import Grouping
from hotset.kernels.match_reference import LayerMatch
from hotset.runtime.routing import RoutingLog

# From this many tokens on, a missing record is staged by the copy engine instead of being read in
# place: a grouped GEMM reads a record once for each block of tokens, and each such read would
# cross the link. Below it every record is read once.
RING_TOKENS = 65

# Up to this many tokens a step may fill slots with what it reads: as long as records are read in
# place. What the ring has staged is copied to slots by other means.
MATCH_TOKENS = RING_TOKENS - 1


class MoERunner:
    """Experts of one layer.

    Args:
        layer: MoE layer index.
        module: the stock experts module (for its norm on expert outputs, where it has one).
        store: where the records are.
        kernels: reference or Triton.
        log: told what is routed.
        use_ring: stage missing records in prefill, or read them in place; default: stage where the
            plan gave room for it, except on a CPU, which reads the arena as fast in place as
            through a copy of it. No output changes by a bit.
        fills: what a `FillPlanner` gives for this layer: steps of up to `MATCH_TOKENS` tokens then
            fill slots as they read. `None` never does, and launches nothing for it.
    """

    def __init__(
        self,
        layer: int,
        module: nn.Module,
        *,
        store: ExpertStore,
        kernels: Kernels,
        log: RoutingLog,
        use_ring: bool | None = None,
        fills: LayerMatch | None = None,
    ) -> None:
        self._layer = layer
        self._spec = store.layers[layer]
        # A norm on each expert's output before it is weighted (muse_spark).
        self._post_norm = (
            cast(nn.Module, module.post_expert_norm) if module.has_post_expert_norm else None
        )
        self._store = store
        self._kernels = kernels
        self._log = log
        planned = store.device.type == "cuda" and store.ring.nbytes > 0
        self._use_ring = planned if use_ring is None else use_ring
        self._fills = fills
        # Steps that could fill run the filling kernel whether they do or not: it is another
        # program to the compiler, which may then order its sums differently (seen on an H200
        # with 64 tokens), and a policy must not change a bit.
        self._no_fill_E = torch.zeros(
            self._spec.num_experts, dtype=torch.int64, device=store.device
        )

    def __call__(
        self, x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor
    ) -> torch.Tensor:
        """Routed experts' weighted sum, [T, H] in the dtype of `x_TH`."""
        self._log.add(self._layer, ids_TK)
        few = len(x_TH) <= MATCH_TOKENS
        matched = self._fills if few else None
        if few:
            y_TKH = self._in_place(x_TH, ids_TK, matched)
        elif self._use_ring:
            y_TKH = self._staged(x_TH, ids_TK)
        else:
            # Into a given tensor, as when some are staged: with one of its own the kernel would be
            # another program, and a budget must not change a bit.
            y_TKH = x_TH.new_zeros((*ids_TK.shape, x_TH.shape[1]), dtype=torch.float32)
            grouping = self._kernels.group(ids_TK, self._spec.num_experts)
            self._run(x_TH, ids_TK, self._store.table.row(self._layer), grouping, y_TKH)
        if self._post_norm is not None:
            y_TKH = self._post_norm(y_TKH.to(x_TH.dtype)).float()
        return self._kernels.combine(y_TKH, weights_TK, x_TH.dtype, matched=matched)

    def _in_place(
        self, x_TH: torch.Tensor, ids_TK: torch.Tensor, matched: LayerMatch | None
    ) -> torch.Tensor:
        """Everything where it is now; missing records that are admitted go to their victims' slots.

        Addresses change behind it, in `combine`.
        """
        # One token needs no grouping, its kernel takes the ids as they are.
        num_experts = self._spec.num_experts
        grouping = self._kernels.group(ids_TK, num_experts) if len(x_TH) > 1 else None
        if matched is not None:
            self._kernels.match(ids_TK, matched, grouping=grouping)
        return self._kernels.expert_outputs(
            x_TH,
            ids_TK,
            self._store.table.row(self._layer),
            self._spec.expert,
            grouping=grouping,
            fill_E=self._no_fill_E if matched is None else matched.fill_E,
        )

    def _staged(self, x_TH: torch.Tensor, ids_TK: torch.Tensor) -> torch.Tensor:
        """Residents from their slots, the missing in groups through the ring, into one buffer."""
        grouping = self._kernels.group(ids_TK, self._spec.num_experts)
        resident_E = self._store.placement.resident[self._layer, : self._spec.num_experts]
        counts_E = grouping.counts_E.cpu().numpy()  # the host must know what to copy
        missing = [int(e) for e in (counts_E.nonzero()[0]) if not resident_E[e]]
        address_E = self._store.table.row(self._layer)
        if missing:
            address_E = address_E.clone()
            address_E[torch.tensor(missing, device=address_E.device)] = 0
        y_TKH = x_TH.new_zeros((*ids_TK.shape, x_TH.shape[1]), dtype=torch.float32)
        self._run(x_TH, ids_TK, address_E, grouping, y_TKH)
        for group in self._store.ring.stream(
            self._layer,
            missing,
            num_experts=self._spec.num_experts,
            record_bytes=self._spec.expert.record_bytes,
        ):
            self._run(x_TH, ids_TK, group.address_E, grouping, y_TKH)
        return y_TKH

    def _run(
        self,
        x_TH: torch.Tensor,
        ids_TK: torch.Tensor,
        address_E: torch.Tensor,
        grouping: Grouping,
        y_TKH: torch.Tensor,
    ) -> None:
        self._kernels.expert_outputs(
            x_TH, ids_TK, address_E, self._spec.expert, grouping=grouping, out=y_TKH
        )
