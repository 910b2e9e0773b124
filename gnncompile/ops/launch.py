"""The ops of a program that is traced for a package on a GPU.

``gnncompile::launch(tensors, numbers, programs, written, kernel)`` launches a Triton kernel. It returns the tensors at
the positions `written`, as the kernel leaves them. In a package the kernel writes to these tensors themselves, and
elsewhere to copies.

A kernel with a flag finds an error, such as an index out of range. A package reads the flag when its results are
complete, and fails. Elsewhere the launch raises the error.

``gnncompile::nonempty(value, rows, entries)`` returns `value`. The call fails at once if there are no rows but entries
of an index. ``gnncompile::bounded(index, size, wraps)`` stands for an index whose wrong entries are refused and
replaced.

``gnncompile::with_hubs(rowptr, hubs, pieces)`` returns `rowptr`, and tells the regions that walk the layout the
lists of its hubs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gnncompile._compat import aoti, aoti_checks
from gnncompile._compat.inductor_call import Call, aligned, contiguous, node_now, tensor_of, writable
from gnncompile.codegen.cpp.objects import data_object, start_task
from gnncompile.exc import ArgumentError, IndexOutOfRangeError
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
    entry = _entries[kernel]
    if entry.flag is None:
        entry.run(given, numbers, programs)
        return [given[at] for at in written]
    flag = given[0].new_zeros((1,), dtype=torch.bool)
    entry.run([*given, flag], numbers, programs)
    if bool(flag):
        raise found_error(entry.flag)
    return [given[at] for at in written]


def found_error(flag: str) -> Exception:
    """Returns the error that a kernel's flag stands for, "index" or "layout"."""
    if flag == "layout":
        return ArgumentError(
            "layout: found the layout of another graph, or tensors in another order. Make the layout of this graph, "
            "and pass its tensors as they are."
        )
    return IndexOutOfRangeError(
        "index out of range: an entry of edge_index, of batch, or of another index is outside of the graph; check "
        "edge_index against the number of nodes, and batch against the number of graphs."
    )


def _fake(tensors: list[Tensor], numbers: Any, programs: Any, written: list[int], kernel: str) -> list[Tensor]:
    return [torch.empty_like(tensors[at]) for at in written]


def _run_nonempty(value: Tensor, rows: int, entries: int) -> Tensor:
    if entries and not rows:
        raise found_error("index")
    return value.clone()


def _copied(value: Tensor, *_: Any) -> Tensor:
    return value.clone()


for _signature, _function in (
    ("nonempty(Tensor value, SymInt rows, SymInt entries) -> Tensor", _run_nonempty),
    ("bounded(Tensor index, SymInt size, bool wraps) -> Tensor", _copied),
    ("with_hubs(Tensor rowptr, Tensor hubs, Tensor pieces) -> Tensor", _copied),
):
    _name = _signature.partition("(")[0]
    LIBRARY.define(_signature, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"gnncompile::{_name}", lambda value, *_: torch.empty_like(value), lib=LIBRARY)

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
        lists = f"{{{', '.join(self.memories())}}}, {{{numbers}}}"
        if self.entry.flag is not None:
            lists += f", {aoti_checks.flags_text(wrapper)}, gnncompile::Error::{self.entry.flag}"
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


class _NonemptyCall(Call):
    """The check that there are rows if an index has entries.

    Args:
        value: A tensor that later nodes read.
        sizes: The numbers of rows and of entries of the index.
    """

    def __init__(self, value: Any, sizes: Sequence[Any]) -> None:
        self.sizes = sizes
        super().__init__([value], written=[value])

    def codegen(self, wrapper: Any) -> None:
        """Writes the check into a package's code."""
        aoti.declare_support(wrapper)
        rows, entries = (aoti.size_text(wrapper, size) for size in self.sizes)
        wrapper.writeline(f"gnncompile::check_rows({rows}, {entries});")


def _lower_nonempty(value: Any, rows: Any, entries: Any) -> Any:
    value = writable(value, node_now().args[0])
    _NonemptyCall(value, (rows, entries))
    return tensor_of(value)


def _lower(
    tensors: Sequence[Any], numbers: Sequence[Any], programs: Any, written: Sequence[int], kernel: str
) -> list[Any]:
    entry, nodes = _entries[kernel], node_now().args[0]
    # contiguous() fixes the layout: Inductor would otherwise move a buffer into that of a later concatenation.
    read = aligned if entry.aligned else contiguous
    seen = {node: read(t) for at, (node, t) in enumerate(zip(nodes, tensors, strict=True)) if at not in written}
    given = [contiguous(writable(t, nodes[at])) if at in written else seen[nodes[at]] for at, t in enumerate(tensors)]
    call = _LaunchCall(entry, given, [given[at] for at in written], numbers, programs)
    compile_entry(entry, call.device)
    return [tensor_of(given[at]) for at in written]


def install() -> None:
    """Registers the lowerings with Inductor. They apply to packages alone."""
    aoti.install_in_packages(_OP, _lower)
    aoti.install_in_packages(_own.nonempty.default, _lower_nonempty)
