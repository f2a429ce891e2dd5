"""Policies against slow oracles written from their definitions, and the traps of the slot cache."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from routing import make_trace, skewed_ids

from hotset.core.errors import ConfigError
from hotset.core.placement import Placement
from hotset.core.policy import POLICIES, HalfLife, Lru, StaticGlobal, Wishes, make_policy
from hotset.core.policy.adaptive import lowest
from hotset.core.simulator import Condition, replay, simulate
from hotset.core.slot_pools import SlotPools


def half_life_oracle(ids, num_experts, slots, decay, num_victims=8):
    """Hits of one layer: scores are decayed one by one, all residents are sorted."""
    resident, score, hits = set(range(slots)), [decay * 0] * num_experts, 0
    for used in (set(step.tolist()) for step in ids):
        hits += len(used & resident)
        victims = sorted(resident, key=lambda e: (score[e], e))[:num_victims]
        worth = [decay * score[v] for v in victims]
        missing = [
            (e, sum(decay * score[e] + 1 > w for w in worth)) for e in sorted(used - resident)
        ]
        missing = [(e, admit) for e, admit in missing if admit > 0]
        free = [(p, v) for p, v in enumerate(victims) if v not in used]
        for (e, admit), (p, v) in zip(missing, free, strict=False):
            if admit > p:
                resident = resident - {v} | {e}
        score = [decay * s + (e in used) for e, s in enumerate(score)]
    return hits


def lru_oracle(ids, num_experts, slots):
    """Hits of one layer of a textbook LRU in which a step's own experts are protected."""
    resident, last, hits = set(range(slots)), [-1] * num_experts, 0
    for step, used in enumerate(set(row.tolist()) for row in ids):
        missing = sorted(used - resident)
        hits += len(used & resident)
        for expert in missing:
            waiting = sorted((last[e], e) for e in resident if e not in used)
            if waiting:
                resident = resident - {waiting[0][1]} | {expert}
        for expert in used:
            last[expert] = step
    return hits


@pytest.mark.parametrize(("half_life", "num_tokens"), [(1.0, 40), (0.5, 20), (3.7, 300), (40, 300)])
@pytest.mark.parametrize("slots", [1, 3, 7, 15, 16])
def test_half_life_is_its_definition(half_life, num_tokens, slots):
    """Exactly equal: half-lives of 1 and 0.5 in fractions, the others have no ties to round."""
    ids = skewed_ids(num_tokens=num_tokens, num_layers=2, num_experts=16, top_k=3, seed=slots)
    decay = Fraction(1, int(2 ** (1 / half_life))) if half_life <= 1 else 2 ** (-1 / half_life)
    want = sum(half_life_oracle(ids[:, layer], 16, slots, decay) for layer in range(2))
    trace = make_trace([ids], num_experts=16)
    result = simulate(trace, [Condition("half-life", slots / 16, half_life)])[0]
    assert result.hits_Q.sum() == want
    if slots == 3:  # Control: the oracle tells half-lives apart.
        other = sum(half_life_oracle(ids[:, layer], 16, slots, 0.99) for layer in range(2))
        assert other != want


@pytest.mark.parametrize("slots", [1, 3, 7, 15, 16])
def test_lru_is_its_definition(slots):
    ids = skewed_ids(num_tokens=300, num_layers=2, num_experts=16, top_k=3, seed=slots)
    want = sum(lru_oracle(ids[:, layer], 16, slots) for layer in range(2))
    trace = make_trace([ids], num_experts=16)
    assert simulate(trace, [Condition("lru", slots / 16)])[0].hits_Q.sum() == want


def test_scores_are_rebased_without_a_change_of_rank():
    """A half-life of 0.5 rebases every 200 steps; a policy that starts later never did."""
    ids = skewed_ids(num_tokens=460, num_layers=1, num_experts=8, top_k=2, seed=1)
    old, young = HalfLife([8], half_life=0.5), HalfLife([8], half_life=0.5)
    for step in ids:
        old.observe(step)
    for step in ids[-40:]:
        young.observe(step)
    pools = SlotPools.uniform([8], [8])
    placement = Placement.from_residents(pools, np.ones((1, 8), bool))
    wishes = [policy.wishes(placement) for policy in (old, young)]
    seen = np.unique(ids[-40:])
    order = [[e for e in w.victims_LV[0] if e in seen] for w in wishes]
    assert order[0] == order[1]
    assert np.array_equal(wishes[0].admit_LE[0, seen], wishes[1].admit_LE[0, seen])


