"""Bit patterns of published codes as numbers: nibbles of words, FP4, and powers of two.

Plain torch, exact. Knows single elements; how elements make a matrix is each format's.
"""

from __future__ import annotations

import torch

# E2M1: sign, two bits of exponent, one of mantissa.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_VALUES = torch.tensor([*_E2M1, *(-value for value in _E2M1)])
E2M1_MAX = 6.0
E4M3_MAX = 448.0


def e2m1(codes: torch.Tensor) -> torch.Tensor:
    """Values of FP4 codes 0..15, float32."""
    return E2M1_VALUES[codes.long()]


def e8m0(scales: torch.Tensor) -> torch.Tensor:
    """2^(byte - 127) of uint8 or E8M0 scales, float32; 255 is NaN.

    By the bits and not by a cast, which would take the byte for the value. 2^-127 is subnormal.
    """
    exponents = scales.view(torch.uint8).int()
    values = torch.ldexp(torch.ones_like(exponents, dtype=torch.float64), exponents - 127).float()
    return torch.where(exponents == 255, torch.nan, values)


def as_float(scales: torch.Tensor) -> torch.Tensor:
    """Scales of any published dtype as float32; integers are E8M0 bytes."""
    if scales.dtype in (torch.uint8, torch.float8_e8m0fnu):
        return e8m0(scales)
    return scales.float()


def nibbles_of_bytes(packed: torch.Tensor) -> torch.Tensor:
    """[..., n] bytes to [..., 2 n] codes 0..15, the low nibble first."""
    bytes_ = packed.view(torch.uint8)
    return torch.stack([bytes_ & 15, bytes_ >> 4], dim=-1).flatten(-2)


def bytes_of_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """The inverse of `nibbles_of_bytes`."""
    pairs = codes.to(torch.uint8).unflatten(-1, (-1, 2))
    packed: torch.Tensor = pairs[..., 0] | (pairs[..., 1] << 4)
    return packed


def nibbles_of_words(packed: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """int32 words to eight codes each, the lowest nibble first, along `dim`."""
    words = packed.movedim(dim, -1).contiguous()
    return nibbles_of_bytes(words.view(torch.uint8)).movedim(-1, dim)


def words_of_nibbles(codes: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """The inverse of `nibbles_of_words`."""
    bytes_ = bytes_of_nibbles(codes.movedim(dim, -1).contiguous())
    return bytes_.view(torch.int32).movedim(-1, dim).contiguous()


def spread(scales: torch.Tensor, sizes: tuple[int, int], shape: tuple[int, int]) -> torch.Tensor:
    """Scales of blocks of `sizes` [rows, columns], one for each value of a matrix of `shape`.

    The last block of a row or column may be partial.
    """
    rows = scales.repeat_interleave(sizes[0], dim=0)[: shape[0]]
    return rows.repeat_interleave(sizes[1], dim=1)[:, : shape[1]]
