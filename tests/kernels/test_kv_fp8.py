"""Keys and values in eight bits: codes are those of the formula, attention reads them exactly."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hotset.kernels.attention import AttentionKernels
from hotset.kernels.kv_fp8 import E4M3_NAN, dequantise, quantise, rounded
from kernels.attention_support import Shape, lay_out, make_rows
from kernels.support import DEVICE

BOTH = pytest.mark.parametrize(
    "kernels", [AttentionKernels("reference"), AttentionKernels("triton")]
)


def awkward(dtype: torch.dtype, width: int) -> torch.Tensor:
    """Rows [R, D]: of every size, zero, ties, subnormal codes, and what is no number."""
    source = torch.Generator().manual_seed(0)
    sizes = torch.logspace(-30, 30, 24)[:, None]
    rows = [torch.randn(24, width, generator=source) * sizes, torch.zeros(1, width)]
    rows.append(torch.arange(width)[None] / 1024)  # every second one is a tie of two codes
    rows.append(torch.linspace(-448, 448, width)[None])
    broken = torch.randn(3, width, generator=source)
    broken[0, 3], broken[1, 5], broken[2, 7] = torch.nan, torch.inf, -torch.inf
    return torch.cat([*rows, broken]).to(dtype).to(DEVICE)


def test_rounding_is_within_half_a_unit() -> None:
    """Of three bits behind the leading one, and of the smallest code."""
    x = awkward(torch.float32, 40)[:-3]
    codes, exponents = quantise(x)
    got, power = rounded(x).double(), 2.0 ** (exponents.double() - 127)[:, None]
    assert torch.all((got - x.double()).abs() <= (x.double().abs() / 16).maximum(power / 1024))
    # The least power that has room: half of it has none, and so no code is wasted.
    most = x.double().abs().amax(dim=1, keepdim=True)
    assert torch.all(most <= 448 * power)
    assert torch.all((most > 224 * power) | (exponents == 1)[:, None])
    assert torch.equal(rounded(rounded(x)), rounded(x)), "what was kept once stays as it is"
    assert not torch.any(codes & 0x7F == E4M3_NAN)


def test_what_is_no_number_is_none_afterwards() -> None:
    x = awkward(torch.float32, 40)[-3:]
    got = rounded(x)
    assert torch.equal(got.isnan(), ~x.isfinite())
    assert got[0].nan_to_num(0).abs().sum() > 0, "the others of its row stay"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_codes_are_exact_in_both_dtypes(dtype: torch.dtype) -> None:
    codes, exponents = quantise(awkward(dtype, 40)[:-3])
    assert torch.equal(dequantise(codes, exponents, dtype).double(), exact(codes, exponents))


def exact(codes: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """By the definition of the formats, in FP64."""
    c = codes.long()
    sign, e, m = 1 - 2.0 * (c >> 7), c >> 3 & 15, c & 7
    size = torch.where(e > 0, (8 + m) * 2.0 ** (e - 10), m * 2.0**-9)
    return sign * size * 2.0 ** (exponents.double() - 127)[..., None]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("width", [16, 40])
def test_both_kernels_write_the_same_codes(dtype: torch.dtype, width: int) -> None:
    """A row of the cache that ends in the middle of a block, tokens of three heads."""
    rows = awkward(dtype, width)
    new = rows.view(1, -1, 3, width)  # [B, T, Hkv, D]
    found = []
    for name in ("reference", "triton"):
        pools = [torch.zeros(3, 8, 3, width, dtype=torch.uint8, device=DEVICE) for _ in range(2)]
        powers = [torch.zeros(3, 8, 3, dtype=torch.uint8, device=DEVICE) for _ in range(2)]
        table_BN = torch.tensor([[2, 0, 1]], dtype=torch.int32, device=DEVICE)
        lengths_B = torch.tensor([new.shape[1] + 5], dtype=torch.int32, device=DEVICE)
        AttentionKernels(name).write(
            *(new, new.flip(1), *pools, table_BN, lengths_B), exponents=(powers[0], powers[1])
        )
        found.append([*pools, *powers])
    for reference, triton in zip(*found, strict=True):
        assert torch.equal(reference, triton)
    # Position 5 is token 5 of the first block, 2.
    assert torch.equal(found[0][0][2, 5], quantise(new[0, 0])[0])


SHAPES = {
    "full": Shape(dtype=torch.bfloat16),
    "window, cap and sinks": Shape(window=20, softcap=4.0, sinks=True, dtype=torch.bfloat16),
    "unequal widths": Shape((40, 17), 4, 1, 24, 16),
}


@BOTH
@pytest.mark.parametrize("name", SHAPES)
def test_attention_reads_what_was_kept_exactly(kernels: AttentionKernels, name: str) -> None:
    """Bit by bit what it gives over pools that hold the same numbers as they are."""
    rows = make_rows(SHAPES[name])
    kept = replace(rows, k_BPHD=rounded(rows.k_BPHD), v_BPHD=rounded(rows.v_BPHD))
    plain = lay_out(kept)
    given = {
        "scale": rows.shape.scale,
        "window": rows.shape.window,
        "softcap": rows.shape.softcap,
        "sinks_Q": rows.sinks_Q,
    }
    rest = (plain.block_table_BN, plain.lengths_B)
    want = kernels.decode(rows.q_BQD, plain.k_pool, plain.v_pool, *rest, **given)
    (k_codes, k_powers), (v_codes, v_powers) = quantise(plain.k_pool), quantise(plain.v_pool)
    coded = (rows.q_BQD, k_codes, v_codes, *rest)
    got = kernels.decode(*coded, **given, exponents=(k_powers, v_powers))
    assert got.isfinite().all() and torch.equal(got, want)
    # Control: one power too much.
    wrong = kernels.decode(*coded, **given, exponents=(k_powers + 1, v_powers))
    assert not torch.equal(wrong, want)
