"""What decoding over our own KV pool needs, made once: pool, attention kernels, captured steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import lcm

import torch
from transformers import PreTrainedModel

from hotset.core.config import EngineConfig
from hotset.core.errors import HardwareError
from hotset.core.geometry import ModelGeometry
from hotset.core.plan import MemoryPlan
from hotset.core.policy import Policy
from hotset.core.profile import Profile
from hotset.kernels.attention import AttentionKernels
from hotset.models.compiled import CompiledLayers, end_compilers
from hotset.models.linear_kernels import missing_packages
from hotset.models.norms import fuse_norms
from hotset.models.rotary import fuse_rotary
from hotset.models.routers import fuse_routers
from hotset.models.seam import ExpertsFunction
from hotset.runtime.decode import DecodeOptions, DecodeStep
from hotset.runtime.kv_pool import BLOCK_TOKENS, KVPool
from hotset.runtime.policies import policy_for
from hotset.runtime.sampling import Sampler
from hotset.runtime.sequences import PoolSequence
from hotset.runtime.steps import Steps

logger = logging.getLogger(__name__)

# (rows of a step, MoE layer) -> ids that are routed instead, [B, K] int64 at a fixed address
Route = Callable[[int, int], torch.Tensor]


def choose_policy(
    geometry: ModelGeometry,
    plan: MemoryPlan,
    config: EngineConfig,
    profile: Profile | None = None,
) -> Policy:
    """The policy that a config names, or the one that fits the plan; see `policy_for`."""
    return policy_for(
        [layer.num_experts for layer in geometry.layers],
        num_slots=plan.num_slots,
        name=config.policy,
        half_life=config.half_life,
        profile=profile,
    )


def warn_of_plain_torch(model: PreTrainedModel, device: torch.device) -> None:
    """Says which packages would make a model's recurrences and convolutions faster on a GPU."""
    missing = missing_packages(model) if device.type == "cuda" else ()
    if missing:
        logger.warning(
            "recurrences and convolutions of this model run in plain torch, right and slower: "
            "not installed: %s",
            ", ".join(missing),
        )


def warn_of_library_cache(
    reason: str, plan: MemoryPlan, device: torch.device, *, strict: bool
) -> None:
    """Says what it costs that a model on a GPU runs in the library's own cache.

    Args:
        reason: why its attention does not run over the KV pool.
        strict: it is an error.

    Raises:
        HardwareError: it is.
    """
    if device.type != "cuda":
        return
    said = (
        "decode runs launch by launch in the library's cache, and each "
        f"{plan.prefill_chunk} tokens of a prompt bring the experts that they miss anew: {reason}"
    )
    if strict:
        raise HardwareError(said, hint="leave `--strict` out to run it all the same")
    logger.warning("%s; with a larger `--prefill-chunk` they come less often", said)


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
            # Of what the compiler raises, what is inside says why.
            error_inside = getattr(error, "inner_exception", error)
            reason = (str(error_inside).strip() or type(error_inside).__name__).splitlines()[0]
            said = f"the decode step cannot be made with {attempt}: {reason}"
            if strict or index == len(options) - 1:
                hint = "`--no-compiled` and `--no-graphs` leave a part out; `--debug` says more"
                raise HardwareError(said, hint=hint) from error
            logger.warning("%s; decoding goes on with %s", said, options[index + 1])
    raise AssertionError("nothing to try")


