"""A machine on paper: its memory, its link, and how fast each of them is by which measurement.

Knows figures and where each came from, as JSON that is versioned and checked; measures nothing
(`bench/probe` does) and plans nothing. A few machines ship with the package, by name. No figure is
made up: one that nobody measured says that it is from a datasheet, or what it was estimated from.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from difflib import get_close_matches
from math import isfinite, log
from pathlib import Path
from typing import Any

from hotset.core.costmodel import Rates
from hotset.core.errors import ConfigError
from hotset.core.hardware import Machine

FORMAT, VERSION = "hotset-machine", 1

UNITS = {
    "link_zero_copy": "GB/s",
    "link_copy": "GB/s",
    "hbm": "GB/s",
    "gemm": "TFLOP/s",
    "expert_gemm": "TFLOP/s",
    "attention": "TFLOP/s",
    "attention_past": "TFLOP/s",
    "cpu_memory": "GB/s",
    "disk": "GB/s",
    "decode_layer": "us",
    "decode_experts": "us",
    "decode_row": "us",
    "prompt_layer": "us",
}
"""Every figure there is, in units of 1e9 bytes or 1e12 operations per second: kernels reading
page-locked host memory in place, the copy engine from host to device, device memory read only,
BF16 matrix products with FP32 sums, those of many experts in one launch (several hundred tokens
each), causal attention of a prompt's tokens to themselves, the same to tokens of earlier chunks,
host memory read by all cores, and files read from disk. The last four are times: what a decoder
layer of a decode step of one row takes beyond its bytes, without experts, what experts add to it,
and what each further row does; what a layer of a prompt takes beyond its bytes and operations."""

LINK_FIGURES = ("link_zero_copy", "link_copy")

ORIGINS = ("measured", "published", "estimated", "datasheet")
"""From best to worst: measured here, measured by others, scaled from another machine's
measurement, and what the vendor promises, which no program reaches."""

# Transfer rate of a PCIe lane in GT/s, by generation; one bit in 65 goes into the encoding from
# generation 3 on (128b/130b), one in five before (8b/10b).
LANE_GTS = {1: 2.5, 2: 5.0, 3: 8.0, 4: 16.0, 5: 32.0, 6: 64.0}

_IN_PACKAGE = Path(__file__).parents[1] / "data" / "machines"
_WRITTEN_BY = "give a file that `hotset doctor -o FILE` wrote"


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One rate of a machine.

    Attributes:
        value: in the unit of `UNITS`.
        origin: one of `ORIGINS`.
        how: what was done to get it, for people.
        date: ISO date of the measurement.
        record_bytes: bytes that were moved in one piece, where the rate depends on that.
    """

    value: float
    origin: str
    how: str
    date: str
    record_bytes: int | None = None

    def __post_init__(self) -> None:
        value, size = self.value, self.record_bytes
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not isfinite(value) or value <= 0:
            raise ConfigError(f"a rate is {value!r}, it must be a number above 0")
        if self.origin not in ORIGINS:
            raise ConfigError(
                f"the origin of a rate is {self.origin!r}", hint=f"one of {', '.join(ORIGINS)}"
            )
        if not isinstance(self.how, str) or not self.how.strip():
            raise ConfigError(f"a rate of {value:g} does not say how it was found (`how`)")
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            raise ConfigError(f"`record_bytes` of a rate is {size!r}, it must be whole bytes")
        try:
            datetime.date.fromisoformat(self.date)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"the date of a rate is {self.date!r}: {error}") from error


