"""vLLM with hotset's experts gives the greedy tokens of vLLM without them, on one rank and on two.

Weights are random, in FP32 where vLLM's CPU kernels take it, so that another order of sums moves
logits by about 1e-6 and greedy choices stay; the control is a model that differs in one weight.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hotset.checkpoint.source import resolve_model
from tiny import save_tiny, tiny_config

Run = Callable[..., dict[str, Any]]

# Sizes that vLLM's CPU kernels insist on: experts in multiples of 32, latents of DeepSeek's own
# size, states of 128.
SIZES: dict[str, dict[str, Any]] = {
    "gpt_oss": {"head_dim": 32, "hidden_size": 64, "intermediate_size": 64},
    "deepseek_v3": {
        **{"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32},
        **{"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32},
        **{"topk_method": "noaux_tc", "num_nextn_predict_layers": 0},
    },
    "qwen3_next": {
        **{"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32},
        **{"shared_expert_intermediate_size": 32, "head_dim": 32},
        **{"linear_key_head_dim": 128, "linear_value_head_dim": 128},
    },
}
DTYPES = {"qwen3_next": "bfloat16"}  # vLLM's linear attention on a CPU takes nothing else


def save(model_type: str, folder: Path, *, seed: int = 0) -> str:
    fields = tiny_config(model_type).to_dict() | SIZES[model_type]
    config = type(tiny_config(model_type))(**fields)
    save_tiny(model_type, folder, config=config, seed=seed, max_shard_size="10MB")
    return str(folder)


def check_equal(run: Run, model: str, *, vram: str, dtype: str = "float32", **job: Any) -> None:
    """Same tokens; slots were used and filled; every audit and comparison in the workers passed."""
    stock = run(model=model, dtype=dtype)
    ours = run(model=model, dtype=dtype, hotset={"vram": vram, "poison": True}, **job)
    assert "failed" not in stock, stock["failed"]
    assert "failed" not in ours, ours["failed"]
    assert ours["tokens"] == stock["tokens"]
    assert all(count["hits"] and count["fills"] for count in ours["traffic"]), ours["traffic"]
    assert all(wrong == [] for wrong in ours["verify"]), ours["verify"]


def test_pocket_gives_the_tokens_of_vllm_without_hotset(run_vllm: Run) -> None:
    check_equal(run_vllm, str(resolve_model("pocket")), vram="3MiB")


@pytest.mark.parametrize(
    ("model_type", "vram"),
    [("gpt_oss", "400KiB"), ("deepseek_v3", "400KiB"), ("qwen3_next", "150KiB")],
)
def test_random_models_give_the_tokens_of_vllm_without_hotset(
    model_type: str, vram: str, run_vllm: Run, tmp_path: Path
) -> None:
    model = save(model_type, tmp_path)
    check_equal(run_vllm, model, vram=vram, dtype=DTYPES.get(model_type, "float32"))


def test_two_ranks_give_the_tokens_of_one(run_vllm: Run, tmp_path: Path) -> None:
    """Over gloo, each rank with its part of every record."""
    check_equal(run_vllm, save("gpt_oss", tmp_path), vram="200KiB", num_ranks=2)


def test_other_weights_give_other_tokens(run_vllm: Run, tmp_path: Path) -> None:
    """The control: these tokens depend on the experts."""
    one = run_vllm(model=save("gpt_oss", tmp_path / "one"), hotset={"vram": 0})
    two = run_vllm(model=save("gpt_oss", tmp_path / "two", seed=1), hotset={"vram": 0})
    assert one["tokens"] != two["tokens"]


@pytest.mark.parametrize(
    ("job", "words"),
    [
        ({"hotset": {"vramm": "1MiB"}}, "did you mean `vram`?"),
        ({"hotset": {}}, "`vram` is not set"),
        (
            {"hotset": {"vram": 0}, "options": {"enable_lora": True}},
            "`--enable-lora` does not work with hotset",
        ),
    ],
    ids=["unknown option", "no budget", "option of vLLM's"],
)
def test_what_is_wrong_ends_the_start(job: dict[str, Any], words: str, run_vllm: Run) -> None:
    answer = run_vllm(model=str(resolve_model("pocket")), **job)
    assert words in answer.get("failed", "it started")
