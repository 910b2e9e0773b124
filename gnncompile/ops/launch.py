"""The ops of a program that is traced for a package on a GPU.

``gnncompile::launch(tensors, numbers, programs, written, kernel)`` launches a Triton kernel. It returns the tensors at
the positions `written`, as the kernel leaves them. In a package the kernel writes to these tensors themselves, and
elsewhere to copies.

``gnncompile::refused(value, bad, rows, entries)`` returns `value`, and lets the call fail if `bad` is true. A package
reads `bad` when its results are complete. If there are no rows but entries of an index, the call fails at once.
``gnncompile::bounded(index, size, wraps)`` stands for an index whose wrong entries are refused and replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gnncompile._compat import aoti, aoti_checks
from gnncompile._compat.inductor_call import Call, aligned, contiguous, node_now, tensor_of, writable
from gnncompile.codegen.cpp.objects import data_object, start_task
from gnncompile.exc import IndexOutOfRangeError
from gnncompile.ops.region import LIBRARY

if TYPE_CHECKING:
    from gnncompile.codegen.triton.entry import Cubin, Entry

LIBRARY.define(
    "launch(Tensor[] tensors, SymInt[] numbers, SymInt programs, int[] written, str kernel) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)

_own = torch.ops.gnncompile
_OP = _own.launch.default

_entries: dict[str, Entry] = {}
"""The kernels of traced programs, by name."""


def launch(
    entry: Entry, tensors: Sequence[Tensor], numbers: Sequence[Any], programs: Any, written: Sequence[int]
) -> list[Tensor]:
    """Calls the op."""
    _entries[entry.name] = entry
    return list(_OP(tensors, numbers, programs, written, entry.name))


def _run(tensors: list[Tensor], numbers: list[int], programs: int, written: list[int], kernel: str) -> list[Tensor]:
    given = [t.clone() if at in written else t.contiguous() for at, t in enumerate(tensors)]
    _entries[kernel].run(given, numbers, programs)
    return [given[at] for at in written]


def _fake(tensors: list[Tensor], numbers: Any, programs: Any, written: list[int], kernel: str) -> list[Tensor]:
    return [torch.empty_like(tensors[at]) for at in written]


def _run_refused(value: Tensor, bad: Tensor, rows: int, entries: int) -> Tensor:
    if bool(bad) or (entries and not rows):
        raise IndexOutOfRangeError(
            "index out of range: an entry of edge_index, of batch, or of another index is outside of the graph; check "
            "edge_index against the number of nodes, and batch against the number of graphs."
        )
    return value.clone()


def _fake_refused(value: Tensor, bad: Tensor, rows: Any, entries: Any) -> Tensor:
    return torch.empty_like(value)


_SIGNATURE = "refused(Tensor value, Tensor bad, SymInt rows, SymInt entries) -> Tensor"
LIBRARY.define(_SIGNATURE, tags=(torch.Tag.pt2_compliant_tag,))
LIBRARY.impl("refused", _run_refused, "CompositeExplicitAutograd")
torch.library.register_fake("gnncompile::refused", _fake_refused, lib=LIBRARY)


def _run_bounded(index: Tensor, size: int, wraps: bool) -> Tensor:
    return index.clone()


def _fake_bounded(index: Tensor, size: Any, wraps: bool) -> Tensor:
    return torch.empty_like(index)


LIBRARY.define("bounded(Tensor index, SymInt size, bool wraps) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
LIBRARY.impl("bounded", _run_bounded, "CompositeExplicitAutograd")
torch.library.register_fake("gnncompile::bounded", _fake_bounded, lib=LIBRARY)
LIBRARY.impl("launch", _run, "CompositeExplicitAutograd")
torch.library.register_fake("gnncompile::launch", _fake, lib=LIBRARY)


class _LaunchCall(Call):
    """The launch of a kernel.

    Args:
        entry: The kernel.
        tensors: The pointers, realized and contiguous.
        written: The tensors among them that the kernel writes to.
        numbers: The int32 numbers.
        programs: The number of programs.
    """

    def __init__(
        self, entry: Entry, tensors: Sequence[Any], written: Sequence[Any], numbers: Sequence[Any], programs: Any
    ) -> None:
        self.entry, self.numbers, self.programs = entry, numbers, programs
        super().__init__(tensors, written=written, constants=(entry.name,))

    def codegen(self, wrapper: Any) -> None:
        """Writes the launch into a package's code."""
        kernel = link_entry(wrapper, self.entry)
        programs = aoti.size_text(wrapper, self.programs), str(self.entry.columns)
        numbers = ", ".join(aoti.size_text(wrapper, number) for number in self.numbers)
        lists = f"{{{', '.join(self.references())}}}, {{{numbers}}}"
        wrapper.writeline(f"gnncompile::launch({kernel}, stream, {', '.join(programs)}, {lists});")


def compile_entry(entry: Entry, device: torch.device) -> None:
    """Starts to compile a kernel for the current package."""
    build = aoti.current_build()
    assert build is not None
    if entry.name not in build.cubins:
        capability = torch.cuda.get_device_capability(device)
        build.cubins[entry.name] = start_task(lambda: entry.compile(capability))


def link_entry(wrapper: Any, entry: Entry) -> str:
    """Puts a kernel into a package, and returns the name of its object in the package's code."""
    build = aoti.current_build()
    assert build is not None
    aoti.declare_support(wrapper)
    made: Cubin = build.cubins[entry.name].result()
    aoti.link_object(
        wrapper,
        f'extern "C" const unsigned char {entry.name}[];',
        lambda: data_object(entry.name, made.code, build.folder),
    )
    kernel = f"kernel_of_{entry.name}"
    parts = f"{made.threads}, {made.shared}, {len(entry.types)}, {entry.numbers}, {made.scratches}"
    parts += f", {str(entry.aligned).lower()}"
    aoti.declare(wrapper, f'static gnncompile::Kernel {kernel}({entry.name}, "{made.symbol}", {parts});')
    return kernel


class _RefusedCall(Call):
    """The note that a call fails if a bool is true.

    Args:
        value: A tensor that later nodes read.
        bad: The bool.
        sizes: The numbers of rows and of entries of an index.
    """

    def __init__(self, value: Any, bad: Any, sizes: Sequence[Any]) -> None:
        self.sizes = sizes
        super().__init__([value, bad], written=[value])

    def codegen(self, wrapper: Any) -> None:
        """Writes the note into a package's code."""
        rows, entries = (aoti.size_text(wrapper, size) for size in self.sizes)
        aoti_checks.write_flag(wrapper, self.references()[1], rows, entries)


def _lower_refused(value: Any, bad: Any, rows: Any, entries: Any) -> Any:
    value = writable(value, node_now().args[0])
    _RefusedCall(value, contiguous(bad), (rows, entries))
    return tensor_of(value)


def _lower(
    tensors: Sequence[Any], numbers: Sequence[Any], programs: Any, written: Sequence[int], kernel: str
) -> list[Any]:
    entry, nodes = _entries[kernel], node_now().args[0]
    # contiguous() fixes the layout: Inductor would otherwise move a buffer into that of a later concatenation.
    given = [contiguous(writable(t, nodes[at])) if at in written else aligned(t) for at, t in enumerate(tensors)]
    call = _LaunchCall(entry, given, [given[at] for at in written], numbers, programs)
    compile_entry(entry, call.device)
    return [tensor_of(given[at]) for at in written]


def install() -> None:
    """Registers the lowerings with Inductor. They apply to packages alone."""
    aoti.install_in_packages(_OP, _lower)
    aoti.install_in_packages(_own.refused.default, _lower_refused)
