"""The expert store: owners, bytes and addresses stay in step, whatever placements follow."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
from records import expert, layers, make_store, record_bytes, resident, routed, runner

from hotset.core.placement import Placement
from hotset.experts.slots import POISON
from hotset.experts.store import ExpertStore
from hotset.kernels.gather import copy_records
from hotset.runtime.routing import RoutingLog
from hotset.runtime.steps import Steps

SMALL, LARGE = expert(), expert(72, 28)
RECORD = SMALL.record_bytes


def copied(store: ExpertStore) -> int:
    """Records copied so far, all of one size."""
    return store.ring.copied_bytes // RECORD


def test_cold_miss_then_warm_hit() -> None:
    store = make_store(layers(4), 2)
    assert store.table.row(0).tolist() == [store.arena.address(0, index) for index in range(4)]
    store.place(resident(store, {0: [2]}))
    slot = int(store.placement.slot_of[0, 2])
    assert int(store.table.row(0)[2]) == store.slots.address(slot)
    assert torch.equal(store.slots.view(slot), record_bytes(store, 0, 2))
    assert copied(store) == 1


def test_who_keeps_a_slot_is_not_copied() -> None:
    store = make_store(layers(6), 3)
    store.place(resident(store, {0: [0, 1, 2]}))
    after = resident(store, {0: [0, 1, 2]})
    after.evict(0, 1)
    after.assign(0, 5)
    store.place(after)
    assert copied(store) == 4, "three, then one"
    store.place(after)
    assert copied(store) == 4, "the same placement again moves nothing"
    assert store.audit() == []


def test_an_evicted_expert_is_read_from_the_host() -> None:
    store = make_store(layers(4), 2)
    store.place(resident(store, {0: [1, 3]}))
    store.place(resident(store, {0: [1]}))
    assert int(store.table.row(0)[3]) == store.arena.address(0, 3)
    store.place(Placement(store.placement.pools))
    assert torch.equal(store.table.address, store.table.host_address)
    assert store.audit() == []


def test_experts_that_swap_slots() -> None:
    store = make_store(layers(4), 2)
    store.place(resident(store, {0: [0, 1]}))
    swapped = Placement(store.placement.pools)
    swapped.assign(0, 1)
    swapped.assign(0, 0)
    assert swapped.slot_of[0, 0] == store.placement.slot_of[0, 1]
    store.place(swapped)
    assert store.audit() == []


def test_a_slot_goes_from_layer_to_layer() -> None:
    store = make_store(layers(4, 4), 2)
    store.place(resident(store, {0: [0, 1]}))
    store.place(resident(store, {1: [2, 3]}))
    assert torch.equal(store.slots.view(0), record_bytes(store, 1, 2))
    assert store.audit() == []


def test_records_of_two_sizes_never_meet() -> None:
    store = make_store(
        layers(6, 4, experts=[SMALL, LARGE]), {SMALL.record_bytes: 3, LARGE.record_bytes: 2}
    )
    store.place(resident(store, {0: [0, 2, 4], 1: [1, 3]}))
    assert store.audit() == []
    store.place(resident(store, {0: [1, 3, 5], 1: [0, 2]}))
    assert store.audit() == []


def test_no_slots_at_all() -> None:
    """CC-19: nothing on the device is a placement like another."""
    store = make_store(layers(4), 0)
    store.place(Placement(store.placement.pools))
    assert store.audit() == []
    assert copied(store) == 0


def test_dense_layers_have_no_rows() -> None:
    """HR-04: a model whose layer 0 is dense numbers its MoE layers from 0."""
    store = make_store(layers(8, 8), 4)
    assert store.table.address.shape == (2, 8)
    store.place(resident(store, {1: [0, 7]}))
    assert store.audit() == []


def test_a_released_slot_holds_nan_until_it_is_filled() -> None:
    """CC-05: what is not filled cannot be reached, and would show."""
    store = make_store(layers(4), 3)
    assert {POISON} == set(store.slots.view(0).tolist())
    store.place(resident(store, {0: [0, 1]}))
    slot = int(store.placement.slot_of[0, 1])
    store.place(resident(store, {0: [0]}))
    assert {POISON} == set(store.slots.view(slot).tolist())
    reachable = set(store.table.row(0).tolist())
    free = {store.slots.address(s) for s in range(3) if store.placement.owner(s) is None}
    assert not reachable & free


def test_fields_are_views_of_the_record() -> None:
    store = make_store(layers(3, experts=[expert(24, 20, bias=True)]), 1)
    fields = store.fields(0, 1)
    assert {name: tuple(value.shape) for name, value in fields.items()} == {
        "up": (40, 24),
        "down": (24, 20),
        "up_bias": (40,),
        "down_bias": (24,),
    }
    fields["down_bias"].fill_(1.0)
    assert bool((store.fields(0, 1)["down_bias"] == 1.0).all())
    assert torch.equal(store.arena.record(0, 2), record_bytes(store, 0, 2)), "and of no other"


@pytest.mark.parametrize("seed", range(4))
def test_any_history_of_placements_leaves_every_byte_right(seed: int) -> None:
    """CC-18, CC-10: 125 random placements in a row, audited byte for byte after each."""
    moe = layers(9, 5, 9, experts=[SMALL, LARGE, SMALL])
    num_slots = {SMALL.record_bytes: 7, LARGE.record_bytes: 2}
    store, rng = make_store(moe, num_slots), random.Random(seed)
    for _ in range(125):
        placement = _scrambled(store, rng) if rng.random() < 0.3 else _edited(store, rng)
        store.place(placement)
        placement.check()
        assert store.audit() == []
        for slot in range(store.slots.num_slots):
            if store.placement.owner(slot) is None:
                assert bool((store.slots.view(slot) == POISON).all())


def _scrambled(store: ExpertStore, rng: random.Random) -> Placement:
    """A placement that has nothing to do with the one before it."""
    placement = Placement(store.placement.pools)
    everyone = [(i, e) for i, layer in enumerate(store.layers) for e in range(layer.num_experts)]
    for layer, index in rng.sample(everyone, len(everyone)):
        if placement.num_free(layer) and rng.random() < 0.7:
            placement.assign(layer, index)
    return placement


def _edited(store: ExpertStore, rng: random.Random) -> Placement:
    """The placement before, with a few owners changed."""
    placement = copy.deepcopy(store.placement)
    for _ in range(rng.randrange(4)):
        layer = rng.randrange(len(store.layers))
        residents = placement.residents(layer)
        if len(residents):
            placement.evict(layer, int(rng.choice(residents.tolist())))
    for _ in range(rng.randrange(4)):
        layer = rng.randrange(len(store.layers))
        absent = np.flatnonzero(~placement.resident[layer, : store.layers[layer].num_experts])
        if placement.num_free(layer) and len(absent):
            placement.assign(layer, int(rng.choice(absent.tolist())))
    return placement


def test_the_audit_finds_one_flipped_byte() -> None:
    """CC-18: in a slot that is owned; a free one holds nothing."""
    store = make_store(layers(4, 4), 5)
    store.place(resident(store, {0: [1, 2], 1: [0, 3]}))
    assert store.audit() == []
    slot = int(store.placement.slot_of[1, 3])
    last = store.layers[1].expert.layout.fields[-1]
    store.slots.view(slot)[last.offset + last.nbytes - 1] ^= 1
    assert store.audit() == [f"slot {slot} differs from layer 1 expert 3"]


def test_the_audit_finds_an_arena_that_changed() -> None:
    store = make_store(layers(4), 2)
    store.place(resident(store, {0: [1, 2]}))
    store.arena.record(0, 2)[0] ^= 0x80
    assert len(store.audit()) == 1


@pytest.mark.parametrize("expert_index", [1, 3])
def test_the_audit_finds_a_wrong_address(expert_index: int) -> None:
    """Of an expert with a slot and of one without."""
    store = make_store(layers(4), 2)
    store.place(resident(store, {0: [1, 2]}))
    store.table.address[0, expert_index] += RECORD
    assert store.audit() == [f"layer 0 expert {expert_index} has a wrong address"]


def test_closing_twice_and_as_a_context() -> None:
    with make_store(layers(4), 2) as store:
        pass
    store.close()
    assert store.arena.bytes_.numel() == 0


def test_fewer_slots_than_a_layer_routes() -> None:
    """CC-01, CC-02: 4 experts a token, 2 slots; all miss, half miss; one and many tokens."""
    for num_tokens in (1, 2, 8, 32):
        store = make_store(layers(16), 2)
        run = runner(store)
        x_TH, ids_TK, weights_TK = routed(store, num_tokens, seed=num_tokens)
        want = run(x_TH, ids_TK, weights_TK)
        first = ids_TK[0, :2].tolist()
        others = sorted(set(range(16)) - set(ids_TK.unique().tolist()))[:2]
        for owned in (first, others, [15, 0], [3]):
            store.place(resident(store, {0: owned}))
            assert torch.equal(run(x_TH, ids_TK, weights_TK), want), owned


def test_slots_filled_for_one_step_serve_the_next() -> None:
    """CC-01: {4..7} are hot, {0..3} are needed, then 6 experts with 4 slots: right each time."""
    store = make_store(layers(16), 4)
    run = runner(store)
    x_TH, _, weights_TK = routed(store, 8)
    for hot, needed in (([4, 5, 6, 7], [0, 1, 2, 3]), ([0, 1, 2, 3], [0, 1, 2, 3, 8, 9])):
        ids_TK = torch.tensor(needed)[torch.arange(32).view(8, 4) % len(needed)]
        store.place(Placement(store.placement.pools))
        want = run(x_TH, ids_TK, weights_TK)
        store.place(resident(store, {0: hot}))
        assert torch.equal(run(x_TH, ids_TK, weights_TK), want)


@pytest.mark.parametrize("where", ["table.adopt", "table.send", "placement.apply"])
def test_a_step_that_breaks_off_between_two_notes_is_mended(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By an interruption, which comes anywhere: table and placement may then disagree on owners."""
    store = make_store(layers(6, 4), 3, staging_records=2)
    store.place(resident(store, {0: [1, 2], 1: [0]}))
    staged = store.ring.stage(0, [4], record_bytes=RECORD)
    store.tee(staged, [(4, 1)])
    part, name = where.split(".")
    carry_out = getattr(getattr(store, part), name)

    def interrupted(*args: object) -> None:
        carry_out(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(getattr(store, part), name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.hand_over(0, [(4, 1)])
    monkeypatch.undo()
    assert store.is_torn
    store.restore()
    store.placement.check()
    assert store.audit() == [] and not store.is_torn


def teed(store: ExpertStore, pairs: list[tuple[int, int]]) -> None:
    """Copies all of a group to slots, whoever is handed them later."""
    staged = store.ring.stage(0, [3, 4, 5], record_bytes=RECORD)
    store.tee(staged, pairs)
    store.ring.release(staged)


def test_a_group_of_records_changes_hands_at_once() -> None:
    store = make_store(layers(6, 4), 4, staging_records=6)
    store.place(resident(store, {0: [0, 1, 2], 1: [0]}))
    slots = store.placement.slot_of[0, [2, 0, 1]].tolist()
    pairs = [(5, 2), (3, 0), (4, 1)]
    teed(store, pairs)
    assert store.is_torn
    store.hand_over(0, pairs)
    assert not store.is_torn
    assert store.placement.slot_of[0, [5, 3, 4]].tolist() == slots
    assert store.placement.residents(0).tolist() == [3, 4, 5]
    store.placement.check()
    assert store.audit() == []


def test_the_control_records_in_one_anothers_slots_show() -> None:
    store = make_store(layers(6), 3, staging_records=6)
    store.place(resident(store, {0: [0, 1, 2]}))
    teed(store, [(5, 2), (3, 0), (4, 1)])
    store.hand_over(0, [(5, 0), (3, 2), (4, 1)])
    assert len(store.audit()) == 2


def test_where_nothing_is_copied_nothing_is_torn() -> None:
    """A prompt that breaks off behind it then leaves nothing to mend."""
    store = make_store(layers(6), 3, staging_records=6)
    teed(store, [])
    assert not store.is_torn


def test_a_group_that_is_copied_halfway_is_mended(monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_store(layers(6), 3, staging_records=6)
    store.place(resident(store, {0: [0, 1, 2]}))

    def interrupted(sources_N: torch.Tensor, targets_N: torch.Tensor, nbytes: int) -> None:
        copy_records(sources_N[:1], targets_N[:1], nbytes)
        raise KeyboardInterrupt

    monkeypatch.setattr("hotset.experts.ring.copy_records", interrupted)
    with pytest.raises(KeyboardInterrupt):
        teed(store, [(5, 2), (3, 0), (4, 1)])
    assert store.is_torn and len(store.audit()) == 1
    store.restore()
    assert store.audit() == [] and not store.is_torn
    assert store.placement.residents(0).tolist() == [0, 1, 2]


def test_the_control_a_poisoned_slot_that_is_read_shows() -> None:
    store = make_store(layers(16), 4)
    run = runner(store)
    x_TH, ids_TK, weights_TK = routed(store, 8)
    used = int(ids_TK[0, 0])
    store.table.retarget({(0, used): store.slots.address(0)})
    assert not bool(torch.isfinite(run(x_TH, ids_TK, weights_TK)).all())


def test_the_log_counts_what_crossed_the_link() -> None:
    store = make_store(layers(16), 4)
    store.place(resident(store, {0: [0, 1, 2, 3]}))
    log = RoutingLog(store.layers)
    run = runner(store, log=log)
    x_TH, _, weights_TK = routed(store, 3)
    ids_TK = torch.tensor([[0, 1, 8, 8], [0, 9, -1, 16], [2, 1, 0, 9]])  # 16 and -1 are padding
    run(x_TH, ids_TK, weights_TK)
    steps = Steps(store, log, None)
    steps.account(log.take(), filled=False)
    total = log.total
    assert (total.steps, total.used, total.hits) == (1, 5, 3)
    assert total.link_bytes == 2 * RECORD
    assert total.hit_rate == 0.6
    steps.account(log.take(), filled=False)
    assert (total.steps, total.used) == (2, 5), "a step is counted once"


def test_a_long_step_gathers_its_ids_only_for_watchers() -> None:
    class Watching:
        def step(self, ids_LN: np.ndarray, owners: object) -> None:
            seen.append(ids_LN)

        def end(self, owner: object) -> None:
            pass

    seen: list[np.ndarray] = []
    store = make_store(layers(16), 4)
    log = RoutingLog(store.layers)
    run, steps = runner(store, log=log), Steps(store, log, None)
    x_TH, ids_TK, weights_TK = routed(store, 80)
    for watchers in ([], [Watching()]):
        steps.watchers = watchers
        steps.run(80, lambda: run(x_TH, ids_TK, weights_TK))
        assert not log._pending, "nothing is left for the next step"
    (ids_LN,) = seen
    assert ids_LN[0].tolist() == ids_TK.flatten().tolist()
    assert log.total.steps == 2


def test_a_norm_on_expert_outputs_is_applied_before_the_weights() -> None:
    """muse_spark: the stock module's own norm, in the model's dtype."""
    store = make_store(layers(16), 0)
    norm = torch.nn.RMSNorm(SMALL.hidden, dtype=torch.bfloat16)
    plain, normed = runner(store), runner(store, post_norm=norm)
    x_TH, ids_TK, weights_TK = routed(store, 4)
    one_hot = torch.zeros_like(weights_TK)
    one_hot[:, 0] = 1.0
    with torch.no_grad():
        got = normed(x_TH, ids_TK, one_hot)
        want = norm(plain(x_TH, ids_TK, one_hot))
    # The same numbers, rounded to bfloat16 before the norm in both.
    assert torch.equal(got, want)
