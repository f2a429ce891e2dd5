"""The decode step: one token for each of up to B rows, captured once and replayed.

Everything of a step happens on the device, from the lengths of the rows to the sampled ids that
the next step starts from, so on CUDA it is one graph, and a step may be launched before the
previous one's tokens are known. Knows rows and ids; nothing of text, requests or why they stop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import pad
from transformers import PreTrainedModel

from hotset.core.geometry import MoELayer
from hotset.core.slot_pools import IntArray
from hotset.kernels.attention import AttentionKernels
from hotset.kernels.padding import mask_padding
from hotset.models.attention import AttentionSwitch, shared_compilation
from hotset.models.compiled import CompiledLayers
from hotset.models.seam import ExpertsFunction, experts_bound, experts_modules
from hotset.runtime.fills import FillPlanner
from hotset.runtime.kv_cache import DecodeBatch, KVCache
from hotset.runtime.kv_pool import KVPool
from hotset.runtime.routing import RoutingLog
from hotset.runtime.sampling import REPORT_WIDTH, TOKEN, Draw, read_draws

# (logits [B, V], rows [B] int64) -> report [B, REPORT_WIDTH] int64 of what was drawn (`Sampler`)
Sample = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

# Steps that run before a capture: kernels are compiled and workspaces allocated in them.
_WARMUP_STEPS = 2

# The one that runs, and the one queued behind it.
MOST_IN_FLIGHT = 2


@dataclass(frozen=True)
class DecodeOptions:
    """How a step is made.

    Attributes:
        graph: capture it into one CUDA graph (CUDA only).
        layers: run these instead of the stock ones: what surrounds experts and attention is
            fused then. It changes low bits against stock kernels, whether captured or not.
    """

    graph: bool
    layers: CompiledLayers | None

    def __str__(self) -> str:
        parts = [("a CUDA graph", self.graph), ("fused layers", self.layers is not None)]
        return " and ".join(name for name, is_on in parts if is_on) or "plain launches"


@dataclass(frozen=True)
class StepResult:
    """What the host learns of a step.

    Attributes:
        draws: what was drawn at each place.
        ids_LN: routed ids of each MoE layer; padding is -1.
    """

    draws: list[Draw]
    ids_LN: IntArray


class DecodeStep:
    """One batch size's step. Its tensors never move; `replay` queues it as it is.

    Args:
        model: with `runners` bound.
        layers: the MoE layers.
        runners: what computes each layer's experts.
        pool: the KV pool that rows live in.
        size: B.
        sample: draws the tokens, on the device and without waiting for it; told the pool's row of
            each place, `pool.num_rows` for padding.
        attention: attention kernels.
        options: see there.
        fills: sends wishes before each step; `None` when nothing is filled.
        log: what the runners tell their ids, for the steps that are not this one, which reports
            them itself.
        before: queued at the start of every step.
        route: ids [B, K] of a MoE layer instead of its router's (a benchmark's replayed routing).
    """

    def __init__(  # noqa: PLR0913 - what a step is joined from, once
        self,
        model: PreTrainedModel,
        layers: Sequence[MoELayer],
        runners: Sequence[ExpertsFunction],
        *,
        pool: KVPool,
        size: int,
        sample: Sample,
        attention: AttentionKernels,
        options: DecodeOptions,
        log: RoutingLog,
        fills: FillPlanner | None = None,
        before: Callable[[], None] | None = None,
        route: Callable[[int], torch.Tensor] | None = None,
    ) -> None:
        device = pool.device
        self.batch = DecodeBatch(pool, size, kernels=attention)
        self.token_B1 = torch.zeros((size, 1), dtype=torch.int64, device=device)
        self._model, self._runners = model, list(runners)
        self._modules = list(experts_modules(model).values())
        self._cache, self._switch = KVCache(self.batch), AttentionSwitch(model)
        self._sample, self._log, self._before, self._route = sample, log, before, route
        self.fills, self.captured = fills, options.graph
        self._routed: list[torch.Tensor] = [torch.empty(0)] * len(layers)
        width = size * max(layer.top_k for layer in layers)
        # Draws and routed ids of a step in one tensor: one copy brings them all.
        num_values = size * REPORT_WIDTH + len(layers) * width
        self._report = torch.zeros(num_values, dtype=torch.int64, device=device)
        self._width = width
        on_gpu = device.type == "cuda"
        self._hosts = deque(
            torch.empty_like(self._report, device="cpu", pin_memory=on_gpu)
            for _ in range(MOST_IN_FLIGHT)
        )
        self._in_flight: deque[tuple[torch.Tensor, torch.cuda.Event | None]] = deque()
        self._layers = options.layers
        self.replay = self._make(options)

    @property
    def size(self) -> int:
        return self.batch.size

    def start(self, rows: Sequence[int | None], tokens: Sequence[int]) -> None:
        """Chooses the rows and their newest tokens, which the next step takes in.

        Nothing may be in flight. Places of `None`, and those that are not given, are padding: they
        route nowhere, and their tokens mean nothing.
        """
        assert not self._in_flight and len(rows) == len(tokens)
        self.batch.assign(rows)
        padding = self.size - len(rows)
        self.token_B1.copy_(torch.tensor([*tokens, *[0] * padding])[:, None])

    def launch(self) -> None:
        """Queues one step for the chosen rows; `finish` later says what came of it.

        Raises:
            RequestError: a row cannot become longer; nothing is queued then.
        """
        assert len(self._in_flight) < MOST_IN_FLIGHT
        self.batch.begin_step()
        if self.fills is not None:
            self.fills.begin_step()
        self.replay()
        host = self._hosts[0]
        self._hosts.rotate(-1)
        host.copy_(self._report, non_blocking=True)
        done = torch.cuda.Event() if self._report.is_cuda else None
        if done is not None:
            done.record()
        self._in_flight.append((host, done))

    def finish(self) -> StepResult:
        """Waits for the oldest step in flight."""
        host, done = self._in_flight.popleft()
        if done is not None:
            done.synchronize()
        drawn, routed = np.split(host.numpy().copy(), [self.size * REPORT_WIDTH])
        return StepResult(draws=read_draws(drawn), ids_LN=routed.reshape(-1, self._width))

    def abandon(self) -> None:
        """Forgets what is in flight, after a step broke off: it may have run in part, so mend the
        slots (`Steps.mend`), and close the rows."""
        self._in_flight.clear()

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def _make(self, options: DecodeOptions) -> Callable[[], None]:
        """The step as a callable, captured where that is asked for.

        While a graph is made the rows are empty and no wishes are in force, so that these runs
        leave neither keys nor fills behind.
        """
        run = self._run if options.layers is None else self._run_compiled
        if not options.graph:
            if options.layers is not None:
                run()  # what cannot be compiled shows here, where weaker options are left
            return run
        side = torch.cuda.Stream(self.batch.pool.device)
        side.wait_stream(torch.cuda.current_stream())
        with torch.inference_mode(), torch.cuda.stream(side):
            for _ in range(_WARMUP_STEPS):
                run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.inference_mode(), torch.cuda.graph(graph):
            run()
        return graph.replay

    def _run_compiled(self) -> None:
        assert self._layers is not None
        pool = self.batch.pool
        paths = {layer.path for layer in pool.layers.values()}
        paths |= {layer.path for layer in pool.states.layers.values()}
        with self._layers.active(), shared_compilation(self._model, paths):
            self._run()

    def _run(self) -> None:
        """The step itself; every launch of it is queued here."""
        if self._before is not None:
            self._before()
        self.batch.advance()
        watched = [self._watched(index) for index in range(len(self._modules))]
        with (
            torch.inference_mode(),
            self._switch.decode(),
            experts_bound(self._modules, watched),
            self._log.aside(),
        ):
            out = self._model(
                input_ids=self.token_B1,
                position_ids=self.batch.position_ids_B1,
                past_key_values=self._cache,
                use_cache=True,
                logits_to_keep=1,
            )
            self.batch.put_back()
            # A row of the pool is one of the sampler too.
            drawn_BW = self._sample(out.logits[:, -1], self.batch.rows_B)
            self.token_B1.copy_(drawn_BW[:, TOKEN, None])
            torch.cat([drawn_BW.flatten(), *self._routed], out=self._report)

    def _watched(self, index: int) -> ExpertsFunction:
        """A layer's runner, for this step: padded rows route nowhere, and ids are noted."""
        runner = self._runners[index]

        def run(x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
            if self._route is not None:
                ids_TK = self._route(index)
            if self.size > 1:
                ids_TK = mask_padding(ids_TK, self.batch.lengths_B)
            ids = ids_TK.reshape(-1)
            missing = self._width - ids.numel()
            self._routed[index] = pad(ids, (0, missing), value=-1) if missing else ids
            return runner(x_TH, ids_TK, weights_TK)

        return run
