"""Which rates are known of this machine: measured here and kept (`bench/probe`), or the package's.

Reads files; measures nothing and plans nothing. A description says in `source` which rates it has
and how old they are. Of a machine without a GPU nothing is known: there is no link to predict.
"""

from __future__ import annotations

import datetime
import hashlib
import os
from dataclasses import replace
from pathlib import Path

import torch

from hotset.core.config import EngineConfig
from hotset.core.errors import ConfigError
from hotset.core.geometry import ModelGeometry
from hotset.core.hardware import Machine
from hotset.core.machine import MachineDescription, shipped_machines
from hotset.core.staging import StagingRule

KEPT_DAYS = 30


def described(machine: Machine, *, folder: Path | None = None) -> MachineDescription | None:
    """Sizes as they are now, with the rates measured here where they are recent enough, else those
    of a machine with the same GPU in the package.

    Args:
        folder: where measured machines are kept; default `kept_folder`.

    Returns:
        `None` where neither is known. Figures that the probe does not take are the package's.
    """
    if machine.device != "cuda":
        return None
    shipped = map(MachineDescription.load, shipped_machines())
    alike = next((d for d in shipped if d.machine.device_name == machine.device_name), None)
    kept = kept_rates(machine, folder=folder)
    if kept is None:
        return None if alike is None else replace(alike, machine=machine)
    return replace(kept if alike is None else kept.completed_by(alike), machine=machine)


def staging_rule(
    geometry: ModelGeometry, config: EngineConfig, known: MachineDescription | None
) -> StagingRule:
    """Weighs reads in place against copies by what is known of the machine, at this model's record
    size; by an H200's rates where nothing is known."""
    if known is None:
        return StagingRule(config.staging)
    rates = known.rates(record_bytes=max(layer.expert.record_bytes for layer in geometry.layers))
    return StagingRule.at(config.staging, rates)


def kept_folder() -> Path:
    """Where measured machines are kept."""
    return Path.home() / ".cache" / "hotset"


def kept_file(machine: Machine, folder: Path | None = None) -> Path:
    """Where the rates of this hardware under this torch are kept; the same whatever is free."""
    parts = (machine.device, machine.device_name, machine.vram_total_bytes)
    host = (machine.host.total_bytes, machine.num_cpu_cores, os.uname().nodename)
    key = hashlib.sha256(repr((*parts, *host, torch.__version__)).encode()).hexdigest()[:16]
    return (folder or kept_folder()) / f"machine-{key}.json"


def kept_rates(machine: Machine, *, folder: Path | None = None) -> MachineDescription | None:
    """What was measured; `None` without it, when a figure is too old, or of another version."""
    try:
        known = MachineDescription.load(kept_file(machine, folder))
    except ConfigError:
        return None  # never measured, not to be read, or of an older program: no reason to fail
    except RuntimeError:
        return None  # whoever runs this has no home
    oldest, _ = known.dates
    days = (datetime.datetime.now(datetime.UTC).date() - oldest).days
    if days > KEPT_DAYS:
        return None
    age = "today" if days < 1 else "yesterday" if days == 1 else f"{days} days ago"
    return replace(known, source=f"measured on this machine {age} (`hotset doctor`)")
