"""What both kernels of `products` share: which of up to four matrices a program works on."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
import triton
import triton.language as tl

_T = TypeVar("_T")

MAX_MATRICES = 4


@triton.jit
def pick(block, a, b, c, d, B: tl.constexpr, C: tl.constexpr, D: tl.constexpr):
    """`a` for blocks before B, then `b`, `c` before D, and `d`; all integers."""
    return tl.where(block < B, a, tl.where(block < C, b, tl.where(block < D, c, d)))


@triton.jit
def pick_address(block, a, b, c, d, B: tl.constexpr, C: tl.constexpr, D: tl.constexpr):
    """`pick` of pointers, as an integer: a hint of alignment must stand at the cast back."""
    a, b, c, d = a.to(tl.int64), b.to(tl.int64), c.to(tl.int64), d.to(tl.int64)
    return pick(block, a, b, c, d, B, C, D)


def arguments(
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    outs: Sequence[torch.Tensor],
    rows: int,
) -> list[torch.Tensor | int]:
    """A kernel's arguments behind its inputs: weights, biases, outputs, sizes and block ends.

    Args:
        biases: none, or one for each matrix.
        rows: of a block.
    """
    sizes = [w.shape[0] for w in weights]
    tensors = (*_four(weights), *_four(biases or outs), *_four(outs))
    return [*tensors, *_four(sizes), *block_ends(sizes, rows)[:-1]]


def _four(items: Sequence[_T]) -> list[_T]:
    """As many as a kernel has arguments for; those that are not there are never used."""
    return [*items, *[items[0]] * (MAX_MATRICES - len(items))]


def block_ends(sizes: Sequence[int], rows: int) -> list[int]:
    """Behind the last block of each matrix, of `rows` rows a block; `MAX_MATRICES` of them."""
    ends, total = [], 0
    for size in sizes:
        total += triton.cdiv(size, rows)
        ends.append(total)
    return ends + ends[-1:] * (MAX_MATRICES - len(ends))


def alignment(weights: Sequence[torch.Tensor]) -> int:
    """Bytes on whose multiples all of them begin, for hints to the compiler."""
    return 16 if all(w.data_ptr() % 16 == 0 for w in weights) else weights[0].element_size()
