"""The memory plan itself: every line in bytes, what was asked and what came of it, and problems.

Plain frozen data that is printed, compared with measurements and sent as JSON. How the numbers
come about is in `planner`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from hotset.core.errors import CapacityError
from hotset.core.speed import Speed


@dataclass(frozen=True)
class Line:
    """One line of a plan.

    Attributes:
        name: what takes the memory, e.g. `resident weights`.
        num_bytes: how much.
        note: where the number comes from, one phrase.
        charged: whether it counts against the budget; otherwise it is part of other lines, or a
            limit, and is there to be read.
    """

    name: str
    num_bytes: int
    note: str
    charged: bool = True


@dataclass(frozen=True)
class Side:
    """Lines of one memory, and the budget they share.

    Attributes:
        lines: in the order they are printed.
        budget_bytes: what the charged lines may take together; `None` without a limit of its own.
        budget_note: where the budget comes from.
    """

    lines: tuple[Line, ...]
    budget_bytes: int | None
    budget_note: str

    @property
    def total_bytes(self) -> int:
        """Bytes of all charged lines."""
        return sum(line.num_bytes for line in self.lines if line.charged)

    def __getitem__(self, name: str) -> int:
        """Bytes of the line of that name; `KeyError` when there is none."""
        for line in self.lines:
            if line.name == name:
                return line.num_bytes
        raise KeyError(name)

    def to_dict(self) -> dict[str, Any]:
        return {
            "budget_bytes": self.budget_bytes,
            "budget_note": self.budget_note,
            "total_bytes": self.total_bytes,
            "lines": [
                {
                    "name": line.name,
                    "bytes": line.num_bytes,
                    "charged": line.charged,
                    "note": line.note,
                }
                for line in self.lines
            ],
        }


@dataclass(frozen=True)
class Choice:
    """A number that was asked for, or left to the planner, and what it became.

    Attributes:
        name: `vram`, `ram`, `context`, `prefill chunk`, `slots`, `staging records`.
        unit: `bytes`, `tokens`, `slots`, `records`.
        requested: `None` means auto.
        effective: what the engine will use.
        reason: why it is this number.
    """

    name: str
    unit: str
    requested: int | None
    effective: int
    reason: str


@dataclass(frozen=True)
class Problem:
    """Why a plan cannot be carried out.

    Attributes:
        flag: the setting to change.
        unit: of `need` and `have`: `bytes` or `tokens`.
        need, have: what it would take and what there is.
        message: both in words.
        hint: what to do, with a value that works where there is one.
    """

    flag: str
    unit: str
    need: int
    have: int
    message: str
    hint: str


@dataclass(frozen=True)
class PlannedPool:
    """Slots of one size, one allocation.

    Attributes:
        record_bytes: size of one slot.
        layers: indices of the MoE layers whose records have this size.
        num_slots: slots of these layers together.
    """

    record_bytes: int
    layers: tuple[int, ...]
    num_slots: int


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """One plan: what is allocated where, made before a weight is read.

    Attributes:
        device, host: the lines of device memory and of host memory. On a CPU device the device
            side lies in host memory, where it is charged as one line.
        slots_per_layer: slots of each MoE layer, in the order of the geometry's layers.
        slot_only_per_layer: experts of each MoE layer, the last ones, for which host memory has no
            room: they keep their slots. Empty where there are none.
        pools: the same slots by record size.
        staging_records: records that the prefill ring holds.
        context_tokens: longest prompt and answer together that is admitted.
        kv_tokens: tokens that the KV cache has room for, of all requests together.
        prefill_chunk: most tokens in one forward.
        choices: requested against effective, for each number a user can set or would ask about.
        warnings: what works but will hurt, each with its remedy.
        problems: why it cannot be carried out; none when it fits.
        speed: what it is expected to be worth; `None` where the machine's rates are not known or
            the plan does not fit.
    """

    device: Side
    host: Side
    slots_per_layer: tuple[int, ...]
    pools: tuple[PlannedPool, ...]
    staging_records: int
    context_tokens: int
    kv_tokens: int
    prefill_chunk: int
    choices: tuple[Choice, ...]
    warnings: tuple[str, ...]
    problems: tuple[Problem, ...]
    speed: Speed | None = None
    slot_only_per_layer: tuple[int, ...] = ()

    @property
    def fits(self) -> bool:
        return not self.problems

    @property
    def num_slots(self) -> int:
        return sum(self.slots_per_layer)

    def require_fit(self) -> MemoryPlan:
        """This plan, if it can be carried out.

        Raises:
            CapacityError: it cannot; all problems, each with the setting to change.
        """
        if self.problems:
            raise CapacityError(
                "; ".join(_unique(problem.message for problem in self.problems)),
                hint="; ".join(_unique(problem.hint for problem in self.problems)),
            )
        return self

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON: `fits`, both sides with each line in bytes, choices, problems."""
        return {
            "fits": self.fits,
            "device": self.device.to_dict(),
            "host": self.host.to_dict(),
            "num_slots": self.num_slots,
            "slots_per_layer": list(self.slots_per_layer),
            "slot_only_per_layer": list(self.slot_only_per_layer),
            "pools": [asdict(pool) for pool in self.pools],
            "staging_records": self.staging_records,
            "context_tokens": self.context_tokens,
            "kv_tokens": self.kv_tokens,
            "prefill_chunk": self.prefill_chunk,
            "choices": [asdict(choice) for choice in self.choices],
            "warnings": list(self.warnings),
            "problems": [asdict(problem) for problem in self.problems],
            "speed": None if self.speed is None else self.speed.to_dict(),
        }


def _unique(texts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(texts))
