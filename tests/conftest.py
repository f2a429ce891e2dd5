"""Shared fixtures. Tests that need the optional data folder skip with a reason where it is missing.

Also decides, before anything imports Triton, how its kernels run in this process: on the GPU
where there is one, in Triton's interpreter otherwise. Both kinds cannot be had in one process.
"""

from __future__ import annotations

import os
import signal
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

if torch.cuda.is_available():
    os.environ.pop("TRITON_INTERPRET", None)
else:
    os.environ["TRITON_INTERPRET"] = "1"

# What is started in the background by some shells ignores Ctrl-C, and so would all that it starts.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples in every run, and no limit that a busy machine exceeds: what fails, fails again.
# Not everywhere that some of the tests run it is installed.
if find_spec("hypothesis"):
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "repeated",
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("repeated")

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session")
def shared() -> Path:
    """The optional folder of models, traces and texts beside the checkout."""
    if not SHARED.is_dir():
        pytest.skip("no ../shared folder beside the checkout")
    return SHARED
