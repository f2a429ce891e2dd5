"""The device form of `gather.copy_records`: 16-byte loads, many in flight, any address."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from hotset.kernels.relaunch import Relaunch

# Words (int32) of one program: 256 threads with four 16-byte loads in flight each. A whole GPU of
# them keeps over 10 MiB in flight, a hundred times what the link's latency needs.
_CHUNK_WORDS = 4096
_WORD_BYTES = 4


@triton.jit
def _copy_kernel(sources_N, targets_N, NUM_WORDS: tl.constexpr, CHUNK: tl.constexpr):
    chunks: tl.constexpr = (NUM_WORDS + CHUNK - 1) // CHUNK
    record = tl.program_id(0) // chunks
    source = tl.load(sources_N + record)
    target = tl.load(targets_N + record)
    if (source == 0) | (target == 0):
        return
    source = tl.multiple_of(source.to(tl.pointer_type(tl.int32)), 16)
    target = tl.multiple_of(target.to(tl.pointer_type(tl.int32)), 16)
    word = (tl.program_id(0) % chunks) * CHUNK + tl.arange(0, CHUNK)
    if NUM_WORDS % CHUNK == 0:
        tl.store(target + word, tl.load(source + word))
    else:
        inside = word < NUM_WORDS
        tl.store(target + word, tl.load(source + word, mask=inside, other=0), mask=inside)


def launch_copy(sources_N: torch.Tensor, targets_N: torch.Tensor, nbytes: int) -> None:
    """See `gather.copy_records`."""
    num_words = nbytes // _WORD_BYTES
    programs = sources_N.numel() * triton.cdiv(num_words, _CHUNK_WORDS)
    if programs == 0:
        return
    _copies(num_words)((programs,), (sources_N, targets_N))


@cache
def _copies(num_words: int) -> Relaunch:
    constants = {"NUM_WORDS": num_words, "CHUNK": _CHUNK_WORDS, "num_warps": 8}
    return Relaunch(_copy_kernel, constants)
