"""`bench prefill`: time to the first token by length of the prompt, of a random model.

Beside it, in the same run and with the same slots: the speed of light, groups of records that wait
for each other, chunks that run one after the other, and stock transformers with accelerate's
offload, cut to a few layers and scaled. Random ids spread evenly over the experts, which is the
most that can cross the link.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from hotset.bench.offload import time_offload
from hotset.bench.rates import measure_rates
from hotset.bench.rows import Row, Spread
from hotset.bench.timing import time_ms
from hotset.core.costmodel import expert_flops, resident_flops
from hotset.core.errors import RequestError
from hotset.core.placement import Placement
from hotset.core.slot_pools import BoolArray
from hotset.core.staging import StagingRule
from hotset.core.units import format_bytes
from hotset.kernels.attention import AttentionKernels
from hotset.models.seam import experts_modules
from hotset.runtime.engine import Engine
from hotset.runtime.expert_stream import ExpertStream
from hotset.runtime.moe import MATCH_TOKENS, MoERunner
from hotset.runtime.prefill import run_together

# Chunks of the comparison that runs one after the other.
SEPARATE_CHUNK = 2048
# Groups that wait, and separate chunks, are only slower where there are several.
_LEAST_COMPARED = 1024
_GEMM_SIDE = {"cuda": 8192, "cpu": 512}


@dataclass(frozen=True)
class _Spent:
    """One kind of run of one prompt.

    Attributes:
        times: milliseconds of each repeat, the first token drawn.
        link_bytes: of records that crossed the link in one of them.
    """

    times: list[float]
    link_bytes: float


class PrefillBench:
    """Prompts on one engine.

    Args:
        engine: over a KV pool; its placement is changed.
        shape: its name, for the rows.
        slots: share of the experts of each layer that own a slot.
        repeats: of each measurement.

    Raises:
        RequestError: the model runs in the library's cache, or the plan has fewer slots.
    """

    def __init__(self, engine: Engine, *, shape: str, slots: float, repeats: int) -> None:
        if engine.decoding is None:
            raise RequestError(
                f"`{shape}` does not run over a KV pool: {engine.geometry.attention_reason}"
            )
        self._engine, self._shape, self._slots = engine, shape, slots
        self._repeats = repeats
        self._placement = self._random_residents()
        self._modules = list(experts_modules(engine.model).values())
        self._rates = measure_rates(engine.store)
        self._gemm_tflops = _gemm_tflops(engine.device, getattr(torch, engine.geometry.dtype))

    def run(self, lengths: Sequence[int], *, offload_layers: int) -> Iterator[Row]:
        """Rates, then for each length our time and what it is compared with.

        Args:
            offload_layers: layers that the comparison with accelerate is cut to; 0 leaves it out.
        """
        for name in ("link", "copy", "hbm"):
            yield self._row("rates", name, "GB/s", [getattr(self._rates, f"{name}_gbps")])
        yield self._row("rates", "matrix products", "TFLOP/s", [self._gemm_tflops])
        for num_tokens in lengths:
            yield from self._length(num_tokens, offload_layers)

    def _length(self, num_tokens: int, offload_layers: int) -> Iterator[Row]:
        case = f"{self._shape}, {self._slots:.0%} slots, {num_tokens} tokens"
        ours = self._measure(num_tokens, self._engine.plan.prefill_chunk)
        sol = self._speed_of_light_ms(num_tokens, ours.link_bytes)
        p50 = Spread.of(ours.times).p50
        yield self._row(case, "first token", "ms", ours.times, sol=sol)
        yield self._row(case, "prefill", "tokens/s", [num_tokens / p50 * 1e3])
        yield self._row(case, "link bytes", "bytes", [ours.link_bytes])
        yield self._row(case, "link rate", "GB/s", [ours.link_bytes / p50 / 1e6])
        others: list[tuple[str, list[float]]] = []
        if num_tokens >= _LEAST_COMPARED and self._engine.store.ring.nbytes:
            waiting = ExpertStream(self._engine.store, overlap=False)
            chunk = self._engine.plan.prefill_chunk
            others.append(("groups that wait", self._measure(num_tokens, chunk, waiting).times))
        if num_tokens > SEPARATE_CHUNK:
            apart = self._measure(num_tokens, SEPARATE_CHUNK, together=False)
            others.append((f"chunks of {SEPARATE_CHUNK} apart", apart.times))
        if offload_layers:
            times = time_offload(
                self._engine, num_tokens, num_layers=offload_layers, repeats=self._repeats
            )
            name = f"accelerate offload, {offload_layers} layers scaled to all"
            others.append((name, times))
        for name, times in others:
            yield self._row(f"{case}, {name}", "first token", "ms", times, baseline=name, ours=p50)

    def _measure(
        self,
        num_tokens: int,
        chunk: int,
        stream: ExpertStream | None = None,
        *,
        together: bool = True,
    ) -> _Spent:
        engine = self._engine
        if stream is None and engine.store.ring.nbytes:
            stream = ExpertStream(engine.store)
        runners = [self._runner(layer, stream) for layer in range(len(self._modules))]
        run = partial(
            run_together,
            modules=self._modules,
            experts=lambda layer, blocks: runners[layer].run(blocks),
        )
        generator = torch.Generator().manual_seed(num_tokens)
        ids = torch.randint(0, engine.geometry.vocab, (num_tokens,), generator=generator).tolist()
        chunks = [ids[start : start + chunk] for start in range(0, num_tokens, chunk)]
        passes = [chunks] if together else [[part] for part in chunks]

        def prompt() -> None:
            with engine.steps.exclusive(), engine._sequence(num_tokens) as sequence:
                for parts in passes:
                    logits_V = sequence.take_in(parts, run)
                int(logits_V.argmax())  # the first token; waits for the device

        engine.place(self._placement)
        before = engine.traffic.link_bytes
        times = time_ms(prompt, device=engine.device, repeats=self._repeats, warmup=1)
        return _Spent(times, (engine.traffic.link_bytes - before) / (self._repeats + 1))

    def _runner(self, layer: int, stream: ExpertStream | None) -> MoERunner:
        engine = self._engine
        return MoERunner(
            layer,
            self._modules[layer],
            store=engine.store,
            kernels=engine.kernels,
            log=engine.steps.log,
            stream=stream,
            staging=StagingRule(
                engine.config.staging,
                link_gbps=self._rates.link_gbps,
                copy_gbps=self._rates.copy_gbps,
            ),
        )

    def _speed_of_light_ms(self, num_tokens: int, link_bytes: float) -> float:
        """Layers are alike, so the longest term of one is the longest of all: records over the
        link, products of the experts, or records with a slot; then what is no expert, and
        attention at its own measured rate."""
        geometry, rates = self._engine.geometry, self._rates
        rate = rates.copy_gbps if num_tokens > MATCH_TOKENS else rates.link_gbps
        flops = sum(expert_flops(layer) * layer.top_k for layer in geometry.layers) * num_tokens
        held = self._engine.plan.device["slots"]
        experts = max(
            link_bytes / rate / 1e6,
            flops / self._gemm_tflops / 1e9,
            min(held, self._slots * geometry.expert_bytes) / rates.hbm_gbps / 1e6,
        )
        resident = max(
            geometry.resident_read_bytes / rates.hbm_gbps / 1e6,
            resident_flops(geometry, num_tokens) / self._gemm_tflops / 1e9,
        )
        return experts + resident + self._attention_ms(num_tokens)

    def _attention_ms(self, num_tokens: int) -> float:
        """All layers' attention to a whole prompt, timed alone."""
        kernels, total = AttentionKernels(self._engine.kernels.name), 0.0
        known: dict[tuple[int, ...], float] = {}
        dtype = getattr(torch, self._engine.geometry.dtype)
        for layer in self._engine.geometry.attention:
            heads, kv_heads, window = layer.num_heads, layer.num_kv_heads, layer.window
            key = (heads, kv_heads, layer.key_dim, layer.value_dim, window or 0)
            if key not in known:
                shapes = ((heads, layer.key_dim), (kv_heads, layer.key_dim))
                q, k, v = (
                    torch.randn(n, num_tokens, d, device=self._engine.device).to(dtype)
                    for n, d in (*shapes, (kv_heads, layer.value_dim))
                )
                attend = partial(kernels.prefill, q, k, v, scale=0.1, window=window)
                known[key] = min(time_ms(attend, device=self._engine.device, repeats=2, warmup=1))
            total += known[key]
        return total

    def _random_residents(self) -> Placement:
        pools, rng = self._engine.pools, np.random.default_rng(0)
        resident_LE: BoolArray = np.zeros((len(pools.num_experts), pools.max_experts), dtype=bool)
        for layer, num_experts in enumerate(pools.num_experts):
            order = rng.permutation(num_experts)
            resident_LE[layer, order[: round(self._slots * num_experts)]] = True
        wanted = int(resident_LE.sum())
        if wanted > self._engine.plan.num_slots:
            raise RequestError(
                f"`--slots {self._slots:g}` are {wanted} slots, the plan has "
                f"{self._engine.plan.num_slots}",
                hint="raise `--vram`, or lower `--context` or `--slots`",
            )
        return Placement.from_residents(pools, resident_LE)

    def _row(
        self,
        case: str,
        figure: str,
        unit: str,
        values: list[float],
        *,
        sol: float | None = None,
        baseline: str | None = None,
        ours: float | None = None,
    ) -> Row:
        spread = Spread.of(values)
        return Row(
            bench="rates" if case == "rates" else "prefill",
            case=self._shape if case == "rates" else case,
            figure=figure,
            unit=unit,
            **vars(spread),
            sol=sol,
            ratio_to_sol=None if sol is None else sol / spread.p50,
            baseline=None if baseline is None else "hotset",
            ratio_to_baseline=None if ours is None else ours / spread.p50,
        )


def describe_memory(engine: Engine) -> str:
    """Peak of the device against its plan, in words; empty on a CPU."""
    if engine.device.type != "cuda":
        return ""
    peak = torch.cuda.max_memory_allocated(engine.device)
    planned = engine.plan.device.total_bytes - engine.plan.device["CUDA context"]
    return f"device peak {format_bytes(peak)} of {format_bytes(planned)} planned"


def _gemm_tflops(device: torch.device, dtype: torch.dtype) -> float:
    """Best of a few square matrix products."""
    side = _GEMM_SIDE[device.type]
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    multiply: Callable[[], object] = partial(torch.matmul, a, b)
    return 2 * side**3 / min(time_ms(multiply, device=device, repeats=5)) / 1e9
