"""Averages gradients over processes and broadcasts buffers, as ``DistributedDataParallel`` does in a plain loop.

Communication runs between CUDA graphs, never inside one. A captured collective would have to be captured and replayed
by all processes at once. But each process has batches of its own sizes, and decides by itself which graph it replays.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gnncompile import _compat
from gnncompile.device import aligned_length
from gnncompile.exc import ArgumentError, ReplicaError

Used = tuple[bool, ...]
"""For each parameter, whether it has a gradient."""


class GradientAveraging:
    """Holds all gradients in a few flat buffers, and averages the buffers of shared parameters over processes.

    There is one buffer for each combination of type, device, and whether the parameters are shared.

    Args:
        replica: Gives the shared parameters, the process group, and whether parameters may be unused.
        others: Trained parameters that are not in the module.

    Attributes:
        parameters: All trained parameters.
        buffers: The flat buffers. They hold only gradients, and their memory never changes.

    Raises:
        ValueError: `replica` has a setting that does more than average gradients.
    """

    def __init__(self, replica: DistributedDataParallel, others: Iterable[nn.Parameter]) -> None:
        self._replica = replica
        self._check_replica()
        module: nn.Module = replica.module
        self._names = {
            parameter: name
            for name, parameter in module.named_parameters()
            if parameter.requires_grad and name not in replica.parameters_to_ignore
        }
        every = [*module.parameters(), *others]
        self.parameters = list(dict.fromkeys([*self._names, *(p for p in every if p.requires_grad)]))
        self._size = dist.get_world_size(replica.process_group)
        self._agreed: Used | None = None
        self._make_room()

    def _make_room(self) -> None:
        groups: dict[Any, list[int]] = {}
        for k, parameter in enumerate(self.parameters):
            groups.setdefault((parameter.dtype, parameter.device, parameter in self._names), []).append(k)
        self.buffers: list[Tensor] = []
        self._averaged: list[Tensor] = []
        self._places: dict[int, Tensor] = {}
        for (dtype, device, shared), members in groups.items():
            lengths = [aligned_length(self.parameters[k].numel(), dtype.itemsize) for k in members]
            buffer = torch.zeros(sum(lengths), dtype=dtype, device=device)
            self.buffers.append(buffer)
            if shared:
                self._averaged.append(buffer)
            for k, part in zip(members, buffer.split(lengths), strict=True):
                parameter = self.parameters[k]
                strides = torch.empty_like(parameter, device="meta").stride()  # the parameter's, if it is dense
                self._places[k] = part.as_strided(parameter.shape, strides)

    def send_buffers(self) -> None:
        """Broadcasts the module's buffers from the first process; called before each forward."""
        self._check_replica()
        replica, groups = self._replica, dict[Any, list[Tensor]]()
        if not replica.broadcast_buffers:
            return
        for name, buffer in replica.module.named_buffers():
            if name not in replica.parameters_to_ignore:
                groups.setdefault((buffer.dtype, buffer.device), []).append(buffer)
        for buffers in groups.values():
            together = torch.cat([b.reshape(-1) for b in buffers])
            dist.broadcast(together, group=replica.process_group, group_src=0)
            # Versions stay, as in DistributedDataParallel: graph structure that was built from a buffer stays valid.
            with torch.no_grad(), _compat.keep_versions(buffers):
                for buffer, values in zip(buffers, together.split([b.numel() for b in buffers]), strict=True):
                    buffer.copy_(values.view_as(buffer))

    def keep(self, gradients: Sequence[Tensor | None]) -> Used:
        """Writes this process's gradients to the buffers, divided by the number of processes where they are shared.

        Args:
            gradients: The gradient of each parameter, or None.

        Returns:
            For each parameter, whether it has a gradient.

        Raises:
            RuntimeError: A shared parameter has no gradient but may not be unused, or a gradient is sparse.
        """
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            self._check(parameter, gradient)
        with torch.no_grad():
            for k, gradient in enumerate(gradients):
                if gradient is None:
                    self._places[k].zero_()
                else:
                    self._places[k].copy_(gradient)
            for buffer in self._averaged:
                buffer.div_(self._size)
        return tuple([gradient is not None for gradient in gradients])

    def average(self, used: Used) -> Used:
        """Sums the buffers over processes; :meth:`keep` has divided them, so the sum is the average.

        Args:
            used: The result of :meth:`keep`.

        Returns:
            For each parameter, whether it has a gradient in any process.
        """
        for buffer in self._averaged:
            dist.all_reduce(buffer, group=self._replica.process_group)
        if not self._may_be_unused:
            return used
        if self._agreed is None or not self._replica.static_graph:
            self._agreed = self._agree(used)
        return self._agreed

    def hand_out(self, used: Used) -> None:
        """Sets each parameter's ``grad`` to its average, or to None if no process used the parameter."""
        for k, parameter in enumerate(self.parameters):
            parameter.grad = self._places[k] if used[k] else None

    @property
    def _may_be_unused(self) -> bool:
        return bool(self._replica.find_unused_parameters or self._replica.static_graph)

    def _agree(self, used: Used) -> Used:
        shared = [k for k, parameter in enumerate(self.parameters) if parameter in self._names]
        flags = torch.tensor([used[k] for k in shared], dtype=torch.uint8).to(self.parameters[shared[0]].device)
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._replica.process_group)
        agreed = list(used)
        for k, flag in zip(shared, flags.tolist(), strict=True):
            agreed[k] = bool(flag)
        return tuple(agreed)

    def _check_replica(self) -> None:
        extras = _compat.extras_of_replica(self._replica)
        if extras:
            raise ArgumentError(
                f"model: found a DistributedDataParallel with {', '.join(extras)}, expected one that does no more than "
                "to average gradients. Leave that out, or train in a plain loop with gnncompile.compile(model)."
            )

    def _check(self, parameter: nn.Parameter, gradient: Tensor | None) -> None:
        if gradient is not None and gradient.layout != torch.strided:
            raise ReplicaError(
                f"{self._names.get(parameter, 'a parameter')}: found a gradient of layout {gradient.layout}, expected "
                "a dense one. Make the layer without sparse=True, or train in a plain loop."
            )
        if gradient is None and parameter in self._names and not self._may_be_unused:
            raise ReplicaError(
                f"{self._names[parameter]}: found no gradient, expected one in every process. Pass "
                "find_unused_parameters=True to DistributedDataParallel, or static_graph=True if the same parameters "
                "are unused in every step."
            )
