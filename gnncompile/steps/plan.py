"""Records the training steps that run one captured graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gnncompile.capture.backend import Captured
from gnncompile.capture.compiled_callable import Call
from gnncompile.capture.inputs import FlatInputs, leaves, with_leaves
from gnncompile.cudagraphs.pool import CudaGraphPool
from gnncompile.cudagraphs.undo import Undone

MOST_UNDONE = 2**20
"""The most bytes of buffers that are copied in each step, to undo what a step wrote that was not wanted."""


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
        undone: What forward and backward leave behind besides losses and gradients, if that can be undone. None if it
            can't: a step must not be begun before it is known to be wanted.
    """

    recordings: CudaGraphPool
    undone: Undone | None = None

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

    def find_undone(self, captures: Sequence[Captured]) -> None:
        """Finds :attr:`undone`: small buffers of the model, such as running statistics, and random draws.

        Args:
            captures: The captured graphs of the step; empty if they are not known.
        """
        if not captures:
            return
        slots = [holder[name] for holder, name in self._slots]
        places = {id(t): at for at, t in enumerate(slots, self.num_leaves) if not isinstance(t, nn.Parameter)}
        written: list[Tensor | None] = []
        for capture in captures:
            if capture.written is None:
                return
            written += [ref() for ref in capture.written]
        found = [t for t in written if t is not None and id(t) in places]
        devices = set[torch.device]().union(*(capture.draws_on for capture in captures))
        if len(found) < len(written) or sum(t.nbytes for t in found) > MOST_UNDONE or not devices <= {self.device}:
            return
        self.undone = Undone(frozenset(places[id(t)] for t in found), self.device if devices else None)

    def call(self, given: Sequence[Any]) -> Call:
        """Builds a call's arguments from their leaves. Further entries, the parameters and buffers, are ignored."""
        args, counts = with_leaves(self._skeleton, iter(given))
        return Call(args, {}, FlatInputs(), counts)
