"""Blocks of the KV cache: who owns which, exactly, after any history; refusals; bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_fakes import t0
from torch.utils._python_dispatch import TorchDispatchMode

from hotset.core.config import EngineConfig
from hotset.core.errors import RequestError
from hotset.core.geometry import AttentionLayer
from hotset.kernels.attention import AttentionKernels, ring_blocks
from hotset.runtime.kv_blocks import BlockAllocator
from hotset.runtime.kv_pool import KVPool, kv_pool_bytes
from hotset.runtime.kv_prefill import PrefillStep
from hotset.runtime.planning import plan_engine

BLOCK_TOKENS = 4


def layer(index: int, window: int | None = None, *, heads: int = 2, dim: int = 8) -> AttentionLayer:
    return AttentionLayer(
        path=f"layers.{index}",
        index=index,
        num_heads=2 * heads,
        num_kv_heads=heads,
        key_dim=dim,
        value_dim=dim // 2,
        window=window,
    )


LAYERS = (layer(0), layer(1, 6), layer(3), layer(4, 6, heads=1), layer(5, 9))


def make_pool(
    num_rows: int = 3, context_tokens: int = 30, full_tokens: int | None = None
) -> KVPool:
    return KVPool(
        LAYERS,
        num_rows=num_rows,
        context_tokens=context_tokens,
        dtype=torch.float32,
        device=torch.device("cpu"),
        block_tokens=BLOCK_TOKENS,
        full_tokens=full_tokens,
    )


def check_accounts(pool: KVPool, owned_tokens: dict[int, int]) -> None:
    """Every block of every kind has at most one owner, and none is lost."""
    for window, kind in pool.kinds.items():
        blocks: list[int] = []
        for row in range(pool.num_rows):
            needed = -(-owned_tokens.get(row, 0) // BLOCK_TOKENS)
            assert kind.num_owned[row] == min(needed, kind.row_blocks), (window, row)
            blocks += kind.table_RN[row, : kind.num_owned[row]].tolist()
            assert (kind.table_RN[row, kind.num_owned[row] :] == 0).all()
        assert len(set(blocks)) == len(blocks) == kind.allocator.num_used
        total = kind.allocator.num_used + kind.allocator.num_free
        assert total == len(pool.pools[0 if window is None else 1 if window == 6 else 5][0])
        assert all(0 <= block < total for block in blocks)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["open", "reserve", "close"]), st.integers(0, 40))))
def test_accounts_are_exact_after_any_history(history: list[tuple[str, int]]) -> None:
    """With room for half of what all rows together may ask for."""
    pool, owned = make_pool(full_tokens=44), {}
    for action, number in history:
        before = dict(owned)
        try:
            if action == "open":
                owned[pool.open()] = 0
            elif owned:
                row = sorted(owned)[number % len(owned)]
                if action == "close":
                    pool.close(row)
                    del owned[row]
                else:
                    pool.reserve(row, number)
                    owned[row] = max(owned[row], number)
        except RequestError:
            assert owned == before
        check_accounts(pool, owned)
    for row in list(owned):
        pool.close(row)
    check_accounts(pool, {})


def test_rows_run_out() -> None:
    pool = make_pool(num_rows=2)
    assert {pool.open(), pool.open()} == {0, 1}
    with pytest.raises(RequestError, match="all 2 rows of the KV cache are in use"):
        pool.open()
    pool.close(0)
    assert pool.open() == 0


def test_blocks_run_out_with_numbers_and_without_harm() -> None:
    pool = make_pool(full_tokens=32)
    first, second = pool.open(), pool.open()
    pool.reserve(first, 20)
    with pytest.raises(RequestError, match=r"3 free blocks of 4 tokens.*13 tokens needs 4 more"):
        pool.reserve(second, 13)
    check_accounts(pool, {first: 20, second: 0})  # no ring was taken either
    pool.reserve(second, 12)
    pool.close(first)
    pool.reserve(second, 30)


def test_a_row_is_at_most_the_context() -> None:
    pool = make_pool(context_tokens=30)
    row = pool.open()
    pool.reserve(row, 30)
    with pytest.raises(RequestError, match="31 tokens do not fit the context of 30"):
        pool.reserve(row, 31)


def test_whole_context_for_every_row_by_default() -> None:
    pool = make_pool(num_rows=3, context_tokens=30)
    for _ in range(3):
        pool.reserve(pool.open(), 30)


def test_our_own_mistakes_are_caught() -> None:
    pool = make_pool()
    row = pool.open()
    pool.reserve(row, 5)
    with pytest.raises(AssertionError):
        pool.grow(row, 9)  # only 8 tokens have blocks
    pool.close(row)
    for misuse in (lambda: pool.close(row), lambda: pool.reserve(row, 1)):
        with pytest.raises(AssertionError):
            misuse()
    allocator = BlockAllocator(4)
    blocks = allocator.allocate(3)
    allocator.free(blocks[:1])
    for freed in (blocks[:1], [blocks[1], blocks[1]], [99]):
        with pytest.raises(AssertionError):
            allocator.free(freed)
    with pytest.raises(AssertionError):
        allocator.allocate(3)


def test_a_closed_row_starts_anew() -> None:
    pool = make_pool()
    row = pool.open()
    pool.reserve(row, 10)
    pool.grow(row, 10)
    assert pool.lengths[row] == 10
    pool.close(row)
    assert pool.open() == row and pool.lengths[row] == 0


@pytest.mark.parametrize("block_tokens", [1, 4, 32])
def test_a_ring_holds_its_window_wherever_it_begins(block_tokens: int) -> None:
    for window in range(1, 70):
        blocks = ring_blocks(window, block_tokens)
        spans = [
            (length - 1) // block_tokens - max(0, length - window) // block_tokens + 1
            for length in range(1, 3 * window + 2 * block_tokens)
        ]
        assert max(spans) == blocks


def test_bytes_are_what_was_said() -> None:
    assert (
        kv_pool_bytes([layer(0)], num_rows=1, context_tokens=4, element_bytes=2, block_tokens=4)
        == 4 * 2 * (8 + 4) * 2
    )
    for full_tokens in (None, 44):
        pool = make_pool(full_tokens=full_tokens)
        sizes = {"num_rows": 3, "context_tokens": 30, "block_tokens": BLOCK_TOKENS}
        said = kv_pool_bytes(LAYERS, element_bytes=4, full_tokens=full_tokens, **sizes)
        assert pool.nbytes == said
    # A ring is the window and what rounding adds, not the context.
    assert pool.kinds[6].row_blocks == 3 and pool.kinds[None].row_blocks == 8
    assert make_pool(context_tokens=5).kinds[9].row_blocks == 2


@pytest.mark.parametrize("max_batch", [1, 3, 8])
@pytest.mark.parametrize("kv_tokens", [None, 5000])
def test_the_plan_has_room_for_the_pool(max_batch: int, kv_tokens: int | None) -> None:
    """Rounding up to blocks and rings included, whatever the lengths."""
    geometry = replace(
        t0(),
        attention=LAYERS,
        kv_bytes_per_token=2 * (2 * 12 + 2 * 12),  # layers 0 and 3, keys of 8 and values of 4
        kv_fixed_bytes=2 * 12 * (2 * 6 + 6 + 2 * 9),  # windows of layers 1, 4 and 5
    )
    for context in (33, 1024, 1055):
        config = EngineConfig(
            model="m",
            device="cpu",
            context_tokens=context,
            prefill_chunk=16,
            max_batch=max_batch,
            kv_tokens=kv_tokens,
        )
        _, plan = plan_engine(geometry, config)
        assert plan.kv_tokens == (kv_tokens or context * max_batch)
        said = plan.device["KV cache"] + plan.device["KV blocks"]
        sizes = {"num_rows": max_batch, "context_tokens": context, "full_tokens": plan.kv_tokens}
        assert kv_pool_bytes(LAYERS, element_bytes=2, **sizes) <= said
        without = plan.device["KV cache"]  # the control: rounding does take something
        assert kv_pool_bytes(LAYERS, element_bytes=2, **sizes) > without


def test_poison_is_everywhere() -> None:
    pool = KVPool(
        LAYERS,
        num_rows=1,
        context_tokens=8,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        poison=True,
    )
    assert all(tensor.isnan().all() for pair in pool.pools.values() for tensor in pair)


class Copies(TorchDispatchMode):
    """Bytes of each tensor that is gathered or joined."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.index, torch.ops.aten.cat):
            self.num_bytes.append(out.nbytes)
        return out


def test_a_later_chunk_copies_what_it_sees_once() -> None:
    """As the plan charges it: gathered from blocks, new tokens included, and not joined."""
    pool, kernels = make_pool(), AttentionKernels("reference")
    row = pool.open()

    def states(num_tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        source = torch.Generator().manual_seed(seed)
        shape = (1, 2, num_tokens)
        return tuple(torch.randn(*shape, dim, generator=source) for dim in (8, 4))

    whole = [torch.cat(pair, dim=2)[0] for pair in zip(states(18, 0), states(9, 1), strict=True)]
    step = PrefillStep(pool, row, 18, kernels=kernels)
    step.attention(LAYERS[0]).update(*states(18, 0))
    step.commit()
    view = PrefillStep(pool, row, 9, kernels=kernels).attention(LAYERS[0])
    new = states(9, 1)
    with Copies() as copies:
        view.update(*new)
    # 27 tokens are 7 blocks of 4; what is written are the 9 new ones.
    large = sorted(size for size in copies.num_bytes if size > 9 * 2 * 8 * 4)
    assert large == [28 * 2 * 4 * 4, 28 * 2 * 8 * 4]
    for got, want in zip(view._attended, whole, strict=True):
        assert torch.equal(got, want)
