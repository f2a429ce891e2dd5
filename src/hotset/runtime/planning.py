"""Asks the planner for this engine's plan: the machine, and what the engine allocates itself."""

from __future__ import annotations

from collections.abc import Iterator

from hotset.core.charges import SAMPLING_BYTES_PER_LOGIT, Workspace
from hotset.core.config import EngineConfig
from hotset.core.geometry import AttentionLayer, ModelGeometry
from hotset.core.hardware import Machine
from hotset.core.hit_curve import HitCurve, assumed_curve
from hotset.core.kv_dtype import with_kv_dtype
from hotset.core.lossless import with_lossless
from hotset.core.machine import MachineDescription
from hotset.core.plan import MemoryPlan
from hotset.core.planner import PlanRequest, make_plan
from hotset.core.profile import Profile
from hotset.core.record import DTYPE_BYTES
from hotset.core.speed import SpeedModel
from hotset.core.sweep import sweep_contexts
from hotset.core.units import MIB
from hotset.kernels import latent_decode
from hotset.kernels.attention_decode import launch_shape, workspace_bytes
from hotset.models.latents import EXPANDED_BYTES, expanded_elements
from hotset.runtime.choosing import CANDIDATE_BYTES, CHOOSING_BYTES, choosing_bytes
from hotset.runtime.known_rates import described
from hotset.runtime.kv_pool import BLOCK_TOKENS, kv_pool_bytes
from hotset.runtime.kv_prefill import CHOSEN_TOKENS
from hotset.runtime.probe import probe_machine
from hotset.runtime.state_rows import state_bytes

# `Engine.logits` asks for every token's logits; it runs in chunks whose logits stay below this.
LOGITS_BYTES = 64 * MIB

# What a captured step keeps to itself for its first row: activations, logits, sampling buffers.
GRAPH_BYTES = 64 * MIB


def plan_engine(
    geometry: ModelGeometry,
    config: EngineConfig,
    *,
    description: MachineDescription | None = None,
    curve: HitCurve | None = None,
) -> tuple[Machine, MemoryPlan]:
    """The machine, and the plan for a model on it; whether it fits is in the plan.

    Args:
        description: of another machine; default this one as it is now.
        curve: hits over slots, for the predicted speed of as many rows as it is of; default the
            config's profile's, or one assumed from other models, of `decoded_rows`.
    """
    geometry = with_kv_dtype(with_lossless(geometry, config.lossless), config.kv_dtype)
    machine, spaces, speed = _parts(geometry, config, description, curve)
    request = PlanRequest.from_config(config)
    return machine, make_plan(geometry, machine, request, workspaces=spaces, speed=speed)


def sweep_engine(
    geometry: ModelGeometry,
    config: EngineConfig,
    *,
    description: MachineDescription | None = None,
    curve: HitCurve | None = None,
) -> list[MemoryPlan]:
    """`plan_engine` at many lengths of context."""
    geometry = with_kv_dtype(with_lossless(geometry, config.lossless), config.kv_dtype)
    machine, spaces, speed = _parts(geometry, config, description, curve)
    request = PlanRequest.from_config(config)
    return sweep_contexts(geometry, machine, request, workspaces=spaces, speed=speed)


def decoded_rows(geometry: ModelGeometry, config: EngineConfig) -> int:
    """Most sequences that a decode step serves side by side."""
    return config.max_batch if geometry.attention and not config.batch_invariant else 1


def _default_curve(geometry: ModelGeometry, config: EngineConfig) -> HitCurve:
    num_rows = decoded_rows(geometry, config)
    if config.profile is not None:
        return HitCurve.from_profile(Profile.load(config.profile), num_rows=num_rows)
    return assumed_curve(num_rows)


def speed_model(
    geometry: ModelGeometry, description: MachineDescription, curve: HitCurve | None = None
) -> SpeedModel:
    """What predicts a model's speed on a machine.

    Raises:
        ConfigError: the description lacks a rate.
    """
    return SpeedModel.of_machine(geometry, description, curve or assumed_curve())


