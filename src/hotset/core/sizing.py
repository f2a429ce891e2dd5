"""Turns "auto" into numbers: slots, staging ring, context and prefill chunk for a budget.

Knows the rules that share memory out, as plain arithmetic; what things cost is in `charges`, what
is refused and how it is said in `refusal`, what speed chooses instead in `fastest`.

Every rule is a function of the number of slots: the more slots, the more context, chunk and ring
go with them. The largest number of slots whose whole set fits is taken, so that more memory never
gives fewer slots.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace

from hotset.core.charges import CUDA_CONTEXT_BYTES, Charges, Sizes
from hotset.core.config import EngineConfig
from hotset.core.hardware import Machine
from hotset.core.staging import NUM_BUFFERS
from hotset.core.units import MIB
from hotset.core.workload import Workload, parse_workload

# The staging ring: one buffer is filled while the other is computed on. A group of 64 records
# is what the reference result streams at; smaller cards get smaller groups, down to one record.
RING_GROUP_RECORDS = 64
# A group grows by one record (the ring by two) for this many slots: a quarter of the memory of
# slots and ring together at most.
SLOTS_PER_GROUP_RECORD = 6

# Auto context: at least this; beyond it, what it takes (cache, and workspaces at the least chunk)
# is at most one part in CONTEXT_PART of the bytes in slots.
CONTEXT_FLOOR_TOKENS = 2048
CONTEXT_PART = 4
CONTEXT_STEP_TOKENS = 256
# A longest context for a model whose config names none.
CONTEXT_UNSTATED_TOKENS = 32768

# Auto prefill chunk: a power of two between these; what its workspaces take above those of the
# floor is at most one part in CHUNK_PART of the bytes in slots. Where chunks run one after the
# other, each streams the cold experts once more. Where they run together it only has to be long
# enough to keep the kernels busy, and its top is what takes JOINED_CHUNK_BYTES: budgets that leave
# eight times as much for slots all get the same chunk, and so round a long prompt alike.
CHUNK_FLOOR_TOKENS = 128
CHUNK_TOP_TOKENS = 2048
JOINED_CHUNK_TOP_TOKENS = 4096
JOINED_CHUNK_BYTES = 512 * MIB
CHUNK_PART = 8


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What was asked of a plan; `None` means auto. Fields as in `EngineConfig`.

    Attributes:
        workload: kinds of requests that were said to come; empty for none.
    """

    vram_bytes: int | None = None
    ram_bytes: int | None = None
    context_tokens: int | None = None
    prefill_chunk: int | None = None
    max_batch: int = 1
    kv_tokens: int | None = None
    kernels: str | None = None
    staging: str | None = None
    workload: tuple[Workload, ...] = ()

    @classmethod
    def from_config(cls, config: EngineConfig) -> PlanRequest:
        return cls(
            vram_bytes=config.vram_bytes,
            ram_bytes=config.ram_bytes,
            context_tokens=config.context_tokens,
            prefill_chunk=config.prefill_chunk,
            max_batch=config.max_batch,
            kv_tokens=config.kv_tokens,
            kernels=config.kernels,
            staging=config.staging,
            workload=() if config.workload is None else parse_workload(config.workload),
        )


