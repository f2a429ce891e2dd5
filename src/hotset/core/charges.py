"""What is charged to a plan: each line's bytes as a function of the sizes, and why.

Knows formulas and the reserves that no formula gives; knows no budget and chooses nothing.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from hotset.core.geometry import ModelGeometry, MoELayer
from hotset.core.plan import Line
from hotset.core.record import DTYPE_BYTES, align_up
from hotset.core.slot_split import SlotSplit
from hotset.core.staging import block_tokens, dequantised_records
from hotset.core.units import GIB, MIB, format_bytes

# What a CUDA context and the kernels loaded into it take before the first allocation (measured:
# 529 MiB on an H200 with torch 2.11). Not allocated by us, but part of what a user sees the
# process take.
CUDA_CONTEXT_BYTES = 544 * MIB

# Left free on the device: library workspaces (cuBLAS: 32 MiB a handle on Hopper), kernels loaded
# late, and what a desktop or another process takes after the plan was made.
HEADROOM_BYTES = 256 * MIB

# What is allocated and freed while running (cache and workspaces, not weights or slots) is
# rounded up by the allocator and leaves holes: one part in this many is kept for it.
HEADROOM_PART = 10

# Left free on the host: Python's heap, tokenizer, page tables (8 bytes per 4 KiB page, 2 MiB a
# GiB where huge pages cannot be had), what the CUDA driver keeps on the host's side.
HOST_HEADROOM_BYTES = 512 * MIB

# The loader's promise: anonymous memory beside the arena (and the resident weights on a CPU).
LOADER_BYTES = 2 * GIB

# Sampling holds one row of logits a few times: as computed (4), in float32 (4), sorted (4) with
# indices (8), probabilities (4), their running sum (4). What a row of the sampler keeps: bias (4),
# how often the answer has a token (4), whether the prompt has it (1), the mask (1 bit), adjusted
# logits (4), the best of each chunk (1).
SAMPLING_BYTES_PER_LOGIT = 28 + 15

# What each row beyond the first adds to the KV cache where nobody said how much: a conversation of
# a few pages. Longer ones take what the others leave.
ROW_TOKENS = 4096

# Grouping tokens by expert takes, per token and routed expert: id (8) and weight (4) as routed,
# sort key, sorted keys and order (8 each, the order once more in 4), a mask (1), and the tables
# of blocks (40 at one pair a block), rounded up.
ROUTING_BYTES_PER_CHOICE = 96


@dataclass(frozen=True)
class Sizes:
    """What the planner chooses; everything that is charged follows from these five.

    Attributes:
        num_slot_only: experts without a host copy; they are among those with a slot.
    """

    num_slots: int
    staging_records: int
    context_tokens: int
    prefill_chunk: int
    num_slot_only: int = 0


@dataclass(frozen=True)
class Workspace:
    """Memory that one part of a forward needs beside weights, slots and cache.

    With T tokens in the forward and C of context, these included:
    `fixed + per_token * T + per_context_token * C + per_pair * T * C`, where of T no more than
    `most_tokens` count per token, and what C takes is no more than `most_context_bytes`. Everything
    that allocates on the device declares one. Those of one name are one line.
    """

    name: str
    note: str
    fixed_bytes: int = 0
    bytes_per_token: int = 0
    bytes_per_context_token: int = 0
    bytes_per_pair: int = 0
    most_tokens: int | None = None
    most_context_bytes: int | None = None

    def num_bytes(self, sizes: Sizes) -> int:
        """Bytes for the largest prefill chunk at the end of the longest context."""
        tokens, context = sizes.prefill_chunk, sizes.context_tokens
        of_context = self.bytes_per_context_token * context
        return (
            self.fixed_bytes
            + self.bytes_per_token * min(tokens, self.most_tokens or tokens)
            + min(of_context, self.most_context_bytes or of_context)
            + self.bytes_per_pair * tokens * context
        )


def model_workspaces(geometry: ModelGeometry) -> tuple[Workspace, ...]:
    """What the stock modules of the model need, as the geometry says."""
    return (
        Workspace(
            "activations",
            "largest chunk outside the experts, and one row of logits being sampled",
            fixed_bytes=geometry.activation_fixed_bytes + geometry.vocab * SAMPLING_BYTES_PER_LOGIT,
            bytes_per_token=geometry.activation_bytes_per_token,
        ),
        Workspace(
            "attention workspace",
            "masks, scores where attention is not fused, keys and values expanded to all heads",
            bytes_per_context_token=geometry.activation_bytes_per_context_token,
            bytes_per_pair=geometry.activation_bytes_per_pair,
        ),
    )


def expert_workspaces(layers: Sequence[MoELayer], kernels: str) -> tuple[Workspace, ...]:
    """What the expert kernels need, for the layer that needs most: the outputs of one block of
    tokens, and what is kept of each token of a chunk."""
    formula = _reference_bytes if kernels == "reference" else _triton_bytes
    per_layer = [formula(layer) for layer in layers]
    note = f"`{kernels}` kernels: per-choice outputs in float32, sums, grouping by expert"
    return (
        Workspace(
            "expert workspace",
            note,
            fixed_bytes=max(fixed for fixed, _ in per_layer),
            bytes_per_token=max(per_token for _, per_token in per_layer),
            most_tokens=max(block_tokens(layer.expert, layer.top_k) for layer in layers),
        ),
        Workspace("expert workspace", note, bytes_per_token=max(map(_kept_bytes, layers))),
        *_dequantised_workspace(layers),
    )


def _dequantised_workspace(layers: Sequence[MoELayer]) -> Iterator[Workspace]:
    """Records that a prompt has dequantised at a time, of the layer that needs most."""
    packed = [layer for layer in layers if not layer.expert.is_plain]
    if packed:
        yield Workspace(
            "dequantised experts",
            "some experts of a layer as plain weights, while a prompt multiplies with them",
            fixed_bytes=max(
                dequantised_records(layer.expert, layer.num_experts)
                * layer.expert.as_plain().record_bytes
                for layer in packed
            ),
        )


def _kept_bytes(layer: MoELayer) -> int:
    """Per token: the sum [H] in float32, the output [H] in the model's dtype, the grouping."""
    expert = layer.expert
    sums = (4 + DTYPE_BYTES[expert.dtype]) * expert.hidden
    return sums + ROUTING_BYTES_PER_CHOICE * layer.top_k


