"""What replaces the library's operators in a decode layer that the compiler has taken apart.

Looks at operators and shapes only, so that it serves every model that uses them in this form:
products of a few tokens with weights, the softmax and top-k of a router, and the top-k of short
rows, whatever module they stand in. Knows nothing of layers or models, and leaves what it does not
recognise. Runs before the compiler's own passes, which would fuse parts of what is looked for.
"""

from __future__ import annotations

import operator
from typing import NamedTuple, cast

import torch
from torch import fx

from hotset.kernels import product_parts, products, products_dot, topk

_aten = torch.ops.aten


class Rewrites(torch._inductor.custom_graph_pass.CustomGraphPass):
    """The pass over a compiled graph that puts our operators in place."""

    def __call__(self, graph: fx.Graph) -> None:
        _routers(graph)
        _short_topk(graph)
        _products_of_few_tokens(graph)

    def uuid(self) -> object:
        """Part of the compiler's cache key: changes whenever what is put in place does."""
        ours = (product_parts, products, products_dot, topk)
        return torch._inductor.custom_graph_pass.get_hash_for_files(
            (__file__, *(module.__file__ for module in ours))
        )


def _routers(graph: fx.Graph) -> None:
    """A softmax, its top-k, and where they follow the division by their sum and a rounding."""
    for node in graph.find_nodes(op="call_function", target=_aten.topk.default):
        logits = _softmax_input(cast(fx.Node, node.args[0])) if _is_short(node) else None
        if logits is None:
            continue
        values, ids = (_item(node, index) for index in range(2))
        if values is None or ids is None:
            continue
        weights = _rounded(_normalised(values) or values)
        normalise, dtype = _normalised(values) is not None, weights.meta["val"].dtype
        with graph.inserting_before(node):
            ours = graph.call_function(
                topk.softmax_topk._opoverload, (logits, node.args[1], normalise, dtype)
            )
            ours.meta["val"] = (weights.meta["val"], ids.meta["val"])
            outs = [graph.call_function(operator.getitem, (ours, index)) for index in range(2)]
        for out, old in zip(outs, (weights, ids), strict=True):
            out.meta = old.meta
            old.replace_all_uses_with(out)
        graph.eliminate_dead_code()


def _softmax_input(node: fx.Node) -> fx.Node | None:
    """What `node` is the softmax of, along the last dimension and in FP32, if it is one.

    exp(x - max x) / sum(exp(x - max x)), as the library's operator is taken apart.
    """
    if node.target is not _aten.div.Tensor:
        return None
    if len(node.users) > 1:  # somebody wants all of it
        return None
    e, total = cast(tuple[fx.Node, fx.Node], node.args)
    if e.target is not _aten.exp.default or not _reduces(total, _aten.sum.dim_IntList, e):
        return None
    shifted = cast(fx.Node, e.args[0])
    if shifted.target is not _aten.sub.Tensor or shifted.kwargs:
        return None
    x, most = cast(tuple[fx.Node, fx.Node], shifted.args)
    if not _reduces(most, _aten.amax.default, x) or x.meta["val"].dtype != torch.float32:
        return None
    if x.target is torch.ops.prims.convert_element_type.default:
        x = cast(fx.Node, x.args[0])  # to FP32, which the kernel does as well
    return x


def _normalised(values: fx.Node) -> fx.Node | None:
    """The one use of top-k's values, if it is their division by their sum."""
    users = [user for user in values.users if user.target is _aten.div.Tensor]
    sums = [user for user in values.users if _reduces(user, _aten.sum.dim_IntList, values)]
    if len(values.users) == 2 and len(users) == len(sums) == 1:
        return users[0] if users[0].args == (values, sums[0]) else None
    return None


def _rounded(values: fx.Node) -> fx.Node:
    """The one use of values, if it is their conversion to another dtype; else the values."""
    users = list(values.users)
    if len(users) == 1 and users[0].target is torch.ops.prims.convert_element_type.default:
        return users[0]
    return values


def _reduces(node: object, target: object, x: fx.Node) -> bool:
    """Whether `node` reduces `x` along its last dimension by `target`, and keeps the dimension."""
    if not isinstance(node, fx.Node) or node.target is not target or node.kwargs:
        return False
    last = ([-1], [x.meta["val"].dim() - 1])
    return (
        len(node.args) == 3 and node.args[0] is x and node.args[1] in last and node.args[2] is True
    )


