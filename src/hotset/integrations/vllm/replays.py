"""A layer's launches for few tokens as one graph, for each number of tokens that comes again.

What runs between vLLM's captured pieces is launched one kernel at a time, which for one token
takes the host longer than the device. A layer of few tokens needs nothing of the host, so it can
be replayed: inputs are copied to where its graph reads them. Knows graphs and the routing log;
nothing of vLLM, slots or steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch

from hotset.runtime.routing import RoutingLog

# (x [T, H], ids [T, K], weights [T, K]) -> [T, H]; logs the ids.
Layer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
# Captures a call: its result, and what runs it again.
Capture = Callable[[Callable[[], torch.Tensor]], tuple[torch.Tensor, Callable[[], None]]]

# Calls before the capture, in which kernels are compiled.
_WARMUP_CALLS = 2


@dataclass(frozen=True)
class _Captured:
    """A layer's graph: what it reads and writes, at addresses that stay."""

    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    out_TH: torch.Tensor
    replay: Callable[[], None]


class LayerReplays:
    """The graphs of all layers of a model.

    Args:
        log: that the layers tell their routed ids. A replay tells it the same tensor each time,
            written anew with the next step: its values must have been read, or queued to be read,
            by then.
        capture: captures a call. Given in tests, where there are no graphs.
    """

    def __init__(self, log: RoutingLog, capture: Capture | None = None) -> None:
        self._log = log
        self._capture = capture or CudaCapture()
        self._calls: Counter[tuple[int, int]] = Counter()
        self._captured: dict[tuple[int, int], _Captured] = {}

    def run(
        self,
        index: int,
        layer: Layer,
        x_TH: torch.Tensor,
        ids_TK: torch.Tensor,
        weights_TK: torch.Tensor,
    ) -> torch.Tensor:
        """What `layer` gives, by its graph from the third call with as many tokens on.

        Returns:
            Of a graph: memory that the next replay of any of these graphs may write to, since one
            that was captured earlier has its workspaces where this one found them free.
        """
        key = (index, len(x_TH))
        if key not in self._captured:
            self._calls[key] += 1
            if self._calls[key] <= _WARMUP_CALLS:
                return layer(x_TH, ids_TK, weights_TK)
            self._captured[key] = self._make(layer, (x_TH, ids_TK, weights_TK))
        captured = self._captured[key]
        for held, given in zip(captured.inputs, (x_TH, ids_TK, weights_TK), strict=True):
            held.copy_(given)
        self._log.add(index, captured.inputs[1])
        captured.replay()
        return captured.out_TH

    def _make(
        self, layer: Layer, inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    ) -> _Captured:
        x_TH, ids_TK, weights_TK = (torch.empty_like(one).copy_(one) for one in inputs)
        with self._log.aside():
            out_TH, replay = self._capture(lambda: layer(x_TH, ids_TK, weights_TK))
        return _Captured((x_TH, ids_TK, weights_TK), out_TH, replay)


class CudaCapture:
    """Captures into CUDA graphs that share one pool of memory: they run one behind the other, and
    what one leaves is read before the next one runs."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: list[torch.cuda.CUDAGraph] = []

    def __call__(self, call: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
        """The call's result, whose memory no later capture uses, and its replay. Runs nothing."""
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        side = torch.cuda.Stream()
        side.wait_stream(current)
        # Not `torch.cuda.graph`, which collects garbage each time: there may be hundreds of these.
        with torch.cuda.stream(side):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = call()
            finally:
                graph.capture_end()
        current.wait_stream(side)
        self._graphs.append(graph)
        return result, graph.replay
