"""What an indexer's scores choose: against lists, one query after the other."""

from __future__ import annotations

import pytest
import torch

from hotset.kernels.selection import choose, chosen_slots
from kernels.support import DEVICE

NEVER = -torch.inf


def test_the_highest_scores_ascending_and_then_nothing() -> None:
    scores = torch.tensor(
        [
            [0.5, -1.0, 2.0, 0.25, NEVER, NEVER],
            [-3.0, -1.0, -2.0, -0.5, -1.5, 7.0],
            [1.0, NEVER, NEVER, NEVER, NEVER, NEVER],
            [NEVER] * 6,
        ],
        device=DEVICE,
    )
    counts = torch.tensor([4, 6, 1, 0], dtype=torch.int32, device=DEVICE)
    chosen = choose(scores, counts, 3)
    assert chosen.tolist() == [[0, 2, 3], [1, 3, 5], [0, 6, 6], [6, 6, 6]]
    assert choose(scores, counts, 100).shape == (4, 6)


def test_of_equal_scores_the_earlier() -> None:
    """Zero has two signs, which are of two ranks; how many queries are together is not seen."""
    scores = torch.zeros(1, 5000, device=DEVICE)
    scores[0, 4000:] = 1.0
    counts = torch.tensor([5000], dtype=torch.int32, device=DEVICE)
    expected = [*range(48), *range(4000, 5000)]
    assert choose(scores, counts, 1048)[0].tolist() == expected
    together = choose(scores.repeat(300, 1), counts.repeat(300), 1048)
    assert together.tolist() == [expected] * 300


@pytest.mark.parametrize("pool", [1, 4])
@pytest.mark.parametrize("shared", [False, True])
def test_slots_against_lists(pool: int, shared: bool) -> None:
    source = torch.Generator().manual_seed(0)
    lengths = [0, 1, 3, 4, 5, 12, 31, 32, 33, 40]
    num_blocks, block_tokens, top_k = 5, 8, 3
    num_rows = 1 if shared else len(lengths)
    table = torch.randperm(num_rows * num_blocks, generator=source).view(num_rows, num_blocks).int()
    counts = [length // pool for length in lengths]
    scores = torch.randn(len(lengths), num_blocks * block_tokens // pool, generator=source)
    for row, count in enumerate(counts):
        scores[row, count:] = NEVER
    as_int = [torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (counts, lengths)]
    scores, table = scores.to(DEVICE), table.to(DEVICE)
    slots, number = chosen_slots(
        *(choose(scores, as_int[0], top_k), *as_int, table), pool=pool, block_tokens=block_tokens
    )
    assert slots.dtype == number.dtype == torch.int32
    assert slots.shape == (len(lengths), top_k * pool + pool - 1)
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        best = sorted(range(count), key=lambda c: -float(scores[row, c]))[:top_k]
        positions = [c * pool + j for c in sorted(best) for j in range(pool)]
        positions += range(count * pool, length)
        own = table[0 if shared else row].tolist()
        expected = [own[p // block_tokens] * block_tokens + p % block_tokens for p in positions]
        assert slots[row, : int(number[row])].tolist() == expected
