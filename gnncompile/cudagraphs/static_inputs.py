"""Copies of a recording's inputs, for the inputs that have another address in each call.

Inputs in one piece of memory, as the tensors of a loader's mini-batch, are copied together. One copy takes all bytes
between the first input and the last, with the lists of hubs among them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gnncompile.layout import batch_metadata, csr
from gnncompile.layout.halo import copy_with_room

MOST_APART, LITTLE = 1.5, 2**16
"""Inputs in one piece of memory are copied together if they span at most ``MOST_APART * bytes + LITTLE`` bytes.

Here, `bytes` is the number of bytes of the inputs.
"""

_APART = 256
"""The least offset in bytes, in its memory, of the copy of a tensor that has an offset in its own memory."""


class StaticInputs:
    """The memory to which inputs are copied.

    Args:
        args: All inputs of the recording.
        copied: Indices of the inputs that are copied.
        together: Whether inputs in one piece of memory may be copied together. This depends on numbers of bytes, and
            later inputs must then stand in the same way.
    """

    def __init__(self, args: Sequence[Any], copied: Sequence[int], together: bool = True) -> None:
        self.tensors: dict[int, Tensor] = {}
        self._single: list[int] = []
        self._without_hubs: list[tuple[int, int]] = []
        self._groups: list[_Group] = []
        in_one_piece: dict[int, list[int]] = {}
        for k in copied:
            in_one_piece.setdefault(args[k].untyped_storage().data_ptr() if together else k, []).append(k)
        for members in in_one_piece.values():
            if len(members) > 1 and _stand_together([args[k] for k in members]):
                self._groups.append(_Group(args, members))
                self.tensors.update(self._groups[-1].tensors)
            else:
                self._single += members
                self.tensors.update(_each_once(args, members, _copy))
                self._tell_without_hubs(args, members)

    def _tell_without_hubs(self, args: Sequence[Any], members: Sequence[int]) -> None:
        """Says of the copies of layouts without hubs that there are none. Later inputs must have none either."""
        for k in members:
            found = csr.given_hubs(args[k])
            if found is not None and found.number == csr.NO_HUBS:
                csr.give_hubs(self.tensors[k], found.rows, found.pieces, csr.NO_HUBS, found.most_edges)
                self._without_hubs.append((k, found.most_edges))

    @property
    def together(self) -> list[list[int]]:
        """For each shared piece of memory, the indices of its inputs."""
        return [group.members for group in self._groups]

    def parts(self) -> tuple[list[tuple[int, Tensor]], list[tuple[int, int, Tensor]]]:
        """Returns the copies, for the C++ code: first of single inputs, then of pieces of memory.

        A single input is given as ``(index, copy)``. A piece of memory is given as ``(index of an input in it, first
        byte that is copied, copy)``; this copy is uint8 ``[bytes]``.
        """
        return [(k, self.tensors[k]) for k in self._single], [group.part for group in self._groups]

    def fits(self, args: Sequence[Any]) -> bool:
        """Whether inputs of the right sizes can be copied to this memory."""
        return all(group.stands_as_before(args) for group in self._groups) and self.lists_fit(args)

    def lists_fit(self, args: Sequence[Any]) -> bool:
        """Whether the inputs' lists of hubs have the same places as before. C++ compares all else."""
        for k, most_edges in self._without_hubs:
            found = csr.given_hubs(args[k])
            if found is None or found.number != csr.NO_HUBS or found.most_edges != most_edges:
                return False
        return all(group.lists_stand_as_before(args) for group in self._groups)

    def copy(self, args: Sequence[Any]) -> None:
        """Copies the inputs to this memory."""
        for k in self._single:
            self.tensors[k].copy_(args[k])
        for group in self._groups:
            group.copy(args)


