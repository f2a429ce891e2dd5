"""A profile: how often each expert of one model was used, and how soon again.

Knows counts, bound to a model by its fingerprint; refuses to be used with another. Refuses to know
single tokens: that is a trace.

Letters: L MoE layers, E experts of the widest layer, B reuse buckets.
"""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotset.core.belady import NEVER, next_uses
from hotset.core.errors import CheckpointError, ConfigError
from hotset.core.fingerprint import ModelFingerprint
from hotset.core.forecast import Forecast
from hotset.core.policy import StaticUniform
from hotset.core.simulator import Condition, simulate
from hotset.core.trace import Trace

FORMAT, VERSION = "hotset-profile", 1
NUM_REUSE_BUCKETS = 16
SUFFIXES = (".json", ".npz")
_FORECAST = "forecast_"


@dataclass(frozen=True)
class PolicyReplay:
    """What the policy that follows the text makes of the text that a profile is of.

    Attributes:
        half_life: with the most hits, steps.
        shares: of the experts that have a slot, ascending.
        hit_rates: at each.
    """

    half_life: float
    shares: tuple[float, ...]
    hit_rates: tuple[float, ...]

    def __post_init__(self) -> None:
        numbers = (*self.shares, *self.hit_rates)
        if not self.half_life > 0 or not all(0 <= number <= 1 for number in numbers):
            raise ValueError(f"a replay of half-life {self.half_life} has shares beyond 0..1")
        if not self.shares or len(self.shares) != len(self.hit_rates):
            raise ValueError(f"{len(self.shares)} shares have {len(self.hit_rates)} hit rates")

    @classmethod
    def from_json(cls, data: Any) -> PolicyReplay:
        """The inverse of `asdict`; `ValueError`, `KeyError` or `TypeError` where it is not."""
        shares, rates = (tuple(map(float, data[key])) for key in ("shares", "hit_rates"))
        return cls(float(data["half_life"]), shares, rates)


