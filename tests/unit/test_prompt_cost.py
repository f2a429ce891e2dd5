"""Prompts: terms by hand, the two buffers against a step-by-step clock, and predictions against
every prompt that was measured."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace

import pytest
from plan_fakes import qwen3_30b, t1
from repository import ROOT

from hotset.core import prompt_cost
from hotset.core.costmodel import Rates, distinct_experts
from hotset.core.format_rates import DEQUANTISE_SHARE
from hotset.core.formats import USUAL
from hotset.core.geometry import AttentionLayer, ModelGeometry
from hotset.core.machine import MachineDescription
from hotset.core.prompt_cost import (
    CHUNK_US,
    POINTWISE_BYTES,
    Staging,
    attention_flops,
    expert_flops,
    least_prompt_ms,
    predict_prompt,
    sum_of_contexts,
    text_experts,
)
from hotset.core.staging import DEQUANTISE_TOKENS, GROUP_US, block_tokens

RATES = Rates(50.0, 55.0, 4000.0, gemm_tflops=200.0, prompt_layer_us=100.0)
RING = Staging(65, 8)

# Prediction within 10% of the measurement is the goal that the model of the machine is held to.
WITHIN = 0.10
# The commits whose rows are predicted; of a prompt that was measured at two, the rows of the later
# one count.
MEASURED_AT = ("57cc1c8", "1b2e1b7")
# Tokens of a chunk and records of a buffer of the plans that ran.
CHUNKS = {"plain": 32_768, "int4": 8192, "mxfp4": 8192, "nvfp4": 8192, "fp8": 8192}
BUFFERS = {"plain": 49, "int4": 49, "mxfp4": 49, "nvfp4": 49, "fp8": 34}


def model() -> ModelGeometry:
    """T1 with one attention layer for each decoder layer."""
    return replace(
        t1(), attention=tuple(AttentionLayer("a", index, 8, 2, 64, 32, None) for index in range(3))
    )


def test_a_pass_streams_all_cold_experts() -> None:
    args = {"num_tokens": 1000, "resident_share": [0.25] * 3, "staging": RING, "used": [16.0] * 3}
    whole = predict_prompt(t1(), RATES, chunk_tokens=1000, **args)
    chunks = predict_prompt(t1(), RATES, chunk_tokens=400, **args)
    together = predict_prompt(t1(), RATES, chunk_tokens=400, together=True, **args)
    assert (whole.num_passes, chunks.num_passes, together.num_passes) == (1, 3, 1)
    # 12 of 16 cold: 2 groups, and 12 times out of 16 the next expert is cold too. 3 us a copy.
    copy_ms = 12 * 98_304 / 55 / 1e6 + (2 + 12 * 4 / 16) * 3 / 1e3
    assert whole.stream_ms == pytest.approx(3 * copy_ms)
    assert chunks.stream_ms == pytest.approx(3 * whole.stream_ms)
    assert together.stream_ms == pytest.approx(whole.stream_ms)
    assert whole.layers_ms == pytest.approx(0.3)
    # Two of the three chunks have others before them, in either way.
    want = pytest.approx(3 * 0.3 + 2 * 3 * CHUNK_US / 1e3)
    assert together.layers_ms == want
    assert chunks.layers_ms == want


def test_a_short_prompt_reads_in_place() -> None:
    args = {"chunk_tokens": 64, "resident_share": [0.0] * 3, "staging": RING}
    short = predict_prompt(t1(), RATES, num_tokens=64, **args)
    experts = text_experts(t1().layers[0], 64)
    assert short.stream_ms == pytest.approx(3 * experts * 98_304 / 50 / 1e6)
    assert short.total_ms >= short.stream_ms + short.layers_ms


def test_terms_by_hand() -> None:
    rates = replace(RATES, expert_tflops=100.0, attention_tflops=50.0, attention_past_tflops=25.0)
    args = {"num_tokens": 8192, "resident_share": [1.0] * 3, "staging": RING, "together": True}
    one = predict_prompt(model(), rates, chunk_tokens=8192, **args)
    two = predict_prompt(model(), rates, chunk_tokens=4096, **args)
    # Half a block of 128 rows more for each of 16 experts; sums in ranges of 4,096 tokens' outputs.
    rows = 8192 * 4 + 16 * 64
    ranges = -(-8192 // block_tokens(model().layers[0].expert, 4))
    touched = ranges * (1 - (1 - 1 / ranges) ** 4)
    sums_ms = 4 * (4 + 2 * touched) * 128 * 8192 / 4e9
    assert one.experts_ms == pytest.approx(3 * (rows * 6 * 128 * 128 / 100e9 + sums_ms))
    first, whole = (attention_flops(model(), 0, n) for n in (4096, 8192))
    assert one.attention_ms == pytest.approx(whole / 50e9)
    assert two.attention_ms == pytest.approx(first / 50e9 + (whole - first) / 25e9)
    elements = 3 * (2 * 128 + (8 + 2) * 64)
    assert one.pointwise_ms == pytest.approx(8192 * POINTWISE_BYTES * elements / 4e9)
    parts = (one.experts_ms, one.resident_ms, one.attention_ms, one.pointwise_ms, one.layers_ms)
    assert one.total_ms == pytest.approx(sum(parts))
    assert one.stream_ms == 0 and one.waiting_ms == pytest.approx(0, abs=1e-12)


def test_quantised_weights_are_made_once_for_all_chunks() -> None:
    """From a number of tokens an expert on; T1 routes each to 4 of 16 experts."""
    least = DEQUANTISE_TOKENS["int4"] * 16 // 4
    plain = t1().layers[0].expert
    packed = plain.in_format(USUAL["int4"])
    quantised = replace(t1(), layers=tuple(replace(x, expert=packed) for x in t1().layers))
    args = {"resident_share": [1.0] * 3, "staging": RING, "together": True, "used": [16.0] * 3}
    moved_ms = 3 * 16 * (packed.record_bytes + plain.record_bytes) / 4000 / 1e6
    moved_ms /= DEQUANTISE_SHARE["int4"]
    cases = ((2 * least, 2 * least, moved_ms), (2 * least, least, moved_ms), (least - 4, least, 0))
    for num_tokens, chunk, made_ms in cases:
        args |= {"num_tokens": num_tokens, "chunk_tokens": chunk}
        want = predict_prompt(t1(), RATES, **args).experts_ms + made_ms
        assert predict_prompt(quantised, RATES, **args).experts_ms == pytest.approx(want)


def test_the_link_runs_beside_products_and_attention() -> None:
    """Bound by the link it is busy throughout, but for the first attention and the last group;
    otherwise two groups of each layer wait until the host has launched them, the first one's
    products beside the second's launch."""
    args = {"num_tokens": 4096, "chunk_tokens": 4096, "resident_share": [0.0] * 3}
    slow_link = predict_prompt(model(), replace(RATES, copy_gbps=0.5), staging=RING, **args)
    between = slow_link.total_ms - slow_link.waiting_ms - slow_link.experts_ms
    last = slow_link.experts_ms / 6
    assert slow_link.total_ms == pytest.approx(slow_link.stream_ms + between / 3 + last)
    fast_link = predict_prompt(model(), replace(RATES, copy_gbps=5000.0), staging=RING, **args)
    assert last < GROUP_US / 1e3
    assert fast_link.waiting_ms == pytest.approx(3 * (2 * GROUP_US / 1e3 - last))


