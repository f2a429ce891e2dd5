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
from hotset.core.placement import Placement
from hotset.models.load import quiet_transformers
from hotset.models.seam import model_class
from hotset.runtime.engine import Engine
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
    """
    ids = list(text_ids)[: engine.plan.context_tokens - NUM_GREEDY]
    yield check_records(engine, source)
    yield check_slots(engine)
    yield check_placements(engine, ids)
    yield check_perplexity(engine, ids)
    yield check_repetition(engine, ids[: max(1, len(ids) // 2)])
    if stock:
        yield check_stock(engine, source, ids)
    else:
        yield Check(
            "stock transformers", None, "not compared: the whole model in FP32 does not fit"
        )


def check_records(engine: Engine, source: CheckpointWeights) -> Check:
    """Every record of the arena against the checkpoint's files, byte for byte."""
    wrong = list(audit_records(source.keys, engine.store.fields))
    num_records = engine.geometry.num_records
    return Check(
        "records", not wrong, _first(wrong) or f"{num_records} records equal the checkpoint's bytes"
    )


def check_slots(engine: Engine) -> Check:
    """Every owned slot against the arena, and the address table with both."""
    wrong = engine.store.audit()
    num_owned = int(engine.store.placement.resident.sum())
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
    if not bool(torch.isfinite(reference).all()) if reference is not None else False:
        return Check("placements", False, "logits are not finite")
    return Check("placements", True, f"{len(ids)} tokens bitwise equal with {', '.join(names)}")


def placements(engine: Engine) -> Iterator[tuple[str, Placement]]:
    """Nothing resident, one layer, 37% and all of the slots, each at random experts."""
    pools, num_slots = engine.pools, engine.pools.num_slots
    rng = np.random.default_rng(0)
    layers = engine.geometry.layers
    yield "no expert in a slot", Placement(pools)
    first = np.zeros((len(layers), pools.max_experts), dtype=np.bool_)
    first[0, : engine.plan.slots_per_layer[0]] = True
    if first.any():
        yield "one layer", Placement.from_residents(pools, first)
    for share in (0.37, 1.0):
        resident = np.zeros_like(first)
        for layer, spec in enumerate(layers):
            count = round(share * engine.plan.slots_per_layer[layer])
            resident[layer, rng.permutation(spec.num_experts)[:count]] = True
        if resident.any():
            filled = int(resident.sum()) / num_slots
            yield f"{filled:.0%} of {num_slots} slots", Placement.from_residents(pools, resident)


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


def check_stock(engine: Engine, source: CheckpointWeights, ids: list[int]) -> Check:
    """Logits of the text against transformers' own forward with its plain experts loop, in FP32.

    Top tokens must agree wherever the stock margin exceeds the bound. In an FP32 engine the
    logits themselves must lie within it too; with 16-bit activations they need not, see
    `logit_bound`.
    """
    want = _stock_logits(source, ids)
    got = engine.logits(ids)
    bound = logit_bound(engine, want)
    worst = float((got - want).abs().max())
    top = want.topk(2, dim=-1)
    clear = (top.values[:, 0] - top.values[:, 1]) > 2 * bound
    same = got.argmax(dim=-1) == top.indices[:, 0]
    wrong = int((clear & ~same).sum())
    ratio = perplexity(got, ids) / perplexity(want, ids)
    fp32 = engine.geometry.dtype == "float32"
    ok = wrong == 0 and ((worst <= bound) if fp32 else abs(ratio - 1) < PERPLEXITY_RTOL)
    return Check(
        "stock transformers",
        ok,
        f"logits differ by up to {worst:.3g} (bound {bound:.3g}), top token differs at {wrong} of "
        f"{int(clear.sum())} positions with a clear margin, perplexity ratio {ratio:.5f}",
    )


# Against FP32, 16-bit activations change a perplexity by a few per mille (measured: 0.1% on a 54M
# model in BF16); a wrong layer changes it by tens of percents.
PERPLEXITY_RTOL = 0.02


def logit_bound(engine: Engine, logits_TV: torch.Tensor) -> float:
    """How far two right computations of the same logits may lie apart.

    Each of the L decoder layers adds sums of about H rounded terms; independent roundings add up
    as their square root, eps * sqrt(L * H) relative to the largest logit. Factor 4 for the tail of
    many positions (four standard deviations).
    """
    eps = torch.finfo(getattr(torch, engine.geometry.dtype)).eps
    terms = engine.geometry.num_layers * engine.geometry.hidden
    return 4 * eps * math.sqrt(terms) * float(logits_TV.abs().max())


def _stock_logits(source: CheckpointWeights, ids: list[int]) -> torch.Tensor:
    with quiet_transformers(), torch.inference_mode():
        model: PreTrainedModel = model_class(source.config).from_pretrained(
            source.folder,
            dtype=torch.float32,
            experts_implementation="eager",
            local_files_only=True,
        )
        model.eval()
        logits: torch.Tensor = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    return logits.float()


def _first(wrong: list[str]) -> str:
    return "" if not wrong else f"{len(wrong)} differ, first: {wrong[0]}"
