"""The kernels compiled for real GPUs, without one: legal there, and with the loads that count.

The interpreter accepts code that the compiler refuses, and says nothing of how memory is read.
"""

from __future__ import annotations

import pytest

from kernels.codegen import Facts, compile_facts, rows


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Facts:
    return compile_facts("compile_kernels.py", tmp_path_factory.mktemp("triton"))


def test_everything_fits_the_cards_shared_memory(facts: Facts) -> None:
    assert max(row["shared_bytes"] for row in facts) <= 227 * 1024


def test_one_token_reads_and_fills_16_bytes_at_a_time(facts: Facts) -> None:
    for row in rows(facts, "one token") + rows(facts, "one token, fill"):
        assert row["loads_16_bytes"] >= 2, row
    for row in rows(facts, "one token, fill"):
        assert row["stores_16_bytes"] >= 2, row
    # Control: rows that start anywhere cannot be read so.
    assert all(row["loads_16_bytes"] == 0 for row in rows(facts, "one token, odd"))


def test_few_tokens_hold_their_weights_in_registers(facts: Facts) -> None:
    """Read 16 bytes at a time, and filled so; shared memory only adds up what warps have."""
    for row in rows(facts, "few tokens"):
        assert row["loads_16_bytes"] >= 8 and row["stores_16_bytes"] >= 8, row
        assert row["shared_bytes"] <= 1024 and row["tensor_core"] == 0, row
    # Control: rows that start anywhere cannot be read so.
    assert all(row["loads_16_bytes"] == 0 for row in rows(facts, "few tokens, odd"))


@pytest.mark.parametrize(
    ("case", "ids", "x"),
    [("one token, fill", "ids_K", "x_H"), ("few tokens", "ids_N", "x_TH")],
)
def test_experts_read_ahead_what_is_complete(facts: Facts, case: str, ids: str, x: str) -> None:
    """Ahead of a wait only what was there before the kernel in front began (`moe_decode`): of the
    first projection's that is the match, which writes `fill_E`, of the second's the first, which
    writes its input."""
    for row in rows(facts, case):
        record = ["*address_E", "address_E"]
        ahead = ["fill_E", ids] if "down" in row["kernel"] else [ids, x]
        assert row["read_ahead"] == [*record, *ahead] and row["written_ahead"] == [], row


def test_sums_read_ahead_only_behind_experts(facts: Facts) -> None:
    """And addresses, which the experts' kernels read, are written behind the wait."""
    ahead = ["evict_V", "fill_E", "host_address_W", "weights_TK"]
    cases = {
        "mask of padding": [],
        "combine": [],
        "combine, retarget": [],
        "combine, ahead": ahead,
        "match": [],
    }
    for case, read_ahead in cases.items():
        for row in rows(facts, case):
            assert row["read_ahead"] == read_ahead and row["written_ahead"] == [], row
    # Control: kernels of a prompt wait for nothing, as the one before them has ended.
    assert all(row["written_ahead"] for row in rows(facts, "accumulate") + rows(facts, "prompt"))


def test_products_read_weights_16_bytes_at_a_time(facts: Facts) -> None:
    for row in rows(facts, "products"):
        assert row["loads_16_bytes"] >= 8, row
    for row in rows(facts, "products, tensor cores"):
        assert row["async_copies_16_bytes"] == row["async_copies"] > 0, row
        assert row["tensor_core"] > 0 and row["read_ahead"] == [], row


@pytest.mark.parametrize("case", ["small batch", "small batch, fill", "prompt", "long prompt"])
def test_grouped_kernels_stream_into_tensor_cores(facts: Facts, case: str) -> None:
    for row in rows(facts, case):
        assert row["async_copies"] > 0 and row["tensor_core"] > 0, row
        assert row["async_copies_16_bytes"] == row["async_copies"], row


def test_what_fills_never_multiplies_asynchronously(facts: Facts) -> None:
    """The compiler's buffers are one too few for it; see `launch._synchronous`."""
    for row in rows(facts, "64 tokens, fill"):
        assert row["asynchronous_tensor_core"] == 0 < row["tensor_core"], row
    # Control: prompts do.
    assert all(row["asynchronous_tensor_core"] > 0 for row in rows(facts, "prompt"))


def test_fp32_is_never_tf32(facts: Facts) -> None:
    for row in rows(facts, "fp32"):
        assert row["tensor_core"] == 0 and row["tf32"] == 0, row


def test_records_are_copied_16_bytes_at_a_time(facts: Facts) -> None:
    (row,) = rows(facts, "copy")
    assert row["loads_16_bytes"] >= 4 and row["stores_16_bytes"] >= 4


def test_sampling_rounds_as_its_specification(facts: Facts) -> None:
    """CPU and GPU draw the same tokens only if no multiplication is fused with an addition."""
    sampling = rows(facts, "sample")
    kernels = {"_draw_kernel", "_choose_kernel", "_adjust_kernel"}
    assert {row["kernel"] for row in sampling} == kernels
    assert {row["kernel"] for row in rows(facts, "report")} == {
        "_summarise_kernel",
        "_report_kernel",
    }
    assert all(row["fused_multiply_adds"] == 0 for row in sampling)
    # Control: they are found where they are.
    assert all(row["fused_multiply_adds"] > 0 for row in rows(facts, "one token"))


def test_a_range_of_a_prompt_is_one_compilation_wherever_it_begins(facts: Facts) -> None:
    found = [[row["hash"] for row in rows(facts, name)] for name in ("prompt", "prompt, anywhere")]
    assert found[0] == found[1] and len(set(found[0])) == 2
