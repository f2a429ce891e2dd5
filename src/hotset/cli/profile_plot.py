"""Draws how many uses the most used experts of a profile cover. Needs matplotlib, an extra."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hotset.core.profile import Profile


def draw_coverage(profile: Profile, path: Path) -> None:
    """Writes the picture: a thin line for each layer, and their mean; even use is the diagonal."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.6), layout="constrained")
    axes = figure.subplots()
    grid = np.linspace(0, 1, 201)
    curves = [
        np.interp(grid, np.arange(experts + 1) / experts, [0, *row[:experts]])
        for row, experts in zip(profile.coverage(), profile.fingerprint.num_experts, strict=True)
    ]
    for curve in curves:
        axes.plot(100 * grid, 100 * curve, color="#2a7ab9", linewidth=0.7, alpha=0.45)
    mean = np.mean(curves, axis=0)
    axes.plot(100 * grid, 100 * mean, color="#1b8a5a", linewidth=2, label="mean of the layers")
    axes.plot([], [], color="#2a7ab9", linewidth=0.7, label="each layer")
    axes.plot([0, 100], [0, 100], color="#8a8a8a", linewidth=1, linestyle="--", label="even use")
    axes.set_title(
        f"{profile.model or 'profile'}: {profile.num_tokens:,} tokens", fontsize=10, loc="left"
    )
    axes.set_xlabel("most used experts, %")
    axes.set_ylabel("uses that they cover, %")
    axes.set_xlim(0, 100)
    axes.set_ylim(0, 101)
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)
