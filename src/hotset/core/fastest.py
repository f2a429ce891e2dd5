"""Chooses the prefill chunk and the slots beside it by predicted time, where a speed is known.

The context comes from the request or from the rules of `sizing`, and so does the staging ring,
whose size the model of the machine does not see. Where chunks run one after the other, a longer
one streams the cold experts fewer times and takes slots away; what a request of the workload takes
together decides.
"""

from __future__ import annotations

from dataclasses import replace

from hotset.core.charges import Charges, Sizes
from hotset.core.plan import Choice
from hotset.core.sizing import CHUNK_FLOOR_TOKENS, Budgets, PlanRequest, largest
from hotset.core.speed import Speed, SpeedModel, Workload

WORKLOAD = Workload()


def fastest_sizes(
    charges: Charges, request: PlanRequest, budgets: Budgets, speed: SpeedModel, sizes: Sizes
) -> Sizes:
    """Sizes that fit and that a request of `WORKLOAD` takes least time with.

    Args:
        sizes: by the rules. They are returned where nothing is faster, or where the chunk was set
            and there is nothing to choose.
    """
    if request.prefill_chunk is not None or not budgets.fits(charges, sizes):
        return sizes
    if charges.joins_chunks:  # the chunk does not change what crosses the link, and little else
        return sizes
    best, best_seconds = sizes, predict(charges, speed, sizes).seconds
    for chunk in _chunks(sizes.context_tokens):
        candidate = _most_slots(charges, budgets, replace(sizes, prefill_chunk=chunk))
        if candidate is None:
            continue
        seconds = predict(charges, speed, candidate).seconds
        if seconds < best_seconds:
            best, best_seconds = candidate, seconds
    return best


def predict(charges: Charges, speed: SpeedModel, sizes: Sizes) -> Speed:
    """What sizes are expected to be worth."""
    return speed.predict(
        slots_per_layer=charges.split.per_layer(sizes.num_slots),
        context_tokens=sizes.context_tokens,
        prefill_chunk=sizes.prefill_chunk,
        staging_records=sizes.staging_records,
        workload=WORKLOAD,
        slot_only_per_layer=charges.split.per_layer(sizes.num_slot_only),
    )


def reasons(choice: Choice, speed: Speed, *, by_rules: bool) -> Choice:
    """The choice with what it is worth in its reason, where the prediction has chosen it."""
    if choice.name != "prefill chunk" or choice.requested is not None or by_rules:
        return choice
    work = speed.workload
    why = (
        f"fastest for {work.prompt_tokens} tokens of prompt and {work.answer_tokens} of answer: "
        f"{speed.seconds:.1f} s predicted"
    )
    return replace(choice, reason=why)


def _chunks(context_tokens: int) -> list[int]:
    """Powers of two up to the prompt of the workload."""
    most = WORKLOAD.within(context_tokens).prompt_tokens
    chunks, chunk = [], CHUNK_FLOOR_TOKENS
    while chunk < 2 * most and chunk <= context_tokens:
        chunks.append(chunk)
        chunk *= 2
    return chunks


def _most_slots(charges: Charges, budgets: Budgets, sizes: Sizes) -> Sizes | None:
    """The same sizes with as many slots as fit, `None` if not even none do.

    With a slot for every expert nothing is staged, and what that frees may be what makes it fit.
    """
    most = charges.split.most
    everything = replace(sizes, num_slots=most, staging_records=0)
    if budgets.device_bytes is not None and budgets.fits(charges, everything):
        return everything
    top = 0 if budgets.device_bytes is None else most - 1
    staged = replace(sizes, staging_records=max(sizes.staging_records, _least_ring(charges)))
    slots = largest(lambda n: budgets.fits(charges, replace(staged, num_slots=n)), 0, top)
    return None if slots is None else replace(staged, num_slots=slots)


def _least_ring(charges: Charges) -> int:
    """Records of the smallest ring of two buffers."""
    return 2 if charges.on_cuda else 0
