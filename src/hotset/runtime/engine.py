"""The engine: token ids in, token ids out. One model, one device, one step at a time.

The path of a token is numbered in docs/architecture.md. Text, files and kernels are other
modules' business; this one decides what runs in a step, and gives everything back at the end.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import chain
from operator import index
from types import TracebackType

import numpy as np
import torch
from transformers.cache_utils import Cache

from hotset.core.config import EngineConfig
from hotset.core.errors import RequestError, explain_out_of_memory
from hotset.core.placement import Placement
from hotset.core.plan import MemoryPlan
from hotset.core.request import FinishReason, SamplingParams, check_length
from hotset.core.slot_pools import SlotPools
from hotset.core.units import format_bytes
from hotset.experts.store import ExpertStore
from hotset.kernels.dispatch import select_kernels
from hotset.kernels.toolchain import check_triton_toolchain
from hotset.models.seam import bind_experts, experts_modules
from hotset.runtime.moe import MoERunner
from hotset.runtime.planning import logits_chunk, plan_engine
from hotset.runtime.probe import choose_device
from hotset.runtime.routing import RoutingLog, Traffic
from hotset.runtime.sampling import Sampler
from hotset.runtime.weights import Progress, WeightSource

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TokenOut:
    """One generated token.

    Attributes:
        token_id: its id. A stop id is put out too, marked by its finish reason.
        finish_reason: set on the last one.
    """

    token_id: int
    finish_reason: FinishReason | None


class Engine:
    """A loaded model. Use it as a context manager, or call `close`.

    Args:
        source: where the weights come from.
        config: the user's choices.
        progress: told how many expert bytes are loaded, of how many.

    Raises:
        CapacityError: the plan does not fit, or memory ran out while loading.
        HardwareError: the machine lacks what the plan needs.
        CheckpointError: a weight is damaged.
    """

    def __init__(
        self, source: WeightSource, config: EngineConfig, *, progress: Progress | None = None
    ) -> None:
        self.config = config
        self.geometry = source.geometry
        self.device = choose_device(config.device)
        self.machine, plan = plan_engine(source.geometry, config)
        self.plan = plan.require_fit()
        self.kernels = select_kernels(self.device, config.kernels)
        if self.kernels.name == "triton" and self.device.type == "cuda":
            check_triton_toolchain()
        self.text = source.text
        self.stop_ids = source.stop_ids
        self._lock = threading.Lock()
        self._answering = threading.Lock()
        self._log = RoutingLog(self.geometry.layers)
        self._closed = False
        self.store = self._make_store()
        try:
            self.model = source.load_resident(self.device)
            self._fill(source, progress or (lambda done, total: None))
            self._bind()
        except BaseException:
            self.close()
            raise

    def _make_store(self) -> ExpertStore:
        self.pools = SlotPools.build(
            num_experts=[layer.num_experts for layer in self.geometry.layers],
            record_bytes=[layer.expert.record_bytes for layer in self.geometry.layers],
            num_slots={pool.record_bytes: pool.num_slots for pool in self.plan.pools},
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
            self.store.place(initial_placement(self.pools, self.plan))

    def _bind(self) -> None:
        for layer, module in enumerate(experts_modules(self.model).values()):
            runner = MoERunner(layer, module, store=self.store, kernels=self.kernels, log=self._log)
            bind_experts(module, runner)

    @property
    def traffic(self) -> Traffic:
        """Experts used, hits and link bytes since the engine started; a copy."""
        return self._log.total.copy()

    def generate_ids(
        self,
        prompt_ids: Sequence[int],
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
        ids = self._check_ids(prompt_ids)
        num_tokens = check_length(len(ids), max_tokens, self.plan.context_tokens)
        stops = self.stop_ids if stop_ids is None else stop_ids
        sampler = Sampler(sampling or SamplingParams(), device=self.device)
        return self._generate(ids, num_tokens, sampler, stops)

    def _generate(
        self, ids: list[int], num_tokens: int, sampler: Sampler, stops: frozenset[int]
    ) -> Iterator[TokenOut]:
        with self._only_answer():
            cache, logits_V = self._prefill(ids)
            for count in range(1, num_tokens + 1):
                token_id = sampler.sample(logits_V)
                if token_id in stops:
                    yield TokenOut(token_id, FinishReason.STOP)
                    return
                if count == num_tokens:
                    yield TokenOut(token_id, FinishReason.LENGTH)
                    return
                yield TokenOut(token_id, None)
                cache, logits = self._step([token_id], cache, num_logits=1)
                logits_V = logits[-1]

    @contextmanager
    def _only_answer(self) -> Iterator[None]:
        """Holds the one cache that the plan has room for."""
        if not self._answering.acquire(blocking=False):
            raise RequestError(
                "another answer is being generated, and the plan holds the cache of one",
                hint="finish or close its iterator first",
            )
        try:
            yield
        finally:
            self._answering.release()

    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Next-token logits after every token of a text, [T, V] float32 on the CPU.

        Raises:
            RequestError: no ids, an id out of range, more of them than the context holds, or an
                answer is being generated.
        """
        ids = self._check_ids(token_ids)
        if len(ids) > self.plan.context_tokens:
            raise RequestError(
                f"{len(ids)} tokens do not fit the context of {self.plan.context_tokens}",
                hint="load with a larger `--context`",
            )
        cache, parts = None, []
        size = min(self.plan.prefill_chunk, logits_chunk(self.geometry))
        with self._only_answer():
            for chunk in self._forwards(ids, size):
                cache, logits = self._step(chunk, cache, num_logits=len(chunk))
                parts.append(logits.float().cpu())
        return torch.cat(parts)

    def place(self, placement: Placement) -> None:
        """Changes which experts have slots, between steps. No output changes by a bit.

        Raises:
            RequestError: the engine is closed.
        """
        with self._lock, torch.inference_mode():
            self._check_open()
            self.store.place(placement)

    def close(self) -> None:
        """Gives slots, resident weights and page-locked memory back. Safe to call twice.

        Waits for the step that another thread runs; the answer it belongs to then fails.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self.model = None  # type: ignore[assignment]
            self.store.close()
            del self.store
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise RequestError("this engine is closed", hint="load the model again")

    def _check_ids(self, token_ids: Sequence[int]) -> list[int]:
        self._check_open()
        try:
            ids = [index(token) for token in token_ids]
        except TypeError as error:
            raise RequestError(f"token ids must be whole numbers: {error}") from error
        if not ids:
            raise RequestError("the prompt has no tokens")
        for token in ids:
            if not 0 <= token < self.geometry.vocab:
                raise RequestError(
                    f"token id {token} is outside the vocabulary of {self.geometry.vocab}"
                )
        return ids

    def _prefill(self, ids: list[int]) -> tuple[Cache, torch.Tensor]:
        cache = None
        for chunk in self._forwards(ids, self.plan.prefill_chunk):
            cache, logits = self._step(chunk, cache, num_logits=1)
        assert cache is not None
        return cache, logits[-1]

    def _forwards(self, ids: list[int], size: int) -> Iterator[list[int]]:
        """The tokens of each forward: chunks, or after the first chunk single tokens where the
        stock model can only continue by those.

        Raises:
            RequestError: the latter, in a strict engine.
        """
        if len(ids) <= size or self.geometry.continues_in_chunks:
            return (ids[start : start + size] for start in range(0, len(ids), size))
        reason = (
            f"`{self.geometry.model_type}` of transformers cannot continue a prompt in chunks: "
            f"{len(ids) - size} of {len(ids)} tokens run one by one"
        )
        if self.config.strict:
            raise RequestError(reason, hint="load with a larger `--prefill-chunk`")
        logger.warning("%s; a larger `--prefill-chunk` spares that", reason)
        return chain([ids[:size]], ([token] for token in ids[size:]))

    def _step(
        self, ids: list[int], cache: Cache | None, *, num_logits: int
    ) -> tuple[Cache, torch.Tensor]:
        """One forward pass. `cache=None` lets the model make its own kind of cache.

        Returns:
            The cache, extended by `ids`, and the logits of the last `num_logits` tokens, [n, V].
        """
        with self._lock, torch.inference_mode():
            self._check_open()
            try:
                with self._room_for_step(len(ids)):
                    out = self.model(
                        input_ids=torch.tensor([ids], device=self.device),
                        past_key_values=cache,
                        use_cache=True,
                        logits_to_keep=num_logits,
                    )
                self._log.finish(self.store.placement)
            finally:
                self._log.drop()
        return out.past_key_values, out.logits[0]

    def _room_for_step(self, num_tokens: int) -> AbstractContextManager[None]:
        lines = ("activations", "attention workspace", "expert workspace", "KV cache")
        planned = ", ".join(f"{name} {format_bytes(self.plan.device[name])}" for name in lines)
        return explain_out_of_memory(
            f"a step of {num_tokens} tokens (planned: {planned})",
            hint="other programs may have taken memory since the start; lower `--prefill-chunk` or "
            "`--context`, or set a smaller `--vram`",
            error=RequestError,
        )


def initial_placement(pools: SlotPools, plan: MemoryPlan) -> Placement:
    """Experts 0, 1, ... of every layer in its slots: without a profile none is better known."""
    resident_LE = np.zeros((len(pools.num_experts), pools.max_experts), dtype=np.bool_)
    for layer, num_slots in enumerate(plan.slots_per_layer):
        resident_LE[layer, :num_slots] = True
    return Placement.from_residents(pools, resident_LE)
