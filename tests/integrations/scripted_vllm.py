"""vLLM's server over a tiny model with hotset's experts, saying what a test wants.

Has what the tests of hotset's own server ask of theirs (`tests/server/clients.py`), so that they
run against vLLM's as they are: `say`, the clients, the text side, and whether anything still runs.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import openai
from clients import END_ID, NAME, TEMPLATE
from vllm_process import free_port, listening

from hotset.runtime.text import Text
from tiny import save_tiny, tiny_config
from vocabulary import BYTE_VOCAB, byte_ids, byte_tokenizer

CONTEXT_TOKENS = 4096


class InVllm:
    """A running server.

    Attributes:
        url: of the server.
        text: templates and tokens of its model.
        thinks: vLLM's reasoning parsers hold an answer without marks for reasoning, or ask for
            marks of their own; so the server is started without one.
        end_tokens: vLLM counts the end of an answer as one.
    """

    thinks = False
    end_tokens = 1

    def __init__(self, url: str, text: Text, script: Path) -> None:
        self.url, self.text, self._script = url, text, script

    @property
    def served(self) -> InVllm:
        """What it serves has a text side, as hotset's has."""
        return self

    def say(self, text: str | bytes) -> None:
        """From now on every answer is this."""
        self._script.write_text(json.dumps([*byte_ids(text), END_ID]), encoding="utf-8")

    @property
    def is_idle(self) -> bool:
        """Whether no request runs or waits."""
        lines = httpx2.get(f"{self.url}/metrics").text.splitlines()
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
        counts = [float(line.split()[-1]) for line in lines if line.startswith(names)]
        assert counts, "the counts have another name"
        return not any(counts)

    def ended(self) -> None:
        """Waits until every request has ended."""
        deadline = time.monotonic() + 10
        while not self.is_idle:
            assert time.monotonic() < deadline, "a request has no end"
            time.sleep(0.05)

    def openai(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60, **options
        )

    def anthropic(self, **options: Any) -> anthropic.Anthropic:
        return anthropic.Anthropic(
            base_url=self.url, api_key="none", max_retries=0, timeout=60, **options
        )


def save_model(folder: Path) -> Text:
    """A random model whose tokens are bytes, with the template of the server's tests."""
    fields = tiny_config("qwen3_moe").to_dict() | {
        **{"vocab_size": BYTE_VOCAB, "max_position_embeddings": CONTEXT_TOKENS},
        **{"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32},
        **{"head_dim": 32, "eos_token_id": END_ID, "bos_token_id": 0},
    }
    config = type(tiny_config("qwen3_moe"))(**fields)
    save_tiny("qwen3_moe", folder, config=config, max_shard_size="10MB")
    byte_tokenizer(template=TEMPLATE).save_pretrained(folder)
    return Text(folder, config)


@contextmanager
def serving(folder: Path) -> Iterator[InVllm]:
    """A server, a process as a user starts it."""
    text, script, port = save_model(folder / "model"), folder / "script", free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(folder / "model"), "--served-model-name", NAME, "alias"]
    command += ["--port", str(port), "--dtype", "float32", "--enforce-eager"]
    command += ["--max-model-len", str(CONTEXT_TOKENS), "--max-num-seqs", "16"]
    command += ["--additional-config", json.dumps({"hotset": {"vram": "200KiB", "poison": True}})]
    command += ["--worker-extension-cls", "hotset.integrations.vllm.worker.HotsetWorker"]
    command += ["--logits-processors", "scripted_logits:Script"]
    command += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    environ = {"SCRIPTED_LOGITS": str(script), "PYTHONPATH": path, "VLLM_SERVER_DEV_MODE": "1"}
    with listening(command, port=port, log=folder / "log", environ=environ) as url:
        yield InVllm(url, text, script)
