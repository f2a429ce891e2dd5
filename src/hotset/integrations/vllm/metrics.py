"""A worker's counts of experts as Prometheus reads them, under the names `hotset serve` has.

vLLM counts requests and tokens at its own `/metrics`; workers are other processes, so each rank
answers here on a port of its own, on the loopback address. Reads counts; keeps none.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from hotset.core.errors import ConfigError
from hotset.integrations.vllm.model import ModelExperts

HOST = "127.0.0.1"


class ExpertCounts(Collector):
    """Reads a model's counts when it is asked; the newest step is counted when the next begins.

    Args:
        model: loaded.
        rank: the label of every metric.
    """

    def __init__(self, model: ModelExperts, rank: int) -> None:
        self._model, self._rank = model, str(rank)

    def collect(self) -> Iterator[Metric]:
        traffic = self._model.traffic
        for name, text, value in (
            ("hotset_steps", "Forward passes.", traffic.steps),
            ("hotset_expert_hits", "Used experts with a slot.", traffic.hits),
            ("hotset_expert_misses", "Used experts without.", traffic.used - traffic.hits),
            ("hotset_expert_fills", "Slots filled.", traffic.fills),
            ("hotset_link_bytes", "Of experts over the link.", traffic.link_bytes),
        ):
            counter = CounterMetricFamily(name, text, labels=["rank"])
            counter.add_metric([self._rank], value)
            yield counter
        slots = GaugeMetricFamily("hotset_slots", "Experts that have a slot.", labels=["rank"])
        slots.add_metric([self._rank], int(self._model.store.placement.resident.sum()))
        yield slots


def serve_counts(model: ModelExperts, *, port: int, rank: int) -> None:
    """Answers Prometheus from a thread, until the process ends.

    Raises:
        ConfigError: the port cannot be had.
    """
    registry = CollectorRegistry()
    registry.register(ExpertCounts(model, rank))
    try:
        start_http_server(port + rank, addr=HOST, registry=registry)
    except OSError as error:
        raise ConfigError(
            f"port {port + rank} for rank {rank}'s metrics cannot be had: {error.strerror}",
            hint='set another `"metrics_port"`; rank r takes the r-th port behind it',
            option="metrics_port",
        ) from error
