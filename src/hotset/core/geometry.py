"""What a MoE model consists of, in numbers: expert shapes, gates, layers, resident bytes, KV bytes.

Pure data. `models/` makes it from a meta-device model, `core/planner` and the kernels read it.
Letters used everywhere: T tokens, K top-k, E experts, S slots, H model dim, I expert
intermediate dim, L MoE layers, B batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from hotset.core.formats import PLAIN, WeightFormat
from hotset.core.record import RecordLayout

MAX_LAYERS = 1024
"""More decoder layers than any model has; to build a million, a mistake, would take all memory."""


class GateForm(Enum):
    """How the two halves of the first projection become one, with `a` the activation.

    The letters g, u are the gate and the up half, L the limit, alpha and c constants of `Gate`.
    """

    NONE = "none"  # a(u): there is no gate (nemotron_h)
    PLAIN = "plain"  # a(g) * u: most models
    CLAMPED = "clamped"  # a(min(g, L)) * clamp(u, -L, L): deepseek_v4, glm5_next, hy_v4
    SWIGLU_OAI = "swiglu_oai"  # min(g, L) * sigmoid(alpha * g) * (clamp(u, -L, L) + 1): gpt_oss
    CLAMPED_AFTER = "clamped_after"  # min(a(g), L) * clamp(u, -L, L): step3p7
    SOFTCAPPED = "softcapped"  # cg*tanh(g/cg) * sigmoid(g) * cu*tanh(u/cu): inkling2


class Activation(Enum):
    """Activations that the kernels know."""

    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    RELU = "relu"
    RELU2 = "relu2"


@dataclass(frozen=True)
class Gate:
    """A gate form with its constants; the ones a form does not use stay 0.

    Attributes:
        form: see `GateForm`. In `SWIGLU_OAI` the clamped g also goes into the sigmoid.
        activation: a() of the form; ignored by `SWIGLU_OAI` and `SOFTCAPPED`.
        limit: L.
        alpha: alpha of `SWIGLU_OAI`.
        gate_cap, up_cap: cg and cu of `SOFTCAPPED`.
    """

    form: GateForm
    activation: Activation = Activation.SILU
    limit: float = 0.0
    alpha: float = 0.0
    gate_cap: float = 0.0
    up_cap: float = 0.0

    @property
    def has_gate(self) -> bool:
        return self.form is not GateForm.NONE


@dataclass(frozen=True)
class ExpertSpec:
    """Shape, gate and record of the experts of one layer.

    The first projection is stored as rows `[gate 0..I-1 | up 0..I-1]` of length H (only the I up
    rows without a gate), whatever the checkpoint does (transposed, interleaved); the second as H
    rows of length I. Record fields: `up` [2I or I, H], `down` [H, I], and with biases
    `up_bias` [2I or I], `down_bias` [H]; for quantised weights see `WeightFormat.fields`.

    Attributes:
        dtype: compute dtype: of inputs, biases and plain weights. Quantised weights are rounded
            to it once, before they are multiplied.
        up_format, down_format: how the weights of each projection are stored.
    """

    hidden: int
    intermediate: int
    gate: Gate
    has_bias: bool
    dtype: str
    layout: RecordLayout
    up_format: WeightFormat = PLAIN
    down_format: WeightFormat = PLAIN

    @classmethod
    def build(
        cls,
        *,
        hidden: int,
        intermediate: int,
        gate: Gate,
        has_bias: bool,
        dtype: str,
        weights: WeightFormat = PLAIN,
        down_weights: WeightFormat | None = None,
    ) -> ExpertSpec:
        """An expert and the layout of its record.

        Args:
            dtype: float32, bfloat16 or float16.
            weights: format of both projections,
            down_weights: or of the first only, where the second has this one.
        """
        down_weights = weights if down_weights is None else down_weights
        assert not down_weights.has_order
        halves = 2 if gate.has_gate else 1
        specs = weights.fields("up", halves=halves, rows=intermediate, columns=hidden, dtype=dtype)
        specs += down_weights.fields(
            "down", halves=1, rows=hidden, columns=intermediate, dtype=dtype
        )
        if has_bias:
            rows = halves * intermediate
            specs += [("up_bias", (rows,), dtype), ("down_bias", (hidden,), dtype)]
        layout = RecordLayout.build(specs)
        return cls(hidden, intermediate, gate, has_bias, dtype, layout, weights, down_weights)

    @property
    def is_plain(self) -> bool:
        """Whether records hold weights in the compute dtype and nothing is to be dequantised."""
        return self.up_format.is_plain and self.down_format.is_plain

    @property
    def is_lossless(self) -> bool:
        """Whether BF16 weights of a projection or both are packed without loss."""
        return self.up_format.is_lossless or self.down_format.is_lossless

    @property
    def packed_format(self) -> WeightFormat:
        """The first projection's format, or, where that is plain, the second's: one of an expert
        that is not plain is packed."""
        return self.down_format if self.up_format.is_plain else self.up_format

    def in_format(self, weights: WeightFormat, down: WeightFormat | None = None) -> ExpertSpec:
        """The same expert with its weights in a format.

        Args:
            weights: of both projections.
            down: of the second one, where it is another.
        """
        return ExpertSpec.build(
            hidden=self.hidden,
            intermediate=self.intermediate,
            gate=self.gate,
            has_bias=self.has_bias,
            dtype=self.dtype,
            weights=weights,
            down_weights=down,
        )

    def as_plain(self) -> ExpertSpec:
        """The same expert with plain weights: what a dequantised record looks like."""
        return self._plain

    @cached_property
    def _plain(self) -> ExpertSpec:
        # Asked for with every launch of a prompt.
        return self.in_format(PLAIN)

    @property
    def record_bytes(self) -> int:
        return self.layout.nbytes


@dataclass(frozen=True)
class MoELayer:
    """One MoE layer: its place in the module tree and its experts.

    Attributes:
        name: path of the experts module, e.g. `model.layers.3.mlp.experts`.
        num_experts, top_k: E and K.
        expert: what each of its experts looks like.
        has_post_norm: a norm of the module tree is applied to each expert's output.
    """

    name: str
    num_experts: int
    top_k: int
    expert: ExpertSpec
    has_post_norm: bool = False


@dataclass(frozen=True)
class Latent:
    """What a layer keeps of a token in the place of keys and values, once for all heads (MLA).

    Attributes:
        rank: of the latent that a matrix of the layer expands to keys and values.
        rope_dim: of the rotary part of the key, the last columns of each head's.
    """

    rank: int
    rope_dim: int


@dataclass(frozen=True)
class Indexer:
    """How a layer chooses the positions that each token attends to (DeepSeek Sparse Attention).

    A candidate's score is sum_h w_h relu(q_h . k): w and q are of the token, k is kept of the
    candidate. Candidates are positions, or whole pools of neighbouring ones; with pools, the
    positions behind the last whole one are attended to in any case.

    Attributes:
        num_heads: of q and w.
        dim: of q and k.
        top_k: most positions that are chosen; a multiple of `pool`.
        pool: positions of one candidate.
    """

    num_heads: int
    dim: int
    top_k: int
    pool: int = 1

    @property
    def most_chosen(self) -> int:
        """Positions that a token attends to at most."""
        return self.top_k + self.pool - 1

    def token_bytes(self, element_bytes: int) -> int:
        """Of keys, for each position of a context; rounded up."""
        return -(-self.dim * element_bytes // self.pool)

    def row_bytes(self, element_bytes: int) -> int:
        """For each sequence besides: keys and gates of the newest positions, of which no key of a
        pool is made yet."""
        return 2 * self.pool * self.dim * element_bytes if self.pool > 1 else 0


@dataclass(frozen=True)
class AttentionLayer:
    """One layer that keeps keys and values, or latents that become keys and values.

    Attributes:
        path: of the attention module.
        index: the layer's index in the model's cache.
        num_heads: query heads; a multiple of `num_kv_heads`.
        num_kv_heads, key_dim, value_dim: of keys and values as they are attended to.
        window: most positions attended to, the current one included; `None` for all.
        latent: what is kept instead of them; `None` where they are kept themselves.
        indexer: the layer's own, whose keys are kept too; `None` where it has none, be it that all
            is attended to or what a layer before it has chosen.
    """

    path: str
    index: int
    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None
    latent: Latent | None = None
    indexer: Indexer | None = None

    @property
    def cached(self) -> tuple[int, int, int]:
        """(heads, width of keys, width of values) of what is kept of a token: of latents one head,
        the latent in the place of its key and the rotary part in that of its value."""
        if self.latent is None:
            return self.num_kv_heads, self.key_dim, self.value_dim
        return 1, self.latent.rank, self.latent.rope_dim


@dataclass(frozen=True)
class StateTensor:
    """A tensor of fixed size that a layer carries from token to token, for each sequence.

    Attributes:
        kind: `conv` (the inputs that a short convolution sees again) or `recurrent`.
        number: which of its kind; a layer may have several.
        shape: of one sequence.
        dtype: of its elements.
    """

    kind: str
    number: int
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class StateLayer:
    """One layer that carries a state; it may keep keys and values as well.

    Attributes:
        path: of the module that carries it.
        index: the layer's index in the model's cache.
        tensors: the state.
    """

    path: str
    index: int
    tensors: tuple[StateTensor, ...]


@dataclass(frozen=True)
class ModelGeometry:
    """All that planning needs to know of a model.

    Attributes:
        model_type: transformers' name of the architecture.
        dtype: compute dtype of the resident weights.
        layers: the MoE layers, in the order of the module tree.
        resident_bytes: parameters and buffers that stay in the module tree.
        resident_read_bytes: of those, what one token's forward reads: all but the embedding table,
            of which it reads a row, unless that is the output head too.
        dequantised_bytes: of `resident_bytes`, those of weights that the checkpoint holds quantised
            and that are kept in the compute dtype.
        kv_bytes_per_token: KV-cache growth for one token of context, all layers together.
        kv_fixed_bytes: cache that does not grow with the context (recurrent and conv states,
            and sliding-window layers, which are counted at their full window).
        attention: the layers that keep keys and values, where all of them can run over a pool of
            KV blocks; otherwise empty, and
        attention_reason: says why not.
        states: with `attention`, the layers that carry a state from token to token.
        hidden, vocab: model dimension and vocabulary size.
        num_layers: decoder layers, MoE or not.
        max_context: longest context the model was made for, tokens.
        activation_bytes_per_token: largest transient of one token outside the experts.
        activation_fixed_bytes: the same whatever the number of tokens (copies of states).
        activation_bytes_per_context_token: the same for each token of the context (keys and
            values expanded to all heads, where the attention does that).
        activation_bytes_per_pair: the same for each pair of a token in the forward and a token of
            its context (masks, attention scores where they are materialised).
        continues_in_chunks: a forward that extends a context may have any number of tokens;
            otherwise it is right for one token only.
        recurrent: some layers carry a state from token to token instead of keys and values.
    """

    model_type: str
    dtype: str
    layers: tuple[MoELayer, ...]
    resident_bytes: int
    kv_bytes_per_token: int
    kv_fixed_bytes: int
    hidden: int
    vocab: int
    num_layers: int
    max_context: int
    activation_bytes_per_token: int
    resident_read_bytes: int = 0
    dequantised_bytes: int = 0
    activation_bytes_per_context_token: int = 0
    activation_bytes_per_pair: int = 0
    activation_fixed_bytes: int = 0
    attention: tuple[AttentionLayer, ...] = ()
    attention_reason: str = ""
    states: tuple[StateLayer, ...] = ()
    continues_in_chunks: bool = True
    recurrent: bool = False

    def activation_bytes(self, num_tokens: int, context_tokens: int) -> int:
        """Peak transient of one forward outside the experts.

        Args:
            num_tokens: new tokens in the forward.
            context_tokens: tokens attended to, the new ones included.
        """
        return (
            self.activation_fixed_bytes
            + num_tokens * self.activation_bytes_per_token
            + context_tokens * self.activation_bytes_per_context_token
            + num_tokens * context_tokens * self.activation_bytes_per_pair
        )

    @property
    def num_records(self) -> int:
        return sum(layer.num_experts for layer in self.layers)

    @property
    def expert_bytes(self) -> int:
        """Bytes of all records together."""
        return sum(layer.num_experts * layer.expert.record_bytes for layer in self.layers)
