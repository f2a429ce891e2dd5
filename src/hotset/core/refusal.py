"""Says in words why a plan cannot be carried out, and finds the values that would work.

Knows budgets, charges and flags; decides nothing about a plan that fits. Each problem has need,
have and the flag to change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from hotset.core.charges import Charges, Sizes
from hotset.core.hardware import Machine
from hotset.core.plan import Line, Problem
from hotset.core.sizing import (
    Budgets,
    PlanRequest,
    choose_sizes,
    largest,
    least_sizes,
    with_host_copies,
)
from hotset.core.units import MIB, format_bytes

# A hint never proposes less: shorter than that, a context or a chunk is no use.
LEAST_HINT_TOKENS = 16

_Fits = Callable[[Charges, Sizes], bool]

# Contexts that are tried where more slots would help; each has to be planned.
_SHORTER_CONTEXTS = (8192, 2048)


@dataclass(frozen=True)
class Refusal:
    """What a request, a machine and the charges have against each other."""

    charges: Charges
    machine: Machine
    request: PlanRequest
    budgets: Budgets

    def problems(self) -> tuple[Problem, ...]:
        """All of them; none means that `choose_sizes` gives sizes that fit."""
        budgets = [*self._beyond_the_machine()]
        within = self._within_lengths()
        if within == self.request:
            return (*budgets, *self._beyond_the_budgets())
        # A length that no model has is one mistake: what it would cost is not a second one.
        mended = self._largest_that_fits(within)
        if mended is not None:
            return (*self._lengths(mended), *budgets)
        rest = replace(self, request=within)._beyond_the_budgets()
        return (*self._lengths(within), *budgets, *rest)

    def _beyond_the_budgets(self) -> Iterator[Problem]:
        least = least_sizes(self.charges, self.request)
        if not self.budgets.device_fits(self.charges, least):
            yield self._device(least)
        if not self._host_fits(self.request, least):
            yield self._host(self._without_host_copies(least), least)

    def _within_lengths(self) -> PlanRequest:
        """The request with no length beyond what limits it."""
        longest = self.charges.geometry.max_context or None
        context = _least(self.request.context_tokens, longest)
        chunk = _least(self.request.prefill_chunk, context or longest)
        return replace(self.request, context_tokens=context, prefill_chunk=chunk)

    def _largest_that_fits(self, within: PlanRequest) -> PlanRequest | None:
        """`within`, where it does not fit with the length that was too long made shorter yet."""

        def shorter(tokens: int) -> PlanRequest:
            chunk = _least(within.prefill_chunk, tokens)
            if within.context_tokens == self.request.context_tokens:
                return replace(within, prefill_chunk=chunk)
            return replace(within, context_tokens=tokens, prefill_chunk=chunk)

        top = within.context_tokens or within.prefill_chunk or 0
        tokens = largest(lambda count: self._fits(shorter(count)), LEAST_HINT_TOKENS, top)
        return None if tokens is None else shorter(tokens)

    def _fits(self, request: PlanRequest) -> bool:
        least = least_sizes(self.charges, request)
        return self.budgets.device_fits(self.charges, least) and self._host_fits(request, least)

    def _host_fits(self, request: PlanRequest, least: Sizes) -> bool:
        """With a host copy for every expert, or slots for those that have none."""
        if self.budgets.host_fits(self.charges, least):
            return True
        if not self.charges.on_cuda:
            return False
        chosen = choose_sizes(self.charges, request, self.budgets)
        return self.budgets.host_fits(
            self.charges, with_host_copies(self.charges, self.budgets, chosen)
        )

    def _lengths(self, instead: PlanRequest) -> Iterator[Problem]:
        """Lengths beyond the model's or the context's; `instead` has those to set."""
        context, chunk = self.request.context_tokens, self.request.prefill_chunk
        longest = self.charges.geometry.max_context
        if context is not None and longest and context > longest:
            also = ""
            if chunk is not None and chunk <= longest and instead.prefill_chunk != chunk:
                also = f" and `--prefill-chunk {instead.prefill_chunk}`"
            out = self._fits(replace(instead, context_tokens=None))
            yield Problem(
                "--context",
                "tokens",
                need=context,
                have=longest,
                message=f"`--context` is {context} tokens, the model was made for {longest}",
                hint=f"set `--context {instead.context_tokens}`{also} or less"
                + (", or leave it out" if out else ""),
            )
        limit = _least(context, longest or None) or longest
        if chunk is not None and limit and chunk > limit:
            out = self._fits(replace(instead, prefill_chunk=None))
            yield Problem(
                "--prefill-chunk",
                "tokens",
                need=chunk,
                have=limit,
                message=f"`--prefill-chunk` is {chunk} tokens, the context has {limit}",
                hint=f"set `--prefill-chunk {instead.prefill_chunk}` or less"
                + (", or leave it out" if out else ""),
            )

    def _beyond_the_machine(self) -> Iterator[Problem]:
        """Budgets that were set higher than what there is."""
        vram, free = self.request.vram_bytes, self.budgets.device_top_bytes
        if vram is not None and free is not None and vram > free:
            yield Problem(
                "--vram",
                "bytes",
                need=vram,
                have=free,
                message=f"`--vram` is {_bytes(vram, free)}, "
                f"`{self.machine.device_name}` has {_bytes(free, vram)} to give",
                hint=f"set `--vram {free // MIB}MiB` or less, or leave it out",
            )
        ram, available = self.request.ram_bytes, self.machine.host.available_bytes
        if ram is not None and ram > available:
            yield Problem(
                "--ram",
                "bytes",
                need=ram,
                have=available,
                message=f"`--ram` is {_bytes(ram, available)}, "
                f"{_bytes(available, ram)} is available{self._container()}",
                hint=f"set `--ram {available // MIB}MiB` or less, or leave it out",
            )

    def _device(self, least: Sizes) -> Problem:
        need, have = self.charges.device_bytes(least), self.budgets.device_bytes or 0
        offer = (
            f"`--vram` is {_bytes(have, need)}"
            if self.request.vram_bytes is not None
            else f"`{self.machine.device_name}` has {_bytes(have, need)} to give"
        )
        top = self.budgets.device_top_bytes
        remedies = []
        if top is None or need <= top:
            remedies.append(f"`--vram {_at_least(need, top)}`")
        remedies += [*self._shorter(least, self.budgets.device_fits), *self._narrower()]
        otherwise = f"a GPU with at least {format_bytes(need)} of free memory is needed"
        return Problem(
            "--vram",
            "bytes",
            need=need,
            have=have,
            message=f"{offer}, the least that works is {_bytes(need, have)} with 0 slots: "
            f"{_items(self.charges.device_lines(least))}",
            hint=_either(remedies, otherwise),
        )

    def _without_host_copies(self, least: Sizes) -> Sizes:
        """What takes least host memory: on a GPU each slot may be its expert's only place."""
        if not self.charges.on_cuda or not self.budgets.device_fits(self.charges, least):
            return least
        chosen = choose_sizes(self.charges, self.request, self.budgets)
        return replace(chosen, num_slot_only=chosen.num_slots)

    def _host(self, least: Sizes, shortest: Sizes) -> Problem:
        """Args:
        least: sizes that take least host memory.
        shortest: every auto at its floor.
        """
        need, have = self.charges.host_bytes(least), self.budgets.host_bytes
        offer = (
            f"`--ram` is {_bytes(have, need)}"
            if self.request.ram_bytes is not None
            else f"{_bytes(have, need)} of host memory is available{self._container()}"
        )
        remedies = []
        available = self.machine.host.available_bytes
        if self.request.ram_bytes is not None and need <= available:
            remedies.append(f"`--ram {_at_least(need, available)}`")
        if not self.charges.on_cuda:
            remedies += self._shorter(shortest, self.budgets.host_fits)
        remedies += [*self._more_slots(least.context_tokens), *self._narrower()]
        otherwise = (
            f"every expert needs a place in host memory or a slot of its own: a machine or "
            f"container with at least {format_bytes(need)} available is needed"
        )
        if least.num_slot_only:
            every = self.charges.host_bytes(replace(least, num_slot_only=0))
            otherwise += f", and with {format_bytes(every)} all slots follow the text"
        return Problem(
            "--ram",
            "bytes",
            need=need,
            have=have,
            message=f"{offer}, {_bytes(need, have)} is needed: "
            f"{_items(self.charges.host_lines(least))}",
            hint=_either(remedies, otherwise),
        )

    def _more_slots(self, context_tokens: int) -> Iterator[str]:
        """A shorter context whose memory holds the experts that host memory has no room for."""
        if self.charges.on_cuda:
            for tokens in _SHORTER_CONTEXTS:
                chunk = _least(self.request.prefill_chunk, tokens)
                shorter = replace(self.request, context_tokens=tokens, prefill_chunk=chunk)
                if tokens < context_tokens and self._fits(shorter):
                    also = "" if chunk is None else f" --prefill-chunk {chunk}"
                    yield f"`--context {tokens}{also}`"
                    return

    def _shorter(self, least: Sizes, fits: _Fits) -> Iterator[str]:
        """Smaller lengths that would fit, each with everything else as it is."""
        context = largest(
            lambda tokens: fits(self.charges, _with_context(least, tokens)),
            LEAST_HINT_TOKENS,
            least.context_tokens - 1,
        )
        if context is not None and (self.request.prefill_chunk or 0) > context:
            yield f"`--context {context} --prefill-chunk {context}`"
        elif context is not None:
            yield f"`--context {context}`"
        chunk = largest(
            lambda tokens: fits(self.charges, replace(least, prefill_chunk=tokens)),
            LEAST_HINT_TOKENS,
            least.prefill_chunk - 1,
        )
        if chunk is not None:
            yield f"`--prefill-chunk {chunk}`"

    def _narrower(self) -> Iterator[str]:
        if self.charges.geometry.dtype == "float32":
            yield "`--dtype bfloat16`, which halves the weights"

    def _container(self) -> str:
        limit = self.machine.host.cgroup_limit_bytes
        return "" if limit is None else f" (the container's limit is {format_bytes(limit)})"


def _with_context(sizes: Sizes, tokens: int) -> Sizes:
    chunk = min(sizes.prefill_chunk, tokens)
    return replace(sizes, context_tokens=tokens, prefill_chunk=chunk)


def _least(value: int | None, limit: int | None) -> int | None:
    """A length that was asked for, no longer than a limit that there is."""
    return value if value is None or limit is None else min(value, limit)


def _bytes(value: int, beside: int) -> str:
    """A size in words, to the byte where it would read the same as the one beside it."""
    text = format_bytes(value)
    return text if value == beside or text != format_bytes(beside) else f"{value} bytes"


def _at_least(num_bytes: int, top: int | None) -> str:
    """A size to type that is no less than `num_bytes`, in MiB where that is no more than `top`."""
    whole = -(-num_bytes // MIB)
    return f"{whole}MiB" if top is None or whole * MIB <= top else str(num_bytes)


def _items(lines: Iterable[Line]) -> str:
    return " + ".join(
        f"{line.name} {format_bytes(line.num_bytes)}" for line in lines if line.num_bytes
    )


def _either(remedies: list[str], otherwise: str) -> str:
    return f"use {' or '.join(remedies)}" if remedies else otherwise
