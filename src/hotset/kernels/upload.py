"""A few numbers of the host's, taken by a kernel that reads page-locked memory where it lies.

A copy by the copy engine waits there for every record that is on its way, which may be milliseconds
of a prompt; a kernel's reads go between them. Knows words and addresses.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from hotset.kernels.relaunch import Relaunch

WORD_BYTES = 4
_WORDS_OF_A_PROGRAM = 512


# Where rows of the table and parts of tensors begin is not worth a compilation, which would come in
# the middle of a prompt.
@triton.jit(do_not_specialize=["index", "num_words"], do_not_specialize_on_alignment=["out"])
def _upload_kernel(places_N, out, index, num_words, WORDS: tl.constexpr):
    source = tl.load(places_N + index).to(tl.pointer_type(tl.int32))
    word = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    inside = word < num_words
    tl.store(out + word, tl.load(source + word, mask=inside, other=0), mask=inside)


def launch_upload(places_N: torch.Tensor, index: int, out: torch.Tensor) -> None:
    """Copies what lies at an address to `out`, ordered on the current stream.

    Args:
        places_N: int64 [N] on the device, addresses of page-locked memory.
        index: of the place to read, which is not written before the kernel has run.
        out: contiguous, whole 32-bit words.
    """
    num_words = out.numel() * out.element_size() // WORD_BYTES
    words = out.view(-1).view(torch.int32)
    grid = (triton.cdiv(num_words, _WORDS_OF_A_PROGRAM),)
    _uploads()(grid, (places_N, words), (index, num_words))


@triton.jit(
    do_not_specialize=["index", "first", "stop", "num_experts"],
    do_not_specialize_on_alignment=["row_E"],
)
def _choose_kernel(places_N, row_E, out_E, index, first, stop, num_experts, EXPERTS: tl.constexpr):
    source = tl.load(places_N + index).to(tl.pointer_type(tl.int64))
    expert = tl.arange(0, EXPERTS)
    real = expert < num_experts
    chosen = tl.load(source + expert, mask=real, other=0)
    chosen = tl.where(chosen == 0, tl.load(row_E + expert, mask=real, other=0), chosen)
    within = (expert >= first) & (expert < stop)
    tl.store(out_E + expert, tl.where(within, chosen, 0), mask=real)


def launch_choose(
    places_N: torch.Tensor,
    index: int,
    row_E: torch.Tensor,
    out_E: torch.Tensor,
    *,
    first: int,
    stop: int,
) -> None:
    """Addresses of the experts `first` .. `stop` - 1, of the others 0.

    Args:
        places_N, index: as of `launch_upload`; there lie E addresses, int64.
        row_E: what counts where such an address is 0.
        out_E: written.
    """
    num_experts = row_E.numel()
    run = _chooses(triton.next_power_of_2(num_experts))
    run((1,), (places_N, row_E, out_E), (index, first, stop, num_experts))


@cache
def _chooses(experts: int) -> Relaunch:
    return Relaunch(_choose_kernel, {"EXPERTS": experts, "num_warps": 4})


@cache
def _uploads() -> Relaunch:
    return Relaunch(_upload_kernel, {"WORDS": _WORDS_OF_A_PROGRAM, "num_warps": 4})
