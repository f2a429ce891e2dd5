"""Outputs that a captured graph reads lie where they lay when it was captured, whatever comes."""

from __future__ import annotations

import torch

from hotset.integrations.vllm.held import HeldOutputs

WIDTHS = (6, 4)


def outputs_of(num_tokens: int) -> list[torch.Tensor]:
    return [torch.randn(num_tokens, width, dtype=torch.bfloat16) for width in WIDTHS]


def addresses(outputs: list[torch.Tensor]) -> list[int]:
    return [one.data_ptr() for one in outputs]


def test_values_are_kept_at_one_address_for_every_number_of_tokens() -> None:
    held = HeldOutputs(8)
    captured = addresses(held.hold(outputs_of(8), is_read_by_graph=True))
    for num_tokens in (8, 3, 1):
        wanted = outputs_of(num_tokens)
        got = held.hold(wanted, is_read_by_graph=True)
        assert addresses(got) == captured
        assert all(torch.equal(one, other) for one, other in zip(got, wanted, strict=True))
        assert addresses(wanted) != captured, "the control: these were elsewhere"


def test_a_long_step_that_no_graph_reads_is_left_where_it_is() -> None:
    held = HeldOutputs(8)
    for num_tokens in (100, 2):
        wanted = outputs_of(num_tokens)
        assert addresses(held.hold(wanted, is_read_by_graph=False)) == addresses(wanted)


def test_layers_do_not_share_what_they_hold() -> None:
    one, other = HeldOutputs(4), HeldOutputs(4)
    first = one.hold(outputs_of(2), is_read_by_graph=True)
    second = other.hold(outputs_of(2), is_read_by_graph=True)
    assert set(addresses(first)).isdisjoint(addresses(second))


def test_nothing_is_held_without_graphs() -> None:
    wanted = outputs_of(2)
    assert addresses(HeldOutputs(0).hold(wanted, is_read_by_graph=True)) == addresses(wanted)