@dataclass(frozen=True)
class Profile:
    """Routing statistics of one model.

    Attributes:
        counts_LE: int64, tokens that used each expert.
        reuse_LB: int64, uses whose expert was used before in the same sequence, by the number of
            tokens since: bucket b holds 2^b .. 2^(b+1) - 1, the last one all above.
        num_tokens, num_sequences: seen.
        model, source, license: for people.
        forecast: for policy `forecast`; `None` when none was fitted.
        replay: `None` when nobody replayed the text.
    """

    fingerprint: ModelFingerprint
    counts_LE: NDArray[np.int64]
    reuse_LB: NDArray[np.int64]
    num_tokens: int
    num_sequences: int
    model: str = ""
    source: str = ""
    license: str = ""
    forecast: Forecast | None = None
    replay: PolicyReplay | None = None

    @classmethod
    def from_trace(cls, trace: Trace, *, with_forecast: bool = False) -> Profile:
        """Counts a trace, and on request fits a forecast, which takes some seconds."""
        reuse_LB = np.zeros((trace.num_layers, NUM_REUSE_BUCKETS), dtype=np.int64)
        for ids_TLK in trace:
            following, _ = next_uses(ids_TLK, trace.max_experts)
            again = (following != NEVER) & (ids_TLK >= 0)
            token, layer, _ = np.nonzero(again)
            bucket = np.log2(following[again] - token).astype(np.int64)
            np.add.at(reuse_LB, (layer, np.minimum(bucket, NUM_REUSE_BUCKETS - 1)), 1)
        return cls(
            fingerprint=trace.info.fingerprint,
            counts_LE=trace.total_counts(),
            reuse_LB=reuse_LB,
            num_tokens=trace.num_tokens,
            num_sequences=len(trace.sequences),
            model=trace.info.model,
            source=trace.info.source,
            license=trace.info.license,
            forecast=Forecast.fit(trace) if with_forecast else None,
        )

    @property
    def prior(self) -> NDArray[np.float64]:
        """Uses per token of each expert, [L, E]: what `core.policy` takes as prior."""
        return self.counts_LE / max(1, self.num_tokens)

    def coverage(self) -> NDArray[np.float64]:
        """Share of a layer's uses that go to its n+1 most used experts, [L, E]."""
        ordered = -np.sort(-self.counts_LE, axis=1)
        covered: NDArray[np.float64] = np.cumsum(ordered, axis=1) / np.maximum(
            1, ordered.sum(axis=1, keepdims=True)
        )
        return covered

    def effective_experts(self) -> NDArray[np.float64]:
        """exp of the entropy of a layer's uses, [L]: E for even use, K for the same ones always."""
        share = self.counts_LE / np.maximum(1, self.counts_LE.sum(axis=1, keepdims=True))
        logs = np.log(share, out=np.zeros_like(share), where=share > 0)
        entropy: NDArray[np.float64] = -(share * logs).sum(axis=1)
        return np.exp(entropy)

    def check_fits(self, fingerprint: ModelFingerprint, *, name: str = "the profile") -> None:
        """Refuses another model.

        Raises:
            ConfigError: says in what the models differ.
        """
        differences = fingerprint.differences(self.fingerprint)
        if differences:
            raise ConfigError(
                f"{name} is of another model: {', '.join(differences)}",
                hint="make one of a trace of this model",
            )

    def merge(self, others: Sequence[Profile]) -> Profile:
        """One profile of all tokens together, without forecast and replay, which cannot be merged.

        Raises:
            ConfigError: one is of another model.
        """
        merged = self
        for other in others:
            other.check_fits(self.fingerprint)
            merged = replace(
                merged,
                counts_LE=merged.counts_LE + other.counts_LE,
                reuse_LB=merged.reuse_LB + other.reuse_LB,
                num_tokens=merged.num_tokens + other.num_tokens,
                num_sequences=merged.num_sequences + other.num_sequences,
                source=_joined(merged.source, other.source),
                license=_joined(merged.license, other.license),
                forecast=None,
                replay=None,
            )
        return merged

    def diff(self, other: Profile, *, slots: float = 0.25) -> ProfileDiff:
        """How differently another text uses the same model.

        Args:
            slots: fraction of each layer's experts whose hot sets are compared.

        Raises:
            ConfigError: `other` is of another model.
        """
        other.check_fits(self.fingerprint)
        shares = [
            profile.counts_LE / np.maximum(1, profile.counts_LE.sum(axis=1, keepdims=True))
            for profile in (self, other)
        ]
        hot = [profile.hot_set(slots) for profile in (self, other)]
        return ProfileDiff(
            slots=slots,
            total_variation_L=np.abs(shares[0] - shares[1]).sum(axis=1) / 2,
            shared_hot_L=(hot[0] & hot[1]).sum(axis=1) / np.maximum(1, hot[0].sum(axis=1)),
            own_coverage=_covered(hot[1], other.counts_LE),
            cross_coverage=_covered(hot[0], other.counts_LE),
        )

    def score(self, trace: Trace, *, slots: float, policy: str = StaticUniform.name) -> float:
        """Hit rate that a static hot set of this profile would have on a trace it has not seen.

        Raises:
            ConfigError: the trace is of another model.
        """
        self.check_fits(trace.info.fingerprint)
        return simulate(trace, [Condition(policy, slots)], prior_LE=self.prior)[0].hit_rate

    def expected_hit_rate(self, slots: float) -> float:
        """Hit rate of its own static hot set on the text it was made from."""
        return _covered(self.hot_set(slots), self.counts_LE)

    def coverage_of_layers(self, slots: float) -> NDArray[np.float64]:
        """Share of each layer's uses that its hot set covers, [L], on the profile's own text."""
        covered_L = (self.counts_LE * self.hot_set(slots)).sum(axis=1)
        share_L: NDArray[np.float64] = covered_L / np.maximum(1, self.counts_LE.sum(axis=1))
        return share_L

    def hot_set(self, slots: float) -> NDArray[np.bool_]:
        """The most used experts, [L, E], the same share of them in each layer."""
        num_experts = self.fingerprint.num_experts
        policy = StaticUniform(num_experts, prior_LE=self.prior)
        per_layer = Condition(StaticUniform.name, slots).slots_per_layer(num_experts)
        return policy.best_experts(per_layer)

    def save(self, path: Path | str) -> None:
        """Writes `.json` (readable) or `.npz` (small, and with the forecast), by suffix.

        Raises:
            ConfigError: another suffix, or a forecast in `.json`.
        """
        path = Path(path)
        meta = {
            "format": FORMAT,
            "version": VERSION,
            "fingerprint": self.fingerprint.to_json(),
            "num_tokens": self.num_tokens,
            "num_sequences": self.num_sequences,
            "model": self.model,
            "source": self.source,
            "license": self.license,
            **({"replay": asdict(self.replay)} if self.replay is not None else {}),
        }
        if _suffix(path) == ".json":
            if self.forecast is not None:
                raise ConfigError(
                    f"`{path}` cannot hold the profile's forecast", hint="end its name in `.npz`"
                )
            tables = {"counts": self.counts_LE.tolist(), "reuse": self.reuse_LB.tolist()}
            path.write_text(json.dumps(meta | tables) + "\n", encoding="utf-8")
        else:
            arrays: dict[str, Any] = {"counts": self.counts_LE, "reuse": self.reuse_LB}
            if self.forecast is not None:
                weights = self.forecast.to_arrays()
                arrays |= {f"{_FORECAST}{name}": array for name, array in weights.items()}
            with path.open("wb") as file:
                np.savez_compressed(file, meta=np.array(json.dumps(meta)), **arrays)

    @classmethod
    def load(cls, path: Path | str) -> Profile:
        """Reads what `save` wrote.

        Raises:
            CheckpointError: missing, damaged, not a profile, or of another version.
        """
        path = Path(path)
        try:
            data = _read_json(path) if _suffix(path) == ".json" else _read_npz(path)
            if data["format"] != FORMAT or data["version"] != VERSION:
                raise CheckpointError(
                    f"`{path}` is `{data['format']}` version {data['version']}, "
                    f"this program reads `{FORMAT}` version {VERSION}"
                )
            profile = cls(
                fingerprint=ModelFingerprint.from_json(data["fingerprint"], where=str(path)),
                counts_LE=np.asarray(data["counts"], dtype=np.int64),
                reuse_LB=np.asarray(data["reuse"], dtype=np.int64),
                num_tokens=int(data["num_tokens"]),
                num_sequences=int(data["num_sequences"]),
                forecast=data.get("forecast") if path.suffix == ".npz" else None,
                replay=PolicyReplay.from_json(data["replay"]) if "replay" in data else None,
                **{key: str(data[key]) for key in ("model", "source", "license")},
            )
        except OSError as error:
            raise CheckpointError(
                f"profile `{path}` cannot be read: {error.strerror or error}",
                hint="give a file that `hotset profile` wrote",
            ) from error
        except (ValueError, KeyError, TypeError, zipfile.BadZipFile, zlib.error) as error:
            raise CheckpointError(f"`{path}` is not a readable profile: {error!r}") from error
        profile._check(path)
        return profile

    def _check(self, path: Path) -> None:
        num_experts = self.fingerprint.num_experts
        shapes = (len(num_experts), max(num_experts)), (len(num_experts), NUM_REUSE_BUCKETS)
        if (self.counts_LE.shape, self.reuse_LB.shape) != shapes:
            raise CheckpointError(
                f"`{path}` has counts {self.counts_LE.shape} and reuse {self.reuse_LB.shape}, "
                f"its model needs {shapes[0]} and {shapes[1]}"
            )
        if min(self.counts_LE.min(), self.reuse_LB.min(), self.num_tokens) < 0:
            raise CheckpointError(f"`{path}` has negative counts")
        if self.forecast is not None and self.forecast.constant_LE.shape != shapes[0]:
            raise CheckpointError(f"`{path}` has a forecast for another shape of model")


