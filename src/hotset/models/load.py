"""Loads what stays in the module tree, through transformers' own loader, onto one device.

Experts are not read here: they are not in the tree. What the library reports as missing or
mismatched is an error; what is in the files and not in the tree was accounted for before, key by
key, by checkpoint/mapping.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any, cast

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import logging as hf_logging

from hotset.checkpoint.mapping import KeyMap
from hotset.checkpoint.reader import ShardReader
from hotset.checkpoint.resident import resident_state_dict
from hotset.checkpoint.validate import check_materialised
from hotset.core.errors import CheckpointError, explain_out_of_memory
from hotset.core.units import format_bytes
from hotset.models.linear_kernels import keep_to_plain_torch
from hotset.models.seam import IMPLEMENTATION, class_config, hotset_class, model_class


def load_resident(
    config: PretrainedConfig, keys: KeyMap, *, dtype: str, device: torch.device
) -> PreTrainedModel:
    """The stock model without its experts, resident weights loaded, ready for `bind_experts`.

    Args:
        config: of the checkpoint, as `read_config` gives it.
        keys: the checkpoint, classified and checked.
        dtype: compute dtype.
        device: where all resident weights go.

    Raises:
        CheckpointError: a resident weight is missing, mismatched or was left without data.
        CapacityError: the device has no room for them.
    """
    stock = model_class(config)
    cls = hotset_class(stock)
    room = explain_out_of_memory(
        f"the resident weights ({format_bytes(keys.core_bytes)} in the files)",
        hint="free memory, or see `hotset plan MODEL` for what fits",
    )
    with room, quiet_transformers(), ShardReader() as reader:
        loaded: Any = cls.from_pretrained(
            None,
            config=class_config(stock, config),
            state_dict=resident_state_dict(keys, reader, dtype=getattr(torch, dtype)),
            dtype=getattr(torch, dtype),
            experts_implementation=IMPLEMENTATION,
            # Straight to the device; without it the library would fill host memory first.
            device_map={"": device} if device.type == "cuda" else None,
            output_loading_info=True,
        )
    model, info = cast(tuple[PreTrainedModel, dict[str, Any]], loaded)
    _check(info)
    check_materialised(model)
    model.eval()
    if device.type != "cuda":
        keep_to_plain_torch(model)
    return model


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keeps the library's load report and progress bars off stderr within the block.

    The report speaks of experts as unexpected, which they are not; ours says what was loaded.
    """
    before, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity(logging.ERROR)
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(before)
        if bars:
            hf_logging.enable_progress_bar()


def _check(info: dict[str, Any]) -> None:
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        found = info.get(kind)
        if found:
            names = [str(item) for item in found]
            shown = ", ".join(f"`{name}`" for name in sorted(names)[:5])
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            raise CheckpointError(
                f"transformers loaded the checkpoint with {kind.replace('_', ' ')}: {shown}{more}",
                hint="is it complete, and does `config.json` belong to it?",
            )
