"""What a job changes before vLLM starts a model, by the job's word for it; for one process only."""

from __future__ import annotations

import sys
from collections.abc import Callable

OLD = "5.17.0"


def old_transformers() -> None:
    """transformers as an older line has it: another version, and no `apply_renamings`."""
    import transformers
    from transformers import core_model_loading, modeling_utils

    assert modeling_utils, "what is left out is imported by then where the library needs it itself"
    transformers.__version__ = OLD
    del core_model_loading.apply_renamings


def one_wrong_bit() -> None:
    """vLLM's loader writes one bit of the first expert of each layer otherwise than the files."""
    from hotset.integrations.vllm.model import ModelExperts

    stock_loaded = ModelExperts.loaded

    def loaded(self: ModelExperts, index: int) -> bool:
        self.banks[index][0] ^= 1
        return stock_loaded(self, index)

    ModelExperts.loaded = loaded  # type: ignore[method-assign]


def broken_plugin() -> None:
    """A module of the plugin's cannot be imported."""
    sys.modules["hotset.integrations.vllm.layer"] = None  # type: ignore[assignment]


CHANGES: dict[str, Callable[[], None]] = {
    "old transformers": old_transformers,
    "one wrong bit": one_wrong_bit,
    "broken plugin": broken_plugin,
}