@dataclass(frozen=True)
class ProfileDiff:
    """How two profiles of one model differ.

    Attributes:
        slots: fraction of the experts that make a hot set here.
        total_variation_L: 0 for equal shares of use, 1 for disjoint experts.
        shared_hot_L: share of the first hot set that is in the second one too.
        own_coverage: uses of the second text that its own hot set covers.
        cross_coverage: uses of the second text that the first one's hot set covers.
    """

    slots: float
    total_variation_L: NDArray[np.float64]
    shared_hot_L: NDArray[np.float64]
    own_coverage: float
    cross_coverage: float


def _covered(resident_LE: NDArray[np.bool_], counts_LE: NDArray[np.int64]) -> float:
    return float((counts_LE * resident_LE).sum() / max(1, counts_LE.sum()))


def _joined(first: str, second: str) -> str:
    parts = dict.fromkeys([*first.split("; "), *second.split("; ")])
    return "; ".join(filter(None, parts))


def _suffix(path: Path) -> str:
    if path.suffix not in SUFFIXES:
        raise ConfigError(
            f"a profile is kept as {' or '.join(SUFFIXES)}, not `{path.suffix or path.name}`"
        )
    return path.suffix


def _read_json(path: Path) -> dict[str, Any]:
    data = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(data, dict):
        raise ValueError("not an object")
    return data


def _read_npz(path: Path) -> dict[str, Any]:
    with np.load(path, allow_pickle=False) as archive:
        meta = json.loads(str(archive["meta"]))
        arrays = {name: archive[name] for name in archive.files if name != "meta"}
    weights = {
        name.removeprefix(_FORECAST): array
        for name, array in arrays.items()
        if name.startswith(_FORECAST)
    }
    forecast = Forecast.from_arrays(weights, where=str(path)) if weights else None
    return {**meta, **arrays, "forecast": forecast}