def test_small_buffers_let_the_link_wait_for_attention() -> None:
    """While a layer's attention runs the link is ahead by two buffers, and then idle."""
    rates = replace(RATES, copy_gbps=1.0, attention_tflops=2.0)
    args = {"num_tokens": 4096, "chunk_tokens": 4096, "resident_share": [0.0] * 3}
    totals = [
        predict_prompt(model(), rates, staging=Staging(65, records), **args).total_ms
        for records in (1, 2, 4, 8)
    ]
    assert totals == sorted(totals, reverse=True)
    assert totals[0] > 1.1 * totals[-1]


def test_layers_with_unused_experts_wait_for_their_routing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_cost, "GROUP_US", 0.0)  # the host does not keep it
    args = {"num_tokens": 128, "chunk_tokens": 128, "resident_share": [0.0] * 3, "staging": RING}
    rates = replace(RATES, prompt_layer_us=1000.0)
    most = predict_prompt(t1(), rates, used=[15.2] * 3, **args)
    fewer = predict_prompt(t1(), rates, used=[15.1] * 3, **args)
    # The second and the third layer's copies come behind attention, not beside it.
    assert fewer.total_ms - most.total_ms == pytest.approx(most.stream_ms * 2 / 3, rel=0.02)


def test_nothing_is_below_the_speed_of_light() -> None:
    for tokens in (64, 256, 4096, 32768):
        for copy in (0.5, 55.0):
            rates = replace(RATES, copy_gbps=copy)
            args = {"num_tokens": tokens, "chunk_tokens": tokens, "staging": RING}
            cost = predict_prompt(model(), rates, resident_share=[0.5] * 3, used=[16.0] * 3, **args)
            least = least_prompt_ms(
                model(),
                rates,
                num_tokens=tokens,
                link_bytes=3 * 8 * 98_304,
                attention_ms=cost.attention_ms,
                streams=RING.streams(tokens),
            )
            assert 0 < least <= cost.total_ms


