"""Makes one memory plan from a model's geometry, a machine and a request. Pure, and the only place.

Everything that must be there is charged first, the worst prefill chunk and the longest context
included; slots get what is left. What a user set is in the plan as it was set, or the plan does
not fit; what was left to auto is stated with its reason. A plan is always returned, and says in
`problems` what is wrong with it. Costs are in `charges`, the auto rules in `sizing`, what replaces
them where the machine's rates are known in `fastest`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hotset.core.charges import Charges, Sizes, Workspace
from hotset.core.fastest import context_price, explained, fastest_sizes, predict
from hotset.core.geometry import ModelGeometry
from hotset.core.hardware import HostMemory, Machine
from hotset.core.plan import Choice, Line, MemoryPlan, Side
from hotset.core.refusal import Refusal
from hotset.core.sizing import (
    Budgets,
    PlanRequest,
    choose_sizes,
    least_sizes,
    with_host_copies,
)
from hotset.core.speed import SpeedModel
from hotset.core.units import format_bytes

__all__ = ["PlanRequest", "Workspace", "make_plan"]


def make_plan(
    geometry: ModelGeometry,
    machine: Machine,
    request: PlanRequest,
    *,
    workspaces: Sequence[Workspace] = (),
    speed: SpeedModel | None = None,
) -> MemoryPlan:
    """Plans device and host memory.

    Args:
        geometry: the model, with at least one MoE layer.
        machine: what there is.
        request: what was asked; `None` fields are chosen here.
        workspaces: what backends allocate on the device beyond what the planner knows by itself
            (the stock modules and the expert kernels).
        speed: of this model on this machine. With it staging ring, prefill chunk and the slots
            beside them are what is predicted to be fastest; without it they go by `sizing`.

    Returns:
        A plan; `require_fit` raises where it cannot be carried out.
    """
    kernels = request.kernels or ("triton" if machine.device == "cuda" else "reference")
    charges = Charges(
        geometry,
        device=machine.device,
        kernels=kernels,
        num_rows=request.max_batch,
        kv_tokens=request.kv_tokens,
        workspaces=workspaces,
    )
    budgets = Budgets.of(machine, request)
    by_rules = sizes = choose_sizes(charges, request, budgets)
    if speed is not None:
        sizes = fastest_sizes(charges, request, budgets, speed, by_rules)
    sizes = with_host_copies(charges, budgets, sizes)
    problems = Refusal(charges, machine, request, budgets).problems()
    expected = None if speed is None or problems else predict(charges, request, speed, sizes)
    choices = _choices(charges, sizes, budgets, request, machine)
    if speed is not None and expected is not None:
        price = context_price(charges, budgets, request, speed, sizes)
        choices = explained(choices, expected, request, sizes=sizes, by_rules=by_rules, price=price)
    return MemoryPlan(
        device=_device_side(charges, sizes, budgets, request, machine),
        host=_host_side(charges, sizes, budgets, request, machine.host),
        slots_per_layer=charges.split.per_layer(sizes.num_slots),
        slot_only_per_layer=charges.split.per_layer(sizes.num_slot_only)
        if sizes.num_slot_only
        else (),
        pools=charges.split.pools(sizes.num_slots),
        staging_records=sizes.staging_records,
        context_tokens=sizes.context_tokens,
        kv_tokens=charges.kv_tokens(sizes.context_tokens),
        prefill_chunk=sizes.prefill_chunk,
        choices=tuple(choices),
        warnings=() if problems else tuple(_warnings(charges, sizes, machine)),
        problems=problems,
        speed=expected,
    )


def _device_side(
    charges: Charges, sizes: Sizes, budgets: Budgets, request: PlanRequest, machine: Machine
) -> Side:
    return Side(charges.device_lines(sizes), budgets.device_bytes, _vram_reason(request, machine))


def _host_side(
    charges: Charges, sizes: Sizes, budgets: Budgets, request: PlanRequest, host: HostMemory
) -> Side:
    lines = charges.host_lines(sizes)
    arena = charges.arena_bytes(sizes)
    resident = 0 if charges.on_cuda else charges.geometry.resident_bytes
    facts = [
        Line(
            "page-locked",
            arena if charges.on_cuda else 0,
            "of which registered with the driver",
            charged=False,
        ),
        Line(
            "loader peak",
            arena + resident + charges.loading_bytes,
            "most while loading" + ("" if charges.on_cuda else ", resident weights included"),
            charged=False,
        ),
    ]
    if host.cgroup_limit_bytes is not None:
        facts.append(
            Line("container limit", host.cgroup_limit_bytes, "of this process", charged=False)
        )
    if host.memlock_limit_bytes is not None:
        facts.append(Line("memlock limit", host.memlock_limit_bytes, "`ulimit -l`", charged=False))
    return Side((*lines, *facts), budgets.host_bytes, _ram_reason(request, host))


def _choices(
    charges: Charges, sizes: Sizes, budgets: Budgets, request: PlanRequest, machine: Machine
) -> Iterator[Choice]:
    used = charges.device_bytes(sizes)
    vram = used if budgets.device_bytes is None else budgets.device_bytes
    yield Choice("vram", "bytes", request.vram_bytes, vram, _vram_reason(request, machine))
    ram_reason = _ram_reason(request, machine.host)
    yield Choice("ram", "bytes", request.ram_bytes, budgets.host_bytes, ram_reason)
    yield Choice(
        "context",
        "tokens",
        request.context_tokens,
        sizes.context_tokens,
        _context_reason(charges, sizes, request),
    )
    if charges.num_rows > 1:
        yield Choice(
            "KV tokens",
            "tokens",
            request.kv_tokens,
            charges.kv_tokens(sizes.context_tokens),
            f"of {charges.num_rows} rows together"
            + (", as set" if request.kv_tokens is not None else ""),
        )
    yield Choice(
        "prefill chunk",
        "tokens",
        request.prefill_chunk,
        sizes.prefill_chunk,
        "as set" if request.prefill_chunk is not None else "by what its workspaces take",
    )
    slots = _slots_reason(charges, sizes, budgets)
    yield Choice("slots", "slots", None, sizes.num_slots, slots)
    if sizes.num_slot_only:
        copies = charges.split.most - sizes.num_slot_only
        why = f"host memory is short: {sizes.num_slot_only} keep their slots"
        yield Choice("host copies", "records", None, copies, why)
    ring = _ring_reason(charges, sizes, request)
    yield Choice("staging records", "records", None, sizes.staging_records, ring)


def _vram_reason(request: PlanRequest, machine: Machine) -> str:
    if request.vram_bytes is not None:
        return "as set"
    if machine.device == "cpu":
        return "no limit of its own on a CPU, and no slots"
    return "what is free, and the CUDA context"


def _ram_reason(request: PlanRequest, host: HostMemory) -> str:
    if request.ram_bytes is not None:
        return "as set"
    if host.cgroup_limit_bytes is None:
        return "what is available"
    return "what is available, no more than the container leaves"


def _context_reason(charges: Charges, sizes: Sizes, request: PlanRequest) -> str:
    if request.context_tokens is not None:
        return "as set"
    if sizes.context_tokens == charges.geometry.max_context:
        return "the model's longest"
    if sizes.context_tokens == least_sizes(charges, request).context_tokens:
        return "the least that auto gives"
    return "its cache takes a share beside the slots"


def _slots_reason(charges: Charges, sizes: Sizes, budgets: Budgets) -> str:
    geometry = charges.geometry
    dense = geometry.num_layers - len(geometry.layers)
    where = f"{len(geometry.layers)} MoE layers"
    if dense > 0:
        where += f", {dense} of {geometry.num_layers} layers have no experts"
    if budgets.device_bytes is None:
        return f"none on a CPU without `--vram` ({where})"
    if sizes.num_slots == charges.split.most:
        return f"one for every expert ({where})"
    return f"what is left for {charges.split.most} experts ({where})"


def _ring_reason(charges: Charges, sizes: Sizes, request: PlanRequest) -> str:
    if request.staging == "in-place":
        return "as set: experts are read where they are"
    if not charges.on_cuda and request.staging is None:
        return "a CPU reads experts where they are"
    if sizes.num_slots == charges.split.most:
        return "no expert is missing"
    return "two groups, one in flight while the other is computed"


def _warnings(charges: Charges, sizes: Sizes, machine: Machine) -> Iterator[str]:
    if not charges.on_cuda:
        return
    pinned, memlock = charges.arena_bytes(sizes), machine.host.memlock_limit_bytes
    if memlock is not None and memlock < pinned:
        yield (
            f"{format_bytes(pinned)} of host memory will be page-locked, the memlock limit is "
            f"{format_bytes(memlock)}; native Linux does not hold CUDA to it, some containers and "
            "WSL2 do: should it fail, use `ulimit -l unlimited`, or with docker "
            "`--ulimit memlock=-1`"
        )
    if sizes.num_slots == 0:
        yield (
            "no expert has a slot, every one is read over the link: a larger `--vram` or a "
            "smaller `--context` makes room"
        )
