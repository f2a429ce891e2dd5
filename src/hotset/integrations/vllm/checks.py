"""Everything that can be checked of a model's experts on one rank: asked for, or at the start.

Knows where vLLM names the checkpoint and the rank; what is compared is said elsewhere.
"""

from __future__ import annotations

from vllm.config import VllmConfig
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)

from hotset.core.errors import CheckpointError
from hotset.integrations.vllm.audit import audit_files
from hotset.integrations.vllm.model import ModelExperts
from hotset.integrations.vllm.verify import verify_experts
from hotset.runtime.weights import CheckpointFiles


def all_that_is_wrong(model: ModelExperts, vllm_config: VllmConfig) -> list[str]:
    """One sentence for everything; see `verify_experts` and `audit_files`. No step may run."""
    named = vllm_config.model_config
    dtype = model.layers[0].expert.dtype
    checkpoint = CheckpointFiles(named.model, dtype=dtype, revision=named.revision)
    rank, num_ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
    records = audit_files(model, checkpoint, rank=rank, num_ranks=num_ranks)
    return [*verify_experts(model), *records]


def require_verified(model: ModelExperts, vllm_config: VllmConfig) -> None:
    """Ends a start whose experts are not what they should be.

    Raises:
        CheckpointError: says the first of what is wrong, and how much there is.
    """
    wrong = all_that_is_wrong(model, vllm_config)
    if wrong:
        raise CheckpointError(
            f"the experts are wrong in {len(wrong)} places; the first: {wrong[0]}",
            hint='leave `"verify"` out to run them all the same',
        )
