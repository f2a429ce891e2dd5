"""What of vLLM hotset does not work with, refused by its name: options at the start.

Knows vLLM's configuration objects. Anything that is not refused here is either supported or does
not touch the experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm.config import ParallelConfig, VllmConfig
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig

from hotset.core.errors import ConfigError
from hotset.integrations.vllm.config import KEY

_PLATFORMS = ("cpu", "cuda")
# Of weights as a vLLM without hotset has laid them out.
_STATE_FORMATS = ("ipc_cache", "runai_streamer_sharded", "sharded_state", "tensorizer")


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
    """Option and reason."""
    yield from _unsupported_parallel(vllm_config.parallel_config)
    yield from _unsupported_memory(vllm_config)
    yield from _unsupported_weights(vllm_config)
    if vllm_config.speculative_config is not None:
        yield "--speculative-config", "layers of a second model run between the first one's"
    backend = vllm_config.kernel_config.moe_backend
    if backend != "auto":
        yield f"--moe-backend {backend}", "the experts' kernels are hotset's"


def _unsupported_parallel(parallel: ParallelConfig) -> Iterator[tuple[str, str]]:
    for option, number in (
        ("--data-parallel-size", parallel.data_parallel_size),
        ("--pipeline-parallel-size", parallel.pipeline_parallel_size),
        ("--decode-context-parallel-size", parallel.decode_context_parallel_size),
        ("--prefill-context-parallel-size", parallel.prefill_context_parallel_size),
    ):
        if number > 1:
            yield option, "a step must run all layers, on the tokens of all ranks"
    # Before expert parallelism, which both of these need.
    if parallel.enable_elastic_ep:
        yield "--enable-elastic-ep", "each rank holds a part of every expert"
    if parallel.enable_eplb:
        yield "--enable-eplb", "its replicas would be records that change"
    if parallel.enable_expert_parallel:
        yield "--enable-expert-parallel", "each rank holds a part of every expert"
    if parallel.enable_dbo:
        yield "--enable-dbo", "two half steps would run at once"
    if parallel.ubatch_size > 1:
        yield "--ubatch-size", "parts of a step would run at once"


def _unsupported_memory(vllm_config: VllmConfig) -> Iterator[tuple[str, str]]:
    offload = vllm_config.offload_config
    if offload.uva.cpu_offload_gb > 0:
        yield "--cpu-offload-gb", "experts are in host memory already"
    if offload.prefetch.offload_group_size > 0:
        yield "--offload-group-size", "experts are in host memory already"
    if vllm_config.model_config.enable_sleep_mode:
        yield "--enable-sleep-mode", "page-locked records cannot be put to sleep"


def _unsupported_weights(vllm_config: VllmConfig) -> Iterator[tuple[str, str]]:
    if vllm_config.lora_config is not None:
        yield "--enable-lora", "records hold no adapters"
    if vllm_config.quant_config is not None:
        name = vllm_config.quant_config.get_name()
        yield f"--quantization {name}", "records are read from unquantised weights"
    if vllm_config.load_config.load_format in _STATE_FORMATS:
        name = vllm_config.load_config.load_format
        yield f"--load-format {name}", "it holds vLLM's own layers of experts, not a checkpoint"
    if vllm_config.weight_transfer_config is not None:
        yield "--weight-transfer-config", "records are written once"


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


def refuse_reloading() -> None:
    """From now on this process's worker refuses to read its weights again, if hotset has them.

    vLLM would leave new weights of experts out without a word: they have no parameters any more.
    """
    from vllm.v1.worker.gpu_worker import Worker

    stock_reload = Worker.reload_weights

    def reload_weights(self: Any, *args: Any, **kwargs: Any) -> Any:
        if KEY in self.vllm_config.compilation_config.static_forward_context:
            raise ConfigError(
                "`reload_weights` does not work with hotset: records are written once",
                hint="start vLLM again, with the new weights",
            )
        return stock_reload(self, *args, **kwargs)

    Worker.reload_weights = reload_weights
