"""hotset inside vLLM: the entry point of `vllm.general_plugins`.

vLLM only logs a plugin whose module does not import, and goes on without it. So nothing is
imported here; what fails in `register` ends the start.
"""

from __future__ import annotations


def register() -> None:
    """Takes the place of vLLM's layer of routed experts, in this process.

    A model without `"hotset"` in `--additional-config` runs as it would without the plugin.
    """
    from hotset.integrations.vllm.layer import take_place

    take_place()
