"""Whether missing records are read in place or staged by the copy engine, whether quantised ones
are dequantised before they are multiplied, and sizes of blocks.

Pure arithmetic on counts, bytes and rates. In place, a record is read once for each kernel block
that has tokens for it, at the zero-copy rate; staged, it is copied once, beside what the device
computes, and each copy and each group takes a moment to set off. Neither changes a bit of the
output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from hotset.core.config import STAGING
from hotset.core.costmodel import Rates
from hotset.core.geometry import ExpertSpec

# H200 behind PCIe 5.0 x16, GB/s: kernels reading page-locked memory, and long copies.
LINK_GBPS = 50.9
COPY_GBPS = 55.2
# What a copy takes beside its bytes: single ones of 1.5 MiB reach 50.1 GB/s, long ones 55.3 (same
# machine), and 1.57 MB (1/50.1 - 1/55.3) are 3 us.
COPY_US = 3.0
# Launches, events and an address row for a group, in host time that the device may wait for: INT4
# prompts of 8,192 tokens took the host 0.6 ms for each further group (13.6 ms a layer in 12 groups,
# 7.4 in 3, where device and link take 4.2; same machine).
GROUP_US = 600.0
# The same machine multiplies the tokens of many experts at this rate.
PRODUCT_TFLOPS = 394.0

# Buffers of the staging ring: one is computed on while the other is filled.
NUM_BUFFERS = 2

# A layer that used so many of its experts expects the next one to do the same: then as many of the
# next layer's groups as there are idle buffers may set off before its routing is known. What it
# does not use of them has crossed the link for nothing.
PREFETCH_SHARE = 0.95

# FP32 outputs of experts are kept until they are added to their tokens' sums: so many bytes at
# most, and of no more tokens than fill a large card (4,096 with 8 choices: 256 blocks of 128).
_OUTPUT_BYTES = 256 * 2**20
_MOST_BLOCK_TOKENS = 4096
_LEAST_BLOCK_TOKENS = 256

# By format: from so many tokens of an expert on average its weights are made once, beforehand, and
# not in registers once for each kernel block. From rates and counts of instructions of an H200, not
# timed: a weight of 4 bits made in registers and multiplied with 128 tokens takes 0.3 and 0.4 ps,
# one after the other; dequantised, 1.0 for the 4 bytes that are written and read, then 0.4 for each
# 128 tokens. So with one block of 128 tokens an expert it does not pay, with two it begins to.
# `benchmarks/dequantise_table.py` times both ways and prints the numbers that belong here.
DEQUANTISE_TOKENS = {"fp8": 128, "int4": 128, "nvfp4": 128, "mxfp4": 128, "lossless": 128}
# Dequantised weights at a time. Of Qwen3-30B-A3B they are 28 experts, enough blocks of 128 tokens
# to fill a large card a few times over; more would only take memory from slots.
_DEQUANTISED_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Reads:
    """What a layer of one forward reads of the records that have no slot, and what it computes.

    Attributes:
        missing: routed experts without a slot, ascending.
        num_multiplied: (expert, kernel block) pairs among them that multiply with the record as it
            is read.
        num_dequantised: experts among them that are dequantised first, for all blocks.
        record_bytes: of one.
        flops: of all experts' products, those with a slot included.
    """

    missing: Sequence[int]
    num_multiplied: int
    num_dequantised: int
    record_bytes: int
    flops: float


@dataclass(frozen=True)
class StagingRule:
    """Chooses for one layer of one forward.

    Attributes:
        mode: `in-place` or `ring` forces it; `None` takes the cheaper.
        link_gbps, copy_gbps, product_tflops: of this machine.
    """

    mode: str | None = None
    link_gbps: float = LINK_GBPS
    copy_gbps: float = COPY_GBPS
    product_tflops: float = PRODUCT_TFLOPS

    def __post_init__(self) -> None:
        assert self.mode is None or self.mode in STAGING, self.mode

    @classmethod
    def at(cls, mode: str | None, rates: Rates) -> StagingRule:
        """The rule of a machine; its products go at an H200's rate where nobody knows theirs."""
        return cls(
            mode,
            link_gbps=rates.link_gbps,
            copy_gbps=rates.copy_gbps,
            product_tflops=rates.expert_tflops or rates.gemm_tflops or PRODUCT_TFLOPS,
        )

    def use_ring(self, reads: Reads, *, group_records: int) -> bool:
        """Whether staging is the cheaper.

        Args:
            group_records: records of a staging buffer.
        """
        if self.mode is not None:
            return self.mode == "ring"
        if not reads.missing:
            return False
        return self._staged_us(reads, group_records) < self._in_place_us(reads)

    def _in_place_us(self, reads: Reads) -> float:
        """One group: products run beside the reads of their own kernel; what dequantises reads
        alone."""
        record_us = reads.record_bytes / self.link_gbps / 1e3
        products_us = reads.flops / self.product_tflops / 1e6
        beside_us = max(reads.num_multiplied * record_us, products_us)
        return max(beside_us + reads.num_dequantised * record_us, GROUP_US)

    def _staged_us(self, reads: Reads, group_records: int) -> float:
        """Link and device side by side, except for one of the groups on either: the link's first
        one, or the device's last."""
        missing = reads.missing
        num_copies = 1 + sum(b != a + 1 for a, b in pairwise(missing))
        num_groups = -(-len(missing) // group_records)
        link_us = len(missing) * reads.record_bytes / self.copy_gbps / 1e3 + num_copies * COPY_US
        device_us = max(reads.flops / self.product_tflops / 1e6, num_groups * GROUP_US)
        return max(link_us, device_us) + min(link_us, device_us) / num_groups


@dataclass(frozen=True)
class DequantiseRule:
    """Chooses for one block of tokens, by its shape and format alone: sums may round elsewhere.

    Attributes:
        expert_tokens: from so many tokens of an expert on average; `None` takes the format's.
    """

    expert_tokens: float | None = None

    def pays(self, num_tokens: int, *, spec: ExpertSpec, top_k: int, num_experts: int) -> bool:
        if spec.is_plain:
            return False
        least = self.expert_tokens
        if least is None:
            least = DEQUANTISE_TOKENS[spec.packed_format.name]
        return num_tokens * top_k >= least * num_experts


def dequantised_records(spec: ExpertSpec, num_experts: int) -> int:
    """Records of a layer that are dequantised at a time; none where they are plain."""
    if spec.is_plain:
        return 0
    return min(num_experts, max(1, _DEQUANTISED_BYTES // spec.as_plain().record_bytes))


def block_tokens(spec: ExpertSpec, top_k: int) -> int:
    """Tokens of whose choices outputs are kept at a time, a power of two: by the model alone.

    Where kernels do not join blocks (`Kernels.joins_blocks`) larger ones are cut to it.
    """
    fits = _OUTPUT_BYTES // (4 * top_k * spec.hidden)
    size = _LEAST_BLOCK_TOKENS
    while size * 2 <= min(fits, _MOST_BLOCK_TOKENS):
        size *= 2
    return size
