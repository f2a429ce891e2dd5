"""The engine: token ids in, token ids out. One model, one device, one step at a time.

The path of a token is numbered in docs/architecture.md. Text, files and kernels are other
modules' business; this one decides what runs in a step, and gives everything back at the end.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import chain

import numpy as np
import torch
from torch import nn

from hotset.core.closing import Closing
from hotset.core.config import EngineConfig
from hotset.core.errors import RequestError, explain_out_of_memory
from hotset.core.hardware import Machine
from hotset.core.lossless import with_lossless
from hotset.core.placement import Placement
from hotset.core.plan import MemoryPlan
from hotset.core.request import SamplingParams, check_length
from hotset.core.slot_pools import SlotPools
from hotset.core.units import format_bytes
from hotset.experts.store import ExpertStore
from hotset.kernels.dispatch import select_kernels
from hotset.kernels.toolchain import check_triton_toolchain
from hotset.models.seam import bind_experts, experts_modules
from hotset.runtime.blocks import Block
from hotset.runtime.chunks import chunks_of
from hotset.runtime.decoding import (
    Decoding,
    choose_policy,
    warn_of_library_cache,
    warn_of_plain_torch,
)
from hotset.runtime.expert_stream import ExpertStream
from hotset.runtime.fills import FillPlanner
from hotset.runtime.known_rates import described, staging_rule
from hotset.runtime.memory import room_for_step
from hotset.runtime.moe import make_runners
from hotset.runtime.parts import Parts
from hotset.runtime.planning import logits_chunk, plan_engine
from hotset.runtime.policies import initial_residents
from hotset.runtime.prefill import BetweenLayers, run_together
from hotset.runtime.probe import choose_device
from hotset.runtime.profiled import load_profile, make_drift, require_same_routers
from hotset.runtime.requests import Request, TokenOut, check_ids
from hotset.runtime.routing import RoutingLog, Traffic
from hotset.runtime.rows import make_rows
from hotset.runtime.sampling import Sampler
from hotset.runtime.scheduler import Scheduler
from hotset.runtime.sequences import Sequence
from hotset.runtime.steps import Steps
from hotset.runtime.tee import Tee
from hotset.runtime.weights import Progress, WeightSource


class Engine(Closing):
    """A loaded model. Use it as a context manager, or call `close`.

    Args:
        source: where the weights come from.
        config: the user's choices.
        planned: what `plan_engine` says of `source` and `config`, where it was asked already.
        progress: told how many expert bytes are loaded, of how many.

    Raises:
        CapacityError: the plan does not fit, or memory ran out while loading.
        HardwareError: the machine lacks what the plan needs.
        CheckpointError: a weight is damaged.
    """

    def __init__(
        self,
        source: WeightSource,
        config: EngineConfig,
        *,
        planned: tuple[Machine, MemoryPlan] | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.config = config
        self.geometry = with_lossless(source.geometry, config.lossless)
        self.device = choose_device(config.device)
        self.machine, plan = planned or plan_engine(source.geometry, config)
        self.plan = plan.require_fit()
        self.kernels = select_kernels(self.device, config.kernels)
        if self.kernels.name == "triton" and self.device.type == "cuda":
            check_triton_toolchain()
        self.text = source.text
        self.stop_ids = source.stop_ids
        self._answering = threading.Lock()
        self._scheduler: Scheduler | None = None
        self._closed = False
        self.profile = load_profile(self.geometry, config)
        self.policy = choose_policy(self.geometry, self.plan, config, self.profile)
        self.store = self._make_store()
        try:
            self.model = source.load_resident(self.device)
            require_same_routers(self.profile, self.geometry, self.model, config)
            self._fill(source, progress or (lambda done, total: None))
            self.steps = self._make_steps()
            self.drift = make_drift(self.profile, self.plan)
            self.steps.watchers += [self.drift] if self.drift else []
            num_rows = config.num_sampler_rows if self.geometry.attention else 1
            self.sampler = Sampler(num_rows, self.geometry.vocab, device=self.device)
            self.decoding = self._make_decoding()
            self.rows = make_rows(
                self.model,
                self.decoding,
                steps=self.steps,
                sampler=self.sampler,
                geometry=self.geometry,
                plan=self.plan,
                config=config,
                device=self.device,
            )
        except BaseException:
            self.close()
            raise

    def _make_store(self) -> ExpertStore:
        self.pools = SlotPools.build(
            num_experts=[layer.num_experts for layer in self.geometry.layers],
            record_bytes=[layer.expert.record_bytes for layer in self.geometry.layers],
            num_slots={pool.record_bytes: pool.num_slots for pool in self.plan.pools},
            num_slot_only=self.plan.slot_only_per_layer,
        )
        device = self.plan.device
        room = explain_out_of_memory(
            f"slots ({format_bytes(device['slots'])}) and staging buffers "
            f"({format_bytes(device['staging ring'])})",
            hint="something else took memory since the plan was made; set a smaller `--vram`",
        )
        with room:
            return ExpertStore(
                self.geometry.layers,
                self.pools,
                device=self.device,
                staging_records=self.plan.staging_records,
                poison=self.config.poison,
            )

    def _fill(self, source: WeightSource, progress: Progress) -> None:
        room = explain_out_of_memory(
            "experts on their way from the files",
            hint="free memory, or see `hotset plan MODEL` for what fits",
        )
        with room:
            source.fill_experts(self.store, progress)
            slots = np.array(self.plan.slots_per_layer)
            resident_LE = initial_residents(self.policy, self.pools, slots)
            self.store.place(Placement.from_residents(self.pools, resident_LE))

    def _make_steps(self) -> Steps:
        log = RoutingLog(self.geometry.layers)
        fills = FillPlanner(self.policy, self.store) if self.policy.moves else None
        tee = Tee(self.policy, self.store) if self.policy.moves else None
        stream = ExpertStream(self.store) if self.store.ring.nbytes else None
        staging = staging_rule(self.geometry, self.config, described(self.machine))
        modules = list(experts_modules(self.model).values())
        self._runners = make_runners(
            modules,
            store=self.store,
            kernels=self.kernels,
            log=log,
            stream=stream,
            staging=staging,
            fills=fills.layers if fills else None,
            tee=tee,
        )
        for module, runner in zip(modules, self._runners, strict=True):
            bind_experts(module, runner)
        return Steps(self.store, log, fills)

    def _make_decoding(self) -> Decoding | None:
        """The KV pool and the decode step over it; `None` where the model needs the library's
        own cache."""
        warn_of_plain_torch(self.model, self.device)
        reason = self.geometry.attention_reason
        if not reason:
            cache = format_bytes(self.plan.device["KV cache"])
            with explain_out_of_memory(
                f"the KV cache ({cache}) and the decode step",
                hint="something else took memory since the plan was made; set a smaller `--vram`",
            ):
                return Decoding(
                    self.model,
                    self._runners,
                    steps=self.steps,
                    sampler=self.sampler,
                    geometry=self.geometry,
                    plan=self.plan,
                    config=self.config,
                    device=self.device,
                    triton=self.kernels.name == "triton",
                )
        warn_of_library_cache(reason, self.plan, self.device, strict=self.config.strict)
        return None

    def experts_module(self, layer: int) -> nn.Module:
        """The stock experts module of a MoE layer."""
        return list(experts_modules(self.model).values())[layer]

    def run_experts(self, layer: int, blocks: Items[Block]) -> list[torch.Tensor]:
        """A layer's output for each block of a prompt; see `MoERunner.run`."""
        return self._runners[layer].run(blocks)

    @property
    def traffic(self) -> Traffic:
        """Experts used, hits and link bytes since the engine started; a copy."""
        return self.steps.traffic

    def generate_ids(
        self,
        prompt_ids: Items[int],
        *,
        max_tokens: int | None = None,
        sampling: SamplingParams | None = None,
        stop_ids: frozenset[int] | None = None,
    ) -> Iterator[TokenOut]:
        """Generates tokens one by one.

        Args:
            prompt_ids: at least one id.
            max_tokens: most tokens to generate; `None` goes on to the end of the context.
            sampling: default greedy.
            stop_ids: ids that end the answer; default the checkpoint's. An empty set never stops.

        Raises:
            RequestError: before the first token, what is wrong with the request; later, a step
                that failed. The engine can go on with the next request.
        """
        self._check_open()
        request = Request(
            prompt_ids=check_ids(prompt_ids, self.geometry.vocab),
            max_tokens=max_tokens,
            sampling=sampling or SamplingParams(),
            stop_ids=self.stop_ids if stop_ids is None else stop_ids,
        )
        check_length(len(request.prompt_ids), max_tokens, self.plan.context_tokens)
        request.sampling.check_vocab(self.geometry.vocab)
        return self._generate(request)

    def _generate(self, request: Request) -> Iterator[TokenOut]:
        with self.scheduling(max_waiting=1) as scheduler:
            scheduler.submit(request)
            for event in chain.from_iterable(iter(scheduler.step, None)):
                if event.error is not None:
                    raise event.error
                assert event.token_id is not None
                out = TokenOut(event.token_id, event.finish_reason)
                if out.finish_reason is not None:
                    break
                yield out
        # Outside the block: whoever has the last token may ask for the next answer.
        yield out

    @contextmanager
    def scheduling(
        self, *, max_waiting: int, change: Callable[[Parts], Parts] = lambda parts: parts
    ) -> Iterator[Scheduler]:
        """Within the block requests are answered by the scheduler that it gives, up to
        `config.max_batch` at a time, and in no other way.

        Args:
            max_waiting: more requests than these may not wait for a row.
            change: puts others in the place of what the scheduler runs (benchmarks do).

        Raises:
            RequestError: the engine is closed, or answers already.
        """
        with self._only_answer():
            self._check_open()
            parts = Parts(
                rows=self.rows,
                steps=self.steps,
                sampler=self.sampler,
                take_in=self._take_in,
                room=self._room_for_step,
                device=self.device,
                vocab=self.geometry.vocab,
                context_tokens=self.plan.context_tokens,
                prefill_share=self.config.prefill_share,
            )
            with Scheduler(change(parts), max_waiting=max_waiting) as scheduler:
                self._scheduler = scheduler
                del parts
                yield scheduler

    def _take_in(
        self, sequence: Sequence, ids: list[int], between_layers: BetweenLayers | None
    ) -> torch.Tensor:
        """Runs a prompt; logits of its last token, [V]."""
        run = partial(
            run_together,
            modules=list(experts_modules(self.model).values()),
            experts=self.run_experts,
            between_layers=between_layers,
        )
        return sequence.take_in(list(self._forwards(ids, self.plan.prefill_chunk)), run)

    @contextmanager
    def _only_answer(self) -> Iterator[None]:
        """Holds the rows that the plan has room for."""
        if not self._answering.acquire(blocking=False):
            raise RequestError(
                "another answer is being generated, and the plan holds the cache of one",
                hint="finish or close its iterator first; `Engine.scheduling` answers several",
            )
        try:
            yield
        finally:
            self._answering.release()

    def logits(self, token_ids: Items[int]) -> torch.Tensor:
        """Next-token logits after every token of a text, [T, V] float32 on the CPU.

        Raises:
            RequestError: no ids, an id out of range, more of them than the context holds, or an
                answer is being generated.
        """
        self._check_open()
        ids = check_ids(token_ids, self.geometry.vocab)
        if len(ids) > self.plan.context_tokens:
            raise RequestError(
                f"{len(ids)} tokens do not fit the context of {self.plan.context_tokens}",
                hint="load with a larger `--context`",
            )
        parts = []
        size = min(self.plan.prefill_chunk, logits_chunk(self.geometry))
        with self._only_answer(), self._sequence(len(ids)) as sequence:
            for chunk in self._forwards(ids, size):
                with self.steps.exclusive(), self._room_for_step(len(chunk)):
                    logits = sequence.forward(chunk, num_logits=len(chunk))
                parts.append(logits.float().cpu())
        return torch.cat(parts)

    @contextmanager
    def _sequence(self, num_tokens: int) -> Iterator[Sequence]:
        self._check_open()
        sequence = self.rows.open(num_tokens)
        assert sequence is not None, "nothing else is answered, and one always has room"
        try:
            yield sequence
        finally:
            sequence.close()

    def place(self, placement: Placement) -> None:
        """Changes which experts have slots, between steps. No output changes by a bit.

        Raises:
            RequestError: the engine is closed, or an answer has queued a step that fills slots.
        """
        self._check_open()
        with self.steps.exclusive():
            if self.store.steps_in_flight:
                raise RequestError(
                    "a decode step that fills slots is queued, placements cannot change under it",
                    hint="finish or close the answers, and step until `wait` has nothing to do",
                )
            self.store.place(placement)

    def close(self) -> None:
        """Gives slots, resident weights and page-locked memory back. Safe to call twice.

        Waits for the step that another thread runs, for a prompt's next layer at the most. Answers
        that are not finished fail.
        """
        if self._closed:
            return
        self._closed = True
        if self._scheduler is not None:
            self._scheduler.close()
        if hasattr(self, "steps"):
            self.steps.close()
        self.store.close()  # waits for what the device still has queued
        # `steps` stays: it refuses what still comes, and has the counts.
        for name in ("rows", "decoding", "model", "store", "_runners", "sampler"):
            self.__dict__.pop(name, None)
        gc.collect()  # modules and steps hold methods of their own: reference counts keep them
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _check_open(self) -> None:
        if self._closed:
            raise RequestError("this engine is closed", hint="load the model again")

    def _forwards(self, ids: list[int], size: int) -> Iterator[list[int]]:
        return chunks_of(ids, size, geometry=self.geometry, strict=self.config.strict)

    def _room_for_step(self, num_tokens: int) -> AbstractContextManager[None]:
        return room_for_step(self.plan, num_tokens)
