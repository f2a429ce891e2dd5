"""Counters and histograms of a server, as Prometheus reads them.

What means the same has the name, labels and buckets that vLLM gives it (`vllm/v1/metrics/`, 0.11),
so that its dashboards work; what only hotset has begins with `hotset_`. Observes events and reads
counts when it is asked; keeps no clock and no prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from hotset.core.request import FinishReason
from hotset.runtime.requests import Counts, Event
from hotset.server.engine_loop import Ticket
from hotset.server.state import Figures

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKEN_SECONDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
_REQUEST_SECONDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0),
    *(240.0, 480.0, 960.0, 1920.0, 7680.0),
)
# What vLLM calls an end; the first two mean the same.
_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CANCELLED: "abort",
    FinishReason.FAILED: "error",
}


class Metrics:
    """One server's metrics, in a registry of their own.

    Args:
        model: the label `model_name` of every metric.
        context_tokens: the largest bucket of token counts.
        counts: of the scheduler, now.
        figures: of the engine, now.

    Attributes:
        num_first_tokens, first_token_seconds: answers that have begun, and how long their first
            tokens took together.
    """

    def __init__(
        self,
        model: str,
        *,
        context_tokens: int,
        counts: Callable[[], Counts],
        figures: Callable[[], Figures],
    ) -> None:
        self._registry = CollectorRegistry()
        self._model = model
        self.num_first_tokens, self.first_token_seconds = 0, 0.0
        sizes = tuple(_one_two_five(context_tokens))
        self._first = self._histogram(
            "vllm:time_to_first_token_seconds", "Time to the first token.", _FIRST_TOKEN_SECONDS
        )
        self._between = self._histogram(
            "vllm:inter_token_latency_seconds", "Time between two tokens.", _TOKEN_SECONDS
        )
        self._whole = self._histogram(
            "vllm:e2e_request_latency_seconds", "From request to its end.", _REQUEST_SECONDS
        )
        self._decode = self._histogram(
            "vllm:request_decode_time_seconds", "From first to last token.", _REQUEST_SECONDS
        )
        self._prompt = self._histogram(
            "vllm:request_prompt_tokens", "Prompt tokens of a request.", sizes
        )
        self._answer = self._histogram(
            "vllm:request_generation_tokens", "Generated tokens of a request.", sizes
        )
        self._registry.register(_Now(model, counts, figures))

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(name, text, ["model_name"], buckets=buckets, registry=self._registry)
        return histogram.labels(self._model)

    def observe(self, ticket: Ticket, event: Event, now: float) -> None:
        """Takes in one event, before the ticket does."""
        num_tokens, last_at = ticket.num_tokens, ticket.last_at
        if event.token_id is not None:
            if last_at is None:
                seconds = now - ticket.submitted_at
                self._first.observe(seconds)
                self.num_first_tokens += 1
                self.first_token_seconds += seconds
            else:
                self._between.observe(now - last_at)
            num_tokens, last_at = num_tokens + 1, now
        if event.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._whole.observe(now - ticket.submitted_at)
            first_at = now if ticket.first_at is None else ticket.first_at
            self._decode.observe((last_at or now) - first_at)
            self._prompt.observe(ticket.num_prompt_tokens)
            self._answer.observe(num_tokens)

    def text(self) -> str:
        """All of them, in Prometheus' text format."""
        return generate_latest(self._registry).decode()


class _Now(Collector):
    """Reads what others count, at the time of a scrape."""

    def __init__(
        self, model: str, counts: Callable[[], Counts], figures: Callable[[], Figures]
    ) -> None:
        self._label, self._counts, self._figures = [model], counts, figures

    def describe(self) -> list[Metric]:
        return []  # names are known at the first scrape; nothing is to be read before

    def collect(self) -> Iterator[Metric]:
        counts, figures = self._counts(), self._figures()
        yield from self._of_requests(counts)
        yield from self._of_experts(figures)
        yield from self._of_decoding(counts, figures)

    def _of_requests(self, counts: Counts) -> Iterator[Metric]:
        used = counts.num_blocks_used / counts.num_blocks if counts.num_blocks else 0.0
        yield self._gauge("vllm:num_requests_running", "Being answered.", counts.num_running)
        yield self._gauge("vllm:num_requests_waiting", "Waiting for a row.", counts.num_waiting)
        yield self._gauge("vllm:kv_cache_usage_perc", "KV cache in use; 1 is all of it.", used)
        yield self._count("vllm:prompt_tokens", "Taken in.", counts.num_prompt_tokens)
        yield self._count("vllm:generation_tokens", "Given out.", counts.num_generated_tokens)
        yield self._count(
            "vllm:prefix_cache_queries", "Prompt tokens looked up.", counts.num_prompt_tokens
        )
        yield self._count("vllm:prefix_cache_hits", "Of these reused.", counts.num_prefix_tokens)
        ended = CounterMetricFamily(
            "vllm:request_success", "Ended requests.", labels=["model_name", "finished_reason"]
        )
        for reason, word in _REASONS.items():
            ended.add_metric([*self._label, word], counts.num_finished.get(reason, 0))
        yield ended

    def _of_experts(self, figures: Figures) -> Iterator[Metric]:
        traffic = figures.traffic
        yield self._count("hotset_steps", "Forward passes.", traffic.steps)
        yield self._count("hotset_expert_hits", "Used experts with a slot.", traffic.hits)
        yield self._count(
            "hotset_expert_misses", "Used experts without.", traffic.used - traffic.hits
        )
        yield self._count("hotset_expert_fills", "Slots filled.", traffic.fills)
        yield self._count("hotset_link_bytes", "Of experts over the link.", traffic.link_bytes)
        for name, (text, value) in figures.gauges.items():
            yield self._gauge(f"hotset_{name}", text, value)

    def _of_decoding(self, counts: Counts, figures: Figures) -> Iterator[Metric]:
        """The time that decode steps took, and would have taken where rates are known."""
        taken, light = counts.decode_seconds, figures.light_seconds
        yield self._count("hotset_decode_seconds", "Of decode steps.", taken)
        if light is not None:
            text = "Of decode steps at the speed of light: bytes at the best measured rates."
            yield self._count("hotset_speed_of_light_seconds", text, light)
        if light is not None and taken > 0:
            text = "Share of the speed of light that decode steps reach."
            yield self._gauge("hotset_speed_of_light_ratio", text, light / taken)

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(name, text, labels=["model_name"])
        family.add_metric(self._label, value)
        return family

    def _count(self, name: str, text: str, value: float) -> CounterMetricFamily:
        family = CounterMetricFamily(name, text, labels=["model_name"])
        family.add_metric(self._label, value)
        return family


def _one_two_five(most: int) -> Iterator[float]:
    """1, 2, 5, 10, ... up to `most`."""
    scale = 1
    while scale <= most:
        yield from (float(step * scale) for step in (1, 2, 5) if step * scale <= most)
        scale *= 10
