"""What vLLM's server says in the client tests: the tokens of a script, whatever the model thinks.

Loaded by vLLM as a logits processor (`--logits-processors scripted_logits:Script`). The model runs
as ever, experts and all; only which token is taken is decided here. Read from a file, so that
every API's requests follow it and none has to carry it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

# Names the file: a JSON list of ids, the end of the answer included.
VARIABLE = "SCRIPTED_LOGITS"


class Script(AdapterLogitsProcessor):
    """Each request says what the script is when it comes, token by token."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: Any) -> Any:
        ids: list[int] = json.loads(Path(os.environ[VARIABLE]).read_text(encoding="utf-8"))

        def say(said: list[int], logits_V: torch.Tensor) -> torch.Tensor:
            only_V = torch.full_like(logits_V, -torch.inf)
            only_V[ids[min(len(said), len(ids) - 1)]] = 0
            return only_V

        return say
