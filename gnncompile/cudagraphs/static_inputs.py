"""Copies of a recording's inputs that come from elsewhere each time.

Inputs that stand in one piece of memory, as the tensors of a loader's mini-batch do, are copied by one copy of all that
lies between the first and the last, lists of hubs with them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gnncompile.layout import batch_metadata, csr

MOST_APART, LITTLE = 1.5, 2**16
"""Inputs in one piece of memory are copied together if they fill it but for this factor, or so many bytes."""

_APART = 256
"""Bytes from the beginning of its memory to a copy of a tensor that does not begin there."""


class StaticInputs:
    """Where copies of inputs stand.

    Args:
        args: All inputs of the recording.
        copied: Positions of those that are copied.
    """

    def __init__(self, args: Sequence[Any], copied: Sequence[int]) -> None:
        self.tensors: dict[int, Tensor] = {}
        self._single: list[int] = []
        self._groups: list[_Group] = []
        together: dict[int, list[int]] = {}
        for k in copied:
            together.setdefault(args[k].untyped_storage().data_ptr(), []).append(k)
        for members in together.values():
            if len(members) > 1 and _stand_together([args[k] for k in members]):
                self._groups.append(_Group(args, members))
                self.tensors.update(self._groups[-1].tensors)
            else:
                self._single += members
                self.tensors.update(_each_once(args, members, _copy))

    @property
    def together(self) -> list[list[int]]:
        """Positions of the inputs that stand in one piece of memory, for each piece."""
        return [group.members for group in self._groups]

    def parts(self) -> tuple[list[tuple[int, Tensor]], list[tuple[int, int, Tensor]]]:
        """What is copied: the position of each single input, and its copy; for each piece of memory the position of an
        input that stands there, the byte at which what is copied begins, and the copy, uint8 ``[bytes]``.
        """
        return [(k, self.tensors[k]) for k in self._single], [group.part for group in self._groups]

    def fits(self, args: Sequence[Any]) -> bool:
        """Whether inputs of the right sizes can be copied here."""
        return all(group.stands_as_before(args) for group in self._groups) and self.lists_fit(args)

    def lists_fit(self, args: Sequence[Any]) -> bool:
        """Whether the lists of hubs that came with the inputs are where they were: all but this is compared in C++."""
        return all(group.lists_stand_as_before(args) for group in self._groups)

    def copy(self, args: Sequence[Any]) -> None:
        """Copies the inputs here."""
        for k in self._single:
            self.tensors[k].copy_(args[k])
        for group in self._groups:
            group.copy(args)


class _Group:
    """Inputs in one piece of memory.

    Attributes:
        members: Their positions.
        part: See :meth:`StaticInputs.parts`.
        tensors: The copies, by position.
    """

    def __init__(self, args: Sequence[Any], members: list[int]) -> None:
        self.members = members
        storage = args[members[0]].untyped_storage()
        hubs = {k: _hubs_in(args[k], storage) for k in members}
        first, end, _ = _spans([args[k] for k in members])
        self._static = torch.empty(end, dtype=torch.uint8, device=args[members[0]].device)
        self.part = members[0], first, self._static[first:]
        self._offsets = [args[k].storage_offset() for k in members]
        self._listed = [(k, _places(found)) for k, found in hubs.items() if found is not None]
        self.tensors = _each_once(args, members, self._at)
        for k, found in hubs.items():
            if found is not None:
                # Whatever number of hubs comes later is launched for, unless there are none at all.
                number = found.number if found.number == csr.NO_HUBS else None
                lists = self._at(found.rows), self._at(found.pieces)
                csr.give_hubs(self.tensors[k], *lists, number, found.most_edges)
        self.copy(args)

    def _at(self, tensor: Tensor) -> Tensor:
        if not tensor.numel():
            return tensor
        # At the same place as there: guards ask whether it is the beginning.
        start = int(tensor.storage_offset()) * tensor.element_size()
        return batch_metadata.view(self._static, tensor.dtype, start, tensor.shape, tensor.stride())

    def stands_as_before(self, args: Sequence[Any]) -> bool:
        """Whether the inputs stand in one piece of memory as they did."""
        start = args[self.members[0]].untyped_storage().data_ptr()
        for k, offset in zip(self.members, self._offsets, strict=True):
            if args[k].storage_offset() != offset or args[k].untyped_storage().data_ptr() != start:
                return False
        return True

    def lists_stand_as_before(self, args: Sequence[Any]) -> bool:
        """The same of the lists of hubs that came with them."""
        return all(_places(_hubs_in(args[k], args[k].untyped_storage())) == places for k, places in self._listed)

    def copy(self, args: Sequence[Any]) -> None:
        """Copies all of them."""
        at, first, static = self.part
        static.copy_(batch_metadata.view(args[at], torch.uint8, first, static.shape))


def _each_once(args: Sequence[Any], members: Sequence[int], make: Callable[[Tensor], Tensor]) -> dict[int, Tensor]:
    """What is made of each input; one tensor twice stays one, which guards may ask."""
    made: dict[int, Tensor] = {}
    for k in members:
        if id(args[k]) not in made:
            made[id(args[k])] = make(args[k])
    return {k: made[id(args[k])] for k in members}


def _stand_together(tensors: Sequence[Tensor]) -> bool:
    """Whether tensors in one piece of memory fill what lies between the first and the last."""
    first, end, needed = _spans(tensors)
    return end - first <= MOST_APART * needed + LITTLE


def _hubs_in(rowptr: Tensor, storage: Any) -> csr.Hubs | None:
    """The list of hubs that came with a tensor, if it stands in the same memory, or is empty."""
    found = csr.given_hubs(rowptr)
    if found is None or found.number == csr.NO_HUBS:
        return found
    inside = all(t.untyped_storage().data_ptr() == storage.data_ptr() for t in (found.rows, found.pieces))
    return found if inside else None


def _places(hubs: csr.Hubs | None) -> Any:
    """Where a list of hubs stands, and from which degree on; of one that is empty the latter alone."""
    if hubs is None or hubs.number == csr.NO_HUBS:
        return False if hubs is None else hubs.most_edges
    return hubs.most_edges, [(t.storage_offset(), t.shape) for t in (hubs.rows, hubs.pieces)]


def _copy(tensor: Tensor) -> Tensor:
    """A copy that begins at the beginning of its memory only if the tensor does, which guards may ask."""
    if not tensor.storage_offset():
        return tensor.detach().clone()
    start, end = _span(tensor)
    memory = torch.empty(2 * _APART + end - start, dtype=torch.uint8, device=tensor.device)
    made = batch_metadata.view(memory, tensor.dtype, _APART + start % _APART, tensor.shape, tensor.stride())
    return made.copy_(tensor.detach())


def _spans(tensors: Sequence[Tensor]) -> tuple[int, int, int]:
    """Of tensors in one piece of memory, lists of hubs that came with them included: the first byte, the one behind the
    last, and how many bytes they are.
    """
    hubs = [_hubs_in(tensor, tensor.untyped_storage()) for tensor in tensors]
    lists = [part for found in hubs if found is not None for part in (found.rows, found.pieces)]
    spans = [_span(tensor) for tensor in [*tensors, *lists] if tensor.numel()]
    first, end = min((start for start, _ in spans), default=0), max((end for _, end in spans), default=0)
    return first, end, sum(end - start for start, end in spans)


def _span(tensor: Tensor) -> tuple[int, int]:
    """The first byte of a dense tensor in its memory, and the one behind its last."""
    start = int(tensor.storage_offset()) * tensor.element_size()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + ((last + 1) * tensor.element_size() if tensor.numel() else 0)
