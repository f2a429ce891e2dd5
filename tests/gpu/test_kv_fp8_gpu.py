"""A KV cache in eight bits on a GPU: exact at real sizes, captured, and one cache for all steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import hotset
from hotset.kernels.attention import AttentionKernels
from hotset.kernels.kv_fp8 import dequantise, quantise, rounded
from kernels.attention_support import Shape, lay_out, make_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BF16 = torch.bfloat16
SHAPES = {
    "Qwen3-30B-A3B": Shape((1, 1000, 0, 8192), 32, 4, 128, 128, dtype=BF16, block_tokens=32),
    "gpt-oss, window": Shape(
        (127, 129, 5000), 64, 8, 64, 64, window=128, sinks=True, dtype=BF16, block_tokens=32
    ),
    "unequal widths": Shape((3000,), 64, 4, 192, 128, dtype=BF16, block_tokens=32),
}


@pytest.mark.parametrize("name", SHAPES)
def test_attention_reads_what_was_kept_exactly(name: str) -> None:
    rows = make_rows(replace(SHAPES[name], scale=SHAPES[name].key_dim ** -0.5))
    kept = replace(rows, k_BPHD=rounded(rows.k_BPHD), v_BPHD=rounded(rows.v_BPHD))
    laid, kernels = lay_out(kept), AttentionKernels("triton")
    how = {"scale": rows.shape.scale, "window": rows.shape.window, "sinks_Q": rows.sinks_Q}
    rest = (laid.block_table_BN, laid.lengths_B)
    want = kernels.decode(rows.q_BQD, laid.k_pool, laid.v_pool, *rest, **how)
    (k_codes, k_powers), (v_codes, v_powers) = quantise(laid.k_pool), quantise(laid.v_pool)
    got = kernels.decode(
        *(rows.q_BQD, k_codes, v_codes, *rest), **how, exponents=(k_powers, v_powers)
    )
    # Two programs to the compiler, which may sum in another order: a few units of FP32 before the
    # last rounding, and so one unit of BF16 where that falls on a border.
    unit = torch.finfo(BF16).eps * want.abs().float() + 1e-6
    assert torch.all((got.float() - want.float()).abs() <= unit)


def test_codes_are_those_of_the_specification() -> None:
    source = torch.Generator("cuda").manual_seed(0)
    new = torch.randn(1, 4096, 4, 128, generator=source, device="cuda")
    new = (new * torch.logspace(-20, 20, 4096, device="cuda")[:, None, None]).to(BF16)
    pools = [torch.zeros(128, 32, 4, 128, dtype=torch.uint8, device="cuda") for _ in range(2)]
    powers = [torch.zeros(128, 32, 4, dtype=torch.uint8, device="cuda") for _ in range(2)]
    table_BN = torch.arange(128, dtype=torch.int32, device="cuda")[None]
    lengths_B = torch.tensor([4096], dtype=torch.int32, device="cuda")
    AttentionKernels("triton").write(
        *(new, -new, *pools, table_BN, lengths_B), exponents=(powers[0], powers[1])
    )
    codes, exponents = quantise(new[0])
    assert torch.equal(pools[0].flatten(0, 1), codes)
    assert torch.equal(powers[0].flatten(0, 1), exponents)
    assert torch.equal(dequantise(pools[1], powers[1], BF16).flatten(0, 1), -rounded(new[0]))


def test_an_engine_decodes_from_it() -> None:
    """Captured steps say what uncaptured ones do, and each token is the best of the logits."""
    prompt = torch.randint(3, 250, (600,), generator=torch.Generator().manual_seed(0)).tolist()
    options = {"device": "cuda", "context": 1024, "prefill_chunk": 256, "kv_dtype": "fp8"}
    with hotset.load("pocket", **options) as model:
        answer = [t.token_id for t in model.generate(token_ids=prompt, max_tokens=24)]
        logits_TV = model.engine.logits([*prompt, *answer])[len(prompt) - 1 : -1]
        pool_bytes = model.engine.decoding.pool.nbytes
    # Chunks and decode steps sum in other orders: BF16 logits of this model differ by a few
    # hundredths, and tokens by no more than such a near tie.
    chosen_T = logits_TV.gather(1, torch.tensor(answer)[:, None])[:, 0]
    assert torch.all(logits_TV.max(dim=1).values - chosen_T <= 0.05 * logits_TV.std())
    with hotset.load("pocket", **options, graphs=False) as model:
        again = [t.token_id for t in model.generate(token_ids=prompt, max_tokens=24)]
    assert again == answer
    with hotset.load("pocket", **options | {"kv_dtype": None}) as model:
        assert pool_bytes < 0.6 * model.engine.decoding.pool.nbytes