@dataclass(frozen=True)
class Budgets:
    """What may be taken, in bytes.

    Attributes:
        device_bytes: device side; `None` on a CPU without `--vram`: no limit, and no slots.
        device_top_bytes: most that `--vram` can be; `None` on a CPU.
        host_bytes: host side.
    """

    device_bytes: int | None
    device_top_bytes: int | None
    host_bytes: int

    @classmethod
    def of(cls, machine: Machine, request: PlanRequest) -> Budgets:
        """What was asked for, else what there is."""
        # The driver's free memory no longer holds the CUDA context, which is a line of the plan.
        on_cuda = machine.device == "cuda"
        top = machine.vram_free_bytes + CUDA_CONTEXT_BYTES if on_cuda else None
        return cls(
            device_bytes=top if request.vram_bytes is None else request.vram_bytes,
            device_top_bytes=top,
            host_bytes=(
                machine.host.available_bytes if request.ram_bytes is None else request.ram_bytes
            ),
        )

    def device_fits(self, charges: Charges, sizes: Sizes) -> bool:
        return self.device_bytes is None or charges.device_bytes(sizes) <= self.device_bytes

    def host_fits(self, charges: Charges, sizes: Sizes) -> bool:
        return charges.host_bytes(sizes) <= self.host_bytes

    def fits(self, charges: Charges, sizes: Sizes) -> bool:
        """Whether these sizes are within the budgets that depend on them. On CUDA the host side
        is the same for all sizes, so a host that is too small must not change the device side."""
        if not self.device_fits(charges, sizes):
            return False
        return charges.on_cuda or self.host_fits(charges, sizes)


def least_sizes(charges: Charges, request: PlanRequest) -> Sizes:
    """The smallest sizes that keep to the request: no slots, every auto at its floor."""
    return _Shares(charges, request).sizes(0)


def choose_sizes(charges: Charges, request: PlanRequest, budgets: Budgets) -> Sizes:
    """The sizes for these budgets, or `least_sizes` where not even those fit."""
    shares, split = _Shares(charges, request), charges.split

    def fits(sizes: Sizes) -> bool:
        return budgets.fits(charges, sizes)

    most = 0 if budgets.device_bytes is None else split.most_within(budgets.device_bytes)
    # A slot for every expert needs no ring, and costs less than one slot fewer; below that all that
    # goes with the slots grows with them.
    best = shares.sizes(most) if most == split.most else None
    if best is None or not fits(best):
        top = min(most, split.most - 1)
        num_slots = largest(lambda count: fits(shares.sizes(count)), 0, top)
        if num_slots is None:
            return shares.sizes(0)
        best = shares.sizes(num_slots)
    if budgets.device_bytes is None or best.num_slots == split.most:
        return shares.grow(best, fits)
    return best


def with_host_copies(charges: Charges, budgets: Budgets, sizes: Sizes) -> Sizes:
    """The same sizes with a host copy for as many experts as host memory has room for; the others
    keep their slots. Unchanged where all have one, and where the slots do not suffice.

    On a CPU slots lie in host memory themselves, and an expert saves nothing by having only one.
    """
    if not charges.on_cuda or budgets.host_fits(charges, sizes):
        return sizes

    def fits_without(num_copies: int) -> bool:
        num_slot_only = sizes.num_slots - num_copies
        return budgets.host_fits(charges, replace(sizes, num_slot_only=num_slot_only))

    # Of the experts with slots as many as possible have a copy too, so that slots can move.
    copies = largest(fits_without, 0, sizes.num_slots)
    return sizes if copies is None else replace(sizes, num_slot_only=sizes.num_slots - copies)


def largest(fits: Callable[[int], bool], low: int, high: int) -> int | None:
    """The largest number in [low, high] that fits, `None` if none does. Smaller ones fit too."""
    count = bisect_right(range(low, high + 1), False, key=lambda value: not fits(value))
    return low + count - 1 if count else None


