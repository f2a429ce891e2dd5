"""The kernels of lossless experts compiled for real GPUs, without one: sums in the order of plain
experts' kernels."""

from __future__ import annotations

import pytest

from kernels.codegen import Facts, compile_facts, rows


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Facts:
    return compile_facts("compile_lossless.py", tmp_path_factory.mktemp("triton"))


@pytest.mark.parametrize("case", ["one token", "one token, fill", "one token, odd"])
def test_one_token_adds_up_in_the_order_of_plain_weights(facts: Facts, case: str) -> None:
    """Within a thread, between lanes, between warps: a layout says which value is where."""
    plain, lossless = rows(facts, f"plain, {case}"), rows(facts, f"lossless, {case}")
    for left, right in zip(plain, lossless, strict=True):
        assert left["kernel"] == right["kernel"] and len(left["sums"]) >= 1
        assert left["sums"][-1] == right["sums"][-1]
    # Control: the two projections' differ.
    assert plain[0]["sums"][-1] != lossless[1]["sums"][-1]


@pytest.mark.parametrize("num_tokens", [8, 40, 1000])
def test_batches_use_synchronous_tensor_cores(facts: Facts, num_tokens: int) -> None:
    """With asynchronous instructions they do not compile; see `launch._synchronous`."""
    for row in rows(facts, f"lossless, {num_tokens} tokens"):
        assert row["asynchronous_tensor_core"] == 0 < row["tensor_core"], row


def test_any_card_can_run_them(facts: Facts) -> None:
    assert max(row["shared_bytes"] for row in facts) <= 227 * 1024
