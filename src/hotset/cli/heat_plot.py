"""Draws use and residency of all experts side by side. Needs matplotlib, an extra."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hotset.core.heat import HeatMap


def draw_heat(heat: HeatMap, path: Path) -> None:
    """Writes the picture: layers down, experts across, in each layer the most used ones first."""
    from matplotlib.figure import Figure

    order = np.argsort(-np.nan_to_num(heat.use_LE, nan=-1.0), axis=1, kind="stable")
    use = np.take_along_axis(heat.use_LE, order, axis=1)
    resident = np.take_along_axis(heat.resident_LE, order, axis=1)
    num_layers = len(use)
    figure = Figure(figsize=(10, 1.6 + 0.09 * num_layers), layout="constrained")
    figure.suptitle(heat.title, fontsize=10)
    parts = (
        ("share of the layer's uses, %", 100 * use, None),
        ("share of the time with a slot, %", 100 * resident, 100.0),
    )
    for axes, (name, values, top) in zip(figure.subplots(1, 2), parts, strict=True):
        image = axes.imshow(values, aspect="auto", cmap="magma", vmin=0.0, vmax=top)
        axes.set_title(name, fontsize=9, loc="left")
        axes.set_xlabel("experts, most used first", fontsize=9)
        axes.set_ylabel("MoE layer", fontsize=9)
        figure.colorbar(image, ax=axes, shrink=0.8)
    figure.savefig(path, dpi=150)
