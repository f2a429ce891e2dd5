"""Runs the experts of one MoE layer: the function that the seam calls.

Picks where bytes are read (slot, arena in place, staging ring), never how they are computed: the
kernel and its reduction order depend on the tokens of a block alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import groupby
from typing import cast

import numpy as np
import torch
from torch import nn

from hotset.core.prompt_cost import expert_flops
from hotset.core.slot_pools import BoolArray, IntArray
from hotset.core.staging import DequantiseRule, Reads, StagingRule, block_tokens
from hotset.experts.ring import Staged
from hotset.experts.store import ExpertStore
from hotset.kernels.dispatch import Kernels
from hotset.kernels.launch import token_block
from hotset.kernels.match_reference import LayerMatch
from hotset.runtime.block_sums import Adds, BlockSum, FewTokens, ManyTokens, PostNorm
from hotset.runtime.blocks import Block
from hotset.runtime.dequantised import DequantisedExperts
from hotset.runtime.expert_stream import ExpertStream, Need
from hotset.runtime.routing import RoutingLog
from hotset.runtime.tee import Swaps, Tee

# A block of up to so many tokens runs whole: all its outputs are kept and summed at the end. It is
# also as many as a step may have that fills slots with what it reads in place.
MATCH_TOKENS = 64


class MoERunner:
    """Experts of one layer.

    Args:
        layer: MoE layer index.
        module: the stock experts module (for its norm on expert outputs, where it has one); `None`
            where experts are no module of the library's.
        store: where the records are.
        kernels: reference or Triton.
        log: told what is routed.
        stream: stages missing records for blocks of many tokens; `None` reads all in place.
        staging: in place or through the ring; with a stream, default by cost. No output changes
            by a bit.
        dequantise: for which blocks of a prompt quantised weights are made beforehand.
        fills: what a `FillPlanner` gives for this layer: steps of up to `MATCH_TOKENS` tokens then
            fill slots as they read. `None` never does, and launches nothing for it.
        tee: gives slots to records that pass through the ring; told what prompts route.
    """

    def __init__(  # noqa: PLR0913 - the parts of a layer, joined once
        self,
        layer: int,
        module: nn.Module | None,
        *,
        store: ExpertStore,
        kernels: Kernels,
        log: RoutingLog,
        stream: ExpertStream | None = None,
        staging: StagingRule | None = None,
        dequantise: DequantiseRule | None = None,
        fills: LayerMatch | None = None,
        tee: Tee | None = None,
    ) -> None:
        self._layer = layer
        self._spec = store.layers[layer]
        # A norm on each expert's output before it is weighted (muse_spark).
        self._post_norm: PostNorm | None = (
            cast(PostNorm, module.post_expert_norm)
            if module is not None and module.has_post_expert_norm
            else None
        )
        self._store = store
        self._kernels = kernels
        self._log = log
        self._stream, self._staging, self._tee = stream, staging or StagingRule(), tee
        self._dequantise = dequantise or DequantiseRule()
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
        block = Block(x_TH, ids_TK, weights_TK)
        if block.num_tokens > MATCH_TOKENS:
            return self.run([block])[0]
        self._log.add(self._layer, ids_TK)
        matched = self._fills
        few = self._few(block, matched)
        if matched is not None:
            self._kernels.match(ids_TK, matched, grouping=few.grouping)
        few.add(self._store.table.row(self._layer), first=0, stop=self._spec.num_experts)
        # Addresses change behind the kernels that fill.
        return few.total(matched=matched)

    def run(self, blocks: Sequence[Block]) -> list[torch.Tensor]:
        """The layer's output for each block of a prompt, [T, H]; staged records cross once.

        The bits of a block depend on its own tokens alone. The host waits until it knows what is
        routed; by then the device has work: what can be computed on without it.
        """
        ids = [block.ids_TK for block in blocks]
        sums = self._opened(blocks)
        ids_TK = ids[0] if len(ids) == 1 else torch.cat(ids)
        known = self._log.fetch(self._layer, ids_TK, [one.counts for one in sums])
        for part, one in enumerate(sums):
            one.expect(partial(_counts, known, part))
        resident_E = self._store.placement.resident[self._layer, : self._spec.num_experts].copy()

        @cache
        def need() -> Need:
            _, counts_PE = known()
            used_E: BoolArray = counts_PE.sum(axis=0) > 0
            return Need(used_E, self._use_ring(used_E & ~resident_E, counts_PE, sums))

        @cache
        def read() -> None:
            """The policy takes in what is routed, once the device has work."""
            routed_TK, _ = known()
            if self._tee is not None:
                self._tee.read(self._layer, routed_TK)

        adders = self._adders(sums)
        if self._stream is not None:
            if self._layer == 0:
                self._stream.begin(sum(one.num_tokens for one in sums))
            self._add_groups(adders, self._stream, need, read)
        else:
            self._add(adders, self._store.table.row(self._layer), 0, self._spec.num_experts)
        read()
        used_E = need().used_E
        self._log.count_layer(
            self._layer, used=int(used_E.sum()), hits=int((used_E & resident_E).sum())
        )
        return _cut([one.total() for one in sums], [block.num_tokens for block in blocks])

    def _opened(self, blocks: Sequence[Block]) -> list[BlockSum]:
        """Sums of all tokens in turn, as few as there can be: neighbours are joined where the
        kernels do that, else large ones are cut."""
        if self._kernels.joins_blocks:
            groups = groupby(blocks, key=lambda block: self._form(block.num_tokens))
            return [one for form, group in groups for one in self._open(list(group), *form)]
        size = block_tokens(self._spec.expert, self._spec.top_k)
        parts = (part for block in blocks for part in block.split(size))
        return [one for part in parts for one in self._open([part], *self._form(part.num_tokens))]

    def _form(self, num_tokens: int) -> tuple[int, bool]:
        """By what a block runs, its number of tokens alone decides: tokens of a kernel block, 0
        for few tokens, and whether experts are dequantised, see `DequantiseRule`."""
        if num_tokens <= MATCH_TOKENS:
            return 0, False
        top_k, num_experts = self._spec.top_k, self._spec.num_experts
        plain = self._dequantise.pays(
            num_tokens, spec=self._spec.expert, top_k=top_k, num_experts=num_experts
        )
        return token_block(num_tokens, top_k, num_experts), plain

    def _open(self, alike: Sequence[Block], kernel_tokens: int, plain: bool) -> list[BlockSum]:
        """The sums of blocks of one form."""
        if not kernel_tokens:
            return [self._few(block) for block in alike]
        layer = self._spec
        return [
            ManyTokens(
                self._kernels,
                layer.expert.as_plain() if plain else layer.expert,
                alike,
                num_experts=layer.num_experts,
                kernel_tokens=kernel_tokens,
                most_rows=block_tokens(layer.expert, layer.top_k) * layer.top_k,
                post_norm=self._post_norm,
            )
        ]

    def _is_dequantised(self, one: BlockSum) -> bool:
        """Whether a sum's experts are plain records by the time it runs."""
        return one.spec.is_plain and not self._spec.expert.is_plain

    def _adders(self, sums: Sequence[BlockSum]) -> list[Adds]:
        """What runs a range of experts: blocks, and one for all that want them dequantised."""
        plain = [one for one in sums if self._is_dequantised(one)]
        adders: list[Adds] = [one for one in sums if not self._is_dequantised(one)]
        if plain:
            many = cast(list[ManyTokens], plain)
            device = self._store.device
            adders.append(DequantisedExperts(self._kernels, self._spec, many, device))
        return adders

    def _few(self, block: Block, matched: LayerMatch | None = None) -> FewTokens:
        return FewTokens(
            self._kernels,
            self._spec.expert,
            block,
            fill_E=self._no_fill_E if matched is None else matched.fill_E,
            post_norm=self._post_norm,
            behind_match=matched is not None,
        )

    def _use_ring(
        self, missing_E: BoolArray, counts_PE: IntArray, sums: Sequence[BlockSum]
    ) -> bool:
        """Whether the missing records are staged; see `StagingRule`."""
        if self._stream is None:
            return False
        kernel_tokens_P1 = np.array([[one.kernel_tokens] for one in sums])
        reads_PE = -(-counts_PE // kernel_tokens_P1)
        # Dequantised, a record is read once for all its blocks.
        plain_P = np.array([self._is_dequantised(one) for one in sums])
        reads_E = reads_PE[~plain_P].sum(axis=0)
        once_E = counts_PE[plain_P].sum(axis=0) > 0
        reads = Reads(
            missing=np.flatnonzero(missing_E).tolist(),
            num_multiplied=int(reads_E[missing_E].sum()),
            num_dequantised=int(once_E[missing_E].sum()),
            record_bytes=self._spec.expert.record_bytes,
            flops=float(expert_flops(self._spec) * counts_PE.sum()),
        )
        return self._staging.use_ring(reads, group_records=self._stream.room(self._layer))

    def _add_groups(
        self,
        adders: Sequence[Adds],
        stream: ExpertStream,
        need: Callable[[], Need],
        read: Callable[[], None],
    ) -> None:
        """Groups outermost: each record is staged once for all blocks."""
        swaps: Swaps | None = None

        def take(staged: Staged, stop: int) -> None:
            nonlocal swaps
            if swaps is None:
                assert self._tee is not None
                read()
                swaps = self._tee.swaps(self._layer, need().used_E)
            swaps.take(staged, stop=stop)

        behind = None if self._tee is None else take
        with stream.groups(self._layer, need, behind) as groups:
            for group in groups:
                self._add(adders, group.address_E, group.first, group.stop)
        if swaps is not None:
            swaps.finish()

    @staticmethod
    def _add(adders: Sequence[Adds], address_E: torch.Tensor, first: int, stop: int) -> None:
        for one in adders:
            one.add(address_E, first=first, stop=stop)


def make_runners(
    modules: Sequence[nn.Module],
    *,
    store: ExpertStore,
    kernels: Kernels,
    log: RoutingLog,
    stream: ExpertStream | None,
    staging: StagingRule,
    fills: Sequence[LayerMatch] | None,
    tee: Tee | None,
) -> list[MoERunner]:
    """The runner of each MoE layer, all by the same rules; see `MoERunner`.

    Args:
        modules: the stock experts modules, by layer.
        fills: by layer; `None` for steps that never fill.
    """
    return [
        MoERunner(
            layer,
            module,
            store=store,
            kernels=kernels,
            log=log,
            stream=stream,
            staging=staging,
            fills=None if fills is None else fills[layer],
            tee=tee,
        )
        for layer, module in enumerate(modules)
    ]


def _counts(known: Callable[[], tuple[IntArray, IntArray]], part: int) -> IntArray:
    _, counts_PE = known()
    counts_E: IntArray = counts_PE[part]
    return counts_E


def _cut(parts: Sequence[torch.Tensor], sizes: Sequence[int]) -> list[torch.Tensor]:
    """The rows of all parts in turn, as tensors of these sizes."""
    out, rest = [], deque(parts)
    for size in sizes:
        block: list[torch.Tensor] = []
        missing = size
        while missing:
            part = rest.popleft()
            if len(part) > missing:
                rest.appendleft(part[missing:])
            block.append(part[:missing])
            missing -= len(block[-1])
        out.append(block[0] if len(block) == 1 else torch.cat(block))
    return out