def test_text_uses_fewer_experts_than_chance() -> None:
    layer = qwen3_30b().layers[0]
    assert text_experts(layer, 1) == pytest.approx(8)
    for tokens in (4, 64, 256, 1000):
        assert 8 < text_experts(layer, tokens) < distinct_experts(layer, tokens)
    assert text_experts(layer, 4096) > 0.99 * 128


def test_operations_by_hand() -> None:
    assert expert_flops(t1().layers[0]) == 2 * 3 * 128 * 128
    full = AttentionLayer("a", 0, 8, 2, 64, 32, None)
    near = replace(full, window=4)
    mixed = replace(t1(), attention=(full, near))
    pairs = (5 + 6 + 7) + (4 + 4 + 4)  # tokens 4, 5, 6
    assert attention_flops(mixed, 4, 7) == 2 * 8 * (64 + 32) * pairs


@pytest.mark.parametrize("window", [None, 1, 3, 8, 50])
def test_pairs_of_tokens_are_counted(window: int | None) -> None:
    for num in (0, 1, 7, 8, 9, 30):
        counted = sum(min(token + 1, window or num) for token in range(num))
        assert sum_of_contexts(num, window) == counted


@dataclass(frozen=True)
class MeasuredPrompt:
    """First token of 12 layers of the Qwen3-30B-A3B shape on an H200, a quarter in slots; between
    which times the repeats lie."""

    format: str
    tokens: int
    low_ms: float
    high_ms: float
    link_bytes: float

    def predicted_ms(self, rates: Rates | None = None) -> float:
        """With the figures of the machine file, or others."""
        whole = qwen3_30b()
        attention = tuple(AttentionLayer("a", i, 32, 4, 128, 128, None) for i in range(12))
        expert = whole.layers[0].expert.in_format(USUAL[self.format])
        cut = replace(
            whole,
            layers=tuple(replace(layer, expert=expert) for layer in whole.layers[:12]),
            num_layers=12,
            attention=attention,
            resident_read_bytes=1_081_715_200,
        )
        return predict_prompt(
            cut,
            rates or h200(),
            num_tokens=self.tokens,
            chunk_tokens=CHUNKS[self.format],
            resident_share=[0.25] * 12,
            staging=Staging(65, BUFFERS[self.format]),
            together=True,
            used=[self.link_bytes / 0.75 / 12 / expert.record_bytes] * 12,
        ).total_ms

    def is_predicted(self, rates: Rates | None = None) -> bool:
        """Within a tenth of what one of the repeats took."""
        least, most = self.low_ms * (1 - WITHIN), self.high_ms * (1 + WITHIN)
        return least <= self.predicted_ms(rates) <= most


def h200() -> Rates:
    return MachineDescription.load("h200").rates(record_bytes=9_437_184)


def measured_prompts() -> list[MeasuredPrompt]:
    found: dict[tuple[str, int], dict[str, tuple[float, float]]] = {}
    for line in (ROOT / "benchmarks/results.jsonl").read_text().splitlines():
        row = json.loads(line)
        own = re.fullmatch(r"qwen3-30b-a3b(?: (\w+))?, 25% slots, (\d+) tokens", row["case"])
        if own and row["commit"] in MEASURED_AT and "--layers 12 " in row["command"]:
            key = own[1] or "plain", int(own[2])
            found.setdefault(key, {})[row["figure"]] = row["p20"], row["p80"]
    return [
        MeasuredPrompt(*key, *figures["first token"], figures["link bytes"][0])
        for key, figures in found.items()
    ]


@pytest.mark.parametrize(
    "prompt", measured_prompts(), ids=lambda prompt: f"{prompt.format}-{prompt.tokens}"
)
def test_measured_prompts_are_predicted(prompt: MeasuredPrompt) -> None:
    """From 64 tokens to 65,536, with one set of figures."""
    assert prompt.is_predicted(), (prompt, prompt.predicted_ms())


@pytest.mark.parametrize(
    "without", ["expert_tflops", "attention_tflops", "prompt_layer_us", "gemm_tflops"]
)
def test_each_figure_is_needed(without: str) -> None:
    """The control: with none of the term, or at another rate, a prompt is missed. Faster products
    of experts would not show within a tenth: most of them wait for the link."""
    rates = h200()
    changed = {
        "expert_tflops": {"expert_tflops": rates.expert_tflops / 4},
        "attention_tflops": {"attention_tflops": None, "attention_past_tflops": None},
        "prompt_layer_us": {"prompt_layer_us": 0.0},
        "gemm_tflops": {"gemm_tflops": None, "expert_tflops": None, "attention_tflops": None},
    }[without]
    prompts = measured_prompts()
    assert len(prompts) == 11
    assert not all(prompt.is_predicted(replace(rates, **changed)) for prompt in prompts)
