"""`bench prefill`: time to the first token by length of the prompt, of a random model.

Beside it, in the same run and with the same slots: the speed of light, groups of records that wait
for each other, chunks that run one after the other, and stock transformers with accelerate's
offload, cut to a few layers and scaled. Experts are drawn evenly, which is the most that can cross
the link.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

import torch

from hotset.bench.offload import OffloadedPrompts
from hotset.bench.prefill_run import PrefillRun, PromptTimes, num_resident
from hotset.bench.rates import measure_rates, with_known
from hotset.bench.rows import Row, Spread
from hotset.bench.timing import time_ms
from hotset.core.costmodel import Rates
from hotset.core.errors import RequestError
from hotset.core.prompt_cost import Staging, attention_flops, least_prompt_ms, predict_prompt
from hotset.core.speed import RING_TOKENS
from hotset.kernels.attention import AttentionKernels
from hotset.runtime.engine import Engine

# Chunks of the comparison that runs one after the other.
SEPARATE_CHUNK = 2048
# Longest prompts that run in the slower ways too: beyond them the ratios go on as they were, and
# chunks of 2,048 alone would take minutes.
MOST_WAITING, MOST_SEPARATE = 32768, 16384
# Groups that wait are only slower where there are several.
_LEAST_COMPARED = 1024
_GEMM_SIDE = {"cuda": 8192, "cpu": 512}


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
        self._rates = measure_rates(engine.store)
        self._gemm_tflops = _gemm_tflops(engine.device, getattr(torch, engine.geometry.dtype))
        ring = engine.store.ring
        room = ring.room(max(layer.expert.record_bytes for layer in engine.geometry.layers))
        self._staging = Staging(RING_TOKENS, room)
        self._run = PrefillRun(engine, slots=slots, rates=self._rates)

    def run(self, lengths: Sequence[int], *, offload_layers: int) -> Iterator[Row]:
        """Rates, then for each length our time and what it is compared with.

        Args:
            offload_layers: layers that the comparison with accelerate is cut to; 0 leaves it out.
        """
        for name in ("link", "copy", "hbm"):
            yield self._row("rates", name, "GB/s", [getattr(self._rates, f"{name}_gbps")])
        yield self._row("rates", "matrix products", "TFLOP/s", [self._gemm_tflops])
        medians = {}
        for num_tokens in lengths:
            ours = self._measure(num_tokens)
            medians[num_tokens] = Spread.of(ours.times).p50
            yield from self._ours(num_tokens, ours)
            for name, times in self._compared(num_tokens):
                yield self._other(num_tokens, name, times, medians[num_tokens])
        if offload_layers:
            offloaded = OffloadedPrompts(self._engine, num_layers=offload_layers)
            name = f"accelerate offload, {offload_layers} layers scaled to all"
            for num_tokens in lengths:
                times = offloaded.times(num_tokens, repeats=self._repeats)
                yield self._other(num_tokens, name, times, medians[num_tokens])

    def _case(self, num_tokens: int) -> str:
        return f"{self._shape}, {self._slots:.0%} slots, {num_tokens} tokens"

    def _measure(self, num_tokens: int, *, overlap: bool = True) -> PromptTimes:
        chunk = self._engine.plan.prefill_chunk
        return self._run.measure(num_tokens, chunk, repeats=self._repeats, overlap=overlap)

    def _ours(self, num_tokens: int, ours: PromptTimes) -> Iterator[Row]:
        row = partial(self._row, self._case(num_tokens))
        p50 = Spread.of(ours.times).p50
        sol = least_prompt_ms(
            self._engine.geometry,
            self._known_rates(),
            num_tokens=num_tokens,
            link_bytes=ours.link_bytes,
            attention_ms=self._attention_ms(0, num_tokens),
            streams=self._staging.streams(num_tokens),
        )
        expected = self._expected_ms(num_tokens, ours.link_bytes)
        against = ("prediction", expected)
        yield row("first token", "ms", ours.times, sol=sol, baseline=against)
        yield row("predicted first token", "ms", [expected])
        yield row("prefill", "tokens/s", [num_tokens / p50 * 1e3])
        yield row("link bytes", "bytes", [ours.link_bytes])
        yield row("link rate", "GB/s", [ours.link_bytes / p50 / 1e6])
        if ours.copy_gbps is not None:
            # What no slot has crosses once, whether it is routed to or not.
            cold = self._cold_bytes()
            yield row("copied bytes", "bytes", [ours.copied_bytes], baseline=("cold bytes", cold))
            limit = ("the copy engine alone", self._rates.copy_gbps)
            yield row("copy rate while copying", "GB/s", [ours.copy_gbps], baseline=limit)
        if ours.peak_bytes:
            plan = self._engine.plan.device
            planned = plan.total_bytes - plan["CUDA context"]  # torch's allocator does not see it
            yield row("device peak", "bytes", [ours.peak_bytes], baseline=("the plan", planned))

    def _compared(self, num_tokens: int) -> Iterator[tuple[str, list[float]]]:
        """Name and milliseconds of our own ways to run a prompt that are slower."""
        if _LEAST_COMPARED <= num_tokens <= MOST_WAITING and self._engine.store.ring.nbytes:
            yield "groups that wait", self._measure(num_tokens, overlap=False).times
        if SEPARATE_CHUNK < num_tokens <= MOST_SEPARATE:
            apart = self._run.measure(
                num_tokens, SEPARATE_CHUNK, repeats=self._repeats, together=False
            )
            yield f"chunks of {SEPARATE_CHUNK} apart", apart.times

    def _other(self, num_tokens: int, name: str, times: list[float], ours: float) -> Row:
        case = f"{self._case(num_tokens)}, {name}"
        return self._row(case, "first token", "ms", times, baseline=("hotset", ours), inverse=True)

    def _cold_bytes(self) -> float:
        """Of all experts without a slot."""
        layers = self._engine.geometry.layers
        cold = [n.num_experts - num_resident(self._slots, n.num_experts) for n in layers]
        return sum(n * x.expert.record_bytes for n, x in zip(cold, layers, strict=True))

    def _known_rates(self) -> Rates:
        """Of this run, and what is known of such a machine beforehand."""
        measured = replace(self._rates, gemm_tflops=self._gemm_tflops)
        return with_known(measured, self._engine.machine)

    def _expected_ms(self, num_tokens: int, link_bytes: float) -> float:
        """As `core.prompt_cost` predicts it from the bytes that crossed the link."""
        engine = self._engine
        layers, chunk = engine.geometry.layers, engine.plan.prefill_chunk
        cold = self._cold_bytes()
        share = 1 - link_bytes / cold if cold else 0.0  # of the cold experts, not used
        return predict_prompt(
            engine.geometry,
            self._with_attention(self._known_rates(), num_tokens),
            num_tokens=num_tokens,
            chunk_tokens=chunk,
            resident_share=[
                num_resident(self._slots, n.num_experts) / n.num_experts for n in layers
            ],
            staging=self._staging,
            together=True,
            used=[(1 - share) * layer.num_experts for layer in layers],
        ).total_ms

    def _with_attention(self, rates: Rates, num_tokens: int) -> Rates:
        """The same, with attention at the rates that it has alone: within the first chunk, and of
        the later ones with all before them."""
        chunk = min(self._engine.plan.prefill_chunk, num_tokens)
        edges = [*range(0, num_tokens, chunk), num_tokens]
        times = [self._attention_ms(start, end) for start, end in pairwise(edges)]
        geometry = self._engine.geometry
        first = attention_flops(geometry, 0, chunk) / times[0] / 1e9
        if len(times) == 1:
            return replace(rates, attention_tflops=first)
        later = attention_flops(geometry, chunk, num_tokens) / sum(times[1:]) / 1e9
        return replace(rates, attention_tflops=first, attention_past_tflops=later)

    def _attention_ms(self, start: int, end: int) -> float:
        """All layers' attention of tokens start..end-1 to all up to them, timed alone."""
        kernels, total = AttentionKernels(self._engine.kernels.name), 0.0
        known: dict[tuple[int, ...], float] = {}
        dtype = getattr(torch, self._engine.geometry.dtype)
        for layer in self._engine.geometry.attention:
            heads, kv_heads, window = layer.num_heads, layer.num_kv_heads, layer.window
            key = (heads, kv_heads, layer.key_dim, layer.value_dim, window or 0)
            if key not in known:
                q, k, v = (
                    torch.randn(num, tokens, width, device=self._engine.device).to(dtype)
                    for num, tokens, width in (
                        (heads, end - start, layer.key_dim),
                        (kv_heads, end, layer.key_dim),
                        (kv_heads, end, layer.value_dim),
                    )
                )
                attend = partial(kernels.prefill, q, k, v, scale=0.1, window=window)
                known[key] = min(time_ms(attend, device=self._engine.device, repeats=2, warmup=1))
            total += known[key]
        return total

    def _row(
        self,
        case: str,
        figure: str,
        unit: str,
        values: list[float],
        *,
        sol: float | None = None,
        baseline: tuple[str, float] | None = None,
        inverse: bool = False,
    ) -> Row:
        """One figure; of times, the baseline's over ours where that is the better one."""
        spread = Spread.of(values)
        ratio = None if baseline is None else spread.p50 / baseline[1]
        return Row(
            bench="rates" if case == "rates" else "prefill",
            case=self._shape if case == "rates" else case,
            figure=figure,
            unit=unit,
            **vars(spread),
            sol=sol,
            ratio_to_sol=None if sol is None else sol / spread.p50,
            baseline=None if baseline is None else baseline[0],
            ratio_to_baseline=None if ratio is None else (1 / ratio if inverse else ratio),
        )


def _gemm_tflops(device: torch.device, dtype: torch.dtype) -> float:
    """Best of a few square matrix products."""
    side = _GEMM_SIDE[device.type]
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    multiply: Callable[[], object] = partial(torch.matmul, a, b)
    return 2 * side**3 / min(time_ms(multiply, device=device, repeats=5)) / 1e9
