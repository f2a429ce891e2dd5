"""The library's weight converters, run on one expert, or on shapes alone.

Knows how transformers' conversion operations are called and which of them only stack rows.
Knows nothing of files or records.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

from hotset.checkpoint.params import ExpertParam


@dataclass(frozen=True)
class _OneExpert:
    """Stands for the model where an operation asks for the shape of what it makes."""

    shape: tuple[int, ...]

    def get_parameter(self, _: str) -> torch.Tensor:
        return torch.empty(self.shape, device="meta")


def stacks_rows(converter: WeightConverter) -> bool:
    """Whether a converter puts its sources below each other, in their order, and nothing more.

    Then a piece can be read straight into its rows of the record.
    """
    merge, *rest = converter.operations
    return (
        isinstance(merge, MergeModulelist)
        and merge.dim == 0
        and all(
            isinstance(op, Concatenate) and op.dim == 1 and op.num_shards_attribute is None
            for op in rest
        )
        and len(rest) <= 1
    )


def convert_expert(
    converter: WeightConverter, sources: Mapping[str, torch.Tensor], param: ExpertParam
) -> torch.Tensor:
    """One expert's slice of a fused parameter, by the library's own operations.

    Args:
        converter: merges or rearranges the sources; it must treat experts independently.
        sources: this expert's tensor by source pattern; of a tensor fused over experts the slice
            `[e : e + 1]`.
        param: what is made.

    Returns:
        [1, ...]: shaped like one expert of `param` when the checkpoint is sound.

    Raises:
        RuntimeError, ValueError: shapes that do not go together.
    """
    shape = (1, *param.shape[1:])
    made = run(converter, {k: [v] for k, v in sources.items()}, _OneExpert(shape), param.full_name)
    (value,) = made.values()
    return value


def run(
    converter: WeightConverter,
    sources: dict[str, list[torch.Tensor]],
    model: PreTrainedModel | _OneExpert,
    target: str,
) -> dict[str, torch.Tensor]:
    """Applies a converter's operations in turn; target pattern -> tensor.

    Args:
        sources: tensors by source pattern, several where the checkpoint has a list of modules.
        model: what operations may ask for a parameter's shape or the config.
        target: full name of the first thing that is made.
    """
    values: Any = dict(sources)
    for operation in converter.operations:
        values = operation.convert(
            values,
            source_patterns=converter.source_patterns,
            target_patterns=converter.target_patterns,
            full_layer_name=target,
            model=model,
            config=getattr(model, "config", None),
            missing_keys=None,
        )
    return {name: v[0] if isinstance(v, list) else v for name, v in values.items()}
