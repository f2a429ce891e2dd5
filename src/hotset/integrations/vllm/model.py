"""The experts of one model in one of vLLM's workers: layers collected, loaded, then run.

vLLM builds layers one by one, loads their weights and only then says that it has: so memory comes
layer by layer, and store, policy and runners when the last layer is loaded. Routed ids, slots and
steps are hotset's own objects; of vLLM this file knows nothing.

vLLM has no place of its own for what comes before and behind a forward: the first layer's call
begins a step, and the last layer's sends what it routed to the host. That is taken in when the
step behind it is queued, so that the host never waits for a device with nothing to do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
import torch

from hotset.checkpoint.finite import is_finite
from hotset.core.errors import CheckpointError, explain_out_of_memory
from hotset.core.fingerprint import ModelFingerprint
from hotset.core.geometry import MoELayer
from hotset.core.placement import Placement
from hotset.core.profile import Profile
from hotset.core.slot_pools import IntArray
from hotset.core.staging import StagingRule
from hotset.core.units import format_bytes
from hotset.experts.arena import make_bank
from hotset.experts.store import ExpertStore
from hotset.integrations.vllm.config import PluginConfig
from hotset.integrations.vllm.replays import LayerReplays
from hotset.integrations.vllm.sizes import sizes_within
from hotset.kernels.dispatch import select_kernels
from hotset.kernels.toolchain import check_triton_toolchain
from hotset.runtime.expert_stream import ExpertStream
from hotset.runtime.fills import FillPlanner
from hotset.runtime.moe import MATCH_TOKENS, MoERunner
from hotset.runtime.policies import initial_residents, policy_for
from hotset.runtime.routing import RoutingLog, Traffic
from hotset.runtime.steps import Steps
from hotset.runtime.tee import Tee


class ModelExperts:
    """The routed experts of a model: arena, slots, policy, and a runner for each layer.

    Args:
        config: the user's choices.
        device: that the model runs on.

    Raises:
        CheckpointError: the profile is missing or damaged.

    Attributes:
        layers: added so far, in the order in which a forward calls them.
        banks: their records.
        store, policy, steps, stream, staging: once every layer is loaded; see `MoERunner`.
    """

    def __init__(self, config: PluginConfig, device: torch.device) -> None:
        self.config, self.device = config, device
        self.kernels = select_kernels(device, config.kernels)
        if self.kernels.name == "triton" and device.type == "cuda":
            check_triton_toolchain()
        self._profile = None if config.profile is None else Profile.load(config.profile)
        self.layers: list[MoELayer] = []
        self.banks: list[torch.Tensor] = []
        self._num_loaded = 0
        self._runners: list[MoERunner] = []
        self._replays: LayerReplays | None = None
        self._tokens_in_step: int | None = None
        self._layers_in_step = 0
        # Steps that the device runs: their tokens, and what waits for their routed ids.
        self._in_flight: deque[tuple[int, Callable[[], IntArray]]] = deque()

    def add(self, layer: MoELayer) -> int:
        """Makes room for a layer's records, `banks[index]`; returns the index."""
        self.layers.append(layer)
        self.banks.append(make_bank(layer.num_experts, layer.expert.record_bytes))
        return len(self.layers) - 1

    def loaded(self, index: int) -> bool:
        """A layer's records are all written; with the last one the model is ready to run.

        Returns:
            Whether it was the last one.

        Raises:
            CheckpointError: a weight is not finite.
            CapacityError: slots do not fit the device.
            ConfigError: the profile is of a model of another shape.
        """
        self._check_finite(index)
        self._num_loaded += 1
        if self._num_loaded == len(self.layers):
            self._start()
            return True
        return False

    def _check_finite(self, index: int) -> None:
        layer, bank = self.layers[index], self.banks[index]
        for expert in range(layer.num_experts):
            record = bank[expert * layer.expert.record_bytes :][: layer.expert.record_bytes]
            for field in layer.expert.layout.fields:
                values = record[field.offset : field.offset + field.nbytes]
                if not is_finite(values.view(getattr(torch, field.dtype))):
                    raise CheckpointError(
                        f"`{field.name}` of expert {expert} in `{layer.name}` holds NaN or Inf",
                        hint="the checkpoint is damaged, or its values do not fit `--dtype`",
                    )

    def _start(self) -> None:
        self._check_profile()
        use_ring = (self.config.staging or self._default_staging) == "ring"
        sizes = sizes_within(self.layers, self.config.vram_bytes, use_ring=use_ring)
        with explain_out_of_memory(
            f"expert slots and staging buffers ({format_bytes(self.config.vram_bytes)})",
            hint='set a smaller `"vram"`',
        ):
            self.store = ExpertStore(
                self.layers,
                sizes.pools,
                device=self.device,
                staging_records=sizes.staging_records,
                poison=self.config.poison,
                banks=self.banks,
            )
        self.policy = policy_for(
            [layer.num_experts for layer in self.layers],
            num_slots=sizes.pools.num_slots,
            name=self.config.policy,
            half_life=self.config.half_life,
            profile=self._profile,
        )
        resident_LE = initial_residents(self.policy, sizes.pools, np.array(sizes.slots_L))
        with torch.inference_mode():
            self.store.place(Placement.from_residents(sizes.pools, resident_LE))
            self._make_runners()

    def _check_profile(self) -> None:
        """Routers are vLLM's, under names of its own: of the model, only the shape is compared."""
        if self._profile is None:
            return
        shape = ModelFingerprint(
            architecture="",
            num_experts=tuple(layer.num_experts for layer in self.layers),
            top_k=tuple(layer.top_k for layer in self.layers),
        )
        self._profile.check_fits(shape, name=f"profile `{self.config.profile}`")

    @property
    def _default_staging(self) -> str:
        return "ring" if self.device.type == "cuda" else "in-place"

    def _make_runners(self) -> None:
        store, policy = self.store, self.policy
        log = RoutingLog(store.layers)
        fills = FillPlanner(policy, store) if policy.moves else None
        tee = Tee(policy, store) if policy.moves else None
        self.stream = ExpertStream(store) if store.ring.nbytes else None
        self.staging = StagingRule(self.config.staging)
        self.steps = Steps(store, log, fills)
        if self.device.type == "cuda":
            self._replays = LayerReplays(log)
        self._runners = [
            MoERunner(
                index,
                None,
                store=store,
                kernels=self.kernels,
                log=log,
                stream=self.stream,
                staging=self.staging,
                fills=fills.layers[index] if fills else None,
                tee=tee,
            )
            for index in range(len(store.layers))
        ]

    def run(
        self,
        index: int,
        x_TH: torch.Tensor,
        ids_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        *,
        is_repeated: bool = False,
    ) -> torch.Tensor:
        """A layer's weighted sum of routed experts, [T, H] in the dtype of `x_TH`.

        With tensor parallelism each rank's part of it, to be added up by vLLM.

        Args:
            index: as `add` gave it; layer 0 begins a step.
            ids_TK: kept until the step is over, so the caller's own copy.
            is_repeated: steps of this many tokens will come again and again, so that a graph of
                the layer's launches is worth its memory. The output may then lie where the next
                call of any layer writes: whoever needs it longer takes a copy.
        """
        if index == 0:
            self._begin(len(x_TH))
        runner = self._runners[index]
        if is_repeated and self._replays is not None and len(x_TH) <= MATCH_TOKENS:
            out_TH = self._replays.run(index, runner, x_TH, ids_TK, weights_TK)
        else:
            out_TH = runner(x_TH, ids_TK, weights_TK)
        self._layers_in_step += 1
        if self._layers_in_step == len(self.layers):
            self._send()
        return out_TH

    def _begin(self, num_tokens: int) -> None:
        # A long step reads on the host where every expert is.
        if self._tokens_in_step is not None or num_tokens > MATCH_TOKENS:
            self.end_step()
        self.steps.begin(num_tokens)
        self._tokens_in_step, self._layers_in_step = num_tokens, 0

    def _send(self) -> None:
        """The step is queued whole: its routed ids go to the host, those of the one before it are
        taken in."""
        num_tokens, self._tokens_in_step = self._tokens_in_step, None
        assert num_tokens is not None
        self._in_flight.append((num_tokens, self.steps.log.send()))
        # A long one has waited for its own ids already.
        most = 0 if num_tokens > MATCH_TOKENS else 1
        while len(self._in_flight) > most:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        num_tokens, ids = self._in_flight.popleft()
        self.steps.finish(num_tokens, ids())

    def end_step(self) -> None:
        """Waits for what is queued, and takes in what it routed; the newest may have broken off."""
        while self._in_flight:
            self._finish_oldest()
        num_tokens, self._tokens_in_step = self._tokens_in_step, None
        if num_tokens is not None:
            self.steps.break_off(num_tokens)

    @property
    def traffic(self) -> Traffic:
        """Experts used, hits and link bytes, up to `end_step` without the newest step; a copy."""
        return self.steps.traffic

    def summary(self) -> str:
        """One line for the log: what is where."""
        num_slots, num_experts = self.store.slots.num_slots, sum(x.num_experts for x in self.layers)
        return (
            f"hotset: {num_experts} experts of {len(self.layers)} layers in "
            f"{format_bytes(self.store.arena.nbytes)} of host memory, {num_slots} of them with a "
            f"slot ({format_bytes(self.store.slots.nbytes)}), staging buffers "
            f"{format_bytes(self.store.ring.nbytes)}, policy `{self.policy.name}`, "
            f"kernels `{self.kernels.name}`"
        )
