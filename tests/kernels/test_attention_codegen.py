"""The attention kernels compiled for a real GPU, without one: legal there, and fast in kind."""

from __future__ import annotations

from typing import Any

import pytest

from kernels.codegen import compile_facts

PARTIAL, REDUCE, WRITE = "_partial_kernel", "_reduce_kernel", "_write_kernel"
PREFILL, LATENT, MERGE = "_prefill_kernel", "_latent_kernel", "_merge_kernel"
NORM, NORMS = "_rms_norm_kernel", ("norm of 128", "norm of 2048")
INDEX, SCORES = "_index_kernel", ("scores", "scores, fp32")
ROTARY, TURNED = "_rotary_kernel", ("rotary", "rotary, neighbours", "rotary, some pass")


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict[str, Any]]:
    """(case, kernel) -> what the code for sm_90 is like."""
    found = compile_facts("compile_attention.py", tmp_path_factory.mktemp("triton"))
    return {(row["case"], row["kernel"]): row for row in found}


@pytest.mark.parametrize("case", ["group 8", "sinks and window", "odd", "wide"])
def test_keys_and_values_stream_into_tensor_cores(
    facts: dict[tuple[str, str], dict[str, Any]], case: str
) -> None:
    row = facts[case, PARTIAL]
    assert row["tensor_core"] > 0 and row["async_copies_16_bytes"] > 0, row
    # All but block ids come 16 bytes at a time: these 4, for keys and for values, in five stages.
    assert row["async_copies"] - row["async_copies_16_bytes"] <= 10, row
    # Two programs at least share a multiprocessor of the smallest supported card.
    assert row["shared_bytes"] <= 99 * 1024 // (1 if case == "wide" else 2), row


def test_codes_come_16_bytes_at_a_time_and_meet_tensor_cores(
    facts: dict[tuple[str, str], dict[str, Any]],
) -> None:
    row = facts["eight bits", PARTIAL]
    assert row["tensor_core"] > 0, row
    assert row["async_copies_16_bytes"] + row["loads_16_bytes"] > 0, row


LATENTS = (
    *("latents, 16 heads", "latents, 128 heads", "latents, fp32"),
    *("latents, no rotary part", "latents, rows not cut"),
)


@pytest.mark.parametrize("case", LATENTS)
def test_latents_stream_into_tensor_cores(
    facts: dict[tuple[str, str], dict[str, Any]], case: str
) -> None:
    row = facts[case, LATENT]
    assert row["async_copies_16_bytes"] > 0, row
    # A block of the smallest supported card has as much.
    assert row["shared_bytes"] <= 99 * 1024, row
    if case == "latents, fp32":
        assert row["tensor_core"] == 0 and row["tf32"] == 0, row
    else:
        assert row["tensor_core"] > 0, row


@pytest.mark.parametrize("case", SCORES)
def test_scores_of_an_indexer(facts: dict[tuple[str, str], dict[str, Any]], case: str) -> None:
    row = facts[case, INDEX]
    assert row["loads_16_bytes"] + row["async_copies_16_bytes"] > 0, row
    assert row["shared_bytes"] <= 99 * 1024, row
    assert (row["tensor_core"] > 0) == (case == "scores") and row["tf32"] == 0, row


def test_partial_results_are_summed_16_bytes_at_a_time(
    facts: dict[tuple[str, str], dict[str, Any]],
) -> None:
    assert facts["group 8", REDUCE]["loads_16_bytes"] >= 8


@pytest.mark.parametrize(
    "case", ["prompt", "prompt, wide", "prompt, unequal", "prompt, sinks, window and cap"]
)
def test_a_prompts_keys_stream_into_tensor_cores(
    facts: dict[tuple[str, str], dict[str, Any]], case: str
) -> None:
    row = facts[case, PREFILL]
    assert row["tensor_core"] > 0 and row["async_copies_16_bytes"] > 0, row
    assert row["async_copies"] == row["async_copies_16_bytes"], row
    # A block of the smallest supported card has as much.
    assert row["shared_bytes"] <= 99 * 1024, row


def test_parts_and_norms_pass_16_bytes_at_a_time(
    facts: dict[tuple[str, str], dict[str, Any]],
) -> None:
    for row in (facts["merged", MERGE], *(facts[case, NORM] for case in NORMS)):
        assert row["loads_16_bytes"] >= 4 and row["stores_16_bytes"] >= 2, row


@pytest.mark.parametrize("case", TURNED)
def test_heads_are_turned_16_bytes_at_a_time_and_rounded_as_stock_does(
    facts: dict[tuple[str, str], dict[str, Any]], case: str
) -> None:
    row = facts[case, ROTARY]
    # A fused multiply-add would leave a rounding out. 4,096 elements in and out, 32 a thread.
    assert row["fused_multiply_adds"] == 0, row
    assert row["loads_16_bytes"] >= 4 and row["stores_16_bytes"] >= 4, row


def test_fp32_is_never_tf32(facts: dict[tuple[str, str], dict[str, Any]]) -> None:
    for row in (facts["fp32", PARTIAL], facts["prompt, fp32", PREFILL]):
        assert row["tensor_core"] == 0 and row["tf32"] == 0, row


def test_every_kernel_compiles(facts: dict[tuple[str, str], dict[str, Any]]) -> None:
    cases = {case for case, _ in facts} - {"merged", *NORMS, *TURNED, *SCORES}
    prompts = {case for case in cases if case.startswith("prompt")}
    latents = {case for case in cases if case.startswith("latents")}
    assert (len(prompts), len(latents), len(cases)) == (5, 5, 16)
    expected = {(case, kernel) for case in cases - prompts for kernel in (REDUCE, WRITE)}
    expected |= {(case, PARTIAL) for case in cases - prompts - latents}
    expected |= {(case, LATENT) for case in latents}
    expected |= {(case, PREFILL) for case in prompts}
    expected |= {("merged", MERGE), *((case, NORM) for case in NORMS)}
    expected |= {(case, ROTARY) for case in TURNED} | {(case, INDEX) for case in SCORES}
    assert facts.keys() == expected
