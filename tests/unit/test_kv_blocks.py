"""Blocks that rows share: who holds each, exactly; found by all tokens before them; bounded."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hotset.core.geometry import AttentionLayer
from hotset.runtime.kv_blocks import BlockAllocator, PrefixIndex
from hotset.runtime.kv_pool import KVPool

BLOCK = 4


def make_pool(*, num_rows: int = 3, full_tokens: int = 40, grain: int = BLOCK) -> KVPool:
    return KVPool(
        [AttentionLayer("layers.0", 0, 2, 2, 8, 8, None)],
        num_rows=num_rows,
        context_tokens=32,
        dtype=torch.float32,
        device=torch.device("cpu"),
        block_tokens=BLOCK,
        full_tokens=full_tokens,
        prefix_grain=grain,
    )


def take_in(pool: KVPool, ids: list[int], most: int | None = None) -> int | None:
    """Opens a row, fills it and keeps it; `None` where there is no room."""
    assert pool.prefixes is not None
    shared = pool.prefixes.find(ids)
    if not pool.has_room(most or len(ids), shared):
        return None
    row = pool.open(most or len(ids), shared)
    pool.reserve(row, len(ids))
    pool.grow(row, len(ids) - pool.lengths[row])
    pool.keep(row, ids)
    return row


def blocks_of(pool: KVPool, row: int) -> list[int]:
    kind = pool.kinds[None]
    return kind.table_RN[row, : kind.num_owned[row]].tolist()


def test_rows_that_begin_alike_hold_the_same_blocks() -> None:
    pool = make_pool()
    first = take_in(pool, list(range(10)))
    second = take_in(pool, [*range(8), 20, 21])
    assert first is not None and second is not None
    ours, theirs = blocks_of(pool, first), blocks_of(pool, second)
    assert ours[:2] == theirs[:2] and ours[2] != theirs[2]
    pool.close(first)
    assert pool.num_full_blocks == (10, 3), "the second still holds what they shared"
    pool.close(second)
    assert pool.num_full_blocks == (10, 0)


def test_a_block_is_found_by_all_tokens_before_it() -> None:
    """The same four tokens behind others are other keys and values."""
    pool = make_pool()
    assert pool.prefixes is not None
    take_in(pool, [1, 2, 3, 4, 5, 6, 7, 8])
    assert len(pool.prefixes.find([1, 2, 3, 4, 5, 6, 7, 8, 9])) == 2
    assert len(pool.prefixes.find([1, 2, 3, 4, 0, 6, 7, 8, 9])) == 1
    assert pool.prefixes.find([9, 2, 3, 4, 5, 6, 7, 8, 9]) == []
    assert pool.prefixes.find([5, 6, 7, 8, 9]) == []


def test_one_token_at_least_is_left_to_take_in() -> None:
    pool = make_pool()
    assert pool.prefixes is not None
    take_in(pool, list(range(8)))
    assert len(pool.prefixes.find(list(range(8)))) == 1
    assert len(pool.prefixes.find(list(range(9)))) == 2
    assert pool.prefixes.find([0]) == []


def test_prefixes_are_reused_in_whole_grains() -> None:
    pool = make_pool(grain=2 * BLOCK)
    assert pool.prefixes is not None
    take_in(pool, list(range(15)))
    assert len(pool.prefixes.find(list(range(20)))) == 2, "the third block is no whole grain"
    assert pool.prefixes.find(list(range(8))) == [], "one token of it must be left"


def test_a_grain_is_found_as_it_was_computed() -> None:
    """Not put together from blocks of texts that only begin alike: low bits of those differ."""
    pool = make_pool(grain=2 * BLOCK)
    assert pool.prefixes is not None
    other = take_in(pool, [0, 1, 2, 3, 20, 21, 22, 23, 24])
    own = take_in(pool, list(range(9)))
    assert other is not None and own is not None
    assert pool.prefixes.find(list(range(20))) == blocks_of(pool, own)[:2]
    assert pool.prefixes.find([0, 1, 2, 3, 20, 21, 22, 23, 9]) == blocks_of(pool, other)[:2]


def test_what_is_kept_gives_way_oldest_first() -> None:
    pool = make_pool(full_tokens=24)  # 6 blocks
    assert pool.prefixes is not None
    for start in (100, 200):
        row = take_in(pool, list(range(start, start + 9)))  # 2 full blocks and a begun one
        assert row is not None
        pool.close(row)
    row = take_in(pool, list(range(300, 309)))  # the two unnamed blocks, and the oldest named one
    assert row is not None
    # Of the first text the last block went first: without it the first is of use still.
    assert len(pool.prefixes.find(list(range(100, 109)))) == 1
    assert len(pool.prefixes.find(list(range(200, 209)))) == 2


def test_a_promise_holds_whatever_others_take() -> None:
    pool = make_pool(full_tokens=40)  # 10 blocks
    first = take_in(pool, list(range(4)), most=24)  # 1 of 6
    assert first is not None
    assert take_in(pool, list(range(50, 54)), most=20) is None, "5 more are not there"
    second = take_in(pool, list(range(50, 54)), most=16)
    assert second is not None
    assert not pool.has_room(1)
    pool.reserve(first, 24)
    pool.reserve(second, 16)
    assert pool.num_full_blocks == (10, 10)


@dataclass
class Books:
    """What is true of the rows that are open."""

    texts: dict[int, list[int]] = field(default_factory=dict)


# Texts over two ids, so that many begin alike.
TEXTS = st.lists(st.integers(0, 1), min_size=1, max_size=30)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.booleans(), TEXTS, st.integers(0, 9)), max_size=25))
def test_the_books_are_exact_after_any_history(history: list[tuple[bool, list[int], int]]) -> None:
    """A model of the pool's content: a block holds the tokens that were written to it."""
    pool, books = make_pool(), Books()
    content: dict[int, tuple[int, ...]] = {}
    for opens, text, pick in history:
        if opens:
            assert pool.prefixes is not None
            num_shared = len(pool.prefixes.find(text))
            row = take_in(pool, text, most=min(32, len(text) + pick))
            if row is not None:
                books.texts[row] = text
                for index, block in enumerate(blocks_of(pool, row)):
                    if index >= num_shared:
                        content[block] = tuple(text[index * BLOCK : (index + 1) * BLOCK])
        elif books.texts:
            row = sorted(books.texts)[pick % len(books.texts)]
            pool.close(row)
            del books.texts[row]
        check(pool, books, content)


