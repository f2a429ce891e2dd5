"""Whether a rank's records are what the checkpoint's files hold: its part of every expert.

The files are read by hotset's own mapping of the checkpoint, and the parts are taken here: nothing
of vLLM's loaders, which wrote the records, is asked. Knows ranks and records; nothing of vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hotset.checkpoint.audit import audit_records
from hotset.integrations.vllm.model import ModelExperts
from hotset.runtime.weights import CheckpointFiles


def audit_files(
    model: ModelExperts, checkpoint: CheckpointFiles, *, rank: int = 0, num_ranks: int = 1
) -> Iterator[str]:
    """One sentence for every field of a record that differs from the files.

    Args:
        model: loaded.
        checkpoint: that it was loaded from.
        rank: of `num_ranks`, which each hold a part of every expert.
    """
    wanted = [(layer.num_experts, layer.expert.hidden) for layer in checkpoint.geometry.layers]
    found = [(layer.num_experts, layer.expert.hidden) for layer in model.layers]
    if wanted != found:
        yield (
            f"{len(found)} layers of experts run, and the checkpoint's {len(wanted)} differ from "
            "them in their number, their experts or their width"
        )
        return

    def fields(layer: int, expert: int) -> dict[str, torch.Tensor]:
        return {name: field.cpu() for name, field in model.store.fields(layer, expert).items()}

    # Experts of one checkpoint have gates in all layers or in none.
    halves = 2 if model.layers[0].expert.gate.has_gate else 1

    def part(field: str, whole: torch.Tensor) -> torch.Tensor:
        return _of_rank(field, whole, halves=halves, rank=rank, num_ranks=num_ranks)

    experts = [layer.expert for layer in model.layers]
    yield from audit_records(checkpoint.keys, fields, experts, part=part)


def _of_rank(
    field: str, whole: torch.Tensor, *, halves: int, rank: int, num_ranks: int
) -> torch.Tensor:
    """Rows of the first projection, columns of the second, whose bias is added on one rank."""
    if num_ranks == 1:
        return whole
    if field == "down_bias":
        return whole if rank == 0 else torch.zeros_like(whole)
    if field == "down":
        return whole.chunk(num_ranks, dim=1)[rank].contiguous()
    rows: torch.Tensor = whole.unflatten(0, (halves, -1)).chunk(num_ranks, dim=1)[rank]
    return rows.flatten(0, 1).contiguous()