def _item(node: fx.Node, index: int) -> fx.Node | None:
    """The one place where item `index` of what `node` returns is taken."""
    found = [user for user in node.users if user.args[1:] == (index,)]
    return found[0] if len(found) == 1 and found[0].target is operator.getitem else None


def _short_topk(graph: fx.Graph) -> None:
    """The library's top-k of short rows takes two launches, ours one."""
    for node in graph.find_nodes(op="call_function", target=_aten.topk.default):
        if _is_short(node):
            with graph.inserting_before(node):
                ours = graph.call_function(topk.topk._opoverload, node.args[:2])
            ours.meta = node.meta
            node.replace_all_uses_with(ours)
            graph.erase_node(node)


def _is_short(node: fx.Node) -> bool:
    """Whether a top-k is one that our kernel computes: of the last dimension, largest first."""
    given = dict(zip(("self", "k", "dim", "largest", "sorted"), node.args, strict=False))
    value, dim = cast(fx.Node, given["self"]).meta["val"], given.get("dim", -1)
    largest, ordered = given.get("largest", True), given.get("sorted", True)
    last = dim in (-1, value.dim() - 1)
    short = topk.accepts(value.shape[-1], cast(int, given["k"]), value.dtype)
    return bool(last and largest and ordered and short)


class _Product(NamedTuple):
    """One product of the graph: node = x_TC @ weight_NC^T (+ bias_N)."""

    node: fx.Node
    weight_NC: fx.Node
    bias_N: fx.Node | None

    @property
    def taken(self) -> fx.Node:
        """x_TC as it is now: it may be a product itself, and have been replaced since."""
        return cast(fx.Node, self.node.args[-2])

    @property
    def key(self) -> tuple[object, ...]:
        """Products of equal keys have the same input, and may share a launch."""
        x = self.taken
        # Each product has its own reshape of what they share.
        same = x.args[0] if x.target in (_aten.reshape.default, _aten.view.default) else x
        return (same, tuple(x.meta["val"].shape), self.bias_N is None)


def _products_of_few_tokens(graph: fx.Graph) -> None:
    """Products with weights that have the same input become one launch."""
    groups: dict[tuple[object, ...], list[_Product]] = {}
    for node in graph.nodes:
        found = _product(node)
        if found is not None:
            groups.setdefault(found.key, []).append(found)
    for group in groups.values():
        for first in range(0, len(group), product_parts.MAX_MATRICES):
            _join(graph, group[first : first + product_parts.MAX_MATRICES])


def _product(node: fx.Node) -> _Product | None:
    """What `node` multiplies, where `products` can: a few tokens, and weights as they are kept."""
    if node.target is _aten.mm.default:
        bias, (x, transposed) = None, node.args
    elif node.target is _aten.addmm.default and not node.kwargs:
        bias, x, transposed = node.args
    else:
        return None
    assert isinstance(x, fx.Node) and isinstance(transposed, fx.Node)
    if transposed.target is not _aten.permute.default or transposed.args[1] != [1, 0]:
        return None
    weight = cast(fx.Node, transposed.args[0])
    given = [weight] if bias is None else [weight, cast(fx.Node, bias)]
    dtype = x.meta["val"].dtype
    if any(n.op != "placeholder" or not _plain(n.meta["val"], dtype) for n in given):
        return None
    num_tokens, num_columns = x.meta["val"].shape
    if not products.accepts(num_tokens, num_columns, dtype):
        return None
    if bias is not None and given[1].meta["val"].shape != weight.meta["val"].shape[:1]:
        return None
    return _Product(node, weight, None if bias is None else given[1])


def _plain(value: torch.Tensor, dtype: torch.dtype) -> bool:
    return value.dtype == dtype and value.is_contiguous()


def _join(graph: fx.Graph, group: list[_Product]) -> None:
    """One launch in the place of a group, where its first product was."""
    weights = [product.weight_NC for product in group]
    biases = [product.bias_N for product in group if product.bias_N is not None]
    with graph.inserting_before(group[0].node):
        ours = graph.call_function(products.products._opoverload, (group[0].taken, weights, biases))
        ours.meta["val"] = [product.node.meta["val"] for product in group]
        outs = [graph.call_function(operator.getitem, (ours, i)) for i in range(len(group))]
    for out, product in zip(outs, group, strict=True):
        out.meta = product.node.meta
        product.node.replace_all_uses_with(out)
        graph.erase_node(product.node)
