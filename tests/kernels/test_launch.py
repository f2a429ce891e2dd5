"""Launch tables: complete, legal for the hardware, and chosen by shapes alone."""

from __future__ import annotations

import pytest

from hotset.kernels.launch import (
    GROUPED,
    ONE_TOKEN_DOWN,
    ONE_TOKEN_UP,
    ONE_TOKEN_UP_PACKED,
    grouped_tile,
    packed_one_token_tile,
    plain_one_token_tile,
    token_block,
)

KIB = 1024


def is_power_of_2(number: int) -> bool:
    return number & (number - 1) == 0


def test_tables_cover_every_dtype_and_block() -> None:
    assert set(GROUPED) == {(size, block) for size in (2, 4) for block in (16, 32, 64, 128)}
    assert set(ONE_TOKEN_UP) == set(ONE_TOKEN_DOWN) == {2, 4}
    tiles = [t for choices in GROUPED.values() for t in choices]
    for tile in tiles + list(ONE_TOKEN_UP.values()) + list(ONE_TOKEN_DOWN.values()):
        assert is_power_of_2(tile.rows) and is_power_of_2(tile.cols) and is_power_of_2(tile.warps)


@pytest.mark.parametrize("shared_kib", [99, 163, 227])
@pytest.mark.parametrize("key", GROUPED)
def test_a_tile_fits_the_card(key: tuple[int, int], shared_kib: int) -> None:
    size, block = key
    tile = grouped_tile(size, block, shared_kib * KIB)
    assert tile.stages >= 2
    assert tile.stages * (block + tile.rows) * tile.cols * size <= shared_kib * KIB


@pytest.mark.parametrize("block", [16, 32, 64, 128])
def test_tiles_that_fill_sum_in_the_same_order(block: int) -> None:
    filling, other = (grouped_tile(2, block, 227 * KIB, fill=fill) for fill in (True, False))
    assert filling.cols == other.cols
    assert (filling == other) == (block < 64)


def test_tiles_of_one_block_reduce_in_the_same_order() -> None:
    """A card may choose rows and stages; the order of a sum is the table's alone."""
    for tiles in GROUPED.values():
        assert len({tile.cols for tile in tiles}) == 1


@pytest.mark.parametrize(
    ("num_tokens", "block"),
    [(1, 16), (2, 16), (16, 16), (17, 32), (33, 64), (64, 64), (65, 64), (768, 64), (769, 128)],
)
def test_token_block(num_tokens: int, block: int) -> None:
    assert token_block(num_tokens, top_k=8, num_experts=128) == block


def test_up_to_64_tokens_an_expert_fits_one_block() -> None:
    assert all(token_block(t, top_k=2, num_experts=4) >= t for t in range(1, 65))


@pytest.mark.parametrize(("columns", "rows"), [(2048, 766), (3072, 768), (2049, 768), (2880, 2880)])
def test_registers_are_limited_only_where_no_thread_spills(columns: int, rows: int) -> None:
    tile = ONE_TOKEN_UP[2]
    assert plain_one_token_tile(tile, rows, columns).registers is None
    # Control: what it was measured with.
    assert plain_one_token_tile(tile, 768, 2048).registers == tile.registers == 64


@pytest.mark.parametrize(("rows", "columns"), [(2048, 1024), (2040, 768), (2048, 760)])
def test_programs_of_long_rows_take_one_tile(rows: int, columns: int) -> None:
    tile = ONE_TOKEN_DOWN[2]
    assert plain_one_token_tile(tile, rows, columns).tiles == 1
    assert plain_one_token_tile(tile, 2048, 768) == tile  # control


def test_short_rows_of_light_codes_come_in_pairs_of_tiles() -> None:
    """Rows of a tile are no part of a sum; columns are, and stay."""
    usual, short = ONE_TOKEN_UP_PACKED[8], packed_one_token_tile("up", 2048, 8, light=True)
    assert (short.rows, short.cols) == (2 * usual.rows, usual.cols)
    assert packed_one_token_tile("up", 2048, 8, light=False) == usual
    assert packed_one_token_tile("up", 4096, 8, light=True) == usual


def test_steps_begin_on_lines_where_that_takes_no_step_more() -> None:
    """Rows of 1,440 bytes begin at 4 places of a line, 96 bytes before them is the most; of 128
    codes a step no last one has room for that."""
    for name in ("up", "down"):
        tile = packed_one_token_tile(name, 2880, 8, light=True, period=4)
        assert tile.stride == 4 and -(-2880 // tile.cols) == -(-(2880 + 96 * 2) // tile.cols)
        assert packed_one_token_tile(name, 2880, 8, light=True).stride == 1
    assert packed_one_token_tile("down", 192, 8, light=True, period=4).stride == 1
