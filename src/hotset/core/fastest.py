"""Chooses the staging ring, the prefill chunk and the slots beside them by predicted time, where a
speed is known: what a request of the workload takes together decides.

Speed does not choose the context, which is what a user can do and not how fast (its price is said),
nor chunks that run together or the sizes of captured steps: they change low bits of an answer, and
no bit may depend on a measured rate.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from hotset.core.charges import Charges, Sizes
from hotset.core.plan import Choice
from hotset.core.sizing import CHUNK_FLOOR_TOKENS, Budgets, PlanRequest, largest, least_sizes
from hotset.core.speed import Speed, SpeedModel, Workload
from hotset.core.staging import NUM_BUFFERS

WORKLOAD = Workload()

# Records of the smallest group that is chosen by speed.
LEAST_GROUP = 8


def fastest_sizes(
    charges: Charges, request: PlanRequest, budgets: Budgets, speed: SpeedModel, sizes: Sizes
) -> Sizes:
    """Sizes that fit and that a request of `WORKLOAD` takes least time with.

    Args:
        sizes: by the rules. They are returned where nothing is faster, or where all was set and
            there is nothing to choose.
    """
    if not budgets.fits(charges, sizes):
        return sizes
    best, best_seconds = sizes, predict(charges, speed, sizes).seconds
    for wanted in _candidates(charges, request, sizes):
        candidate = _most_slots(charges, request, budgets, wanted)
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


def explained(
    choices: Iterable[Choice], speed: Speed, *, sizes: Sizes, by_rules: Sizes, price: str
) -> Iterator[Choice]:
    """The choices, with what they are worth in the reasons of those that the prediction has made.

    Args:
        price: of the context, see `context_price`.
    """
    work = speed.workload
    fastest = (
        f"fastest for {work.prompt_tokens} tokens of prompt and {work.answer_tokens} of answer: "
        f"{speed.seconds:.1f} s predicted"
    )
    chosen = {
        "prefill chunk": sizes.prefill_chunk != by_rules.prefill_chunk,
        "staging records": 0 < sizes.staging_records != by_rules.staging_records,
    }
    for choice in choices:
        if chosen.get(choice.name, False):
            yield replace(choice, reason=fastest)
        elif choice.name == "context" and choice.requested is None:
            yield replace(choice, reason=choice.reason + price)
        else:
            yield choice


def context_price(
    charges: Charges, budgets: Budgets, request: PlanRequest, speed: SpeedModel, sizes: Sizes
) -> str:
    """What the context costs in decode speed against the shortest that `WORKLOAD` and auto need,
    one phrase; nothing where that is no more than a percent.

    Args:
        sizes: with the context.
    """
    # A prompt is at most half of a context.
    least = max(2 * WORKLOAD.prompt_tokens, least_sizes(charges, request).context_tokens)
    if least >= sizes.context_tokens:
        return ""
    shorter = _most_slots(charges, request, budgets, replace(sizes, context_tokens=least))
    if shorter is None:
        return ""
    most, here = (predict(charges, speed, one).tokens_per_second for one in (shorter, sizes))
    return f"; with {least} decoding is {most / here - 1:.0%} faster" if most > 1.01 * here else ""


def _candidates(charges: Charges, request: PlanRequest, sizes: Sizes) -> Iterator[Sizes]:
    """Rings, then chunks, of the same context; their slots are yet to be found.

    A longer ring lets the link be further ahead while attention runs, and has fewer groups to
    launch; a longer chunk that runs alone streams the cold experts fewer times. Both take slots.
    """
    chunks, rings = [sizes.prefill_chunk], [sizes.staging_records]
    if request.prefill_chunk is None and not charges.joins_chunks:
        chunks = _chunks(sizes.context_tokens)
    if sizes.staging_records and charges.on_cuda and request.staging != "in-place":
        rings += _rings(charges, sizes)
    for ring in rings:
        for chunk in chunks:
            yield replace(sizes, staging_records=ring, prefill_chunk=chunk)


def _rings(charges: Charges, sizes: Sizes) -> list[int]:
    """Rings of groups of powers of two up to a whole layer. The experts of a small group leave
    parts of a large device idle, which the model does not know: none below `LEAST_GROUP`."""
    most = max(layer.num_experts for layer in charges.geometry.layers)
    group, rings = min(LEAST_GROUP, sizes.staging_records // NUM_BUFFERS), []
    while group <= most:
        rings.append(NUM_BUFFERS * group)
        group *= 2
    return rings


def _chunks(context_tokens: int) -> list[int]:
    """Powers of two up to the prompt of the workload."""
    most = WORKLOAD.within(context_tokens).prompt_tokens
    chunks, chunk = [], CHUNK_FLOOR_TOKENS
    while chunk < 2 * most and chunk <= context_tokens:
        chunks.append(chunk)
        chunk *= 2
    return chunks


def _most_slots(
    charges: Charges, request: PlanRequest, budgets: Budgets, sizes: Sizes
) -> Sizes | None:
    """The same sizes with as many slots as fit, `None` if not even none do.

    With a slot for every expert nothing is staged, and what that frees may be what makes it fit.
    """
    most = charges.split.most
    everything = replace(sizes, num_slots=most, staging_records=0)
    if budgets.device_bytes is not None and budgets.fits(charges, everything):
        return everything
    top = 0 if budgets.device_bytes is None else most - 1
    least_ring = NUM_BUFFERS if charges.on_cuda and request.staging != "in-place" else 0
    staged = replace(sizes, staging_records=max(sizes.staging_records, least_ring))
    slots = largest(lambda n: budgets.fits(charges, replace(staged, num_slots=n)), 0, top)
    return None if slots is None else replace(staged, num_slots=slots)
