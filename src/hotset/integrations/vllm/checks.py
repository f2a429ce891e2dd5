"""Everything that can be checked of a model's experts on one rank: asked for, or at the start.

Knows where vLLM names the checkpoint and the rank, and when there are files to compare with; what
is compared is said elsewhere.

hotset's mapping of a checkpoint is built on one line of transformers, and vLLM runs with others. So
what reads files is imported where they are compared, and nothing above that.
"""

from __future__ import annotations

from vllm.config import VllmConfig
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)
from vllm.logger import init_logger

from hotset.core.errors import CheckpointError
from hotset.core.transformers_line import is_other_line, other_line
from hotset.integrations.vllm.model import ModelExperts
from hotset.integrations.vllm.verify import verify_experts

logger = init_logger("vllm.hotset.checks")  # vLLM shows what is logged below its own name


def check_verifiable(vllm_config: VllmConfig) -> None:
    """Makes sure, before a weight is read, that the checkpoint's files can be compared with.

    Raises:
        ConfigError: this environment's transformers is of another line than hotset's.
    """
    if not _has_files(vllm_config):
        return
    import transformers

    if is_other_line(transformers.__version__):
        failed = "`verify` cannot compare experts with the checkpoint's files"
        raise other_line(transformers.__version__, failed=failed)


def all_that_is_wrong(model: ModelExperts, vllm_config: VllmConfig) -> list[str]:
    """One sentence for everything; see `verify_experts` and `audit_files`. No step may run.

    Weights that vLLM made up are compared with nothing, which is logged; slots, addresses and
    placements are.

    Raises:
        ConfigError: see `check_verifiable`.
        CheckpointError: the files are missing, damaged or not understood.
    """
    check_verifiable(vllm_config)
    wrong = verify_experts(model)
    if _has_files(vllm_config):
        return [*wrong, *_wrong_records(model, vllm_config)]
    logger.warning(
        "hotset: `--load-format dummy` reads no files, so records were compared with none"
    )
    return wrong


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
    records = "record, " if _has_files(vllm_config) else ""
    logger.info("hotset: every %sslot and placement is verified", records)


def _has_files(vllm_config: VllmConfig) -> bool:
    return bool(vllm_config.load_config.load_format != "dummy")


def _wrong_records(model: ModelExperts, vllm_config: VllmConfig) -> list[str]:
    from hotset.integrations.vllm.audit import audit_files
    from hotset.runtime.weights import CheckpointFiles

    named = vllm_config.model_config
    dtype = model.layers[0].expert.dtype
    checkpoint = CheckpointFiles(named.model, dtype=dtype, revision=named.revision)
    rank, num_ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
    return list(audit_files(model, checkpoint, rank=rank, num_ranks=num_ranks))
