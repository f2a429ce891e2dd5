"""Prompts through an engine, timed: each repeat begins with the same owners of slots.

Knows times, bytes over the link, the copy engine's rate and the device's peak; not what they are
compared with. Prompts are random ids. The experts of more than `MATCH_TOKENS` tokens are drawn too,
evenly, as the router of a random model sends most tokens of a layer to the same few: so all of them
are used, the most that can cross the link.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from hotset.bench.timing import time_ms
from hotset.core.costmodel import Rates
from hotset.core.errors import RequestError
from hotset.core.geometry import ModelGeometry
from hotset.core.placement import Placement
from hotset.core.slot_pools import BoolArray
from hotset.core.staging import StagingRule
from hotset.models.seam import experts_modules
from hotset.runtime.blocks import Block
from hotset.runtime.engine import Engine
from hotset.runtime.expert_stream import ExpertStream
from hotset.runtime.moe import MoERunner
from hotset.runtime.prefill import run_together
from hotset.runtime.tee import Tee


@dataclass(frozen=True)
class PromptTimes:
    """One kind of run of one prompt.

    Attributes:
        times: milliseconds of each repeat, the first token drawn.
        link_bytes: of the records that one of them used and that had no slot, each once in a layer.
        copied_bytes: of what the copy engine brought for one of them; 0 where all is read in place.
        copy_gbps: its rate while it copied; `None` where it did not.
        peak_bytes: most that torch had allocated on the device; 0 on a CPU.
    """

    times: list[float]
    link_bytes: float
    copied_bytes: float
    copy_gbps: float | None
    peak_bytes: int


class CopyClock:
    """Times the copies of a ring; see `experts.ring.CopyTimer`."""

    def __init__(self) -> None:
        self._spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._begun, self._ms, self._bytes = 0.0, 0.0, 0

    def begin(self, stream: torch.cuda.Stream | None) -> None:
        if stream is None:
            self._begun = time.perf_counter()
            return
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record(stream)
        self._spans.append((start, end))

    def end(self, stream: torch.cuda.Stream | None, num_bytes: int) -> None:
        self._bytes += num_bytes
        if stream is None:
            self._ms += (time.perf_counter() - self._begun) * 1e3
        else:
            self._spans[-1][1].record(stream)

    @property
    def gbps(self) -> float | None:
        """Bytes over the time in which they moved; `None` before any has. The device is idle."""
        total = self._ms + sum(start.elapsed_time(end) for start, end in self._spans)
        return self._bytes / total / 1e6 if total else None


def num_resident(slots: float, num_experts: int) -> int:
    """Experts of a layer that a share of slots is, rounded down."""
    return int(slots * num_experts + 1e-6)


class EvenRouting:
    """Sends the tokens of a prompt to experts by chance; drawn once for each shape of block, the
    first time that it comes.

    Args:
        geometry: of the model.
    """

    def __init__(self, geometry: ModelGeometry) -> None:
        self._layers = geometry.layers
        self._drawn: dict[tuple[int, int, int], torch.Tensor] = {}

    def __call__(self, layer: int, blocks: Sequence[Block]) -> list[Block]:
        """The same tokens, otherwise routed."""
        spread = []
        for index, block in enumerate(blocks):
            key = (layer, index, block.num_tokens)
            if key not in self._drawn:
                num_experts = self._layers[layer].num_experts
                draws_TE = torch.rand(block.num_tokens, num_experts, device=block.ids_TK.device)
                ids_TK = draws_TE.topk(block.ids_TK.shape[1]).indices
                self._drawn[key] = ids_TK.to(block.ids_TK.dtype)
            spread.append(replace(block, ids_TK=self._drawn[key]))
        return spread


class PrefillRun:
    """Prompts on one engine.

    Args:
        engine: over a KV pool; its placement is changed.
        slots: share of the experts of each layer that own a slot.
        rates: by which records are staged or read in place.

    Raises:
        RequestError: the plan has fewer slots.
    """

    def __init__(self, engine: Engine, *, slots: float, rates: Rates) -> None:
        self._engine, self._slots, self._rates = engine, slots, rates
        self._modules = list(experts_modules(engine.model).values())
        self._residents()  # refused now
        self._even = EvenRouting(engine.geometry)

    def measure(
        self,
        num_tokens: int,
        chunk: int,
        *,
        repeats: int,
        overlap: bool = True,
        together: bool = True,
    ) -> PromptTimes:
        """Times a prompt, as `Engine` takes one in.

        Args:
            chunk: most tokens of a forward.
            repeats: after one run that does not count.
            overlap: copy groups of records while others are computed on.
            together: layers outermost; otherwise chunks run one after the other, each bringing
                what it misses, and only the first one warms up.
        """
        engine = self._engine
        generator = torch.Generator().manual_seed(num_tokens)
        ids = torch.randint(0, engine.geometry.vocab, (num_tokens,), generator=generator).tolist()
        chunks = [ids[start : start + chunk] for start in range(0, num_tokens, chunk)]
        passes = [chunks] if together else [[part] for part in chunks]
        stream = ExpertStream(engine.store, overlap=overlap) if engine.store.ring.nbytes else None
        runners = [self._runner(layer, stream) for layer in range(len(self._modules))]
        self._time(passes[:1], runners)
        if engine.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(engine.device)
        times, link, copied, clock = [], 0, 0, CopyClock()
        for _ in range(repeats):
            engine.place(self._residents())
            before = engine.traffic.link_bytes, engine.store.ring.copied_bytes
            engine.store.ring.timer = clock
            times.append(self._time(passes, runners))
            engine.store.ring.timer = None
            link += engine.traffic.link_bytes - before[0]
            copied += engine.store.ring.copied_bytes - before[1]
        return PromptTimes(
            times=times,
            link_bytes=link / repeats,
            copied_bytes=copied / repeats,
            copy_gbps=clock.gbps,
            peak_bytes=torch.cuda.max_memory_allocated(engine.device)
            if engine.device.type == "cuda"
            else 0,
        )

    def _time(self, passes: Sequence[list[list[int]]], runners: Sequence[MoERunner]) -> float:
        """Milliseconds of a prompt whose chunks run together in each pass."""
        engine = self._engine
        run = partial(
            run_together,
            modules=self._modules,
            experts=lambda layer, blocks: runners[layer].run(self._even(layer, blocks)),
        )

        def prompt() -> None:
            num_tokens = sum(len(part) for parts in passes for part in parts)
            with engine.steps.exclusive(), engine._sequence(num_tokens) as sequence:
                for parts in passes:
                    logits_V = sequence.take_in(parts, run)
                int(logits_V.argmax())  # the first token; waits for the device

        return time_ms(prompt, device=engine.device, repeats=1, warmup=0)[0]

    def _runner(self, layer: int, stream: ExpertStream | None) -> MoERunner:
        engine = self._engine
        return MoERunner(
            layer,
            self._modules[layer],
            store=engine.store,
            kernels=engine.kernels,
            log=engine.steps.log,
            stream=stream,
            staging=StagingRule.at(engine.config.staging, self._rates),
            tee=Tee(engine.policy, engine.store) if engine.policy.moves else None,
        )

    def _residents(self) -> Placement:
        """The same experts of each layer, chosen by chance."""
        pools, rng = self._engine.pools, np.random.default_rng(0)
        resident_LE: BoolArray = np.zeros((len(pools.num_experts), pools.max_experts), dtype=bool)
        for layer, num_experts in enumerate(pools.num_experts):
            order = rng.permutation(num_experts)
            resident_LE[layer, order[: num_resident(self._slots, num_experts)]] = True
        wanted = int(resident_LE.sum())
        if wanted > self._engine.plan.num_slots:
            raise RequestError(
                f"`--slots {self._slots:g}` are {wanted} slots, the plan has "
                f"{self._engine.plan.num_slots}",
                hint="raise `--vram`, or lower `--slots` or `--tokens`",
            )
        return Placement.from_residents(pools, resident_LE)
