"""Groups of a layer through the ring: what comes, when, and that no bit depends on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from records import expert, layers, make_store, record_bytes, resident, routed, runner
from torch import nn

from hotset.experts.ring import Staged
from hotset.experts.store import ExpertStore
from hotset.kernels.dispatch import ReferenceKernels
from hotset.kernels.reference import read_record
from hotset.runtime.blocks import Block
from hotset.runtime.expert_stream import ExpertStream, Group, Need
from hotset.runtime.moe import MATCH_TOKENS

SMALL, LARGE = expert(), expert(72, 28)
MANY = MATCH_TOKENS + 8


def used(
    store: ExpertStore, experts: Sequence[int], layer: int = 0, *, use_ring: bool = True
) -> Callable[[], Need]:
    used_E = np.zeros(store.layers[layer].num_experts, dtype=np.bool_)
    used_E[list(experts)] = True
    return lambda: Need(used_E, use_ring)


def bring(
    store: ExpertStore, stream: ExpertStream, layer: int, experts: Sequence[int]
) -> list[Group]:
    """All groups; each is checked while it is valid: ranges follow each other, what is staged is
    the arena's bytes, and the rest of a range is read as the table says."""
    groups, size, end = [], store.layers[layer].expert.record_bytes, 0
    with stream.groups(layer, used(store, experts, layer)) as coming:
        for group in coming:
            assert group.first == end
            end = group.stop
            there = group.staged.experts if group.staged else ()
            for index, address in enumerate(group.address_E.tolist()):
                if index in there:
                    staged = read_record(address, size, store.device)
                    assert torch.equal(staged, record_bytes(store, layer, index))
                else:
                    inside = group.first <= index < group.stop
                    assert address == (store.table.row(layer)[index] if inside else 0)
            groups.append(group)
    assert end == store.layers[layer].num_experts
    return groups


def staged_of(groups: Sequence[Group]) -> list[int]:
    return [index for group in groups if group.staged for index in group.staged.experts]


