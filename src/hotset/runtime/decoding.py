"""What decoding over our own KV pool needs, made once: pool, attention kernels, captured step.

Also the choice of the policy by which slots change hands while decoding.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from transformers import PreTrainedModel

from hotset.core.config import EngineConfig
from hotset.core.errors import HardwareError
from hotset.core.geometry import ModelGeometry
from hotset.core.plan import MemoryPlan
from hotset.core.policy import HalfLife, NoPolicy, Policy, make_policy
from hotset.core.profile import Profile
from hotset.core.slot_pools import BoolArray, IntArray, SlotPools
from hotset.kernels.attention import AttentionKernels
from hotset.models.compiled import CompiledLayers
from hotset.models.seam import ExpertsFunction
from hotset.runtime.decode import DecodeOptions, DecodeStep
from hotset.runtime.kv_pool import KVPool
from hotset.runtime.sampling import Sampler
from hotset.runtime.sequences import PoolSequence
from hotset.runtime.steps import Steps

logger = logging.getLogger(__name__)


def choose_policy(
    geometry: ModelGeometry,
    plan: MemoryPlan,
    config: EngineConfig,
    profile: Profile | None = None,
) -> Policy:
    """The policy that a config names, or the one that fits the plan.

    With no slots, or one for every expert, none can change hands: auto is then `none`.

    Args:
        profile: of this model, what static policies and `forecast` know.

    Raises:
        ConfigError: an unknown policy, or one that needs a profile.
    """
    movable = 0 < plan.num_slots < geometry.num_records
    name = config.policy or (HalfLife.name if movable or config.half_life else NoPolicy.name)
    policy = make_policy(
        name,
        num_experts=[layer.num_experts for layer in geometry.layers],
        half_life=config.half_life,
        prior_LE=None if profile is None else profile.prior,
        forecast=None if profile is None else profile.forecast,
    )
    policy.check_ready()  # now, and not when the weights are loaded
    if config.policy and policy.moves and not movable:
        reason = "there are no slots" if plan.num_slots == 0 else "every expert has a slot"
        logger.warning("`--policy %s` has nothing to move: %s", config.policy, reason)
    return policy


def initial_residents(policy: Policy, pools: SlotPools, slots_L: IntArray) -> BoolArray:
    """Experts that own a slot before anything was routed, [L, E].

    To the simulator `none` is the engine without slots. Here the plan has paid for them, so they
    get owners, which then keep them.
    """
    if isinstance(policy, NoPolicy):
        return policy.best_experts(slots_L)
    return policy.initial(pools, slots_per_layer=slots_L)


def weaker_options(options: DecodeOptions) -> list[DecodeOptions]:
    """What may be tried in turn: as asked, without fusing, and without capturing either."""
    tried = [options]
    if options.layers is not None:
        tried.append(replace(options, layers=None))
    if options.graph:
        tried.append(DecodeOptions(graph=False, layers=None))
    return tried


def first_that_works(
    make: Callable[..., DecodeStep], options: Sequence[DecodeOptions], *, strict: bool
) -> tuple[DecodeOptions, DecodeStep]:
    """Makes the decode step with the first options that it can be made with; each that it cannot
    is said.

    Raises:
        HardwareError: none works, or in a strict engine the first does not.
        torch.OutOfMemoryError: as it is; weaker options need no less.
    """
    for index, attempt in enumerate(options):
        try:
            return attempt, make(options=attempt)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, torch._dynamo.exc.FailOnRecompileLimitHit) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            said = f"the decode step cannot be made with {attempt}: {reason}"
            if strict or index == len(options) - 1:
                hint = "`--no-compiled` and `--no-graphs` leave a part out; `--debug` says more"
                raise HardwareError(said, hint=hint) from error
            logger.warning("%s; decoding goes on with %s", said, options[index + 1])
    raise AssertionError("nothing to try")


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
        self.options, self.step = first_that_works(
            self._make, weaker_options(options), strict=config.strict
        )

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
