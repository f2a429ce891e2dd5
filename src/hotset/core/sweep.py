"""The same plan at many lengths of context: what a longer cache costs in slots and speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hotset.core.charges import Workspace
from hotset.core.fastest import workloads
from hotset.core.geometry import ModelGeometry
from hotset.core.hardware import Machine
from hotset.core.plan import MemoryPlan
from hotset.core.planner import make_plan
from hotset.core.sizing import CONTEXT_FLOOR_TOKENS, CONTEXT_UNSTATED_TOKENS, PlanRequest
from hotset.core.speed import SpeedModel


def sweep_contexts(
    geometry: ModelGeometry,
    machine: Machine,
    request: PlanRequest,
    *,
    workspaces: Sequence[Workspace] = (),
    speed: SpeedModel | None = None,
) -> list[MemoryPlan]:
    """One plan for each context, shortest first; those that do not fit too.

    Args:
        request: its context is left out of account, all else is kept. All are made for the same
            requests, so that their speeds compare.
    """
    request = replace(request, workload=workloads(request))
    return [
        make_plan(
            geometry,
            machine,
            replace(request, context_tokens=tokens),
            workspaces=workspaces,
            speed=speed,
        )
        for tokens in swept_contexts(geometry.max_context or CONTEXT_UNSTATED_TOKENS)
    ]


def swept_contexts(longest: int) -> list[int]:
    """2,048 tokens and every doubling below the model's longest context, and that."""
    contexts, tokens = [], CONTEXT_FLOOR_TOKENS
    while tokens < longest:
        contexts.append(tokens)
        tokens *= 2
    return [*contexts, longest]