def ring_records(num_slots: int, most_slots: int, *, widest_layer: int) -> int:
    """Records of a staging ring beside so many slots; none beside a slot for every expert.

    Args:
        most_slots: experts of all layers.
        widest_layer: most experts of one.
    """
    if num_slots == most_slots:
        return 0
    group = min(RING_GROUP_RECORDS, widest_layer, 1 + num_slots // SLOTS_PER_GROUP_RECORD)
    return NUM_BUFFERS * group


class _Shares:
    """Context, chunk and ring as functions of the number of slots."""

    def __init__(self, charges: Charges, request: PlanRequest) -> None:
        self.charges = charges
        self.request = request
        longest = charges.geometry.max_context or CONTEXT_UNSTATED_TOKENS
        self.longest = min(longest, request.kv_tokens or longest)
        self.group_top = min(
            RING_GROUP_RECORDS, max(layer.num_experts for layer in charges.geometry.layers)
        )

    def sizes(self, num_slots: int) -> Sizes:
        share = self.charges.split.num_bytes(num_slots)
        context = self.request.context_tokens or self._context(share)
        partial = Sizes(num_slots, self._staging(num_slots), context, 1)
        return replace(
            partial, prefill_chunk=self.request.prefill_chunk or self._chunk(partial, share)
        )

    def grow(self, sizes: Sizes, fits: Callable[[Sizes], bool]) -> Sizes:
        """What is left once no more slots can be used: first to the chunk, then to the context, and
        to the chunk again, which the context may have kept short: so it is the one that this
        context would get if it were set."""
        sizes = self._grow_chunk(sizes, fits)
        if self.request.context_tokens is None:
            tokens = largest(
                lambda tokens: fits(replace(sizes, context_tokens=tokens)),
                sizes.context_tokens,
                self.longest,
            )
            grown = max(sizes.context_tokens, self._rounded(tokens or 0))
            sizes = self._grow_chunk(replace(sizes, context_tokens=grown), fits)
        return sizes

    def _grow_chunk(self, sizes: Sizes, fits: Callable[[Sizes], bool]) -> Sizes:
        if self.request.prefill_chunk is None:
            for chunk in self._chunks(sizes.context_tokens):
                if chunk > sizes.prefill_chunk and fits(replace(sizes, prefill_chunk=chunk)):
                    return replace(sizes, prefill_chunk=chunk)
        return sizes

    def _staging(self, num_slots: int) -> int:
        wanted = self.request.staging or ("ring" if self.charges.on_cuda else "in-place")
        if wanted == "in-place":
            return 0
        return ring_records(num_slots, self.charges.split.most, widest_layer=self.group_top)

    def _context(self, share: int) -> int:
        chunk = self.request.prefill_chunk or CHUNK_FLOOR_TOKENS
        floor = min(self.longest, max(CONTEXT_FLOOR_TOKENS, chunk))
        left = share // CONTEXT_PART - self.charges.cache_fixed_bytes
        fits = 0
        for most, per_token in self.charges.context_bytes(chunk):
            tokens = (left - most) // per_token if per_token else self.longest
            fits = max(fits, tokens if left >= most else 0)
        return max(floor, self._rounded(min(self.longest, fits)))

    def _rounded(self, tokens: int) -> int:
        if tokens >= self.longest:
            return self.longest
        # The longest may itself be shorter than a step.
        return min(self.longest, max(1, tokens // CONTEXT_STEP_TOKENS) * CONTEXT_STEP_TOKENS)

    def _chunk(self, sizes: Sizes, share: int) -> int:
        least = min(CHUNK_FLOOR_TOKENS, sizes.context_tokens)
        # What the context takes is counted with the context.
        fixed = self.charges.workspace_bytes(replace(sizes, prefill_chunk=least))
        for chunk in self._chunks(sizes.context_tokens):
            candidate = replace(sizes, prefill_chunk=chunk)
            if self.charges.workspace_bytes(candidate) - fixed <= share // CHUNK_PART:
                return chunk
        return least

    def _chunks(self, context_tokens: int) -> list[int]:
        """Chunks that may be chosen, largest first."""
        powers, chunk = [], self._top_chunk()
        while chunk > CHUNK_FLOOR_TOKENS:
            powers.append(chunk)
            chunk //= 2
        return [chunk for chunk in powers if chunk <= context_tokens]

    def _top_chunk(self) -> int:
        if not self.charges.joins_chunks:
            return CHUNK_TOP_TOKENS
        chunk = JOINED_CHUNK_TOP_TOKENS
        while chunk > CHUNK_FLOOR_TOKENS:
            if chunk * self.charges.bytes_per_chunk_token <= JOINED_CHUNK_BYTES:
                break
            chunk //= 2
        return chunk
