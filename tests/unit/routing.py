"""Made-up routing for policy tests: skewed, drifting, seeded. Not a test file."""

from __future__ import annotations

import numpy as np

from hotset.core.fingerprint import ModelFingerprint
from hotset.core.trace import Trace, TraceInfo, TraceSequence, id_dtype


def skewed_ids(
    *, num_tokens: int, num_layers: int, num_experts: int, top_k: int, seed: int, skew: float = 0.3
) -> np.ndarray:
    """Distinct ids [T, L, K]: Dirichlet popularity per layer, which changes once halfway."""
    random = np.random.default_rng(seed)
    halves = []
    for length in (num_tokens // 2, num_tokens - num_tokens // 2):
        share = random.dirichlet(np.full(num_experts, skew), size=num_layers)
        noise = random.gumbel(size=(length, num_layers, num_experts))
        halves.append(np.argsort(-(noise + np.log(share + 1e-9)), axis=2)[:, :, :top_k])
    return np.concatenate(halves)


def make_trace(
    ids: list[np.ndarray], *, num_experts: int, domains: list[str] | None = None
) -> Trace:
    """A trace of the given sequences [T, L, K]."""
    _, num_layers, top_k = ids[0].shape
    fingerprint = ModelFingerprint(
        architecture="made_up",
        num_experts=(num_experts,) * num_layers,
        top_k=(top_k,) * num_layers,
        router_hash="ab12",
    )
    sequences, start = [], 0
    for index, part in enumerate(ids):
        domain = domains[index] if domains else ""
        sequences.append(TraceSequence(index, start, len(part), domain))
        start += len(part)
    whole = np.concatenate(ids).astype(id_dtype(num_experts))
    return Trace(TraceInfo(fingerprint, model="made up"), whole, tuple(sequences))
