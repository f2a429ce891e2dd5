"""Piecewise CUDA graphs simulated on a CPU, where vLLM captures none.

vLLM's own splitting, dispatch and padding run as on a GPU. Only the graph of a piece is played: a
replay runs the piece on the tensors of its capture, whatever it is called with, and leaves its
outputs in the memory of the capture. So what is read at a stale address is read here too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

SIZES = [1, 2, 4, 8, 16, 32]
# Of all pieces in this process: a run has one model.
counts = {"captures": 0, "replays": 0, "moved": 0}


def install() -> None:
    """Makes vLLM compile, cut and capture on a CPU as on a GPU; before a model is built."""
    from vllm.config import CompilationMode, CUDAGraphMode
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
    from vllm.platforms.cpu import CpuPlatform

    stock_check = CpuPlatform.check_and_update_config

    def check(cls: type, vllm_config: Any) -> None:
        stock_check(vllm_config)
        compilation = vllm_config.compilation_config
        compilation.mode, compilation.backend = CompilationMode.VLLM_COMPILE, "eager"
        compilation.cudagraph_mode = CUDAGraphMode.PIECEWISE
        compilation.cudagraph_capture_sizes = list(SIZES)
        compilation.max_cudagraph_capture_size = SIZES[-1]
        compilation.compile_sizes = []

    def select_forward(runner: Any) -> Callable[..., Any]:
        ops = torch.ops.vllm
        return ops.moe_forward_shared if runner._shared_experts else ops.moe_forward

    CpuPlatform.check_and_update_config = classmethod(check)
    CpuPlatform.get_static_graph_wrapper_cls = classmethod(
        lambda cls: f"{__name__}.{SimulatedGraph.__name__}"
    )
    MoERunner._select_forward = select_forward


def hold_nothing() -> None:
    """A control: outputs of experts stay wherever they are."""
    from hotset.integrations.vllm.held import HeldOutputs

    HeldOutputs.hold = lambda self, outputs, is_read_by_graph: list(outputs)


def fetch_for_padding() -> None:
    """A control: rows of padding have the experts that they are routed to."""
    os.environ["VLLM_MOE_SKIP_PADDING"] = "0"
    from hotset.integrations.vllm import padding

    padding._num_real_tokens = lambda context: None


# A job's word for what is to go wrong.
BREAK = {"broken": hold_nothing, "padding fetched": fetch_for_padding}


class SimulatedGraph:
    """Has the interface of vLLM's `CUDAGraphWrapper`."""

    def __init__(
        self, runnable: Any, vllm_config: Any, runtime_mode: Any, cudagraph_options: Any = None
    ) -> None:
        self._runnable, self._mode = runnable, runtime_mode
        self._captured: dict[Any, tuple[Sequence[Any], Any]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runnable, name)

    def __call__(self, *inputs: Any) -> Any:
        from vllm.forward_context import get_forward_context

        context = get_forward_context()
        if context.cudagraph_runtime_mode != self._mode:
            return self._runnable(*inputs)
        batch = context.batch_descriptor
        if batch not in self._captured:
            self._captured[batch] = inputs, self._runnable(*inputs)
            counts["captures"] += 1
        else:
            self._replay(*self._captured[batch], inputs)
        return self._captured[batch][1]

    def _replay(self, captured: Sequence[Any], outputs: Any, inputs: Sequence[Any]) -> None:
        counts["replays"] += 1
        counts["moved"] += addresses(inputs) != addresses(captured)
        for kept, new in zip(tensors(outputs), tensors(self._runnable(*captured)), strict=True):
            kept.copy_(new)


def tensors(values: Any) -> list[torch.Tensor]:
    several = values if isinstance(values, tuple | list) else [values]
    return [one for one in several if isinstance(one, torch.Tensor)]


def addresses(values: Any) -> list[int]:
    return [one.data_ptr() for one in tensors(values)]
