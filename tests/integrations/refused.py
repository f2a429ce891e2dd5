"""What `check_engine` says of each of these options of vLLM's: one JSON line, option to sentence.

Run by the tests as a process. A real configuration, in which one option at a time is set behind
vLLM's own checks, which refuse most of these on a CPU, or with one process.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

QUANTISED = SimpleNamespace(get_name=lambda: "fp8")
ANY = SimpleNamespace()
# (option, where the configuration has it, a value)
OPTIONS: list[tuple[str, str, Any]] = [
    ("--data-parallel-size", "parallel_config.data_parallel_size", 2),
    ("--pipeline-parallel-size", "parallel_config.pipeline_parallel_size", 2),
    ("--decode-context-parallel-size", "parallel_config.decode_context_parallel_size", 2),
    ("--prefill-context-parallel-size", "parallel_config.prefill_context_parallel_size", 2),
    ("--enable-expert-parallel", "parallel_config.enable_expert_parallel", True),
    ("--enable-eplb", "parallel_config.enable_eplb", True),
    ("--enable-elastic-ep", "parallel_config.enable_elastic_ep", True),
    ("--enable-dbo", "parallel_config.enable_dbo", True),
    ("--ubatch-size", "parallel_config.ubatch_size", 2),
    ("--speculative-config", "speculative_config", ANY),
    ("--moe-backend triton", "kernel_config.moe_backend", "triton"),
    ("--enable-lora", "lora_config", ANY),
    ("--quantization fp8", "quant_config", QUANTISED),
    ("--load-format sharded_state", "load_config.load_format", "sharded_state"),
    ("--load-format tensorizer", "load_config.load_format", "tensorizer"),
    ("--weight-transfer-config", "weight_transfer_config", ANY),
    ("--cpu-offload-gb", "offload_config.uva.cpu_offload_gb", 1.0),
    ("--offload-group-size", "offload_config.prefetch.offload_group_size", 2),
    ("--enable-sleep-mode", "model_config.enable_sleep_mode", True),
]


def main(model: str) -> None:
    from vllm.engine.arg_utils import EngineArgs

    from hotset.core.errors import ConfigError
    from hotset.integrations.vllm.refusals import check_engine

    config = EngineArgs(model=model, max_model_len=256).create_engine_config()
    check_engine(config)  # the control: as it is, nothing is refused
    said = {}
    for option, path, value in OPTIONS:
        *owners, name = path.split(".")
        owner = config
        for part in owners:
            owner = getattr(owner, part)
        before = getattr(owner, name)
        object.__setattr__(owner, name, value)
        try:
            check_engine(config)
        except ConfigError as error:
            said[option] = str(error)
        object.__setattr__(owner, name, before)
    print("\n" + json.dumps({"refused": said}))


if __name__ == "__main__":
    main(sys.argv[1])
