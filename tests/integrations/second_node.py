"""The second of two nodes that a model of vLLM's is spread over: a process beside the first one.

The nodes are of one machine and meet over its loopback address; nothing else is shared, as each
starts its own workers. Run as a process, with what the first node's vLLM is made with.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from vllm_process import free_port


def joined(*, rank: int) -> dict[str, Any]:
    """Options of a node that meets the other one."""
    return {
        **{"nnodes": 2, "node_rank": rank, "master_addr": "127.0.0.1"},
        **{"master_port": free_port(), "distributed_executor_backend": "mp"},
    }


@contextmanager
def started(options: dict[str, Any]) -> Iterator[None]:
    """The node runs within the block.

    Args:
        options: of the first node.
    """
    environ = os.environ | {"VLLM_CPU_OMP_THREADS_BIND": "1"}
    command = [sys.executable, __file__, json.dumps({**options, "node_rank": 1})]
    node = subprocess.Popen(command, env=environ, stdout=sys.stderr, start_new_session=True)
    try:
        yield
    finally:
        node.terminate()
        node.wait(60)
        with suppress(ProcessLookupError):  # a worker that waits for the first node's stays
            os.killpg(node.pid, signal.SIGKILL)


def main(options: dict[str, Any]) -> None:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    config = EngineArgs(**options).create_engine_config(headless=True)
    MultiprocExecutor(config, monitor_workers=False).start_worker_monitor(inline=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