@dataclass(frozen=True, kw_only=True)
class MachineDescription:
    """What a plan and a prediction need to know of a machine.

    Attributes:
        name: for people.
        machine: sizes of device and host memory.
        link_generation, link_width: of PCIe, `None` where unknown or where there is no GPU.
        figures: by the keys of `UNITS`; several of one kind differ in `record_bytes`.
        notes: what else a reader should know.
        source: where the figures come from, one phrase; not part of a file.
    """

    name: str
    machine: Machine
    link_generation: int | None = None
    link_width: int | None = None
    figures: Mapping[str, tuple[Figure, ...]] = field(default_factory=dict)
    notes: str = ""
    source: str = field(default="", compare=False)

    @property
    def dates(self) -> tuple[datetime.date, datetime.date]:
        """Of the oldest and the newest figure; today without any."""
        found = (figure.date for points in self.figures.values() for figure in points)
        dates = [datetime.date.fromisoformat(date) for date in found]
        today = datetime.datetime.now(datetime.UTC).date()
        return min(dates, default=today), max(dates, default=today)

    def completed_by(self, other: MachineDescription) -> MachineDescription:
        """This one, with the other's figures of the kinds that it has none of."""
        added = {k: points for k, points in other.figures.items() if k not in self.figures}
        names = ", ".join(f"`{kind}`" for kind in added)
        return replace(
            self,
            figures={**self.figures, **added},
            source=f"{self.source}; {names}: {other.source}" if added else self.source,
        )

    def figure(self, kind: str, *, record_bytes: int | None = None) -> Figure | None:
        """The figure of a kind that was taken at the nearest record size; `None` without one.

        Args:
            kind: a key of `UNITS`.
            record_bytes: what will be moved in one piece; `None` for the fastest.
        """
        assert kind in UNITS, kind
        known = self.figures.get(kind, ())
        if not known:
            return None
        if record_bytes is None:
            return max(known, key=lambda figure: figure.value)
        # Nearest in ratio: rates rise with the logarithm of the size until they level off.
        return min(known, key=lambda f: abs(log((f.record_bytes or record_bytes) / record_bytes)))

    def rates(self, *, record_bytes: int | None = None) -> Rates:
        """The rates that `core.costmodel` computes with.

        Args:
            record_bytes: of one expert; zero-copy reads are taken at this size. The copy engine
                moves neighbouring records in one piece, so its fastest figure counts.

        Raises:
            ConfigError: a figure is missing that a prediction needs.
        """
        zero_copy = self._needed("link_zero_copy", record_bytes)
        return Rates(
            link_gbps=zero_copy.value,
            copy_gbps=self._needed("link_copy", None).value,
            hbm_gbps=self._needed("hbm", None).value,
            gemm_tflops=self._value("gemm"),
            expert_tflops=self._value("expert_gemm"),
            attention_tflops=self._value("attention"),
            attention_past_tflops=self._value("attention_past"),
            cpu_gbps=self._value("cpu_memory"),
            disk_gbps=self._value("disk"),
            layer_us=self._value("decode_layer") or 0.0,
            experts_us=self._value("decode_experts") or 0.0,
            row_us=self._value("decode_row") or 0.0,
            prompt_layer_us=self._value("prompt_layer") or 0.0,
        )

    def _value(self, kind: str) -> float | None:
        figure = self.figure(kind)
        return None if figure is None else figure.value

    def _needed(self, kind: str, record_bytes: int | None) -> Figure:
        figure = self.figure(kind, record_bytes=record_bytes)
        if figure is None:
            raise ConfigError(
                f"machine `{self.name}` has no figure `{kind}`, and speed is predicted from it",
                hint="`hotset doctor -o FILE` on that machine writes one with all",
            )
        return figure

    def caveats(self) -> list[str]:
        """A sentence for each kind of figure that was not measured on this machine."""
        found = []
        for kind, figures in self.figures.items():
            worst = max(figures, key=lambda figure: ORIGINS.index(figure.origin))
            if worst.origin != "measured":
                value = f"{worst.value:g} {UNITS[kind]}"
                found.append(f"`{kind}` of {value} is {worst.origin}: {worst.how}")
        return found

    def to_dict(self) -> dict[str, Any]:
        """As `save` writes it; fields that say nothing are left out."""
        figures = {
            kind: [{k: v for k, v in asdict(f).items() if v is not None} for f in points]
            for kind, points in self.figures.items()
        }
        return {
            "format": FORMAT,
            "version": VERSION,
            "name": self.name,
            "notes": self.notes,
            "machine": self.machine.to_dict(),
            "link_generation": self.link_generation,
            "link_width": self.link_width,
            "figures": figures,
        }

    @classmethod
    def from_dict(cls, data: Any, *, where: str) -> MachineDescription:
        """The inverse of `to_dict`.

        Args:
            where: names the file in the error.

        Raises:
            ConfigError: not a description, of another version, or a value is wrong.
        """
        if not isinstance(data, Mapping) or data.get("format") != FORMAT:
            raise ConfigError(
                f"`{where}` does not describe a machine: its `format` is not `{FORMAT}`",
                hint="`hotset doctor -o FILE` writes one",
            )
        if data.get("version") != VERSION:
            raise ConfigError(
                f"`{where}` is version {data.get('version')!r}, this program reads {VERSION}"
            )
        own = {f.name for f in fields(cls)} - {"source"}
        if missing := sorted({"name", "machine", "figures"} - data.keys()):
            raise ConfigError(f"`{where}` lacks {', '.join(f'`{key}`' for key in missing)}")
        if unknown := sorted(data.keys() - own - {"format", "version"}):
            raise ConfigError(f"`{where}` has unknown {', '.join(f'`{key}`' for key in unknown)}")
        try:
            if not isinstance(data["machine"], Mapping):
                raise ConfigError("`machine` is not an object")
            return cls(
                name=_text(data, "name"),
                notes=_text(data, "notes"),
                machine=Machine.from_dict(data["machine"]),
                link_generation=_link_number(data, "link_generation", tuple(LANE_GTS)),
                link_width=_link_number(data, "link_width", (1, 2, 4, 8, 16, 32)),
                figures=dict(_figures(data["figures"])),
            )
        except ConfigError as error:
            raise ConfigError(f"`{where}`: {error.message}", hint=error.hint) from error

    @classmethod
    def load(cls, name: str | Path) -> MachineDescription:
        """Reads a description.

        Args:
            name: a JSON file, or one of `shipped_machines`.

        Raises:
            ConfigError: there is neither, or the file is no description.
        """
        shipped = _IN_PACKAGE / f"{name}.json"
        is_name = str(name) in shipped_machines()
        path = shipped if is_name else Path(name)
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            close = get_close_matches(str(name), shipped_machines(), n=1)
            names = f"give a file, or one of {', '.join(shipped_machines())}"
            hint = f"did you mean `{close[0]}`?" if close else names
            raise ConfigError(f"there is no machine `{name}`", hint=hint) from error
        except OSError as error:
            raise ConfigError(
                f"machine file `{path}` cannot be read: {error.strerror}", hint=_WRITTEN_BY
            ) from error
        except ValueError as error:
            raise ConfigError(
                f"machine file `{path}` is not JSON: {error}", hint=_WRITTEN_BY
            ) from error
        found = cls.from_dict(data, where=str(name))
        first, last = found.dates
        days = f"{first}" if first == last else f"{first} to {last}"
        where = f"`{name}` of the package" if is_name else f"`{path}`"
        return replace(found, source=f"{where}, of {days}")

    def save(self, path: Path) -> None:
        """Writes a JSON file.

        Raises:
            ConfigError: it cannot be written.
        """
        try:
            path.write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"`{path}` cannot be written: {error.strerror}") from error


