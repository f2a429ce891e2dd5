"""What ties routing statistics to one model: its shape and a hash of its router weights.

Knows names and numbers; the hash is computed elsewhere and arrives as hex.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hotset.core.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class ModelFingerprint:
    """Two models with equal fingerprints route alike.

    Attributes:
        architecture: transformers' `model_type`.
        num_experts: experts of each MoE layer, in order, length L.
        top_k: routed experts per token of each MoE layer, length L.
        router_hash: hex digest of all router weights; empty when it is not known, and then it is
            not compared.
    """

    architecture: str
    num_experts: tuple[int, ...]
    top_k: tuple[int, ...]
    router_hash: str = ""

    def differences(self, other: ModelFingerprint) -> list[str]:
        """Why statistics of `other` do not fit this model; empty when they do."""
        found = [
            f"{label} {ours} against {theirs}"
            for label, ours, theirs in (
                ("architecture", self.architecture, other.architecture),
                ("MoE layers", len(self.num_experts), len(other.num_experts)),
                ("experts per layer", _short(self.num_experts), _short(other.num_experts)),
                ("top-k", _short(self.top_k), _short(other.top_k)),
            )
            if ours != theirs and "" not in (ours, theirs)
        ]
        hashes = (self.router_hash, other.router_hash)
        if all(hashes) and hashes[0] != hashes[1]:
            found.append(f"router weights {hashes[0][:12]} against {hashes[1][:12]}")
        return found

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Any, *, where: str) -> ModelFingerprint:
        """Reads what `to_json` wrote.

        Args:
            where: names the file in the error.

        Raises:
            CheckpointError: a field is missing or has the wrong type.
        """
        try:
            fingerprint = cls(
                architecture=str(data["architecture"]),
                num_experts=tuple(int(count) for count in data["num_experts"]),
                top_k=tuple(int(count) for count in data["top_k"]),
                router_hash=str(data["router_hash"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"`{where}` has no valid model fingerprint: {error!r}") from error
        same_length = len(fingerprint.num_experts) == len(fingerprint.top_k) > 0
        if not same_length or min(fingerprint.num_experts + fingerprint.top_k) < 1:
            raise CheckpointError(
                f"`{where}` has an impossible model fingerprint: "
                f"{len(fingerprint.num_experts)} layers of experts, {len(fingerprint.top_k)} top-k"
            )
        return fingerprint


def _short(values: Sequence[int]) -> str:
    """`32` for equal values, the list otherwise."""
    return str(values[0]) if len(set(values)) == 1 else str(list(values))