class _Group:
    """Inputs in one piece of memory.

    Attributes:
        members: The indices of the inputs.
        part: See :meth:`StaticInputs.parts`.
        tensors: The copies, by index of the input.
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
                # No number: kernels are launched for any later number of hubs. If there are no hubs now, there must be
                # none later.
                number = found.number if found.number == csr.NO_HUBS else None
                lists = self._at(found.rows), self._at(found.pieces)
                csr.give_hubs(self.tensors[k], *lists, number, found.most_edges)
        self.copy(args)

    def _at(self, tensor: Tensor) -> Tensor:
        if not tensor.numel():
            return tensor
        # At the same offset as the input: guards ask whether a tensor is at the beginning of its memory.
        start = int(tensor.storage_offset()) * tensor.element_size()
        return batch_metadata.view(self._static, tensor.dtype, start, tensor.shape, tensor.stride())

    def stands_as_before(self, args: Sequence[Any]) -> bool:
        """Whether the inputs are in one piece of memory, at the same offsets as before."""
        start = args[self.members[0]].untyped_storage().data_ptr()
        for k, offset in zip(self.members, self._offsets, strict=True):
            if args[k].storage_offset() != offset or args[k].untyped_storage().data_ptr() != start:
                return False
        return True

    def lists_stand_as_before(self, args: Sequence[Any]) -> bool:
        """Whether the inputs' lists of hubs have the same places as before."""
        return all(_places(_hubs_in(args[k], args[k].untyped_storage())) == places for k, places in self._listed)

    def copy(self, args: Sequence[Any]) -> None:
        """Copies all inputs of the group."""
        at, first, static = self.part
        static.copy_(batch_metadata.view(args[at], torch.uint8, first, static.shape))


def _each_once(args: Sequence[Any], members: Sequence[int], make: Callable[[Tensor], Tensor]) -> dict[int, Tensor]:
    """Returns the result of `make` for each input, by index.

    A tensor that is two of the inputs has one result: guards may ask for this.
    """
    made: dict[int, Tensor] = {}
    for k in members:
        if id(args[k]) not in made:
            made[id(args[k])] = make(args[k])
    return {k: made[id(args[k])] for k in members}


def _stand_together(tensors: Sequence[Tensor]) -> bool:
    """Whether tensors in one piece of memory fill most of the bytes between the first tensor and the last."""
    first, end, needed = _spans(tensors)
    return end - first <= MOST_APART * needed + LITTLE


def _hubs_in(rowptr: Tensor, storage: Any) -> csr.Hubs | None:
    """Returns the lists of hubs of a tensor if they are in the same memory, or are empty; else None."""
    found = csr.given_hubs(rowptr)
    if found is None or found.number == csr.NO_HUBS:
        return found
    inside = all(t.untyped_storage().data_ptr() == storage.data_ptr() for t in (found.rows, found.pieces))
    return found if inside else None


def _places(hubs: csr.Hubs | None) -> Any:
    """Returns the offsets and shapes of lists of hubs, and from which degree on a row is a hub.

    For empty lists it returns only the degree, for no lists False.
    """
    if hubs is None or hubs.number == csr.NO_HUBS:
        return False if hubs is None else hubs.most_edges
    return hubs.most_edges, [(t.storage_offset(), t.shape) for t in (hubs.rows, hubs.pieces)]


def _copy(tensor: Tensor) -> Tensor:
    """Returns a copy that begins at the beginning of its memory only if the tensor does: guards may ask for this.

    The copy of a part's features has room for halo rows, as the features have.
    """
    roomy = copy_with_room(tensor)
    if roomy is not None:
        return roomy
    if not tensor.storage_offset():
        return tensor.detach().clone()
    start, end = _span(tensor)
    memory = torch.empty(2 * _APART + end - start, dtype=torch.uint8, device=tensor.device)
    made = batch_metadata.view(memory, tensor.dtype, _APART + start % _APART, tensor.shape, tensor.stride())
    return made.copy_(tensor.detach())


def _spans(tensors: Sequence[Tensor]) -> tuple[int, int, int]:
    """Returns the first byte, the byte after the last, and the number of bytes of tensors in one piece of memory.

    Their lists of hubs in that memory are included.
    """
    hubs = [_hubs_in(tensor, tensor.untyped_storage()) for tensor in tensors]
    lists = [part for found in hubs if found is not None for part in (found.rows, found.pieces)]
    spans = [_span(tensor) for tensor in [*tensors, *lists] if tensor.numel()]
    first, end = min((start for start, _ in spans), default=0), max((end for _, end in spans), default=0)
    return first, end, sum(end - start for start, end in spans)


def _span(tensor: Tensor) -> tuple[int, int]:
    """Returns the first byte of a dense tensor in its memory, and the byte after its last."""
    start = int(tensor.storage_offset()) * tensor.element_size()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + ((last + 1) * tensor.element_size() if tensor.numel() else 0)
