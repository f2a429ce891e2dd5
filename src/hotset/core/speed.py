"""What a plan is expected to be worth: tokens per second, time to the first token, load time.

Joins a model's geometry, a machine's rates and a hit curve; refuses to know budgets. Everything
that was not measured for this model on this machine is listed as an assumption, in words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hotset.core.costmodel import (
    Rates,
    StepCost,
    cpu_break_even,
    predict_load_seconds,
    predict_step,
)
from hotset.core.geometry import ModelGeometry
from hotset.core.hit_curve import HitCurve
from hotset.core.machine import MachineDescription
from hotset.core.prompt_cost import PromptCost, Staging, predict_prompt
from hotset.core.staging import NUM_BUFFERS
from hotset.core.workload import Workload

# Forwards of that many tokens or more stream missing experts through the staging ring. The number
# is one more than the runtime's `moe.MATCH_TOKENS`; a test holds them together.
RING_TOKENS = 65


@dataclass(frozen=True)
class Speed:
    """What is predicted for one plan.

    Attributes:
        workload: what it is predicted for.
        slot_share: share of all experts' bytes that have a slot.
        hit_rate: share of the experts of a decode step that have one.
        step: a decode step in the middle of the answer.
        prompt: until the prompt of one request is through.
        num_rows: sequences in it.
        tokens_per_second: of all rows together.
        seconds: for one request, prompt and answer.
        load_seconds: reading the weights from disk; `None` where its rate is not known.
        cpu_break_even: hit rate below which computing on the CPU would be faster, see
            `core.costmodel`; `None` where the CPU's rate is not known.
        half_life: for the policy, steps; `None` where the hit curve has none.
        half_life_note: why this one, one phrase.
        assumptions: what was not measured for this model on this machine.
        rates_source: where the machine's rates come from and how old they are, one phrase.
    """

    workload: Workload
    slot_share: float
    hit_rate: float
    step: StepCost
    prompt: PromptCost
    num_rows: int
    tokens_per_second: float
    seconds: float
    load_seconds: float | None
    cpu_break_even: float | None
    half_life: float | None
    assumptions: tuple[str, ...]
    rates_source: str = ""
    half_life_note: str = ""

    @property
    def first_token_seconds(self) -> float:
        """The prompt and the step that gives the first token."""
        return self.prompt.total_ms / 1e3

    def to_dict(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "step": {**asdict(self.step), "total_ms": self.step.total_ms},
            "prompt": {**asdict(self.prompt), "total_ms": self.prompt.total_ms},
            "first_token_seconds": self.first_token_seconds,
            "assumptions": list(self.assumptions),
        }


class SpeedModel:
    """Predicts for one model on one machine.

    Args:
        geometry: the model.
        rates: the machine's.
        curve: hits over slots, and how many rows a step has.
        assumptions: about the rates; those about the curve and the model are added.
        rates_source: see `Speed`.
    """

    def __init__(
        self,
        geometry: ModelGeometry,
        rates: Rates,
        curve: HitCurve,
        *,
        assumptions: Sequence[str] = (),
        rates_source: str = "",
    ) -> None:
        self.geometry, self.rates, self.curve = geometry, rates, curve
        self.rates_source = rates_source
        self.assumptions = (*assumptions, *self._own_assumptions())

    @classmethod
    def of_machine(
        cls, geometry: ModelGeometry, description: MachineDescription, curve: HitCurve
    ) -> SpeedModel:
        """With the rates of a description at this model's record size.

        Raises:
            ConfigError: a figure is missing that a prediction needs.
        """
        record_bytes = max(layer.expert.record_bytes for layer in geometry.layers)
        rates = description.rates(record_bytes=record_bytes)
        return cls(
            geometry,
            rates,
            curve,
            assumptions=description.caveats(),
            rates_source=description.source,
        )

    def predict(
        self,
        *,
        slots_per_layer: Sequence[int],
        context_tokens: int,
        prefill_chunk: int,
        staging_records: int,
        workload: Workload,
        slot_only_per_layer: Sequence[int] = (),
    ) -> Speed:
        """Speed with that many slots in each MoE layer.

        Args:
            slot_only_per_layer: experts that hold some of them for good, whoever is used; empty
                for none.
            context_tokens: what each row's cache may hold; the workload is cut to it.
            prefill_chunk: most tokens of one forward.
            staging_records: that all buffers of the ring hold together.
        """
        work, rows = workload.within(context_tokens), self.curve.num_rows
        layers = self.geometry.layers
        shares = [slots / x.num_experts for slots, x in zip(slots_per_layer, layers, strict=True)]
        hit_rates = self._hit_rates(slots_per_layer, slot_only_per_layer or [0] * len(layers))
        used = [self.curve.used(layer) for layer in layers]
        filled = work.prompt_tokens + work.answer_tokens // 2
        step = predict_step(
            self.geometry,
            self.rates,
            hit_rates=hit_rates,
            used=used,
            context_tokens=filled * rows,
            num_rows=rows,
        )
        staging = Staging(RING_TOKENS, staging_records // NUM_BUFFERS)
        prompt = self._prompt(work, prefill_chunk, shares=shares, staging=staging)
        sizes = [layer.num_experts * layer.expert.record_bytes for layer in layers]
        held = sum(share * size for share, size in zip(shares, sizes, strict=True)) / sum(sizes)
        return Speed(
            workload=work,
            slot_share=held,
            hit_rate=sum(h * u for h, u in zip(hit_rates, used, strict=True)) / sum(used),
            step=step,
            prompt=prompt,
            num_rows=rows,
            tokens_per_second=rows * 1e3 / step.total_ms,
            seconds=(prompt.total_ms + work.answer_tokens * step.total_ms) / 1e3,
            load_seconds=predict_load_seconds(self.geometry, self.rates),
            cpu_break_even=cpu_break_even(self.rates, held),
            half_life=self.curve.half_life,
            assumptions=self.assumptions,
            rates_source=self.rates_source,
            half_life_note=self.curve.half_life_note,
        )

    def _prompt(
        self, work: Workload, chunk: int, *, shares: Sequence[float], staging: Staging
    ) -> PromptCost:
        return predict_prompt(
            self.geometry,
            self.rates,
            num_tokens=work.prompt_tokens,
            chunk_tokens=chunk,
            resident_share=shares,
            staging=staging,
            # Over a KV pool the chunks of a prompt run with the layers outermost.
            together=bool(self.geometry.attention),
        )

    def _hit_rates(self, slots_per_layer: Sequence[int], fixed: Sequence[int]) -> list[float]:
        return [
            self._hit_rate(layer.num_experts, slots=slots, num_fixed=own)
            for layer, slots, own in zip(self.geometry.layers, slots_per_layer, fixed, strict=True)
        ]

    def _hit_rate(self, num_experts: int, *, slots: int, num_fixed: int) -> float:
        """Of a layer in which some experts, as likely as any, keep their slots."""
        if num_fixed == num_experts:
            return 1.0
        moving = self.curve.at((slots - num_fixed) / (num_experts - num_fixed))
        share = num_fixed / num_experts
        return share + (1 - share) * moving

    def _own_assumptions(self) -> list[str]:
        found = [f"the hit rate is {self.curve.source}"] if self.curve.assumed else []
        if self.rates.gemm_tflops is None:
            found.append("the products of a prompt are hidden behind its bytes: no rate is known")
        elif self.rates.expert_tflops is None:
            found.append("products of many experts are as fast as one of large matrices")
        if self.rates.gemm_tflops and self.rates.attention_tflops is None:
            found.append("attention of a prompt is as fast as a product of large matrices")
        if not self.geometry.attention:
            found.append("the attention of a prompt costs nothing: its layers are not listed")
        if self.rates.layer_us == 0:
            found.append("layers take no time beyond their bytes: no figure is known")
        return found