def _parts(
    geometry: ModelGeometry,
    config: EngineConfig,
    description: MachineDescription | None,
    curve: HitCurve | None,
) -> tuple[Machine, list[Workspace], SpeedModel | None]:
    machine = probe_machine(config.device) if description is None else description.machine
    known = description or described(machine)
    # The model of speed is one of a GPU and its link: without a GPU there is nothing to predict.
    predicted = known if machine.device == "cuda" else None
    speed = None
    if predicted is not None:
        speed = speed_model(geometry, predicted, curve or _default_curve(geometry, config))
    spaces = [*_workspaces(geometry, config, on_cuda=machine.device == "cuda")]
    return machine, spaces, speed


def logits_chunk(geometry: ModelGeometry) -> int:
    """Tokens whose logits, as computed and in float32, take at most `LOGITS_BYTES`."""
    return max(1, LOGITS_BYTES // (geometry.vocab * (DTYPE_BYTES[geometry.dtype] + 4)))


def _rounding(geometry: ModelGeometry, config: EngineConfig) -> int:
    """Most by which the pool exceeds the cache that the planner counts."""
    num_rows = config.max_batch
    # One token more than whole blocks, and longer than every window.
    windows = [layer.window or 0 for layer in geometry.attention]
    context = (max(windows) // BLOCK_TOKENS + 2) * BLOCK_TOKENS + 1
    pool = kv_pool_bytes(
        geometry.attention,
        num_rows=num_rows,
        context_tokens=context,
        full_tokens=context,
        element_bytes=DTYPE_BYTES[geometry.dtype],
        fp8=config.kv_dtype == "fp8",
    )
    pool += state_bytes(geometry.states, num_rows=num_rows, num_places=max(config.batch_sizes))
    counted = geometry.kv_bytes_per_token * context + geometry.kv_fixed_bytes * num_rows
    return max(0, pool - counted)


def _graph_bytes(geometry: ModelGeometry, num_rows: int) -> int:
    """What the captured step of so many rows keeps to itself: each further row has logits, as
    computed and in float32, and partial results of attention, cut as for the longest context."""
    size = DTYPE_BYTES[geometry.dtype]
    attended = max(_attended_bytes(layer, size) for layer in geometry.attention)
    return GRAPH_BYTES + (num_rows - 1) * (attended + geometry.vocab * (size + 4))


def _attended_bytes(layer: AttentionLayer, element_bytes: int) -> int:
    """Partial results of one row in one layer."""
    if layer.latent is not None:
        launch = latent_decode.launch_shape(
            num_heads=layer.num_heads, rank=layer.latent.rank, element_bytes=element_bytes
        )
        width = layer.latent.rank
    else:
        launch = launch_shape(
            num_heads=layer.num_heads,
            num_kv_heads=layer.num_kv_heads,
            key_dim=layer.key_dim,
            value_dim=layer.value_dim,
            element_bytes=element_bytes,
        )
        width = layer.value_dim
    return workspace_bytes(launch, batch=1, num_heads=layer.num_heads, value_dim=width)


def _expanded(geometry: ModelGeometry) -> Iterator[Workspace]:
    """Keys and values that a prompt's latents are expanded to: all heads where they fit, otherwise
    those that do, or one."""
    name, note = "latents", "expanded to keys and values of as many heads at a time as fit"
    for layer in geometry.attention:
        if layer.latent is not None:
            one_head = expanded_elements(layer.key_dim, layer.value_dim)
            one_head *= DTYPE_BYTES[geometry.dtype]
            yield Workspace(
                name,
                note,
                bytes_per_context_token=layer.num_heads * one_head,
                most_context_bytes=EXPANDED_BYTES,
            )
            yield Workspace(name, note, bytes_per_context_token=one_head)
            return  # layers of one model are alike, and run one after the other


def _chosen(geometry: ModelGeometry, config: EngineConfig) -> Iterator[Workspace]:
    """What indexers take: to choose for tokens of a prompt and for the rows of captured steps, and
    for each token of a prompt where what was chosen lies, beside its queries in latent space."""
    layers = [layer for layer in geometry.attention if layer.indexer is not None]
    if not layers:
        return
    layer = layers[0]  # layers of one model are alike, and run one after the other
    assert layer.indexer is not None and layer.latent is not None
    size, indexer = DTYPE_BYTES[geometry.dtype], layer.indexer
    width = layer.latent.rank + layer.latent.rope_dim
    # Queries in latent space and their rotary parts, sums in FP32 and rounded, and in between.
    attending = CHOSEN_TOKENS * layer.num_heads * width * (4 + 4 * size)
    name, note = "chosen tokens", "scores of an indexer, its choice, and what attends to it"
    yield Workspace(
        name,
        note,
        bytes_per_token=4 * (indexer.most_chosen + 1) + layer.num_heads * layer.value_dim * size,
        # A context that is no longer than what may be chosen needs none of it.
        bytes_per_context_token=-(-(CHOOSING_BYTES + attending) // indexer.top_k),
        most_context_bytes=CHOOSING_BYTES + attending,
    )
    rows = sum(config.batch_sizes)
    yield Workspace(
        name,
        note,
        fixed_bytes=rows * choosing_bytes(indexer, 0),
        bytes_per_context_token=rows * -(-CANDIDATE_BYTES // indexer.pool),
    )


def _captured_note(config: EngineConfig) -> str:
    if config.batch_invariant:
        return f"kept by the captured decode steps of {config.max_batch} rows, one for each"
    *smaller, most = map(str, config.batch_sizes)
    rows = f"{', '.join(smaller)} and {most} rows" if smaller else f"{most} row"
    return f"kept by the captured decode steps of {rows}"


def _workspaces(
    geometry: ModelGeometry, config: EngineConfig, *, on_cuda: bool
) -> Iterator[Workspace]:
    yield Workspace("logits", "of a text, a part at a time", fixed_bytes=LOGITS_BYTES)
    if geometry.attention:
        note = "rounding up to whole blocks"
        if geometry.states:
            note += ", and states that a decode step works on"
        yield Workspace("KV blocks", note, fixed_bytes=_rounding(geometry, config))
    yield from _expanded(geometry)
    yield from _chosen(geometry, config)
    if config.kv_dtype is not None:
        yield Workspace(
            "KV codes",
            "one layer's keys or values in eight bits, gathered for a later chunk of a prompt",
            bytes_per_context_token=max(
                layer.num_kv_heads * (max(layer.key_dim, layer.value_dim) + 1)
                for layer in geometry.attention
            ),
        )
    if geometry.attention and config.max_batch > 1:
        # The planner counts the sampling of one row.
        more = (config.num_sampler_rows - 1) * geometry.vocab * SAMPLING_BYTES_PER_LOGIT
        yield Workspace("more rows", "of logits that are sampled together", fixed_bytes=more)
    if on_cuda:
        captured = geometry.attention and config.graphs and config.kernels != "reference"
        yield Workspace(
            "graph pools",
            _captured_note(config) if captured else "decode is not captured",
            fixed_bytes=sum(_graph_bytes(geometry, n) for n in config.batch_sizes)
            if captured
            else 0,
        )
    normed = [layer for layer in geometry.layers if layer.has_post_norm]
    if normed:
        # Expert outputs once more in the model's dtype, normed, and back in float32.
        element = 2 * DTYPE_BYTES[geometry.dtype] + 4
        yield Workspace(
            "expert norms",
            "copies of the expert outputs that a norm takes",
            bytes_per_token=max(layer.top_k * layer.expert.hidden for layer in normed) * element,
        )
