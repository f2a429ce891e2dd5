"""What decoding over our own KV pool needs, made once: pool, attention kernels, captured step.

Also the choice of the policy by which slots change hands while decoding.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from transformers import PreTrainedModel

from hotset.core.config import EngineConfig
from hotset.core.geometry import ModelGeometry
from hotset.core.plan import MemoryPlan
from hotset.core.policy import HalfLife, NoPolicy, Policy, make_policy
from hotset.kernels.attention import AttentionKernels
from hotset.models.compiled import CompiledLayers
from hotset.models.seam import ExpertsFunction
from hotset.runtime.decode import DecodeOptions, DecodeStep
from hotset.runtime.kv_pool import KVPool
from hotset.runtime.sampling import Sampler
from hotset.runtime.sequences import PoolSequence
from hotset.runtime.steps import Steps

logger = logging.getLogger(__name__)


def choose_policy(geometry: ModelGeometry, plan: MemoryPlan, config: EngineConfig) -> Policy:
    """The policy that a config names, or the one that fits the plan.

    With no slots, or one for every expert, none can change hands: auto is then `none`.

    Raises:
        ConfigError: an unknown policy, or one that needs a profile.
    """
    movable = 0 < plan.num_slots < geometry.num_records
    name = config.policy or (HalfLife.name if movable or config.half_life else NoPolicy.name)
    policy = make_policy(
        name,
        num_experts=[layer.num_experts for layer in geometry.layers],
        half_life=config.half_life,
    )
    policy.check_ready()  # now, and not when the weights are loaded
    return policy


class Decoding:
    """Pool and step of one row.

    Args:
        model: with `runners` bound.
        runners: what computes each layer's experts.
        steps: keeps the books.
        sampler: draws the tokens, in the step and outside it.
        geometry: of the model; its attention runs over a pool.
        plan, config: what to allocate, and which parts to leave out.
        device: of all of it.
        triton: use the Triton attention kernels, not the reference.
    """

    def __init__(  # noqa: PLR0913 - the parts of an engine, joined once
        self,
        model: PreTrainedModel,
        runners: Sequence[ExpertsFunction],
        *,
        steps: Steps,
        sampler: Sampler,
        geometry: ModelGeometry,
        plan: MemoryPlan,
        config: EngineConfig,
        device: torch.device,
        triton: bool,
    ) -> None:
        self._model, self._steps = model, steps
        self._attention = AttentionKernels("triton" if triton else "reference")
        self.pool = KVPool(
            geometry.attention,
            num_rows=1,
            context_tokens=plan.context_tokens,
            dtype=getattr(torch, geometry.dtype),
            device=device,
            poison=config.poison,
        )
        on_gpu = device.type == "cuda"
        fused = on_gpu and triton and config.compiled
        options = DecodeOptions(
            graph=on_gpu and triton and config.graphs,
            layers=CompiledLayers(model) if fused else None,
        )
        if on_gpu and not options.graph:
            logger.warning("the decode step is not captured: as set by `--no-graphs` or kernels")
        self.options = options
        self._make = partial(
            DecodeStep,
            model,
            geometry.layers,
            runners,
            pool=self.pool,
            size=1,
            sample=sampler,
            attention=self._attention,
            log=steps.log,
            fills=steps.fills,
        )
        self.step = self._make(options=options)

    @contextmanager
    def uncaptured(self) -> Iterator[None]:
        """Within the block the same step runs launch by launch, for comparison."""
        captured = self.step
        self.step = self._make(options=replace(self.options, graph=False))
        try:
            yield
        finally:
            self.step = captured

    def sequence(self) -> PoolSequence:
        """A new sequence.

        Raises:
            RequestError: all rows are in use.
        """
        return PoolSequence(
            self._model,
            self._steps,
            pool=self.pool,
            kernels=self._attention,
            decode=self.step,
        )
