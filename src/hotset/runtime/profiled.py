"""A profile in an engine: refused for another model, then watched for drift."""

from __future__ import annotations

import numpy as np
from torch import nn

from hotset.core.config import EngineConfig
from hotset.core.drift import Drift
from hotset.core.geometry import ModelGeometry
from hotset.core.plan import MemoryPlan
from hotset.core.profile import Profile
from hotset.models.fingerprint import model_fingerprint, shape_fingerprint


def load_profile(geometry: ModelGeometry, config: EngineConfig) -> Profile | None:
    """The profile that a config names, `None` where it names none.

    Raises:
        CheckpointError: the file is missing or damaged.
        ConfigError: it is of a model of another shape; its routers are compared later, when there
            are weights.
    """
    if config.profile is None:
        return None
    profile = Profile.load(config.profile)
    profile.check_fits(shape_fingerprint(geometry), name=f"profile `{config.profile}`")
    return profile


def require_same_routers(
    profile: Profile | None, geometry: ModelGeometry, model: nn.Module, config: EngineConfig
) -> None:
    """Refuses a profile of a model of this shape that routes otherwise.

    Args:
        model: with its resident weights.

    Raises:
        ConfigError: the router weights differ.
    """
    if profile is not None:
        fingerprint = model_fingerprint(geometry, model)
        profile.check_fits(fingerprint, name=f"profile `{config.profile}`")


def make_drift(profile: Profile | None, plan: MemoryPlan) -> Drift | None:
    """What watches the steps of an engine with a profile and slots."""
    if profile is None or plan.num_slots == 0:
        return None
    return Drift(profile, np.array(plan.slots_per_layer))
