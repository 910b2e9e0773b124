"""Records the training steps that run one captured graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gnncompile.capture.compiled_callable import Call
from gnncompile.capture.inputs import FlatInputs, leaves, with_leaves
from gnncompile.cudagraphs.pool import CudaGraphPool


class Plan:
    """How the steps that run one captured graph are recorded.

    Args:
        capture: The object that identifies the captured graph.
        call: Arguments that the graph was captured for.
        built_of: Tensors that graph structure (such as a CSR layout) was built from.
        model: The model, whose parameters and buffers are read. Dynamo's guards ensure that none is added or removed.
        also: Further tensors that a step writes to.

    Attributes:
        structural: Indices, among the leaves of the arguments, of the tensors in `built_of`.
        num_leaves: The number of leaves of the arguments.
        recordings: Records and replays the steps.
        repeatable: Whether forward and backward change nothing except losses and gradients, so a second run is safe.
    """

    recordings: CudaGraphPool
    repeatable = False

    def __init__(
        self,
        capture: Any,
        call: Call,
        built_of: list[Any],
        model: nn.Module,
        also: list[Tensor],
        over_parts: bool = False,
    ) -> None:
        self.capture, self._also = capture, also
        found: list[Any] = []
        leaves((call.args, call.counts), found)
        self.num_leaves = len(found)
        places = {t.data_ptr() for t in built_of if isinstance(t, Tensor)}
        if over_parts:
            places.discard(0)  # the address of all empty tensors
        self.structural = [k for k, v in enumerate(found) if isinstance(v, Tensor) and v.data_ptr() in places]
        self._skeleton = with_leaves((call.args, call.counts), iter([None] * len(found)))
        holders: list[dict[str, Any]] = [h for m in model.modules() for h in (m._parameters, m._buffers)]
        self._slots = [(h, name) for h in holders for name, tensor in h.items() if tensor is not None]
        self._parameters = [(h, name) for h, name in self._slots if isinstance(h[name], nn.Parameter)]
        self.device = next((t.device for t in self.state()), torch.device("cpu"))

    def parameters(self) -> list[Tensor]:
        """Returns the model's parameters."""
        return [tensor for holder, name in self._parameters if (tensor := holder.get(name)) is not None]

    def state(self) -> list[Any]:
        """Returns the tensors that a step may write to; None in place of a parameter or buffer that was removed."""
        return [*(holder.get(name) for holder, name in self._slots), *self._also]

    def call(self, given: Sequence[Any]) -> Call:
        """Builds a call's arguments from their leaves. Further entries, the parameters and buffers, are ignored."""
        args, counts = with_leaves(self._skeleton, iter(given))
        return Call(args, {}, FlatInputs(), counts)
