"""A weight source that makes a model of a given shape up, in memory.

Speeds depend on shapes and placement, not on what the weights say; every record still has bytes
of its own, so that a wrong address or a stale slot shows in the logits.
"""

from __future__ import annotations

import torch
from transformers import PretrainedConfig, PreTrainedModel

from hotset.bench.random_records import fill_random
from hotset.core.formats import PLAIN, WeightFormat
from hotset.core.geometry import ModelGeometry
from hotset.core.units import MIB
from hotset.experts.store import ExpertStore
from hotset.models.geometry import build_meta
from hotset.models.load import quiet_transformers
from hotset.models.quantised import with_weights
from hotset.models.seam import IMPLEMENTATION, hotset_class, model_class
from hotset.runtime.text import Text
from hotset.runtime.weights import Progress

# As transformers' initializer_range; keeps activations of deep random models finite.
_STD = 0.02
_GROUP_BYTES = 256 * MIB


class RandomWeights:
    """Random weights of one shape.

    Args:
        config: the shape.
        dtype: compute dtype.
        seed: of all weights.
        weights: format of the experts' weights.
    """

    text: Text | None = None
    stop_ids: frozenset[int] = frozenset()

    def __init__(
        self,
        config: PretrainedConfig,
        *,
        dtype: str = "bfloat16",
        seed: int = 0,
        weights: WeightFormat = PLAIN,
    ) -> None:
        self._config = config
        self._seed = seed
        self.geometry: ModelGeometry = with_weights(build_meta(config, dtype).geometry, weights)

    def load_resident(self, device: torch.device) -> PreTrainedModel:
        """The stock model without experts, initialised by its own rules on `device`.

        Through `from_pretrained` with nothing to load: built on the meta device, so that experts
        are gone before anything is allocated, and then every weight is a missing one.
        """
        cls = hotset_class(model_class(self._config))
        torch.manual_seed(self._seed)
        with quiet_transformers():
            model: PreTrainedModel = cls.from_pretrained(
                None,
                config=self._config,
                state_dict={},
                dtype=getattr(torch, self.geometry.dtype),
                experts_implementation=IMPLEMENTATION,
                device_map={"": device} if device.type == "cuda" else None,
            )
        model.eval()
        return model

    def fill_experts(self, store: ExpertStore, progress: Progress) -> None:
        """Fills the arena a few hundred MiB at a time, drawn on the store's device."""
        generator = torch.Generator(store.device).manual_seed(self._seed)
        done, total = 0, self.geometry.expert_bytes
        for index, layer in enumerate(store.layers):
            record_bytes = layer.expert.record_bytes
            per_group = max(1, _GROUP_BYTES // record_bytes)
            for first in range(0, layer.num_experts, per_group):
                count = min(per_group, layer.num_experts - first)
                records = torch.zeros(count, record_bytes, dtype=torch.uint8, device=store.device)
                fill_random(records, layer.expert, generator, std=_STD)
                for offset, record in enumerate(records):
                    store.record(index, first + offset).copy_(record)
                done += records.numel()
                progress(done, total)