class Decoding:
    """The pool, and the decode steps over it.

    With `batch_invariant` each row has a step of its own, so that no bit of an answer depends on
    what else is decoded, and only what prompts in whole chunks have put into the pool is shared
    (`exact`). Otherwise there is a step for each batch size, an expert's record is read once for
    all rows, and the size may change low bits: products of another shape may be summed in another
    order.

    Args:
        model: with `runners` bound.
        runners: what computes each layer's experts.
        steps: keeps the books.
        sampler: draws the tokens, in the step and outside it.
        geometry: of the model; its attention runs over a pool.
        plan, config: what to allocate, and which parts to leave out.
        device: of all of it.
        triton: use the Triton attention kernels, not the reference.

    Attributes:
        pool: of keys and values.
        steps: of each size, the smallest first; or of each row.
        exact: see above.
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
        self._model, self._books = model, steps
        self._attention = AttentionKernels("triton" if triton else "reference")
        self.exact, self._strict = config.batch_invariant, config.strict
        self.pool = KVPool(
            geometry.attention,
            geometry.states,
            num_rows=config.max_batch,
            context_tokens=plan.context_tokens,
            dtype=getattr(torch, geometry.dtype),
            device=device,
            full_tokens=plan.kv_tokens,
            prefix_grain=prefix_grain(geometry, plan, config),
            fp8=config.kv_dtype == "fp8",
            poison=config.poison,
            num_places=max(config.batch_sizes),
        )
        on_gpu = device.type == "cuda"
        fused = on_gpu and triton and config.compiled
        if fused:
            fuse_norms(model)
            fuse_rotary(model)
            fuse_routers(model)
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
            sample=sampler,
            attention=self._attention,
            log=steps.log,
            fills=steps.fills,
        )
        self._sizes = config.batch_sizes
        self.options, self.steps = self._make_steps(options)

    def _make_steps(
        self,
        options: DecodeOptions,
        *,
        before: Callable[[], None] | None = None,
        route: Route | None = None,
    ) -> tuple[DecodeOptions, list[DecodeStep]]:
        made, compiles = [], options.layers is not None
        try:
            for size in self._sizes:
                ids = None if route is None else partial(route, size)
                make = partial(self._make, size=size, before=before, route=ids)
                options, step = first_that_works(make, weaker_options(options), strict=self._strict)
                made.append(step)
        finally:
            if compiles:
                end_compilers()
        return options, made

    def steps_for(self, rows: Sequence[int]) -> list[tuple[DecodeStep, list[int]]]:
        """Steps that serve these rows of the pool, each row once: the smallest that has room for
        all, or each row's own."""
        if self.exact:
            return [(self.steps[row], [row]) for row in rows]
        if not rows:
            return []
        return [(next(step for step in self.steps if step.size >= len(rows)), list(rows))]

    @contextmanager
    def uncaptured(self) -> Iterator[None]:
        """Within the block the same steps run launch by launch, for comparison."""
        captured = self.steps
        _, self.steps = self._make_steps(replace(self.options, graph=False))
        try:
            yield
        finally:
            self.steps = captured

    @contextmanager
    def routed(self, route: Route, *, before: Callable[[], None]) -> Iterator[None]:
        """Within the block the same steps send tokens where `route` says, not where the model's
        routers do (for benchmarks). Nothing may be in flight at its ends.

        Args:
            before: queued at the start of every step.
        """
        own = self.steps
        _, self.steps = self._make_steps(self.options, before=before, route=route)
        try:
            yield
        finally:
            self.steps = own

    @property
    def captured(self) -> bool:
        return self.options.graph

    def sequence(self, num_tokens: int, ids: Sequence[int] = ()) -> PoolSequence | None:
        """A new sequence of up to so many tokens; `None` while there is no room for it.

        Args:
            ids: it begins with what the pool still has of these, not all of them.
        """
        pool = self.pool
        if not pool.has_room(0):  # no row is free: a long prompt is not hashed at every step
            return None
        shared = pool.prefixes.find(ids) if pool.prefixes is not None and ids else []
        if not pool.has_room(num_tokens, shared):
            return None
        return PoolSequence(
            self._model,
            self._books,
            pool=pool,
            row=pool.open(num_tokens, shared),
            kernels=self._attention,
            exact=self.exact,
        )


def prefix_grain(geometry: ModelGeometry, plan: MemoryPlan, config: EngineConfig) -> int | None:
    """Equal prefixes are reused in multiples of so many tokens; `None` where they are not.

    A prompt's keys and values depend in low bits on how it was cut into forwards. Where they must
    not, prefixes end where a chunk does, so that with them and without the same forwards follow.
    """
    if not config.prefix_reuse:
        return None
    reason = prefix_refusal(geometry)
    if reason:
        said = f"prefixes are not reused: {reason}"
        if config.strict:
            raise HardwareError(said, hint="leave `--prefix-reuse` or `--strict` out")
        logger.warning("%s", said)
        return None
    return lcm(BLOCK_TOKENS, plan.prefill_chunk) if config.batch_invariant else BLOCK_TOKENS


def prefix_refusal(geometry: ModelGeometry) -> str:
    """Why what a model keeps of a prefix cannot be shared; empty where it can."""
    if geometry.attention_reason:
        return geometry.attention_reason
    if any(layer.window is not None for layer in geometry.attention):
        return "sliding windows keep the newest tokens only"
    if geometry.states:
        return "some layers carry a state, which is that of the newest token only"
    if not geometry.continues_in_chunks:
        return f"`{geometry.model_type}` of transformers cannot continue a prompt"
    return ""
