"""What of vLLM hotset does not work with, refused at the start by the option's name.

Knows vLLM's configuration objects. Anything that is not refused here is either supported or does
not touch the experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm.config import VllmConfig
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig

from hotset.core.errors import ConfigError

_PLATFORMS = ("cpu", "cuda")


def check_engine(vllm_config: VllmConfig) -> None:
    """Refuses what cannot work, before a weight is read.

    Raises:
        ConfigError: names the option.
    """
    for option, reason in _unsupported(vllm_config):
        raise ConfigError(
            f"`{option}` does not work with hotset: {reason}",
            hint=f"leave `{option}` out, or hotset out of `--additional-config`",
        )
    device = vllm_config.device_config.device_type
    if device not in _PLATFORMS:
        raise ConfigError(f"hotset runs on CUDA and on a CPU, not on `{device}`")


def _unsupported(vllm_config: VllmConfig) -> Iterator[tuple[str, str]]:
    parallel = vllm_config.parallel_config
    for option, number in (
        ("--data-parallel-size", parallel.data_parallel_size),
        ("--pipeline-parallel-size", parallel.pipeline_parallel_size),
        ("--decode-context-parallel-size", parallel.decode_context_parallel_size),
        ("--prefill-context-parallel-size", parallel.prefill_context_parallel_size),
    ):
        if number > 1:
            yield option, "a step must run all layers, on the tokens of all ranks"
    if parallel.enable_expert_parallel:
        yield "--enable-expert-parallel", "each rank holds a part of every expert"
    if parallel.enable_eplb:
        yield "--enable-eplb", "its replicas would be records that change"
    if parallel.enable_dbo:
        yield "--enable-dbo", "two half steps would run at once"
    if vllm_config.speculative_config is not None:
        yield "--speculative-config", "layers of a second model run between the first one's"
    if vllm_config.lora_config is not None:
        yield "--enable-lora", "records hold no adapters"
    if vllm_config.quant_config is not None:
        name = vllm_config.quant_config.get_name()
        yield f"--quantization {name}", "records are read from unquantised weights"
    if _cpu_offload_gb(vllm_config) > 0:
        yield "--cpu-offload-gb", "experts are in host memory already"
    if vllm_config.model_config.enable_sleep_mode:
        yield "--enable-sleep-mode", "page-locked records cannot be put to sleep"


def _cpu_offload_gb(vllm_config: VllmConfig) -> float:
    """It has moved between configuration objects from version to version."""
    offload: Any = getattr(vllm_config, "offload_config", None)
    uva: Any = getattr(offload, "uva", None)
    old: Any = getattr(vllm_config.cache_config, "cpu_offload_gb", 0)
    return float(getattr(uva, "cpu_offload_gb", 0) or old or 0)


def check_layer(name: str, moe: FusedMoEConfig, layer: Any) -> None:
    """Refuses a layer of experts that hotset would compute otherwise.

    Raises:
        ConfigError: names the layer, and what of it.
    """
    reasons = {
        "routing weights on its input": layer.apply_router_weight_on_input,
        "a padded hidden size": moe.hidden_dim != moe.hidden_dim_unpadded,
        "shared experts fused with the routed ones": (
            getattr(layer.expert_map_manager, "num_fused_shared_experts", 0) > 0
        ),
        "experts on other ranks": moe.num_local_experts != moe.num_experts,
        "sequence parallelism": moe.is_sequence_parallel,
    }
    for reason, found in reasons.items():
        if found:
            raise ConfigError(
                f"layer `{name}` has {reason}, which hotset does not support inside vLLM",
                hint="run this model without hotset in `--additional-config`",
            )
