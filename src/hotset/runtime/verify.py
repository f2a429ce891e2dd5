"""Checks a loaded model from end to end: bytes, placements, and transformers' own answer.

Every check says what it compared and by how much; none is skipped in silence. Owns no engine: it
is given one and leaves its placement as it was.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from hotset.checkpoint.audit import audit_records
from hotset.checkpoint.reader import ShardReader
from hotset.checkpoint.resident import whole_state_dict
from hotset.core.errors import RequestError
from hotset.core.placement import Placement
from hotset.models.load import quiet_transformers
from hotset.models.seam import class_config, model_class
from hotset.runtime.engine import Engine
from hotset.runtime.moe import MATCH_TOKENS
from hotset.runtime.weights import CheckpointWeights

# New tokens of the greedy comparison and of the repeated-token check.
NUM_GREEDY = 24


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        name: of the check.
        ok: `None` when it could not be made; `detail` says why.
        detail: what was compared, with numbers.
    """

    name: str
    ok: bool | None
    detail: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def verify(
    engine: Engine, source: CheckpointWeights, text_ids: Sequence[int], *, stock: bool
) -> Iterator[Check]:
    """Runs the checks one by one.

    Args:
        engine: loaded from `source`, with `poison` set, so that free slots hold NaN meanwhile.
        source: the checkpoint.
        text_ids: tokens of a text; its first half is the prompt of the greedy checks.
        stock: also compare with transformers' own forward; it loads the whole model in FP32.

    Raises:
        RequestError: the engine's context or the text is too short.
    """
    require_text(text_ids)
    room = engine.plan.context_tokens - NUM_GREEDY
    if room < 2:
        raise RequestError(
            f"a context of {engine.plan.context_tokens} tokens is too short to verify anything in",
            hint=f"use `--context {2 * NUM_GREEDY}` or more",
        )
    ids = list(text_ids)[:room]
    yield check_records(engine, source)
    yield check_slots(engine)
    yield check_placements(engine, ids)
    yield check_decode(engine, ids[: max(1, len(ids) // 2)])
    yield check_perplexity(engine, ids)
    yield check_repetition(engine, ids[: max(1, len(ids) // 2)])
    if stock:
        yield from check_stock(engine, source, ids)
    else:
        yield Check("stock logits", None, "the whole model in FP32 does not fit host memory")


def require_text(text_ids: Sequence[int], name: str = "the text") -> None:
    """Refuses a text that is too short for a perplexity; ask before loading.

    Args:
        text_ids: its tokens.
        name: for the message.

    Raises:
        RequestError: it has fewer than two tokens.
    """
    if len(text_ids) < 2:
        raise RequestError(
            f"{name} has {len(text_ids)} tokens, at least 2 are needed to verify anything",
            option="text",
            hint="give a text of a few sentences",
        )


def check_records(engine: Engine, source: CheckpointWeights) -> Check:
    """Every record, in the arena or in the slot that is all it has, against the checkpoint's files,
    byte for byte."""
    experts = [layer.expert for layer in engine.geometry.layers]

    def fields(layer: int, expert: int) -> dict[str, torch.Tensor]:
        return {name: field.cpu() for name, field in engine.store.fields(layer, expert).items()}

    wrong = list(audit_records(source.keys, fields, experts))
    num_records = engine.geometry.num_records
    return Check(
        "records", not wrong, _first(wrong) or f"{num_records} records equal the checkpoint's bytes"
    )


def check_slots(engine: Engine) -> Check:
    """Every owned slot against the arena, where it has a copy there, and the table with both."""
    wrong = engine.store.audit()
    placement = engine.store.placement
    num_owned = int((placement.resident & ~placement.pinned).sum())
    return Check("slots", not wrong, _first(wrong) or f"{num_owned} slots equal the arena's bytes")


def check_placements(engine: Engine, ids: list[int]) -> Check:
    """Logits of a text under several placements, bit for bit; free slots hold NaN meanwhile."""
    before, reference, names = engine.store.placement, None, []
    try:
        for name, placement in placements(engine):
            engine.place(placement)
            wrong = engine.store.audit()
            if wrong:
                return Check("placements", False, f"{name}: {wrong[0]}")
            logits = engine.logits(ids)
            if reference is not None and not torch.equal(logits, reference):
                worst = float((logits - reference).abs().max())
                return Check("placements", False, f"{name} changes logits by up to {worst:.3g}")
            reference = logits
            names.append(name)
    finally:
        engine.place(before)
    if reference is None or not bool(torch.isfinite(reference).all()):
        return Check("placements", False, "logits are not finite")
    return Check("placements", True, f"{len(ids)} tokens bitwise equal with {', '.join(names)}")


def check_decode(engine: Engine, prompt_ids: list[int]) -> Check:
    """Greedy answers under the same placements, with fills where the policy makes them, and once
    more with every step launched kernel by kernel instead of replayed; slots audited after each."""
    before, reference, names = engine.store.placement, None, []

    def differs(name: str) -> str:
        nonlocal reference
        found = [t.token_id for t in engine.generate_ids(prompt_ids, max_tokens=NUM_GREEDY)]
        reference = reference or found
        names.append(name)
        wrong = engine.store.audit()
        if wrong:
            return f"{name}: {wrong[0]}"
        return "" if found == reference else f"{name} gives other tokens"

    try:
        for name, placement in placements(engine):
            engine.place(placement)
            if problem := differs(name):
                return Check("decode", False, problem)
        if engine.decoding is not None and engine.decoding.captured:
            with engine.decoding.uncaptured():
                if problem := differs("uncaptured"):
                    return Check("decode", False, problem)
    finally:
        engine.place(before)
    return Check("decode", True, f"{NUM_GREEDY} greedy tokens equal with {', '.join(names)}")


def placements(engine: Engine) -> Iterator[tuple[str, Placement]]:
    """Nothing resident, one layer, 37% and all of the slots, each at random experts. Those that
    have no other place than a slot stay where they are."""
    pools, num_experts = engine.pools, engine.geometry.num_records
    slot_only = pools.num_slot_only or (0,) * len(pools.num_experts)
    slots = [n - own for n, own in zip(engine.plan.slots_per_layer, slot_only, strict=True)]
    rng = np.random.default_rng(0)
    layers = engine.geometry.layers
    yield "no expert in a slot", Placement(pools)
    first = np.zeros((len(layers), pools.max_experts), dtype=np.bool_)
    first[0, : slots[0]] = True
    if first.any():
        yield "one layer", Placement.from_residents(pools, first)
    for share in (0.37, 1.0):
        resident = np.zeros_like(first)
        for layer, spec in enumerate(layers):
            others = spec.num_experts - slot_only[layer]
            resident[layer, rng.permutation(others)[: round(share * slots[layer])]] = True
        if resident.any():
            name = f"{int(resident.sum())} of {num_experts} experts in slots"
            yield name, Placement.from_residents(pools, resident)


def check_perplexity(engine: Engine, ids: list[int]) -> Check:
    """Perplexity of the text: finite, and better than guessing among the vocabulary."""
    value = perplexity(engine.logits(ids), ids)
    vocab = engine.geometry.vocab
    return Check(
        "perplexity",
        math.isfinite(value) and value < vocab,
        f"{value:.2f} over {len(ids)} tokens (guessing gives {vocab})",
    )


def perplexity(logits_TV: torch.Tensor, ids: Sequence[int]) -> float:
    """exp of the mean negative log likelihood of ids[1:] under the logits of ids[:-1]."""
    log_probs = torch.log_softmax(logits_TV[:-1].double(), dim=-1)
    targets = torch.tensor(list(ids[1:]))[:, None]
    return float(torch.exp(-log_probs.gather(1, targets).mean()))


def check_repetition(engine: Engine, prompt_ids: list[int]) -> Check:
    """A broken kernel shows as one token for ever: the greedy answer must use more than one."""
    out = [t.token_id for t in engine.generate_ids(prompt_ids, max_tokens=NUM_GREEDY)]
    detail = f"{len(set(out))} different among {len(out)} greedy tokens"
    return Check("repeated token", len(out) < NUM_GREEDY or len(set(out)) > 1, detail)


def check_stock(engine: Engine, source: CheckpointWeights, ids: list[int]) -> Iterator[Check]:
    """A text and a greedy answer against transformers' own forward with its plain experts loop.

    Stock runs in FP32. An FP32 engine must agree within `logit_bound`; with 16-bit activations
    single logits need not, because a router's near tie may fall the other way, so the two
    distributions over the next token are compared instead, see `divergence_bound`.
    """
    prompt = ids[: max(1, len(ids) // 2)]
    steps = engine.generate_ids(prompt, max_tokens=NUM_GREEDY, stop_ids=frozenset())
    answer = [step.token_id for step in steps]
    few = ids[:MATCH_TOKENS]
    got, got_few = engine.logits(ids), engine.logits(few)
    model = stock_model(source)
    want = stock_logits(model, ids)
    yield compare_logits(engine, got, want)
    # Sums of few tokens are another program, which is the one that decode runs.
    yield compare_logits(engine, got_few, want[: len(few)], name="stock logits, few tokens")
    after_prompt = stock_logits(model, prompt + answer)[len(prompt) - 1 : -1]
    yield compare_answer(engine, answer, after_prompt)


def compare_logits(
    engine: Engine, got_TV: torch.Tensor, want_TV: torch.Tensor, *, name: str = "stock logits"
) -> Check:
    """Logits of one text, the engine's and stock's."""
    agree = int((got_TV.argmax(dim=-1) == want_TV.argmax(dim=-1)).sum())
    top = f"the top token agrees at {agree} of {len(want_TV)} positions"
    if engine.geometry.dtype == "float32":
        worst, bound = float((got_TV - want_TV).abs().max()), logit_bound(engine, want_TV)
        detail = f"logits differ by up to {worst:.3g} (bound {bound:.3g}), {top}"
    else:
        worst, bound = divergence(got_TV, want_TV), divergence_bound(engine)
        detail = f"mean divergence {worst:.3g} nats (bound {bound:.3g}), {top}"
    return Check(name, worst <= bound, detail)


def compare_answer(engine: Engine, answer: list[int], want_TV: torch.Tensor) -> Check:
    """Greedy tokens, each against stock's logits for its place."""
    chosen = want_TV.gather(1, torch.tensor(answer)[:, None])[:, 0]
    behind = want_TV.amax(dim=-1) - chosen
    same = f"{int((behind == 0).sum())} of {len(answer)} greedy tokens are stock's"
    if engine.geometry.dtype != "float32":
        if not behind.any():
            return Check("greedy answer", True, same)
        return Check("greedy answer", None, f"{same}; the others may be near ties in 16 bits")
    # Two logits that are each off by the bound may change places.
    bound = 2 * logit_bound(engine, want_TV)
    worst = float(behind.max())
    return Check(
        "greedy answer", worst <= bound, f"{same}, at most {worst:.3g} behind (bound {bound:.3g})"
    )


def divergence(got_TV: torch.Tensor, want_TV: torch.Tensor) -> float:
    """Mean Kullback-Leibler divergence of the engine's next token from stock's, nats."""
    want = torch.log_softmax(want_TV.double(), dim=-1)
    got = torch.log_softmax(got_TV.double(), dim=-1)
    return float((want.exp() * (want - got)).sum(dim=-1).mean())


def divergence_bound(engine: Engine) -> float:
    """2 eps. Roundings of size eps enter a divergence squared, but they move a router's choice
    with a probability of order eps, at the cost of a part of a nat. Measured on two models: 0.04
    to 0.33 eps in BF16 and FP16; with one layer's gate and up swapped 60 eps."""
    return 2 * torch.finfo(getattr(torch, engine.geometry.dtype)).eps


def logit_bound(engine: Engine, logits_TV: torch.Tensor) -> float:
    """How far two right computations of the same logits may lie apart.

    Each of the L decoder layers adds sums of about H rounded terms; independent roundings add up
    as their square root, eps * sqrt(L * H) relative to the largest logit. A recurrent state takes
    up the roundings of every token so far: a position then adds those of up to T tokens. Factor 4
    for the tail of many positions (four standard deviations).
    """
    eps = torch.finfo(getattr(torch, engine.geometry.dtype)).eps
    terms = engine.geometry.num_layers * engine.geometry.hidden
    if engine.geometry.recurrent:
        terms *= len(logits_TV)
    return 4 * eps * math.sqrt(terms) * float(logits_TV.abs().max())


def stock_model(source: CheckpointWeights) -> PreTrainedModel:
    """transformers' own model of a checkpoint, with its plain experts loop, in FP32 on the CPU."""
    stock = model_class(source.config)
    # By tensor and not by folder: the library would want an index file beside several shards.
    with quiet_transformers(), ShardReader() as reader:
        model: PreTrainedModel = stock.from_pretrained(
            None,
            config=class_config(stock, source.config),
            state_dict=whole_state_dict(source.keys, reader, dtype=torch.float32),
            dtype=torch.float32,
            experts_implementation="eager",
        )
    model.eval()
    return model


def stock_logits(model: PreTrainedModel, ids: Sequence[int]) -> torch.Tensor:
    """Logits after every token of a text, [T, V] float32."""
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=torch.tensor([list(ids)])).logits[0]
    return logits.float()


def _first(wrong: list[str]) -> str:
    return "" if not wrong else f"{len(wrong)} differ, first: {wrong[0]}"