@pytest.mark.parametrize("width", [8, 40, 512, 576, 700])
@pytest.mark.parametrize("count", ["none in one layer", 3, 8, 20, "as many elsewhere"])
def test_lowest_equals_a_full_sort(width, count):
    """With many equal scores, in the ways that wide, narrow, full and even layers are searched."""
    random = np.random.default_rng(width)
    score = random.integers(0, 5, size=(6, width)).astype(float)
    able = random.random((6, width)) < 0.5
    if count == "none in one layer":
        able[0] = False
    elif count == "as many elsewhere":  # a multiple of the layers, but not as many in each
        able[:] = False
        able[0, : width // 4], able[2, : width // 4] = True, True
        able[1, :4] = True
        able[3:, 0] = np.arange(3) < -able.sum() % 6
    else:
        ranks = random.permuted(np.tile(np.arange(width), (6, 1)), axis=1)
        able = ranks < count
    found = lowest(score, able, 8, scratch_LE=np.empty((6, width), np.int64))
    for layer in range(6):
        order = sorted(np.flatnonzero(able[layer]), key=lambda e: (score[layer, e], e))[:8]
        assert found[layer].tolist() == order + [-1] * (8 - len(order))


def test_an_expert_counts_once_per_step_and_padding_not_at_all():
    once, often = HalfLife([4], half_life=4.0), HalfLife([4], half_life=4.0)
    once.observe(np.array([[1, 3, -1, -1, -1]]))
    often.observe(np.array([[1, 3, 1, 1, 9]]))
    assert np.array_equal(once._score, often._score)


@pytest.mark.parametrize("half_life", [8.0, np.inf])
def test_a_prompt_counts_like_its_tokens(half_life):
    """Token by token and at once: 200 additions round to at most 200 eps. Uses of which less than
    2^-40 is left are missing; of those there are less than 1 / (1 - d) = 12."""
    ids_LTK = np.random.default_rng(0).integers(-1, 5, (2, 400, 3))  # repeats and padding
    stepped, read = (HalfLife([4, 5], half_life=half_life) for _ in range(2))
    for policy in (stepped, read):
        policy.observe(np.array([[3], [1]]))
    for token in range(400):
        stepped.observe(ids_LTK[:, token])
    for layer, ids_TK in enumerate(ids_LTK):
        read.read(layer, ids_TK)
    got, want = read._score / read._worth, stepped._score / stepped._worth
    np.testing.assert_allclose(got, want, rtol=400 * np.finfo(float).eps, atol=12 * 2.0**-40)
    backwards = HalfLife([4, 5], half_life=half_life)
    for layer, ids_TK in enumerate(ids_LTK):
        backwards.read(layer, ids_TK[::-1])
    if half_life < np.inf:  # the control: the end of a prompt counts most
        assert not np.allclose(backwards._score, read._score, rtol=0.01)


def test_the_last_used_of_a_prompt_is_the_last_used():
    policy = Lru([6])
    policy.observe(np.array([[0, 1]]))
    policy.read(0, np.array([[2, 3], [4, -1], [2, 9]]))
    assert np.argsort(-policy.scores(0), kind="stable").tolist() == [2, 4, 3, 0, 1, 5]
    policy.observe(np.array([[1]]))
    assert policy.scores(0).argmax() == 1


def test_hit_rate_recovers_after_a_prompt_of_other_text():
    """100 decode steps, a prompt of 2,000 other tokens, 100 decode steps as before."""
    share = np.where(np.arange(32) < 8, 1.0, 0.02)
    random = np.random.default_rng(0)
    draw = lambda p, n: np.stack(  # noqa: E731
        [random.choice(32, 4, replace=False, p=p / p.sum()) for _ in range(n)]
    )[:, None]
    policy = HalfLife([32])
    pools = SlotPools.uniform([32], [8])
    placement = Placement.from_residents(pools, policy.initial(pools))
    before = replay([draw(share, 100)], policy, placement)[0, 0] / 400
    policy.read(0, draw(share[::-1], 2000)[:, 0])
    replay([draw(share, 20)], policy, placement)
    after = replay([draw(share, 80)], policy, placement)[0, 0] / 320
    assert after >= 0.8 * before


def test_a_working_set_that_fits_is_not_evicted():
    ids = np.stack([np.roll(np.arange(6), i)[:2] for i in range(300)])[:, None]
    for policy in (HalfLife([16]), Lru([16])):
        pools = SlotPools.uniform([16], [6])
        start = np.zeros((1, 16), bool)
        start[0, 10:] = True
        placement = Placement.from_residents(pools, start)
        hits = replay([ids[:20], ids[20:]], policy, placement)
        assert hits[1, 0] == 2 * 280
        assert set(placement.residents(0)) == set(range(6))


def test_every_layer_gets_its_share_of_hits():
    """A global LRU would let the first layers own the cache."""
    ids = skewed_ids(num_tokens=400, num_layers=8, num_experts=8, top_k=2, seed=3)
    for policy in (HalfLife([8] * 8), Lru([8] * 8)):
        pools = SlotPools.uniform([8] * 8, [3] * 8)
        placement = Placement.from_residents(pools, policy.initial(pools))
        rates = replay([ids], policy, placement)[0] / 800
        assert rates.min() >= 0.5 * rates.max()


def test_wishes_name_residents_worst_first_and_never_pinned_ones():
    policy = HalfLife([6], half_life=4.0, num_victims=3)
    pools = SlotPools.uniform([6], [4])
    placement = Placement.from_residents(pools, policy.initial(pools))
    placement.pin(0, 1)
    for expert in (3, 0, 2, 0):
        policy.observe(np.array([[expert]]))
    wishes = policy.wishes(placement)
    assert wishes.victims_LV.tolist() == [[3, 2, 0]]
    # A first use is worth 1 and beats one of 4 and one of 2 steps ago, but not two of expert 0.
    assert wishes.admit_LE[0, [4, 5]].tolist() == [2, 2]
    for pinned in (0, 2, 3):
        placement.pin(0, pinned)
    assert policy.wishes(placement).victims_LV.tolist() == [[-1, -1, -1]]
    assert not policy.wishes(placement).admit_LE.any()


def test_wishes_offer_an_empty_slot_first():
    policy = HalfLife([6], half_life=4.0, num_victims=3)
    pools = SlotPools.uniform([6], [3])
    start = np.zeros((1, 6), bool)
    start[0, :2] = True
    placement = Placement.from_residents(pools, start, num_spare=2)
    placement.lend(0)
    for _ in range(3):
        policy.observe(np.array([[0, 1]]))
    wishes = policy.wishes(placement)
    assert wishes.victims_LV.tolist() == [[6, 0, 1]]
    assert wishes.admit_LE[0, 5] == 1  # The empty slot only: two uses outrank one.


def test_wishes_can_be_written_in_place():
    policy = Lru([6], num_victims=2)
    pools = SlotPools.uniform([6], [3])
    placement = Placement.from_residents(pools, policy.initial(pools))
    out = Wishes.none(1, 2, 6)
    assert policy.wishes(placement, out=out) is out
    assert out.victims_LV.tolist() == [[0, 1]]
    assert out.admit_LE.tolist() == [[2] * 6]
    assert out.victims_LV.dtype == out.admit_LE.dtype == np.int32


def test_endless_half_life_is_the_static_set_of_the_profile():
    prior = np.array([[0.1, 0.9, 0.2, 0.8, 0.3]])
    policy = HalfLife([5], half_life=np.inf, prior_LE=prior)
    pools = SlotPools.uniform([5], [2])
    placement = Placement.from_residents(pools, policy.initial(pools))
    assert placement.residents(0).tolist() == [1, 3]
    hits = replay([np.tile([[[0], [2], [4]]], (50, 1, 1)).reshape(-1, 1, 1)], policy, placement)
    assert hits.sum() == 0
    assert placement.residents(0).tolist() == [1, 3]


def test_half_life_per_layer():
    """Two layers in one policy do what they do in one each."""
    ids = skewed_ids(num_tokens=200, num_layers=1, num_experts=12, top_k=3, seed=5)
    rates = []
    for half_lives in ([2.0, 50.0], [2.0], [50.0]):
        policy = HalfLife([12] * len(half_lives), half_life=np.array(half_lives))
        pools = SlotPools.uniform([12] * len(half_lives), [4] * len(half_lives))
        placement = Placement.from_residents(pools, policy.initial(pools))
        rates.append(replay([ids], policy, placement, copies=len(half_lives))[0].tolist())
    assert rates[0] == rates[1] + rates[2]
    assert rates[0][0] != rates[0][1]


def test_initial_sets_of_the_policies():
    prior = np.array([[0.9, 0.8, 0.7, 0.6], [0.5, 0.1, 0.2, 0.3]])
    pools = SlotPools.uniform([4, 4], [2, 2])
    want = {
        "half-life": [[0, 1], [0, 3]],
        "lru": [[0, 1], [0, 3]],
        "static-uniform": [[0, 1], [0, 3]],
        "static-global": [[0, 1, 2, 3], []],
        "none": [[], []],
    }
    assert set(want) | {"forecast"} == set(POLICIES)
    for name, residents in want.items():
        policy = make_policy(name, num_experts=[4, 4], prior_LE=prior)
        marked = policy.initial(pools)
        assert [np.flatnonzero(row).tolist() for row in marked] == residents, name
        Placement.from_residents(pools, marked).check()
    unequal = make_policy("half-life", num_experts=[4, 4], prior_LE=prior)
    marked = unequal.initial(pools, slots_per_layer=np.array([1, 3]))
    assert marked.sum(axis=1).tolist() == [1, 3]


def test_static_global_stays_within_a_pool():
    pools = SlotPools.build(num_experts=[4, 3], record_bytes=[10, 20], num_slots={10: 1, 20: 2})
    prior = np.array([[0.9, 0.8, 0.7, 0.6], [0.5, 0.1, 0.2, 0.0]])
    marked = StaticGlobal([4, 3], prior_LE=prior).initial(pools)
    assert [np.flatnonzero(row).tolist() for row in marked] == [[0], [0, 2]]


def test_fixed_policies_wish_for_nothing():
    prior = np.ones((1, 4))
    pools = SlotPools.uniform([4], [2])
    for name in ("static-uniform", "static-global", "none"):
        policy = make_policy(name, num_experts=[4], prior_LE=prior)
        placement = Placement.from_residents(pools, policy.initial(pools))
        policy.observe(np.array([[3]]))
        policy.read(0, np.array([[3]] * 9))
        out = Wishes(np.full((1, 8), 7, np.int32), np.full((1, 4), 7, np.int32))
        assert (policy.wishes(placement, out=out).victims_LV == -1).all()
        assert not out.admit_LE.any()


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("half-lfe", {}, "did you mean `half-life`"),
        ("lru", {"half_life": 4}, "policy `lru` has no `half_life`"),
        ("half-life", {"half_life": 0}, "the least is 0.1 steps"),
        ("half-life", {"half_life": float("nan")}, "the least is 0.1 steps"),
        ("half-life", {"prior_weight": -1}, "it must be a number from 0 on"),
        ("half-life", {"num_victims": 0}, "must be in 1..127"),
        ("forecast", {}, "needs a profile with a forecast"),
        ("lru", {"prior_LE": np.ones((2, 4))}, r"shape \(2, 4\), the model \(1, 4\)"),
    ],
)
def test_wrong_parameters_are_refused(name, options, text):
    with pytest.raises(ConfigError, match=text):
        make_policy(name, num_experts=[4], **options)


def test_static_policies_need_a_profile():
    with pytest.raises(ConfigError, match="policy `static-uniform` needs a profile"):
        make_policy("static-uniform", num_experts=[4]).initial(SlotPools.uniform([4], [2]))
    with pytest.raises(ConfigError, match="policy `static-global` needs a profile"):
        make_policy("static-global", num_experts=[4]).check_ready()
    make_policy("half-life", num_experts=[4]).check_ready()