def _resident_note(geometry: ModelGeometry) -> str:
    note = "all that is not a routed expert"
    if geometry.dequantised_bytes:
        note += f"; {format_bytes(geometry.dequantised_bytes)} of it quantised in the files"
    return note


def _triton_bytes(layer: MoELayer) -> tuple[int, int]:
    """Fixed, and per token of a block: `y` [K, H] in float32, `h` [K, I] in the model's dtype."""
    expert, size = layer.expert, DTYPE_BYTES[layer.expert.dtype]
    y = 4 * layer.top_k * expert.hidden
    return 0, y + size * layer.top_k * expert.intermediate


def _reference_bytes(layer: MoELayer) -> tuple[int, int]:
    """Fixed: one record as read, and its weights in float32. Per token of a block: `y` [K, H]; for
    the tokens of one expert the input twice [2H], both halves of the first projection [2I], the
    gate and its steps [5I], the output [H], all in float32."""
    expert = layer.expert
    floats = layer.top_k * expert.hidden + 3 * expert.hidden + 7 * expert.intermediate
    fixed = expert.record_bytes + 4 * _num_elements(layer)
    return fixed, 4 * floats


def prompt_workspace(geometry: ModelGeometry) -> Workspace:
    """What the chunks of a prompt hold while they wait for each other at a layer's experts.

    Per token: the residual stream, the experts' input, the same beside that of the other chunks,
    and a shared expert's output [4H], the router's logits [E] in float32, rotary tables [2D], and
    what the experts keep.
    """
    size = DTYPE_BYTES[geometry.dtype]
    num_experts = max(layer.num_experts for layer in geometry.layers)
    widest = max(layer.key_dim for layer in geometry.attention)
    waiting = size * (4 * geometry.hidden + 2 * widest) + 4 * num_experts
    return Workspace(
        "prompt",
        "tokens of the longest prompt that wait for its other chunks between layers",
        bytes_per_context_token=waiting + max(map(_kept_bytes, geometry.layers)),
    )


def _num_elements(layer: MoELayer) -> int:
    """Elements of one expert, padding of its plain record included."""
    return layer.expert.as_plain().record_bytes // DTYPE_BYTES[layer.expert.dtype]


