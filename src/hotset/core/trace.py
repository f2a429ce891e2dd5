"""A trace: the routed expert ids of real tokens, sequence by sequence. No text.

Knows ids and where sequences begin; refuses to know weights, time and prompts. Files are read and
written by `core.trace_file` (our format) and `core.trace_npz` (numpy archives).

Letters: T tokens, L MoE layers, K top-k, E experts of the widest layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hotset.core.errors import CheckpointError, ConfigError
from hotset.core.fingerprint import ModelFingerprint

IdArray = NDArray[np.unsignedinteger]

# Routing of the model in the package, and the name it goes by.
POCKET = "pocket"
_IN_PACKAGE = Path(__file__).parents[1] / "data" / "pocket.npz"

PARITIES = ("all", "even", "odd")


def id_dtype(max_experts: int) -> np.dtype[np.unsignedinteger]:
    """The smallest type that holds every id and the padding, which is its largest value."""
    return np.dtype(np.uint8 if max_experts <= 255 else np.uint16)


@dataclass(frozen=True)
class TraceSequence:
    """Tokens `start .. start + num_tokens - 1` of a trace belong together.

    Attributes:
        index: its number in the file, kept by `Trace.select`.
        domain: what kind of text it was, may be empty.
    """

    index: int
    start: int
    num_tokens: int
    domain: str = ""


@dataclass(frozen=True)
class TraceInfo:
    """Where a trace comes from.

    Attributes:
        fingerprint: the model; its architecture is empty when the file does not say.
        model: name for people.
        source, license: of the data.
        inferred: the number of experts was taken from the highest id seen.
    """

    fingerprint: ModelFingerprint
    model: str = ""
    source: str = ""
    license: str = ""
    inferred: bool = False


@dataclass(frozen=True)
class Trace:
    """Routed ids of all tokens.

    Attributes:
        ids_TLK: uint8 or uint16; the type's largest value pads layers with a smaller top-k.
        sequences: in the order of the file; they may leave out tokens (see `select`).
        token_ids_T: int32, or `None` where they were not recorded.
    """

    info: TraceInfo
    ids_TLK: IdArray
    sequences: tuple[TraceSequence, ...]
    token_ids_T: NDArray[np.int32] | None = None

    @property
    def num_experts(self) -> tuple[int, ...]:
        return self.info.fingerprint.num_experts

    @property
    def num_layers(self) -> int:
        return len(self.num_experts)

    @property
    def max_experts(self) -> int:
        return max(self.num_experts)

    @property
    def num_tokens(self) -> int:
        return sum(sequence.num_tokens for sequence in self.sequences)

    @property
    def domains(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(sequence.domain for sequence in self.sequences))

    def ids_of(self, sequence: TraceSequence) -> NDArray[np.int64]:
        """Ids of one sequence, [T, L, K] int64, padding as -1."""
        ids = self.ids_TLK[sequence.start : sequence.start + sequence.num_tokens]
        wide = ids.astype(np.int64)
        wide[ids == np.iinfo(self.ids_TLK.dtype).max] = -1
        return wide

    def __iter__(self) -> Iterator[NDArray[np.int64]]:
        return map(self.ids_of, self.sequences)

    def counts(self, sequence: TraceSequence) -> NDArray[np.int64]:
        """Tokens of one sequence that used each expert, [L, E]."""
        ids = self.ids_of(sequence)
        width = self.max_experts
        cells = ids + np.arange(self.num_layers)[:, None] * width
        flat = np.bincount(cells[ids >= 0], minlength=self.num_layers * width)
        return flat.reshape(self.num_layers, width)

    def total_counts(self) -> NDArray[np.int64]:
        """Tokens of all sequences that used each expert, [L, E]."""
        total = np.zeros((self.num_layers, self.max_experts), dtype=np.int64)
        for sequence in self.sequences:
            total += self.counts(sequence)
        return total

    def select(self, *, parity: str = "all", domains: tuple[str, ...] = ()) -> Trace:
        """The trace with fewer sequences, in unchanged order.

        Args:
            parity: `even` or `odd` numbers in the file, or `all`.
            domains: empty for all.

        Raises:
            ConfigError: an unknown parity or domain, or nothing is left.
        """
        if parity not in PARITIES:
            raise ConfigError(f"sequences `{parity}`", hint=f"one of {', '.join(PARITIES)}")
        for domain in domains:
            if domain not in self.domains:
                raise ConfigError(
                    f"the trace has no domain `{domain}`",
                    hint=f"it has {', '.join(filter(None, self.domains)) or 'none'}",
                )
        kept = tuple(
            sequence
            for sequence in self.sequences
            if parity in ("all", "odd" if sequence.index % 2 else "even")
            and (not domains or sequence.domain in domains)
        )
        if not kept:
            raise ConfigError(
                f"no sequence is left: `{parity}` of {len(self.sequences)}",
                hint="`--sequences all` takes every one, `--profile-from none` needs none",
            )
        return replace(self, sequences=kept)


def check_trace(trace: Trace, *, where: str) -> Trace:
    """Returns the trace if its parts agree.

    Raises:
        CheckpointError: names what is wrong with file `where`.
    """
    shape, num_experts = trace.ids_TLK.shape, trace.num_experts
    if len(shape) != 3 or shape[1] != len(num_experts):
        raise CheckpointError(
            f"`{where}` holds ids of shape {list(shape)}, expected "
            f"[tokens, {len(num_experts)} layers, top-k]"
        )
    padding = np.iinfo(trace.ids_TLK.dtype).max
    for layer, experts in enumerate(num_experts):
        ids = trace.ids_TLK[:, layer]
        wrong = (ids >= experts) & (ids != padding)
        if wrong.any():
            token = int(np.argwhere(wrong)[0][0])
            raise CheckpointError(
                f"`{where}` routes token {token} of layer {layer} to expert "
                f"{int(ids[wrong][0])}, the layer has {experts}"
            )
    for sequence in trace.sequences:
        end = sequence.start + sequence.num_tokens
        if sequence.start < 0 or sequence.num_tokens < 1 or end > shape[0]:
            raise CheckpointError(
                f"`{where}`: sequence {sequence.index} covers tokens {sequence.start}..{end - 1}, "
                f"the file has {shape[0]}"
            )
    if not trace.sequences:
        raise CheckpointError(f"`{where}` holds no sequence")
    return trace


def load_trace(path: Path | str, *, num_experts: int | None = None) -> Trace:
    """Reads a trace of any known layout.

    Args:
        path: a file, or `pocket` for the trace in the package.
        num_experts: experts per layer, where the file does not say (see `core.trace_npz`).

    Raises:
        CheckpointError: missing, unreadable, damaged, or of no known layout.
        ConfigError: `num_experts` contradicts the file.
    """
    from hotset.core import trace_file, trace_npz

    path = _IN_PACKAGE if str(path) == POCKET else Path(path)
    if not path.is_file():
        raise CheckpointError(
            f"there is no trace `{path}`", hint=f"give a file, or `{POCKET}` for the package's own"
        )
    try:
        with path.open("rb") as file:
            magic = file.read(8)
    except OSError as error:
        raise CheckpointError(
            f"trace `{path}` cannot be read: {error.strerror}",
            hint="check its owner and permissions",
        ) from error
    readers: dict[bytes, Callable[[Path], Trace]] = {trace_file.MAGIC: trace_file.read_trace}
    if magic in readers:
        trace = readers[magic](path)
    elif magic.startswith(trace_npz.MAGIC):
        trace = trace_npz.read_npz(path, num_experts=num_experts)
    else:
        raise CheckpointError(
            f"`{path}` is not a trace: it {f'begins with {magic!r}' if magic else 'is empty'}",
            hint="a trace is a file of this package's own, or an .npz archive of expert ids",
        )
    if num_experts is not None and set(trace.num_experts) != {num_experts}:
        raise ConfigError(f"`{path}` has {max(trace.num_experts)} experts, not {num_experts}")
    return trace
