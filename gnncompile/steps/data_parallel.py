"""Averages gradients over processes and sends buffers, as ``DistributedDataParallel`` does around a plain loop's step.

Communication stands between recordings, in none of them: a collective that is captured must be captured and replayed by
all processes at once, but each has batches of its own sizes and decides for itself what it replays.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gnncompile import _compat
from gnncompile.exc import ArgumentError, ReplicaError

ALIGNMENT = 16
"""Bytes; kernels of optimizers want each gradient at a multiple of it."""

Used = tuple[bool, ...]
"""Which parameters have a gradient."""


class GradientAveraging:
    """Gradients in common buffers, one for each type; those of the parameters that processes share are averaged there.

    Args:
        replica: Says which parameters are shared, among which processes, and what may be unused.
        others: Parameters that are trained beside the module's.

    Attributes:
        parameters: All that are trained.
        buffers: Hold their gradients, and nothing else; always the same memory.

    Raises:
        ValueError: `replica` was told to do something else as well.
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
            step = max(ALIGNMENT // dtype.itemsize, 1)
            lengths = [math.ceil(self.parameters[k].numel() / step) * step for k in members]
            buffer = torch.zeros(sum(lengths), dtype=dtype, device=device)
            self.buffers.append(buffer)
            if shared:
                self._averaged.append(buffer)
            for k, part in zip(members, buffer.split(lengths), strict=True):
                parameter = self.parameters[k]
                strides = torch.empty_like(parameter, device="meta").stride()  # its own, where it fills its memory
                self._places[k] = part.as_strided(parameter.shape, strides)

    def send_buffers(self) -> None:
        """Before a forward: the module's buffers become those of the first process."""
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
            # As DistributedDataParallel does it: structure that was built of a buffer stays valid.
            with torch.no_grad(), _compat.keep_versions(buffers):
                for buffer, values in zip(buffers, together.split([b.numel() for b in buffers]), strict=True):
                    buffer.copy_(values.view_as(buffer))

    def keep(self, gradients: Sequence[Tensor | None]) -> Used:
        """Writes this process's gradients, one for each of the parameters, to the buffers.

        Raises:
            RuntimeError: A shared parameter has none, or a sparse one.
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
        """Averages what the buffers hold over processes.

        Args:
            used: What :meth:`keep` returned.

        Returns:
            Which parameters have a gradient in any process.
        """
        for buffer in self._averaged:
            dist.all_reduce(buffer, group=self._replica.process_group)
        if not self._may_be_unused:
            return used
        if self._agreed is None or not self._replica.static_graph:
            self._agreed = self._agree(used)
        return self._agreed

    def hand_out(self, used: Used) -> None:
        """Makes the averages the parameters' gradients."""
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
