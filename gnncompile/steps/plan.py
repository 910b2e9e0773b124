"""How a step of training through one captured graph is recorded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gnncompile.capture.compiled_callable import Call
from gnncompile.capture.inputs import FlatInputs, leaves, with_leaves
from gnncompile.cudagraphs.pool import CudaGraphPool


class Plan:
    """How steps through one captured graph are recorded.

    Args:
        capture: What stands for the captured graph.
        call: Arguments that it serves.
        built_of: Tensors that graph structure was built of.
        model: The model, for its parameters and buffers; which there are is among Dynamo's guards.
        also: Further tensors that a step writes to.

    Attributes:
        structural: Positions among the leaves of the arguments of those that structure is built of.
        recordings: Makes and replays them.
        repeatable: Whether nothing comes of a forward and backward beside losses and gradients.
    """

    recordings: CudaGraphPool
    repeatable = False

    def __init__(self, capture: Any, call: Call, built_of: list[Any], model: nn.Module, also: list[Tensor]) -> None:
        self.capture, self._also = capture, also
        found: list[Any] = []
        leaves((call.args, call.counts), found)
        places = {t.data_ptr() for t in built_of if isinstance(t, Tensor)}
        self.structural = [k for k, v in enumerate(found) if isinstance(v, Tensor) and v.data_ptr() in places]
        self._skeleton = with_leaves((call.args, call.counts), iter([None] * len(found)))
        holders: list[dict[str, Any]] = [h for m in model.modules() for h in (m._parameters, m._buffers)]
        self._slots = [(h, name) for h in holders for name, tensor in h.items() if tensor is not None]
        self._parameters = [(h, name) for h, name in self._slots if isinstance(h[name], nn.Parameter)]
        self.device = next((t.device for t in self.state()), torch.device("cpu"))

    def parameters(self) -> list[Tensor]:
        """The model's parameters."""
        return [tensor for holder, name in self._parameters if (tensor := holder.get(name)) is not None]

    def state(self) -> list[Any]:
        """Parameters and buffers, which a step writes to; None in the place of one that is gone."""
        return [*(holder.get(name) for holder, name in self._slots), *self._also]

    def call(self, given: Sequence[Any]) -> Call:
        """The arguments, of their leaves (and the parameters and buffers behind these)."""
        args, counts = with_leaves(self._skeleton, iter(given))
        return Call(args, {}, FlatInputs(), counts)