class Charges:
    """All lines of a plan as functions of `Sizes`.

    `device_bytes` is the cheap form for searching; `device_lines` and `host_lines` are the same
    numbers with their notes.
    """

    def __init__(
        self,
        geometry: ModelGeometry,
        *,
        device: str,
        kernels: str,
        num_rows: int = 1,
        kv_tokens: int | None = None,
        workspaces: Sequence[Workspace] = (),
    ) -> None:
        self.geometry = geometry
        # In the library's own cache there is one sequence at a time.
        self.num_rows = num_rows if geometry.attention else 1
        self._kv_tokens = kv_tokens if geometry.attention else None
        self.on_cuda = device == "cuda"
        self.split = SlotSplit(geometry.layers)
        self.largest_record = max(layer.expert.record_bytes for layer in geometry.layers)
        self.workspaces = (
            *model_workspaces(geometry),
            *expert_workspaces(geometry.layers, kernels),
            *([prompt_workspace(geometry)] if geometry.attention else []),
            *workspaces,
        )

    def workspace_bytes(self, sizes: Sizes) -> int:
        return sum(workspace.num_bytes(sizes) for workspace in self.workspaces)

    def device_bytes(self, sizes: Sizes) -> int:
        """Total of the device side."""
        return sum(line.num_bytes for line in self._device(sizes))

    def device_lines(self, sizes: Sizes) -> tuple[Line, ...]:
        """The device side. On a CPU it lies in host memory."""
        return tuple(self._device(sizes))

    def host_bytes(self, sizes: Sizes) -> int:
        """Total of the host side."""
        return sum(line.num_bytes for line in self._host(sizes))

    def host_lines(self, sizes: Sizes) -> tuple[Line, ...]:
        """The host side's charged lines."""
        return tuple(self._host(sizes))

    def _device(self, sizes: Sizes) -> Iterator[Line]:
        geometry, split = self.geometry, self.split
        yield Line("resident weights", geometry.resident_bytes, _resident_note(geometry))
        yield Line(
            "slots",
            split.num_bytes(sizes.num_slots),
            f"{sizes.num_slots} of {split.most} experts",
        )
        # address[L, E] and host_address[L, E], int64.
        yield Line("expert tables", 16 * geometry.num_records, "two addresses for each expert")
        yield Line(
            "staging ring",
            sizes.staging_records * self.largest_record,
            f"{sizes.staging_records} records in flight in prefill",
        )
        yield from self._cache(sizes.context_tokens)
        yield from self._workspace_lines(sizes)
        if self.on_cuda:
            yield Line("CUDA context", CUDA_CONTEXT_BYTES, "the driver's, and loaded kernels")
            yield Line("headroom", HEADROOM_BYTES + self._churn(sizes), _headroom_note())

    def _host(self, sizes: Sizes) -> Iterator[Line]:
        geometry = self.geometry
        note = f"{geometry.num_records} records"
        if any(layer.expert.is_lossless for layer in geometry.layers):
            note += ", BF16 weights in 12 bits"
        if sizes.num_slot_only:
            left = geometry.num_records - sizes.num_slot_only
            note = f"{left} of {note}, the others are in slots alone"
        yield Line("expert arena", self.arena_bytes(sizes), note)
        if not self.on_cuda:
            total = self.device_bytes(sizes)
            yield Line("device side", total, "on a CPU it lies in host memory")
        yield Line("loading", self.loading_bytes, "tensors on their way from the files")
        churn = 0 if self.on_cuda else self._churn(sizes)
        yield Line("host headroom", HOST_HEADROOM_BYTES + churn, "interpreter, tokenizer, driver")

    @property
    def joins_chunks(self) -> bool:
        """Whether a prompt's chunks run with the layers outermost: over a KV pool they do."""
        return bool(self.geometry.attention)

    @property
    def bytes_per_chunk_token(self) -> int:
        """Workspaces that one more token of a chunk takes, wherever it lies in its context."""
        return sum(workspace.bytes_per_token for workspace in self.workspaces)

    def arena_bytes(self, sizes: Sizes) -> int:
        """Records with a host copy side by side, in whole pages."""
        in_slots = self.split.num_bytes(sizes.num_slot_only)
        return align_up(self.geometry.expert_bytes - in_slots, mmap.PAGESIZE)

    @cached_property
    def loading_bytes(self) -> int:
        """Anonymous memory while loading: the loader's promise, or less for a small model, which
        cannot have more in flight than its resident weights and four experts in float32."""
        record = max(_num_elements(layer) * 4 for layer in self.geometry.layers)
        return min(LOADER_BYTES, self.geometry.resident_bytes + 4 * record)

    def kv_tokens(self, context_tokens: int) -> int:
        """Tokens that all rows together have room for: as asked, but at least one of the longest;
        or one of those and a part for each further row."""
        if self._kv_tokens is not None:
            return max(self._kv_tokens, context_tokens)
        return context_tokens + (self.num_rows - 1) * min(context_tokens, ROW_TOKENS)

    def cache_bytes(self, context_tokens: int) -> int:
        """KV cache of all rows, one of which may have that length."""
        geometry = self.geometry
        growing = geometry.kv_bytes_per_token * self.kv_tokens(context_tokens)
        return growing + geometry.kv_fixed_bytes * self.num_rows

    @property
    def cache_fixed_bytes(self) -> int:
        """The part of `cache_bytes` that a context beyond `ROW_TOKENS` does not change."""
        longest = self._kv_tokens or ROW_TOKENS
        per_token = 0 if self._kv_tokens else self.geometry.kv_bytes_per_token
        return self.cache_bytes(longest) - per_token * longest

    def context_bytes(self, prefill_chunk: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Two bounds of what a context takes beyond `ROW_TOKENS`, (bytes, bytes for each token):
        cache and workspaces; in the first one those that have a most grow for ever, in the second
        one they are at it from the start."""
        capped = [w for w in self.workspaces if w.most_context_bytes is not None]
        cache = 0 if self._kv_tokens else self.geometry.kv_bytes_per_token
        growing = cache + sum(
            workspace.bytes_per_context_token + workspace.bytes_per_pair * prefill_chunk
            for workspace in self.workspaces
        )
        most = sum(workspace.most_context_bytes or 0 for workspace in capped)
        below = sum(workspace.bytes_per_context_token for workspace in capped)
        return (0, growing), (most, growing - below)

    def _cache(self, context_tokens: int) -> Iterator[Line]:
        rows = f" of {self.num_rows} rows" if self.num_rows > 1 else ""
        note = f"{self.kv_tokens(context_tokens)} tokens{rows}"
        yield Line("KV cache", self.cache_bytes(context_tokens), note)
        yield Line(
            "KV copies",
            self._copied_bytes(context_tokens),
            "one layer's cache, gathered for a later chunk of a prompt"
            if self.geometry.attention
            else "one layer's cache twice, while it is extended",
        )

    def _copied_bytes(self, context_tokens: int) -> int:
        """Over a pool a later chunk of a prompt attends to a copy of what a layer has of the row.

        The library's cache grows by concatenation, layer by layer, keys and values in turn: while
        one is copied, the old one is still there. An average layer's both are charged; where only
        every fourth layer grows, one layer's keys are twice that, and headroom has the rest.
        """
        geometry = self.geometry
        if not geometry.attention:
            return -(-geometry.kv_bytes_per_token * context_tokens // geometry.num_layers)
        size, most = DTYPE_BYTES[geometry.dtype], 0
        for layer in geometry.attention:
            num_heads, key_width, value_width = layer.cached
            # What new tokens see of a window is joined to them; that is short, and headroom has it.
            tokens = context_tokens if layer.window is None else min(context_tokens, layer.window)
            most = max(most, tokens * num_heads * (key_width + value_width) * size)
        return most

    def _workspace_lines(self, sizes: Sizes) -> Iterator[Line]:
        lines: dict[str, Line] = {}
        for workspace in self.workspaces:
            before = lines.get(workspace.name, Line(workspace.name, 0, workspace.note))
            num_bytes = before.num_bytes + workspace.num_bytes(sizes)
            lines[workspace.name] = Line(workspace.name, num_bytes, before.note)
        yield from lines.values()

    def _churn(self, sizes: Sizes) -> int:
        """Room for rounding and holes in what comes and goes."""
        moving = self.cache_bytes(sizes.context_tokens) + self.workspace_bytes(sizes)
        return moving // HEADROOM_PART


def _headroom_note() -> str:
    return f"{format_bytes(HEADROOM_BYTES)} and a tenth of cache and workspaces"
