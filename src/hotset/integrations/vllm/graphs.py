"""vLLM's piecewise graphs around layers of experts: where they are cut, what is read over a cut.

The host must learn what was routed before an expert is fetched, so no graph may hold a layer of
experts. Knows vLLM's compilation options and its runner of a layer; nothing of slots or stores.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import CUDAGraphMode, VllmConfig, get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

from hotset.core.errors import ConfigError
from hotset.integrations.vllm.config import PluginConfig
from hotset.integrations.vllm.held import HeldOutputs

# vLLM's own ops around a layer of experts: where the graphs of a piecewise capture are cut.
MOE_OPS = ("vllm::moe_forward", "vllm::moe_forward_shared")


def leave_graphs(vllm_config: VllmConfig) -> None:
    """Cuts the pieces of a captured forward at the layers of experts.

    Raises:
        ConfigError: whole forwards are to be captured.
    """
    compilation = vllm_config.compilation_config
    mode = compilation.cudagraph_mode
    if mode is None or mode == CUDAGraphMode.NONE:
        return
    if mode != CUDAGraphMode.PIECEWISE:
        raise ConfigError(
            f"`cudagraph_mode` is {mode.name}, and hotset's experts cannot be part of a graph",
            hint='add `--compilation-config \'{"cudagraph_mode": "PIECEWISE"}\'`',
        )
    ops = compilation.splitting_ops or []
    compilation.splitting_ops = [*ops, *(op for op in MOE_OPS if op not in ops)]


class HotsetRunner(MoERunner):
    """vLLM's runner of a layer, whose outputs the next captured piece finds where it looks."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        vllm_config = get_current_vllm_config()
        is_ours = PluginConfig.of(vllm_config.additional_config) is not None
        self._outputs = HeldOutputs(_max_captured(vllm_config) if is_ours else 0)

    def _forward_impl(self, *args: Any, **kwargs: Any) -> Any:
        """The routed experts' output, [T, H], behind the shared experts' where there are any."""
        outputs = super()._forward_impl(*args, **kwargs)
        if not self._outputs.max_tokens:  # first, as a compiler looks into this on a CPU
            return outputs
        is_replayed = get_forward_context().cudagraph_runtime_mode == CUDAGraphMode.PIECEWISE
        if isinstance(outputs, torch.Tensor):
            return self._outputs.hold([outputs], is_read_by_graph=is_replayed)[0]
        return tuple(self._outputs.hold(outputs, is_read_by_graph=is_replayed))


def _max_captured(vllm_config: VllmConfig) -> int:
    """Tokens of the largest piecewise graph."""
    compilation = vllm_config.compilation_config
    if compilation.cudagraph_mode != CUDAGraphMode.PIECEWISE:
        return 0
    return compilation.max_cudagraph_capture_size or 0
