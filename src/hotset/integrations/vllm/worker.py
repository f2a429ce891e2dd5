"""What `--worker-extension-cls` adds to vLLM's workers: asking for hotset's counts, and verifying.

`LLM.collective_rpc("hotset_traffic")` gives one answer for each rank. Knows where a worker keeps
its model; what is counted and compared is not its business.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from vllm.config import VllmConfig

from hotset.core.errors import ConfigError
from hotset.integrations.vllm.checks import all_that_is_wrong
from hotset.integrations.vllm.config import KEY
from hotset.integrations.vllm.model import ModelExperts


class HotsetWorker:
    """Mixed into vLLM's worker class, so every name begins with `hotset`."""

    def hotset_traffic(self) -> dict[str, int]:
        """Steps, experts used, hits, link bytes and fills since the start."""
        model = experts_of(self)
        model.end_step()
        return asdict(model.traffic)

    def hotset_summary(self) -> str:
        """What lies where on this rank, in one line."""
        return experts_of(self).summary()

    def hotset_verify(self) -> list[str]:
        """One sentence for everything that is wrong on this rank; see `all_that_is_wrong`."""
        vllm_config: VllmConfig = self.vllm_config  # type: ignore[attr-defined]
        return all_that_is_wrong(experts_of(self), vllm_config)


def experts_of(worker: Any) -> ModelExperts:
    """The experts of a worker's model.

    Raises:
        ConfigError: it runs without hotset.
    """
    context: dict[str, Any] = worker.vllm_config.compilation_config.static_forward_context
    if KEY not in context:
        raise ConfigError(
            "this model runs without hotset",
            hint='start vLLM with `--additional-config \'{"hotset": {"vram": "8GiB"}}\'`',
        )
    model: ModelExperts = context[KEY]
    return model