def shipped_machines() -> list[str]:
    """Names of the machines in the package."""
    return sorted(path.stem for path in _IN_PACKAGE.glob("*.json"))


def pcie_gbps(generation: int, width: int) -> float:
    """What a PCIe link carries in one direction, GB/s of payload and packet headers together."""
    encoding = 128 / 130 if generation >= 3 else 8 / 10
    return LANE_GTS[generation] * width * encoding / 8


def _text(data: Mapping[str, Any], key: str) -> str:
    value = data.get(key, "")
    if not isinstance(value, str):
        raise ConfigError(f"`{key}` is {value!r}, it must be a text")
    return value


def _link_number(data: Mapping[str, Any], key: str, known: tuple[int, ...]) -> int | None:
    value = data.get(key)
    if value is not None and (isinstance(value, bool) or value not in known):
        words = ", ".join(map(str, known))
        raise ConfigError(f"`{key}` is {value!r}, it must be one of {words}, or null")
    return value


def _figures(data: Any) -> Iterator[tuple[str, tuple[Figure, ...]]]:
    if not isinstance(data, Mapping):
        raise ConfigError("`figures` is not an object")
    known = {f.name for f in fields(Figure)}
    for kind, points in data.items():
        if kind not in UNITS:
            raise ConfigError(f"unknown figure `{kind}`", hint=f"one of {', '.join(UNITS)}")
        if not isinstance(points, list) or not points:
            raise ConfigError(f"figure `{kind}` is not a list of rates")
        for point in points:
            if not isinstance(point, Mapping) or not known - {"record_bytes"} <= point.keys():
                raise ConfigError(f"a rate of `{kind}` lacks one of {', '.join(sorted(known))}")
            if unknown := sorted(point.keys() - known):
                raise ConfigError(f"a rate of `{kind}` has unknown `{unknown[0]}`")
        try:
            yield kind, tuple(Figure(**point) for point in points)
        except ConfigError as error:
            raise ConfigError(f"`{kind}`: {error.message}", hint=error.hint) from error