def check(pool: KVPool, books: Books, content: dict[int, tuple[int, ...]]) -> None:
    held: set[int] = set()
    for row, text in books.texts.items():
        blocks = blocks_of(pool, row)
        held.update(blocks)
        found = [token for block in blocks for token in content[block]]
        assert found[: len(text)] == text, "a row's blocks hold its own text"
    assert pool.num_full_blocks == (10, len(held))
    allocator = pool.kinds[None].allocator
    assert allocator.num_free + allocator.num_used == 10


def test_our_own_mistakes_are_caught() -> None:
    allocator = BlockAllocator(4)
    (block,) = allocator.allocate(1)
    with pytest.raises(AssertionError):
        allocator.hold([block])  # it has no name
    allocator.name(block, b"x")
    allocator.hold([block])
    allocator.free([block])
    assert allocator.num_used == 1
    allocator.free([block])
    with pytest.raises(AssertionError):
        allocator.free([block])
    with pytest.raises(AssertionError):
        PrefixIndex(allocator, block_tokens=4, grain_tokens=6)
    pool = make_pool()
    row = pool.open()
    with pytest.raises(AssertionError):
        pool.keep(row, [1])  # it has no keys and values of it


def test_a_name_that_ignores_what_came_before_is_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The control of the history test: names of a block's own tokens alone mix texts up."""

    def chain(self: PrefixIndex, ids: list[int]) -> list[bytes]:
        ends = range(BLOCK, len(ids) + 1, BLOCK)
        return [bytes(ids[end - BLOCK : end]) for end in ends]

    monkeypatch.setattr(PrefixIndex, "_chain", chain)
    pool = make_pool()
    assert pool.prefixes is not None
    take_in(pool, [1, 2, 3, 4, 5, 6, 7, 8])
    assert pool.prefixes.find([5, 6, 7, 8, 9]) != []
