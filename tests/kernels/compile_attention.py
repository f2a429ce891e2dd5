"""Compiles the attention kernels for a GPU that need not be there, and prints facts as JSON.

Run as a program, outside the interpreter, like `compile_kernels.py`, whose tools it uses.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from compile_kernels import AbsentGPU, Compiled
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from hotset.kernels import (
    attention_decode,
    attention_merge,
    attention_prefill,
    device,
    index_scores,
    kv_write,
    latent_decode,
    rms_norm,
    rotary,
)

FORM = rms_norm.NormForm(1e-6, rounds_first=True)


def layer_in_eight_bits(num_heads: int, num_kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    """The same over pools of codes."""
    pools = [torch.empty(8, 32, num_kv_heads, dim, dtype=torch.uint8) for _ in range(2)]
    powers = [torch.empty(8, 32, num_kv_heads, dtype=torch.uint8) for _ in range(2)]
    exponents = powers[0], powers[1]
    table_BN, lengths_B = torch.zeros(2, 5, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    new = torch.empty(2, 1, num_kv_heads, dim, dtype=dtype)
    kv_write.write_kv(new, new, *pools, table_BN, lengths_B, exponents=exponents)
    q_BQD = torch.empty(2, num_heads, dim, dtype=dtype)
    attention_decode.decode_attention(
        *(q_BQD, *pools, table_BN, lengths_B), scale=0.1, exponents=exponents
    )


def layer(
    num_heads: int, num_kv_heads: int, key_dim: int, value_dim: int, dtype: torch.dtype, **how: Any
) -> None:
    """One decode step of a layer: what is new is written, then attended to."""
    pools = [torch.empty(8, 32, num_kv_heads, dim, dtype=dtype) for dim in (key_dim, value_dim)]
    table_BN, lengths_B = torch.zeros(2, 5, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    new = [torch.empty(2, 1, num_kv_heads, dim, dtype=dtype) for dim in (key_dim, value_dim)]
    kv_write.write_kv(*new, *pools, table_BN, lengths_B)
    q_BQD = torch.empty(2, num_heads, key_dim, dtype=dtype)
    attention_decode.decode_attention(q_BQD, *pools, table_BN, lengths_B, scale=0.1, **how)


def chosen(num_heads: int, dim: int, dtype: torch.dtype) -> None:
    """Scores of an indexer."""
    q_NHD = torch.empty(2, num_heads, dim, dtype=dtype)
    pool = torch.empty(8, 32, dim, dtype=dtype)
    table_BN, counts_B = torch.zeros(2, 5, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    index_scores.index_scores(q_NHD, torch.empty(2, num_heads), pool, table_BN, counts_B)


def latents(
    num_heads: int, rank: int, rope: int, dtype: torch.dtype, *, many: bool = False
) -> None:
    """One decode step of a layer that keeps latents."""
    pools = [torch.empty(8, 32, 1, dim, dtype=dtype) for dim in (rank, rope)]
    table_BN, lengths_B = torch.zeros(2, 5, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    new = [torch.empty(2, 1, 1, dim, dtype=dtype) for dim in (rank, rope)]
    kv_write.write_kv(*new, *pools, table_BN, lengths_B)
    queries = [torch.empty(2, num_heads, dim, dtype=dtype) for dim in (rank, rope)]
    latent_decode.decode_latents(*queries, *pools, table_BN, lengths_B, scale=0.1, many=many)


def prompt(
    num_heads: int, num_kv_heads: int, key_dim: int, value_dim: int, dtype: torch.dtype, **how: Any
) -> None:
    """The end of a prompt that goes on."""
    q_QTD = torch.empty(num_heads, 300, key_dim, dtype=dtype)
    k_HPD = torch.empty(num_kv_heads, 700, key_dim, dtype=dtype)
    v_HPD = torch.empty(num_kv_heads, 700, value_dim, dtype=dtype)
    attention_prefill.prefill_attention(q_QTD, k_HPD, v_HPD, scale=0.1, **how)


def merged(num_heads: int, dim: int, dtype: torch.dtype) -> None:
    """The same queries' attention to their past and to themselves."""
    parts = [torch.empty(300, num_heads, dim, dtype=dtype) for _ in range(2)]
    logs = [torch.empty(num_heads, 300) for _ in range(2)]
    attention_merge.merge(parts[0], logs[0], parts[1], logs[1], dtype=dtype)


