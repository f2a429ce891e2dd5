"""Chooses the staging ring, the prefill chunk and the slots beside them by predicted time, where a
speed is known: what the requests of the workload take on average decides.

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
from hotset.core.speed import Speed, SpeedModel
from hotset.core.staging import NUM_BUFFERS
from hotset.core.workload import Workload, expected

# Records of the smallest group that is chosen by speed.
LEAST_GROUP = 8
# Groups in which what a layer misses may come: each number a third or a half above the one before.
GROUPS = (2, 3, 4, 6, 8, 12, 16, 24, 32)
# Chunks one after the other that a prompt may be cut into.
MOST_PASSES = 8


def fastest_sizes(
    charges: Charges, request: PlanRequest, budgets: Budgets, speed: SpeedModel, sizes: Sizes
) -> Sizes:
    """Sizes that fit and that requests of the expected kinds take least time with, on average.

    Args:
        sizes: by the rules. They are returned where nothing is faster, or where all was set and
            there is nothing to choose.
    """
    if not budgets.fits(charges, sizes):
        return sizes
    best, best_seconds = sizes, _mean_seconds(charges, request, speed, sizes)
    for wanted in _candidates(charges, request, sizes):
        candidate = _most_slots(charges, request, budgets, wanted)
        if candidate is None:
            continue
        seconds = _mean_seconds(charges, request, speed, candidate)
        if seconds < best_seconds:
            best, best_seconds = candidate, seconds
    return best


def predict(charges: Charges, request: PlanRequest, speed: SpeedModel, sizes: Sizes) -> Speed:
    """What sizes are expected to be worth to the request with the longest prompt."""
    return _predict(charges, speed, sizes, workloads(request)[0])


def workloads(request: PlanRequest) -> tuple[Workload, ...]:
    """Kinds of requests that a plan is made for, longest prompt first."""
    return expected(request.workload, asked_context=request.context_tokens)


def _mean_seconds(charges: Charges, request: PlanRequest, speed: SpeedModel, sizes: Sizes) -> float:
    works = workloads(request)
    return sum(_predict(charges, speed, sizes, work).seconds for work in works) / len(works)


def _predict(charges: Charges, speed: SpeedModel, sizes: Sizes, work: Workload) -> Speed:
    return speed.predict(
        slots_per_layer=charges.split.per_layer(sizes.num_slots),
        context_tokens=sizes.context_tokens,
        prefill_chunk=sizes.prefill_chunk,
        staging_records=sizes.staging_records,
        workload=work,
        slot_only_per_layer=charges.split.per_layer(sizes.num_slot_only),
    )


def explained(
    choices: Iterable[Choice],
    speed: Speed,
    request: PlanRequest,
    *,
    sizes: Sizes,
    by_rules: Sizes,
    price: str,
) -> Iterator[Choice]:
    """The choices, with what they are worth in the reasons of those that the prediction has made.

    Args:
        price: of the context, see `context_price`.
    """
    works = [work.within(sizes.context_tokens) for work in workloads(request)]
    prompts = " or ".join(str(work.prompt_tokens) for work in works)
    answers = " or ".join(dict.fromkeys(str(work.answer_tokens) for work in works))
    fastest = (
        f"fastest for {prompts} tokens of prompt and {answers} of answer: "
        f"{speed.seconds:.1f} s predicted" + (" for the first" if len(works) > 1 else "")
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
    """What the context costs in decode speed against the shortest that the workload and auto need,
    one phrase; nothing where that is no more than a percent.

    Args:
        sizes: with the context.
    """
    # A prompt is at most half of a context.
    longest = workloads(request)[0].prompt_tokens
    least = max(2 * longest, least_sizes(charges, request).context_tokens)
    if least >= sizes.context_tokens:
        return ""
    shorter = _most_slots(charges, request, budgets, replace(sizes, context_tokens=least))
    if shorter is None:
        return ""
    most, here = (
        predict(charges, request, speed, one).tokens_per_second for one in (shorter, sizes)
    )
    return f"; with {least} decoding is {most / here - 1:.0%} faster" if most > 1.01 * here else ""


def _candidates(charges: Charges, request: PlanRequest, sizes: Sizes) -> Iterator[Sizes]:
    """Rings, then chunks, of the same context; their slots are yet to be found.

    A longer ring lets the link be further ahead while attention runs, and has fewer groups to
    launch; a longer chunk that runs alone streams the cold experts fewer times. Both take slots.
    """
    chunks, rings = [sizes.prefill_chunk], [sizes.staging_records]
    if request.prefill_chunk is None and not charges.joins_chunks:
        chunks = _chunks(request, sizes.context_tokens)
    if sizes.staging_records and charges.on_cuda and request.staging != "in-place":
        rings += _rings(charges, sizes)
    for ring in rings:
        for chunk in chunks:
            yield replace(sizes, staging_records=ring, prefill_chunk=chunk)


def _rings(charges: Charges, sizes: Sizes) -> list[int]:
    """Rings that cut what a layer misses beside these slots into a few equal groups or more, and
    the least. The experts of a small group leave parts of a large device idle, which the model does
    not know: none below `LEAST_GROUP`."""
    most = max(layer.num_experts for layer in charges.geometry.layers)
    missing = most - min(charges.split.per_layer(sizes.num_slots))
    least = min(LEAST_GROUP, sizes.staging_records // NUM_BUFFERS)
    groups = {least, *(-(-missing // num) for num in GROUPS)}
    return [NUM_BUFFERS * group for group in sorted(groups) if group >= least]


def _chunks(request: PlanRequest, context_tokens: int) -> list[int]:
    """Powers of two up to the longest prompt of the workload, none so short that it would be cut
    into more than `MOST_PASSES`."""
    most = workloads(request)[0].within(context_tokens).prompt_tokens
    chunks, chunk = [], CHUNK_FLOOR_TOKENS
    while chunk < 2 * most and chunk <= context_tokens:
        if chunk * MOST_PASSES >= most:
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
