"""The embedded model in FP32, opened once: by hotset and by stock transformers."""

from __future__ import annotations

import pytest

from families import Pocket, open_pocket


@pytest.fixture(scope="session")
def pocket() -> Pocket:
    return open_pocket()
