"""Whole records dequantised once: plain records for a prompt's many tokens to multiply with.

    plain weight = round(value(code) * scale), biases as they are

A prompt uses each weight of a staged record for hundreds of tokens, once for each block of them;
dequantised beforehand it is a plain record to the grouped kernels. Its bits are those that the
expert kernels make in registers (`packed`), and so are the products'. Knows addresses, not where
they lead.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from hotset.core.geometry import ExpertSpec
from hotset.kernels.device import field_pointer, is_interpreted, load_tile
from hotset.kernels.launch import DEQUANTISE, Tile
from hotset.kernels.lossless import lossless_tile
from hotset.kernels.packed import Matrix, input_columns, packed_tile
from hotset.kernels.relaunch import Relaunch


# Addresses are those of any range of experts: where they begin says nothing worth a compilation,
# which would come in the middle of a prompt.
@triton.jit(do_not_specialize_on_alignment=["address_N", "counts_N"])
def _dequantise_kernel(
    address_N,
    counts_N,
    out,
    OUT_BYTES: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    M: tl.constexpr,
    OUT_OFFSET: tl.constexpr,
    DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    index = tl.program_id(1)
    record = tl.load(address_N + index)
    if (record == 0) | (tl.load(counts_N + index) == 0):
        return
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < NUM_ROWS
    nowhere = tl.full((), 0, tl.int64)
    plain = field_pointer(out.to(tl.int64) + index.to(tl.int64) * OUT_BYTES, OUT_OFFSET, DTYPE)
    for first in range(0, M.columns, COLS):
        cols = first + tl.arange(0, COLS)
        real = inside[:, None] & (cols < M.columns)[None, :]
        if M.codes == "plain":
            source = field_pointer(record, M.offset, DTYPE)
            tile = load_tile(source + rows[:, None] * M.columns + cols[None, :], real, False)
        elif M.codes == "lossless":
            tile = lossless_tile(
                record, nowhere, rows, inside, first, M, DTYPE, ROWS, COLS, False, False, INTERPRET
            )
        else:
            tile = packed_tile(
                record,
                nowhere,
                rows,
                inside,
                first,
                M,
                DTYPE,
                ROWS,
                COLS,
                False,
                False,
                INTERPRET,
            )
        columns = input_columns(record, nowhere, rows, cols, M, False)
        tl.store(plain + rows[:, None] * M.columns + columns[None, :], tile, mask=real)


def dequantise_records(
    address_N: torch.Tensor,
    spec: ExpertSpec,
    out_ND: torch.Tensor,
    counts_N: torch.Tensor | None = None,
) -> None:
    """Writes records as plain ones; see `dispatch.Kernels.dequantise_records`."""
    counts_N = address_N if counts_N is None else counts_N
    for num_tiles, run in _launches(spec, out_ND.shape[1]):
        run((num_tiles, address_N.numel()), (address_N, counts_N, out_ND))


@cache
def _launches(spec: ExpertSpec, out_bytes: int) -> tuple[tuple[int, Relaunch], ...]:
    """Of each matrix its tiles, and what launches them: found once for a format, as it takes the
    host as long as the launches."""
    offset = {field.name: field.offset for field in spec.as_plain().layout.fields}
    found = []
    for name, matrix, num_rows in _matrices(spec):
        tile = DEQUANTISE[matrix.per_word]
        constants = {
            "OUT_BYTES": out_bytes,
            "NUM_ROWS": num_rows,
            "M": matrix,
            "OUT_OFFSET": offset[name],
            "DTYPE": getattr(tl, spec.dtype),
            "INTERPRET": is_interpreted(_dequantise_kernel),
            **_launch_shape(tile, matrix),
        }
        run = Relaunch(_dequantise_kernel, constants)
        found.append((triton.cdiv(num_rows, tile.rows), run))
    return tuple(found)


def _matrices(spec: ExpertSpec) -> list[tuple[str, Matrix, int]]:
    """Each field of the plain record with its rows; a bias is a matrix of one row."""
    up, down = Matrix.of(spec, "up"), Matrix.of(spec, "down")
    up_rows = (2 if spec.gate.has_gate else 1) * spec.intermediate
    found = [("up", up, up_rows), ("down", down, spec.hidden)]
    if spec.has_bias:
        plain = spec.as_plain()
        for name, size, like in (("up_bias", up_rows, "up"), ("down_bias", spec.hidden, "down")):
            place = spec.layout.field(name).offset
            row = replace(Matrix.of(plain, like), columns=size, row_words=size, offset=place)
            found.append((name, row, 1))
    return found


def _launch_shape(tile: Tile, matrix: Matrix) -> dict[str, Any]:
    cols = min(tile.cols, max(32, triton.next_power_of_2(matrix.columns)))
    return {
        "ROWS": tile.rows,
        "COLS": cols,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
