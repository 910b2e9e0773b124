"""Runs a model on data by the names of its arguments, and measures the difference between two runs."""

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch_geometric.data import Batch, HeteroData

from gnncompile.exc import ArgumentError

Call = Callable[[nn.Module, Any], Any]

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""The largest difference that rounding may cause, relative to the largest value, for each type."""


def arguments(model: nn.Module, data: Any) -> dict[str, Any]:
    """Returns the arguments of a model's forward, taken from the attributes of `data` with the same names.

    A parameter named `data` gets the data itself.

    Raises:
        ValueError: `data` has no attribute for an argument without a default, or for any argument.
    """
    found: dict[str, Any] = {}
    for name, parameter in inspect.signature(model.forward).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        value = _attribute(data, name)
        if value is not None:
            found[name] = value
        elif parameter.default is parameter.empty:
            raise ArgumentError(
                f"model: got a forward with the argument {name!r}, which data has no attribute for; pass "
                "call=lambda model, data: model(...)"
            )
    if not found:
        raise ArgumentError(
            "model: got a forward that names no attribute of data; pass call=lambda model, data: model(...)"
        )
    return found


def _attribute(data: Any, name: str) -> Any:
    if name == "data":
        return data
    if name in ("batch_size", "num_graphs") and isinstance(data, Batch):
        return data.num_graphs
    if isinstance(data, HeteroData):
        return data.collect(name.removesuffix("_dict"), allow_empty=True) or None
    if name == "num_nodes":
        return data.num_nodes
    return data.get(name)


def call_by_names(model: nn.Module, data: Any) -> Any:
    """Runs a model on the attributes of `data` that its forward names."""
    return model(**arguments(model, data))


def results(model: nn.Module, data: Any, call: Call) -> tuple[list[Tensor], list[Tensor]]:
    """Runs a copy of the model in eval mode; returns float outputs, and gradients of parameters and node features."""
    model, data = copy.deepcopy(model).eval(), copy.copy(data)
    leaves = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for store in data.node_stores:
        for key, value in list(store.items()):
            if isinstance(value, Tensor) and value.is_floating_point() and store.is_node_attr(key):
                store[key] = value.detach().clone().requires_grad_()
                leaves.append(store[key])
    with torch.enable_grad():
        returned: list[Any] = pytree.tree_leaves(call(model, data))
        outputs = [out for out in returned if isinstance(out, Tensor) and out.is_floating_point()]
        weighted = [out * torch.arange(out.numel(), device=out.device).cos().view_as(out) for out in outputs]
        total = torch.stack([product.sum().double() for product in weighted]).sum() if outputs else torch.zeros(())
    if not total.requires_grad:
        return [out.detach() for out in outputs], []
    gradients: tuple[Tensor | None, ...] = torch.autograd.grad(total, leaves, allow_unused=True)
    filled = [torch.zeros_like(a) if g is None else g for a, g in zip(leaves, gradients, strict=True)]
    return [out.detach() for out in outputs], filled


def difference(found: list[Tensor], expected: list[Tensor]) -> float:
    """Returns the largest difference of two lists of tensors, relative to the largest expected value.

    The difference is infinite if shapes or positions of NaNs differ.
    """
    if [t.shape for t in found] != [t.shape for t in expected]:
        return float("inf")
    worst, scale = 0.0, 0.0
    for one, other in zip(found, expected, strict=True):
        if other.numel():
            if not torch.equal(one.isnan(), other.isnan()):
                return float("inf")
            worst = max(worst, float((one.double() - other.double()).nan_to_num().abs().max()))
            scale = max(scale, float(other.double().nan_to_num().abs().max()))
    return worst / scale if worst else 0.0


def tolerance(tensors: list[Tensor]) -> float:
    """Returns the largest allowed difference for tensors, by the least precise of their types."""
    return max((TOLERANCE.get(t.dtype, 0.0) for t in tensors), default=0.0)
