"""The kernels of quantised experts compiled for real GPUs, without one."""

from __future__ import annotations

import pytest

from kernels.codegen import Facts, compile_facts, rows

PUBLISHED = ("fp8", "nvfp4", "mxfp4", "int4")


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Facts:
    return compile_facts("compile_packed.py", tmp_path_factory.mktemp("triton"))


def test_any_card_can_run_them(facts: Facts) -> None:
    """Shared memory suffices, and no instruction needs a card that knows FP8."""
    assert max(row["shared_bytes"] for row in facts) <= 227 * 1024
    assert not any(row["hardware_fp8"] for row in facts)


def test_subnormal_numbers_are_kept(facts: Facts) -> None:
    """Small codes pass through subnormal FP32 numbers on their way."""
    assert not any(row["flushes_subnormals"] for row in facts)


@pytest.mark.parametrize("name", PUBLISHED)
def test_one_token_reads_codes_16_bytes_at_a_time(facts: Facts, name: str) -> None:
    for row in rows(facts, f"{name}, one token"):
        assert row["loads_16_bytes"] >= 1 and row["stores_16_bytes"] >= 1, row
    # Control: rows that start anywhere cannot be read so.
    assert all(row["stores_16_bytes"] == 0 for row in rows(facts, "int4 zeros, one token"))


@pytest.mark.parametrize("name", PUBLISHED)
def test_one_token_reads_ahead_what_is_complete(facts: Facts, name: str) -> None:
    """As plain records, see `test_codegen`."""
    up, down = rows(facts, f"{name}, one token")
    assert up["read_ahead"] == ["*address_E", "address_E", "ids_K", "x_H"]
    assert down["read_ahead"] == ["*address_E", "address_E", "fill_E", "ids_K"]
    assert up["written_ahead"] == down["written_ahead"] == []


@pytest.mark.parametrize("name", PUBLISHED)
def test_one_token_multiplies_what_each_thread_has_read(facts: Facts, name: str) -> None:
    """On tensor cores, and no weight crosses between threads: shared memory has sums and inputs.

    A thread decodes what it has read if the compiler lays warps over blocks. Operands that cross
    take 4 KiB or more (measured with warps laid over the halves); inputs and sums need 1 KiB.
    """
    for row in rows(facts, f"{name}, one token"):
        assert row["tensor_core"] > 0 and row["shared_bytes"] <= 1024, row


@pytest.mark.parametrize("case", ["fp8, small batch", "nvfp4, small batch"])
def test_batches_use_tensor_cores(facts: Facts, case: str) -> None:
    for row in rows(facts, case):
        assert row["tensor_core"] > 0, row


@pytest.mark.parametrize("num_tokens", [40, 1000])
def test_larger_blocks_compile(facts: Facts, num_tokens: int) -> None:
    """With asynchronous tensor core instructions they do not; see `launch._synchronous`."""
    for row in rows(facts, f"fp8 channel, {num_tokens} tokens"):
        assert row["asynchronous_tensor_core"] == 0 < row["tensor_core"], row


def test_records_anywhere_in_a_layer_are_one_compilation(facts: Facts) -> None:
    """A prompt's range of experts begins anywhere; it must not wait for the compiler."""
    found = [row["hash"] for row in rows(facts, "int4 zeros, whole records")]
    assert len(found) % 2 == 0 and found[: len(found) // 2] == found[len(found) // 2 :]
    assert len(set(found)) == len(found) // 2
