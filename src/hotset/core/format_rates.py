"""What experts of a format take on a device beyond their bytes, as shares of its memory's rate.

Knows constants by the name of a format and where each was measured; knows no machine and no step.
The shares are an H200's; other GPUs take them too, as nobody has measured theirs.
"""

from __future__ import annotations

from hotset.core.geometry import ExpertSpec

# One token's kernels reading records in slots, of the rate of device memory. From the rows of
# `bench experts` at commit 36f9174 (8 layers of the 30B-A3B shape, all in slots; us a layer INT4
# 13.6, MXFP4 15.1, FP8 16.6, NVFP4 18.8, lossless 24.7, BF16 22.3), 4,300 GB/s, and 6 us of a layer
# that no byte explains (`decode_experts` of the machine).
SLOT_SHARE = {
    "plain": 1.0,
    "lossless": 0.71,
    "fp8": 0.83,
    "int4": 0.60,
    "mxfp4": 0.51,
    "nvfp4": 0.39,
}

# Records of a prompt read and plain ones written, of the same rate. Profiles of 4 layers of that
# shape, 8,192 tokens (decision 0015): 0.43 to 0.57 ms a layer, for bytes that memory moves in 0.35
# (4 bits) to 0.42 (FP8). Which format took which was not kept; lossless ones were not timed.
DEQUANTISE_SHARE = {
    "lossless": 0.75,
    "fp8": 0.75,
    "int4": 0.75,
    "mxfp4": 0.75,
    "nvfp4": 0.75,
}


def slot_read_bytes(spec: ExpertSpec) -> float:
    """Plain bytes that take as long to read from device memory as a record in a slot does."""
    up = sum(field.nbytes for field in spec.layout.fields if field.name.startswith("up"))
    down = spec.record_bytes - up
    return up / SLOT_SHARE[spec.up_format.name] + down / SLOT_SHARE[spec.down_format.name]


def dequantise_bytes(spec: ExpertSpec) -> float:
    """Plain bytes that take as long to move as it takes to read a record and to write its weights.

    Where one projection is plain, it goes at the other one's share: both are copied together.
    """
    moved = spec.record_bytes + spec.as_plain().record_bytes
    return moved / DEQUANTISE_SHARE[spec.packed_format.name]