def turned(num_heads: int, dim: int, columns: int, form: rotary.RotaryForm) -> None:
    """Queries of a prompt, as a projection leaves them."""
    x_BHTD = torch.empty(1, 304, num_heads, dim, dtype=torch.bfloat16).transpose(1, 2)
    angles = [torch.empty(1, 304, columns, dtype=torch.bfloat16) for _ in range(2)]
    rotary.rotate(x_BHTD, *angles, form, heads_at=1)


def main(capability: int) -> None:
    compiled = Compiled()
    driver.set_active(AbsentGPU(capability))
    JITFunction.__getitem__ = lambda *bound: compiled.launcher(*bound)  # noqa: PLW0108
    bf16, rows = torch.bfloat16, []

    def case(name: str, *args: Any, **how: Any) -> None:
        layer(*args, **how)
        rows.extend(compiled.facts(name))

    case("group 8", 32, 4, 128, 128, bf16)
    case("sinks and window", 64, 8, 64, 64, bf16, window=128, sinks_Q=torch.empty(64, dtype=bf16))
    case("odd", 12, 4, 192, 80, torch.float16, softcap=30.0)
    case("wide", 16, 2, 512, 512, bf16)
    case("fp32", 8, 2, 64, 64, torch.float32)
    layer_in_eight_bits(32, 4, 128, bf16)
    rows.extend(compiled.facts("eight bits"))
    for name, *widths in (
        ("latents, 16 heads", 16, 512, 64, bf16),
        ("latents, 128 heads", 128, 512, 64, bf16),
        ("latents, fp32", 20, 512, 64, torch.float32),
        ("latents, no rotary part", 64, 512, 0, bf16),
    ):
        latents(*widths)
        rows.extend(compiled.facts(name))
    latents(64, 512, 64, bf16, many=True)
    rows.extend(compiled.facts("latents, rows not cut"))
    for name, *widths in (("scores", 64, 128, bf16), ("scores, fp32", 32, 128, torch.float32)):
        chosen(*widths)
        rows.extend(compiled.facts(name))
    for name, *shape in (
        ("prompt", 32, 4, 128, 128, bf16),
        ("prompt, wide", 16, 2, 256, 256, bf16),
        ("prompt, unequal", 12, 4, 192, 128, torch.float16),
        ("prompt, fp32", 8, 2, 64, 64, torch.float32),
    ):
        prompt(*shape)
        rows.extend(compiled.facts(name))
    prompt(64, 8, 64, 64, bf16, window=128, sinks_Q=torch.empty(64, dtype=bf16), softcap=30.0)
    rows.extend(compiled.facts("prompt, sinks, window and cap"))
    merged(32, 128, bf16)
    rows.extend(compiled.facts("merged"))
    for width in (128, 2048):
        rms_norm.rms_norm(torch.empty(300, width, dtype=bf16), torch.empty(width, dtype=bf16), FORM)
        rows.extend(compiled.facts(f"norm of {width}"))
    turned(32, 128, 128, rotary.RotaryForm())
    rows.extend(compiled.facts("rotary"))
    turned(128, 64, 64, rotary.RotaryForm("neighbours", "halves", "first"))
    rows.extend(compiled.facts("rotary, neighbours"))
    turned(20, 256, 64, rotary.RotaryForm("neighbours", "neighbours", "neighbours", wide=True))
    rows.extend(compiled.facts("rotary, some pass"))
    interpreted = device.is_interpreted(device.round_to)
    json.dump({"interpreted": interpreted, "rows": rows}, sys.stdout)


if __name__ == "__main__":
    main(capability=int(sys.argv[1]))
