"""vLLM's layer of routed experts, with hotset in the place of its weights and kernels.

vLLM looks a replacement up by the name of the class that a model asks for, so every subclass of
its layer gets one of its own. Routers, shared experts, reductions over ranks and the loading of
checkpoints stay vLLM's. Knows vLLM's layer and method interfaces; what runs is `model`'s business.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.logger import init_logger
from vllm.model_executor.custom_op import PluggableLayer
from vllm.model_executor.layers.fused_moe.config import (
    FUSED_MOE_UNQUANTIZED_CONFIG,
    FusedMoEConfig,
    FusedMoEQuantConfig,
)
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.utils import set_weight_attrs

from hotset.core.geometry import MoELayer
from hotset.integrations.vllm import cpu_routing, records
from hotset.integrations.vllm.checks import check_verifiable, require_verified
from hotset.integrations.vllm.config import KEY, PluginConfig
from hotset.integrations.vllm.graphs import HotsetRunner, leave_graphs
from hotset.integrations.vllm.metrics import serve_counts
from hotset.integrations.vllm.model import ModelExperts
from hotset.integrations.vllm.op import routed_experts
from hotset.integrations.vllm.refusals import check_engine, check_layer, refuse_reloading

logger = init_logger("vllm.hotset")  # vLLM shows what is logged below its own name


class HotsetMethod(FusedMoEMethodBase):
    """Runs a layer through hotset's store; its parameters are views of host memory that vLLM's
    loader writes into, and are gone when that is done.

    Args:
        moe: vLLM's description of the layer.
        name: of the layer.
        model: that it belongs to.
    """

    # vLLM would move parameters to the device to process them there.
    requires_device_loading = False

    def __init__(self, moe: FusedMoEConfig, name: str, model: ModelExperts) -> None:
        super().__init__(moe)
        self._name, self._model, self._index = name, model, -1
        self._views: dict[str, torch.Tensor] = {}
        self._vllm_config = get_current_vllm_config()

    def create_weights(
        self,
        layer: nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **attributes: Any,
    ) -> None:
        """Registers parameters over a new bank of records; nothing lies on a GPU."""
        check_layer(self._name, self.moe, layer)
        spec = records.spec_of(self.moe, params_dtype)
        moe_layer = MoELayer(self._name, num_experts, self.moe.experts_per_token, spec)
        self._index = self._model.add(moe_layer)
        bank = self._model.banks[self._index]
        self._views = records.parameter_views(bank, spec, num_experts)
        for name, view in self._views.items():
            parameter = nn.Parameter(view, requires_grad=False)
            set_weight_attrs(parameter, attributes)
            layer.register_parameter(name, parameter)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """The checkpoint is read: takes the parameters out of the layer, and hands over."""
        if records.is_interleaved(self.moe):
            records.put_halves_apart(self._views)
        for name in self._views:
            delattr(layer, name)
        self._views = {}
        if self._model.loaded(self._index):
            logger.info("%s", self._model.summary())
            if self._model.config.verify:
                require_verified(self._model, self._vllm_config)
            port = self._model.config.metrics_port
            if port is not None:
                serve_counts(self._model, port=port, rank=get_tensor_model_parallel_rank())

    def get_fused_moe_quant_config(self, layer: nn.Module) -> FusedMoEQuantConfig | None:
        return FUSED_MOE_UNQUANTIZED_CONFIG

    def apply(
        self,
        layer: nn.Module,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: object,
        shared_experts_input: torch.Tensor | None,
    ) -> torch.Tensor:
        """[T, H]; vLLM runs shared experts itself beside a method without kernels of its own."""
        return routed_experts(x, topk_weights, topk_ids, self._index)

    @property
    def is_monolithic(self) -> bool:
        """Whether vLLM hands over logits (`apply_monolithic`) or routed ids (`apply`)."""
        return cpu_routing.experts_route(self._model.device)

    def apply_monolithic(
        self,
        layer: nn.Module,
        x: torch.Tensor,
        router_logits: torch.Tensor,
        input_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[T, H]; see `cpu_routing`."""
        weights_TK, ids_TK = cpu_routing.route(layer, x, router_logits)
        return routed_experts(x, weights_TK, ids_TK, self._index)


class HotsetExperts(RoutedExperts):
    """A layer of routed experts that asks for hotset where the user has."""

    def _get_quant_method(
        self, prefix: str, quant_config: object, moe_config: FusedMoEConfig
    ) -> FusedMoEMethodBase:
        vllm_config = get_current_vllm_config()
        config = PluginConfig.of(vllm_config.additional_config)
        if config is None:
            return super()._get_quant_method(prefix, quant_config, moe_config)
        return HotsetMethod(moe_config, prefix, model_of(vllm_config, config))


def model_of(vllm_config: VllmConfig, config: PluginConfig) -> ModelExperts:
    """The model that is being built, made with its first layer.

    Raises:
        ConfigError: an option of vLLM's that does not work with hotset; `verify` where files
            cannot be compared with.
    """
    context: dict[str, Any] = vllm_config.compilation_config.static_forward_context
    if KEY not in context:
        check_engine(vllm_config)
        if config.verify:
            check_verifiable(vllm_config)
        leave_graphs(vllm_config)
        refuse_reloading()
        context[KEY] = ModelExperts(config, torch.device(vllm_config.device_config.device))
    model: ModelExperts = context[KEY]
    return model


def take_place() -> None:
    """Registers replacements for vLLM's layer of routed experts, for its runner, and for each
    subclass of them, those included that a model's module defines later."""
    for stock, ours in ((RoutedExperts, HotsetExperts), (MoERunner, HotsetRunner)):
        _take_place_of(stock, ours)


def _take_place_of(stock: Any, ours: type[PluggableLayer]) -> None:
    PluggableLayer.register_oot(name=stock.__name__)(ours)
    for cls in _subclasses(stock):
        _replace(cls, ours)

    def define(cls: type[PluggableLayer], /, **kwargs: Any) -> None:
        super(stock, cls).__init_subclass__(**kwargs)
        _replace(cls, ours)

    stock.__init_subclass__ = classmethod(define)


def _replace(cls: type[PluggableLayer], ours: type[PluggableLayer]) -> None:
    if not issubclass(cls, ours):
        mixed = type(f"Hotset{cls.__name__}", (ours, cls), {})
        PluggableLayer.register_oot(name=cls.__name__)(mixed)


def _subclasses(cls: type[PluggableLayer]) -> list[type[PluggableLayer]]:
    own = cls.__subclasses__()
    return [*own, *(below for one in own for below in _subclasses(one))]
