"""Shared fixtures. Tests that need the optional data folder skip with a reason where it is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session")
def shared() -> Path:
    """The optional folder of models, traces and texts beside the checkout."""
    if not SHARED.is_dir():
        pytest.skip("no ../shared folder beside the checkout")
    return SHARED
