"""The seam: stock transformers models with their fused expert parameters taken out of the tree.

transformers dispatches every experts module on its interface through `ALL_EXPERTS_FUNCTIONS`.
One name, `hotset`, is registered there; it hands the routed tokens to whatever `bind_experts`
bound to the module. Everything else (routers, attention, norms, shared experts) stays stock and
resident. This file knows transformers' classes; it knows nothing of files, devices or records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
)

from hotset.checkpoint.params import ExpertParam
from hotset.core.errors import CheckpointError

IMPLEMENTATION = "hotset"

# Fused parameter of an experts module -> field of a record.
FIELDS = {
    "gate_up_proj": "up",
    "up_proj": "up",
    "down_proj": "down",
    "gate_up_proj_bias": "up_bias",
    "up_proj_bias": "up_bias",
    "down_proj_bias": "down_bias",
}

# (hidden [T, H], routed ids [T, K], routing weights [T, K]) -> [T, H]
ExpertsFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _dispatch(
    module: nn.Module, hidden_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor
) -> torch.Tensor:
    """What the library calls for every MoE layer whose implementation is `hotset`.

    A compiled layer stops here and goes on behind it.
    """
    function: ExpertsFunction = module._hotset_experts  # type: ignore[assignment]
    return function(hidden_TH, ids_TK, weights_TK)


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _dispatch)


def bind_experts(module: nn.Module, function: ExpertsFunction) -> None:
    """Sets what computes this module's experts. Kept outside `nn.Module`'s own dictionaries, so
    that neither `state_dict`, `.to()` nor a deep copy of parameters follows it."""
    object.__setattr__(module, "_hotset_experts", function)


@contextmanager
def experts_bound(
    modules: Iterable[nn.Module], functions: Iterable[ExpertsFunction]
) -> Iterator[None]:
    """Within the block each module's experts are computed by its function, behind it by what
    computed them before."""
    before = [(module, cast(ExpertsFunction, module._hotset_experts)) for module in modules]
    for (module, _), function in zip(before, functions, strict=True):
        bind_experts(module, function)
    try:
        yield
    finally:
        for module, function in before:
            bind_experts(module, function)


def is_experts(module: nn.Module) -> bool:
    """Whether the library's `use_experts_implementation` decorated this module's class."""
    return all(hasattr(module, a) for a in ("_is_expert_parallel", "has_gate", "is_transposed"))


def experts_modules(model: nn.Module) -> dict[str, nn.Module]:
    """All experts modules by path, in the order of the module tree: MoE layer 0, 1, ..."""
    return {name: module for name, module in model.named_modules() if is_experts(module)}


def model_class(config: PretrainedConfig) -> type[PreTrainedModel]:
    """The stock class that computes next-token logits for this config.

    Composite (vision, audio) configs without a text-only class give their full class; its towers
    are removed by `text_only`.

    Raises:
        CheckpointError: the installed transformers has no such class.
    """
    for mapping in (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        MODEL_FOR_MULTIMODAL_LM_MAPPING,
    ):
        if type(config) in mapping:
            found = mapping[type(config)]
            # A mapping may list several heads for one config; the first is the plain one.
            return cast(type[PreTrainedModel], found[0] if isinstance(found, tuple) else found)
    raise CheckpointError(
        f"model type `{config.model_type}` has no text generation class in transformers",
        hint="it may need a newer transformers line than the one this version is built on",
    )


def class_config(cls: type[PreTrainedModel], config: PretrainedConfig) -> PretrainedConfig:
    """The part of a composite config that `cls` is built from (its text part, or all of it)."""
    text = config.sub_configs.get("text_config")
    if text is not None and getattr(cls, "config_class", None) is text:
        return config.get_text_config()
    return config


def hotset_class(cls: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """A subclass of a stock class whose instances come without fused expert parameters.

    The parameters are removed in `__init__`, so that `from_pretrained` never allocates them: left
    in the tree and absent from what is loaded, they would be allocated and filled at random. The
    instance's `hotset_params` lists what was removed. `__module__` and `__name__` are the stock
    class's: the library reads both when it looks for weight conversions.
    """

    class Detached(cls):  # type: ignore[misc, valid-type]
        def __init__(self, config: PretrainedConfig, *args: object, **kwargs: object) -> None:
            super().__init__(config, *args, **kwargs)
            object.__setattr__(self, "hotset_towers", text_only(self))
            object.__setattr__(self, "hotset_params", detach_experts(self))

    Detached.__name__, Detached.__qualname__ = cls.__name__, cls.__qualname__
    Detached.__module__ = cls.__module__
    return Detached


def detach_experts(model: nn.Module) -> tuple[ExpertParam, ...]:
    """Removes the fused parameters of every experts module and describes them.

    Raises:
        CheckpointError: there is no experts module, or one has a parameter that is not understood.
    """
    params: list[ExpertParam] = []
    modules = experts_modules(model)
    if not modules:
        raise CheckpointError(
            f"`{type(model).__name__}` has no experts that transformers can hand over",
            hint="hotset runs Mixture-of-Experts models on transformers' experts interface",
        )
    for layer, (path, module) in enumerate(modules.items()):
        for name, param in list(module.named_parameters(recurse=False)):
            if name not in FIELDS:
                raise CheckpointError(f"experts parameter `{path}.{name}` is not understood")
            params.append(_describe(module, path, name, layer, tuple(param.shape)))
            delattr(module, name)
        _mark_initialised(model, path)
    return tuple(params)


def _mark_initialised(model: nn.Module, path: str) -> None:
    """Keeps the library from initialising the deleted parameters, which fails.

    Most models do it with the experts module, some with the block around it, which then has no
    tensors of its own that would need it.
    """
    module, block = model.get_submodule(path), model.get_submodule(path.rpartition(".")[0])
    module._is_hf_initialized = True  # type: ignore[assignment]
    own = (*block.parameters(recurse=False), *block.buffers(recurse=False))
    if not own:
        block._is_hf_initialized = True  # type: ignore[assignment]


def _describe(
    module: nn.Module, path: str, name: str, layer: int, shape: tuple[int, ...]
) -> ExpertParam:
    field = FIELDS[name]
    return ExpertParam(
        module=path,
        name=name,
        layer=layer,
        field=field,
        shape=shape,
        transposed=bool(module.is_transposed) and not field.endswith("_bias"),
        interleaved=not module.is_concatenated and field.startswith("up"),
    )


def text_only(model: PreTrainedModel) -> tuple[str, ...]:
    """Removes vision and audio towers; returns the paths of what was removed.

    A tower is a sub-model whose config is one of the composite config's parts other than the text
    part. A text forward never calls it.
    """
    parts = {
        type(getattr(model.config, key))
        for key in model.config.sub_configs
        if key != "text_config" and getattr(model.config, key, None) is not None
    }
    towers = [
        name
        for name, module in model.named_modules()
        if name and isinstance(module, PreTrainedModel) and type(module.config) in parts
    ]
    outermost = [t for t in towers if not any(t.startswith(f"{o}.") for o in towers)]
    for name in outermost:
        parent, _, child = name.rpartition(".")
        delattr(model.get_submodule(parent), child)
    return tuple(outermost)