@pytest.mark.parametrize(("staging_records", "num_buffers"), [(2, 2), (3, 3), (7, 2), (40, 2)])
@pytest.mark.parametrize("experts", [[], [0], [7, 2], [0, 1, 2, 5, 6, 9, 10, 11], range(12)])
def test_every_record_crosses_once(
    staging_records: int, num_buffers: int, experts: Sequence[int]
) -> None:
    store = make_store(layers(12), staging_records=staging_records, num_buffers=num_buffers)
    groups = bring(store, ExpertStream(store), 0, experts)
    assert staged_of(groups) == sorted(experts)
    sizes = [len(group.staged.experts) for group in groups if group.staged]
    assert all(size <= staging_records // num_buffers for size in sizes)
    assert not sizes or max(sizes) - sizes[-1] <= max(1, len(sizes) - 1), "about even"
    assert store.ring.copied_bytes == len(experts) * store.layers[0].expert.record_bytes
    assert store.ring.num_idle == num_buffers


def test_later_groups_are_on_their_way_before_they_are_asked_for() -> None:
    store = make_store(layers(6), staging_records=3, num_buffers=3)
    size = store.layers[0].expert.record_bytes
    with ExpertStream(store).groups(0, used(store, range(6))) as groups:
        for number in range(1, 7):
            next(groups)
            assert store.ring.copied_bytes == min(6, number + 2) * size


def test_the_next_layers_first_groups_set_off_behind_a_layer_that_used_all() -> None:
    store = make_store(layers(8, 8, 8), 3, staging_records=4)
    store.place(resident(store, {1: [0, 1], 2: [5]}))
    stream, size = ExpertStream(store), store.layers[0].expert.record_bytes
    before = store.ring.copied_bytes
    bring(store, stream, 0, range(8))
    assert store.ring.copied_bytes - before == (8 + 4) * size, "as many as both buffers hold"
    groups = bring(store, stream, 1, [0, 3, 4, 7])  # 2 and 5 were brought for nothing, 6 is not
    assert staged_of(groups) == [2, 3, 4, 5, 7]
    assert store.ring.copied_bytes - before == (8 + 5) * size
    bring(store, stream, 2, [1])
    assert store.ring.copied_bytes - before == (8 + 5 + 1) * size, "half a layer foretells nothing"


def test_what_is_here_already_is_computed_on_before_the_routing_is_known() -> None:
    """The host need not wait for the device while the device waits for the host."""
    store = make_store(layers(8, 8), 2, staging_records=6)
    store.place(resident(store, {1: [1, 6]}))
    stream = ExpertStream(store)
    stream.prefetch(1)
    asked: list[int] = []

    def need() -> Need:
        asked.append(1)
        return used(store, range(8), 1)()

    with stream.groups(1, need) as groups:
        early = next(groups)
        assert (early.first, early.stop) == (0, 4) and not asked
        assert early.staged is not None and early.staged.experts == (0, 2, 3)
        assert [group.stop for group in groups] == [8] and len(asked) == 1
    assert store.ring.num_idle == 2


def test_what_comes_last_is_sent_for_behind_the_first_groups() -> None:
    """Their buffers are free again: the link need not wait until all that is here is given out."""
    store = make_store(layers(8, 8), staging_records=6, num_buffers=3)
    stream, size = ExpertStream(store), store.layers[0].expert.record_bytes
    stream.prefetch(1)
    before = store.ring.copied_bytes
    asked: list[int] = []

    def need() -> Need:
        asked.append(1)
        return used(store, range(8), 1)()

    with stream.groups(1, need) as groups:
        stops = []
        for number, group in enumerate(groups):
            stops.append(group.stop)
            assert len(asked) == (number > 1), "once, while the first two are computed on"
            assert store.ring.copied_bytes - before == (number > 1) * 2 * size
    assert stops == [2, 4, 6, 8]


@pytest.mark.parametrize("num_early", [0, 1, 2])
def test_staged_groups_are_shown_once_behind_what_reads_them(num_early: int) -> None:
    """And not before it is known what is routed; their buffers are idle only then."""
    store = make_store(layers(8, 8), staging_records=4)
    stream, log = ExpertStream(store), []
    if num_early:
        stream.prefetch(1)
    if num_early == 1:
        store.ring.release(stream._early.pop())

    def need() -> Need:
        log.append("known")
        return used(store, range(8), 1)()

    def behind(staged: Staged, stop: int) -> None:
        assert staged.buffer not in store.ring._idle and stop == staged.experts[-1] + 1
        log.append(f"shown {staged.experts[0]}")

    with stream.groups(1, need, behind) as groups:
        log.extend(f"read {group.first}" for group in groups)
    early = [f"read {2 * place}" for place in range(num_early)]
    assert log[: num_early + 1] == [*early, "known"]
    assert sorted(log[num_early + 1 :]) == sorted(
        [f"shown {first}" for first in (0, 2, 4, 6)]
        + [f"read {first}" for first in (0, 2, 4, 6)][num_early:]
    )
    assert all(log.index(f"read {n}") < log.index(f"shown {n}") for n in (0, 2, 4, 6))


def test_a_layer_that_fits_a_buffer_needs_no_routing_at_all() -> None:
    store = make_store(layers(8, 8), 4, staging_records=8)
    store.place(resident(store, {1: [1, 5, 6, 7]}))
    stream = ExpertStream(store)
    stream.prefetch(1)
    with stream.groups(1, used(store, range(8), 1)) as groups:
        assert [(group.first, group.stop) for group in groups] == [(0, 8)]


def test_behind_a_prefetch_the_rest_may_be_read_in_place() -> None:
    store = make_store(layers(8, 8), staging_records=6)
    stream = ExpertStream(store)
    stream.prefetch(1)
    before = store.ring.copied_bytes
    with stream.groups(1, used(store, [0, 7], 1, use_ring=False)) as groups:
        *early, rest = groups
        stop = early[-1].stop
        assert [group.first for group in early] == [0, 3] and stop == 6
        assert rest.staged is None and (rest.first, rest.stop) == (stop, 8)
        assert rest.address_E[stop:].tolist() == store.table.row(1)[stop:].tolist()
    assert store.ring.copied_bytes == before and store.ring.num_idle == 2


def test_what_was_prefetched_for_another_layer_is_given_up() -> None:
    store = make_store(layers(8, 8, 8), staging_records=2)
    stream = ExpertStream(store)
    stream.prefetch(1)
    bring(store, stream, 2, range(8))
    assert store.ring.num_idle == 2
    stream.prefetch(0)
    stream.drop()
    assert store.ring.num_idle == 2


def test_a_prompt_sends_for_its_first_layer_where_shorter_ones_used_all_of_it() -> None:
    store = make_store(layers(8, 8), staging_records=4)
    stream = ExpertStream(store)

    def sent_at_once(num_tokens: int, experts: Sequence[int]) -> int:
        before = store.ring.copied_bytes
        stream.begin(num_tokens)
        early = store.ring.copied_bytes - before
        bring(store, stream, 0, experts)
        return early // store.layers[0].expert.record_bytes

    assert sent_at_once(100, range(8)) == 0, "nothing is known yet, and layer 1 has the buffers"
    assert sent_at_once(99, range(4)) == 0
    assert sent_at_once(100, range(8)) == 4, "both buffers"
    assert sent_at_once(300, range(6)) == 4
    assert sent_at_once(300, range(8)) == 0, "it was not enough any more"
    assert sent_at_once(300, range(8)) == 4
    stream.begin(300)
    stream.begin(300)  # the one before ended ahead of its first layer
    bring(store, stream, 0, range(8))
    stream.drop()
    assert store.ring.num_idle == 2
    waiting = ExpertStream(store, overlap=False)
    for _ in range(2):
        waiting.begin(300)
        assert store.ring.num_idle == 2
        bring(store, waiting, 0, range(8))


def test_residency_may_change_behind_a_prefetch() -> None:
    """As decode steps between two layers do: what is missing now is read in place."""
    store = make_store(layers(8, 8), 2, staging_records=8)
    store.place(resident(store, {1: [1, 6]}))
    stream = ExpertStream(store)
    stream.prefetch(1)  # 0, 2, 3
    store.place(resident(store, {1: [0, 6]}))
    groups = bring(store, stream, 1, range(8))
    assert staged_of(groups) == [0, 2, 3, 4, 5, 7]


def test_small_records_use_the_room_of_the_largest() -> None:
    moe = layers(9, 9, experts=[SMALL, LARGE])
    store = make_store(moe, {}, staging_records=4)
    stream = ExpertStream(store)
    assert stream.room(0) == 2 * LARGE.record_bytes // SMALL.record_bytes > 2
    assert stream.room(1) == 2
    assert len(bring(store, stream, 1, range(9))) == 5


def test_a_stream_that_is_left_early_spoils_nothing() -> None:
    store = make_store(layers(8, 8), staging_records=2)
    stream = ExpertStream(store)
    with pytest.raises(ValueError, match="left"), stream.groups(0, used(store, range(8))) as groups:
        next(groups)
        raise ValueError("left")
    assert store.ring.num_idle == 2
    bring(store, stream, 1, range(8))


@pytest.mark.parametrize("owned", [[], [3], [0, 1, 2, 3], [1, 5, 8, 15], range(16)])
@pytest.mark.parametrize(("staging_records", "num_buffers"), [(2, 2), (6, 2), (9, 3), (64, 2)])
def test_staged_equals_in_place(
    owned: Sequence[int], staging_records: int, num_buffers: int
) -> None:
    """MB-06: tokens that touch all 16 experts run in groups, whatever room there is for them."""
    store = make_store(
        layers(16), len(owned), staging_records=staging_records, num_buffers=num_buffers
    )
    store.place(resident(store, {0: owned}))
    copied = store.ring.copied_bytes
    staged, in_place = runner(store, use_ring=True), runner(store)
    x_TH, ids_TK, weights_TK = routed(store, MANY)
    assert len(ids_TK.unique()) == 16
    assert torch.equal(staged(x_TH, ids_TK, weights_TK), in_place(x_TH, ids_TK, weights_TK))
    moved = (store.ring.copied_bytes - copied) // store.layers[0].expert.record_bytes
    assert moved == 16 - len(owned), "PP-03: each missing expert moves once"
    assert store.placement.residents(0).tolist() == sorted(owned), "the hot set stays"
    assert store.audit() == []


def test_blocks_share_what_is_staged_and_nothing_else() -> None:
    """A block alone and beside others gives the same bits, few tokens (summed in another order)
    included, and with in-place reads too; each record crosses once for all of them."""
    store = make_store(layers(16), 3, staging_records=6)
    store.place(resident(store, {0: [2, 3, 9]}))
    sizes = (MANY, 1, 33, MATCH_TOKENS, MANY)
    blocks = [Block(*routed(store, size, seed=i)) for i, size in enumerate(sizes)]
    before = store.ring.copied_bytes
    together = runner(store, use_ring=True).run(blocks)
    assert store.ring.copied_bytes - before == 13 * store.layers[0].expert.record_bytes
    for block, got in zip(blocks, together, strict=True):
        alone = runner(store)(block.x_TH, block.ids_TK, block.weights_TK)
        assert torch.equal(got, alone)
    for got, want in zip(runner(store).run(blocks), together, strict=True):
        assert torch.equal(got, want)


def test_large_blocks_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens beyond what a block may hold run in a block of their own, one of one token too."""
    store = make_store(layers(16), staging_records=6)
    inputs = routed(store, 2 * MANY + 1)
    want = torch.cat(
        [runner(store)(*(t[i : i + MANY] for t in inputs)) for i in (0, MANY, 2 * MANY)]
    )
    monkeypatch.setattr("hotset.runtime.moe.block_tokens", lambda *_: MANY)
    assert torch.equal(runner(store, use_ring=True)(*inputs), want)


def test_a_norm_on_expert_outputs() -> None:
    store = make_store(layers(16), staging_records=6)
    norm = nn.LayerNorm(24, dtype=torch.bfloat16)
    staged = runner(store, use_ring=True, post_norm=norm)
    inputs = routed(store, MANY)
    assert torch.equal(staged(*inputs), runner(store, post_norm=norm)(*inputs))
    assert not torch.equal(staged(*inputs), runner(store)(*inputs))


def test_only_what_is_routed_is_staged() -> None:
    store = make_store(layers(16), 2, staging_records=4)
    store.place(resident(store, {0: [3, 4]}))
    staged, in_place = runner(store, use_ring=True), runner(store)
    x_TH, ids_TK, weights_TK = routed(store, MATCH_TOKENS + 1)
    ids_TK = ids_TK % 5  # experts 0..4 only, repeated within rows as well
    ids_TK[5] = -1  # padding
    before = store.ring.copied_bytes
    out_TH = staged(x_TH, ids_TK, weights_TK)
    assert torch.equal(out_TH, in_place(x_TH, ids_TK, weights_TK))
    assert not out_TH[5].any()
    assert store.ring.copied_bytes - before == 3 * store.layers[0].expert.record_bytes


def test_few_tokens_are_read_in_place() -> None:
    store = make_store(layers(16), staging_records=4)
    runner(store, use_ring=True)(*routed(store, MATCH_TOKENS))
    assert store.ring.copied_bytes == 0


@pytest.fixture
def grouped() -> tuple[ExpertStore, tuple[torch.Tensor, ...], torch.Tensor]:
    """A store whose ring holds two records at a time, inputs, and the right output."""
    store = make_store(layers(16), staging_records=4)
    inputs = routed(store, MANY)
    return store, inputs, runner(store)(*inputs)


def test_the_control_a_wrong_staged_byte_shows(grouped) -> None:
    store, inputs, want = grouped
    store.arena.record(0, 7)[:64] = 0
    assert not torch.equal(runner(store, use_ring=True)(*inputs), want)


def test_the_control_a_missed_group_shows(grouped, monkeypatch: pytest.MonkeyPatch) -> None:
    store, inputs, want = grouped
    ranges = ExpertStream._ranges
    monkeypatch.setattr(
        ExpertStream,
        "_ranges",
        lambda self, *args: ranges(self, *args)[:3] + ranges(self, *args)[4:],
    )
    assert not torch.equal(runner(store, use_ring=True)(*inputs), want)


def test_the_control_another_order_of_groups_shows(
    grouped, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FP32 sums round differently in another order; here before they are rounded to BF16."""
    store, inputs, _ = grouped
    sums: list[torch.Tensor] = []

    class Watching(ReferenceKernels):
        def add_experts(self, *args, sum_TH, **kwargs) -> None:
            sums.append(sum_TH)
            super().add_experts(*args, sum_TH=sum_TH, **kwargs)

    def run() -> torch.Tensor:
        chosen = runner(store, use_ring=True)
        chosen._kernels = Watching()
        chosen(*inputs)
        return sums[-1]

    ranges = ExpertStream._ranges
    want = run()
    assert torch.equal(run(), want)
    monkeypatch.setattr(ExpertStream, "_ranges", lambda self, *args: ranges(self, *args)[::-1])
    assert not torch.equal(run(), want)
