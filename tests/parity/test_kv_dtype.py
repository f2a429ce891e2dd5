"""A KV cache in eight bits through the whole engine: every token sees the same rounded keys."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from families import CONTEXT, Family, difference, make_family, text
from hotset.core.config import EngineConfig
from hotset.core.errors import ConfigError
from hotset.core.kv_dtype import with_kv_dtype
from hotset.kernels.kv_fp8 import rounded
from hotset.runtime import kv_prefill
from hotset.runtime.planning import plan_engine

# Full attention; sinks and sliding windows, whose rings turn; states beside it.
TYPES = ("qwen3_moe", "gpt_oss", "qwen3_next")
NUM_PROMPT, NUM_TOKENS, CHUNK = 30, 40, 16
EPS32 = torch.finfo(torch.float32).eps


@pytest.fixture(scope="module", params=TYPES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    return make_family(request.param, tmp_path_factory.mktemp("model"))


def logits_of(family: Family, ids: list[int], **options: object) -> torch.Tensor:
    with family.engine(kv_dtype="fp8", **options) as engine:
        return engine.logits(ids)


def test_prompts_chunks_and_decode_steps_agree(family: Family) -> None:
    """All see what is kept, so that they differ as without rounding: by the order of sums. Such an
    error of size eps moves a key across the border of two codes with a probability of order eps,
    and then by half a unit, 1/16: of a few thousand keys none, or one that counts for little."""
    ids = text(NUM_TOKENS)
    with family.engine(kv_dtype="fp8") as engine:
        whole = engine.logits(ids)
        answer = [out.token_id for out in engine.generate_ids(ids[:NUM_PROMPT], max_tokens=8)]
        after = engine.logits(ids[:NUM_PROMPT] + answer)[NUM_PROMPT - 1 : -1]
        peak = engine.decoding.pool.nbytes if engine.decoding else 0
    bound = EPS32**0.5 * 8 * float(whole.std())
    assert difference(logits_of(family, ids, prefill_chunk=CHUNK), whole) <= bound
    assert torch.all(after.max(dim=1).values - after[range(len(answer)), answer] <= bound)
    with family.engine() as engine:
        plain = engine.logits(ids)
        assert engine.decoding is not None and peak < 0.4 * engine.decoding.pool.nbytes
    # It is another cache, and not a wrong one: codes are off by 1/32 on average. Tokens whose
    # experts change are off by more.
    rms = float((whole - plain).square().mean().sqrt())
    assert bound < difference(whole, plain) and rms <= 0.5 * float(plain.std())


def test_control_a_prompt_that_sees_its_own_keys_unrounded(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = text(NUM_TOKENS)
    whole = logits_of(family, ids)
    monkeypatch.setattr(kv_prefill, "rounded", lambda x: x)
    bound = EPS32**0.5 * 8 * float(whole.std())
    assert difference(logits_of(family, ids, prefill_chunk=CHUNK), whole) > bound


def test_the_plan_knows_what_is_kept(family: Family) -> None:
    """In FP32 a row of 8 takes 32 bytes, in eight bits 9."""
    config = EngineConfig(model="m", device="cpu", context_tokens=4096)
    geometry = family.source.geometry
    plain, coded = (
        plan_engine(geometry, replace(config, kv_dtype=dtype))[1] for dtype in (None, "fp8")
    )
    assert coded.device["KV cache"] < plain.device["KV cache"]
    changed = with_kv_dtype(geometry, "fp8")
    grown = geometry.kv_bytes_per_token
    assert changed.kv_bytes_per_token == grown * 9 // 32
    with family.engine(kv_dtype="fp8", context_tokens=CONTEXT) as engine:
        assert engine.decoding is not None
        charged = engine.plan.device["KV cache"] + engine.plan.device["KV blocks"]
        assert engine.decoding.pool.nbytes <= charged


@pytest.mark.parametrize(
    ("model_type", "why"), [("deepseek_v3", "latents"), ("minimax", "library's cache")]
)
def test_what_cannot_be_kept_so_is_refused(
    model_type: str, why: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    family = make_family(model_type, tmp_path_factory.mktemp("model"))
    config = EngineConfig(model="m", device="cpu", kv_dtype="fp8")
    with pytest.raises(ConfigError, match=why) as refused:
        plan_engine(family.source.geometry, config)
    assert refused.value.option == "kv_dtype"
    with pytest.raises(ConfigError, match="`kv_dtype` is `int4`"):
        EngineConfig(model="m", kv_dtype="int4")


def test_rounding_twice_is_rounding_once() -> None:
    """A later chunk writes and reads the same numbers as the first did."""
    x = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(rounded(rounded(x)), rounded(x))
