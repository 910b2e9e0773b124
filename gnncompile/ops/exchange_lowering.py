"""Lowers exchanges for Inductor: no copy of the rows, and other work between the start of an exchange and its end.

One buffer holds own rows, then halo rows. The producer of the own rows writes into its front, and the collective
receives into its tail. Features of a part have room for halo rows after them. In the backward, the gradients that
arrive are added to the front of the region's result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from gnncompile._compat import inductor_call
from gnncompile._compat.inductor_call import (
    Borrowed,
    Call,
    Result,
    contiguous,
    front,
    in_front,
    realized,
    tensor_of,
    tuple_text,
    writable,
)
from gnncompile.ops.exchange import GRADIENTS, ROWS
from gnncompile.ops.gemm import only_follows
from gnncompile.ops.region_lowering import RegionCall, lower_region, region_name

_own = torch.ops.gnncompile
_IMPORT = "from gnncompile.ops import exchange as _gnncompile_exchange"


class Start(Call):
    """Starts an exchange. The first tensors are its arguments; the others are results of earlier exchanges.

    The constants are the function of :mod:`gnncompile.ops.exchange` that starts it, the group, and the number of
    arguments.
    """

    @property
    def handle(self) -> str:
        """The variable of the generated code that holds the exchange until it is over."""
        return f"exchange_{self.get_operation_name()}"

    def codegen(self, wrapper: Any) -> None:
        """Writes the call into Inductor's wrapper."""
        function, group, count = self.constant_args
        given = self.references()[:count]
        filled = self.filled(wrapper)
        arguments = ", ".join([given[0], *filled, *given[1:]])
        wrapper.add_import_once(_IMPORT)
        wrapper.writeline(f"{self.handle} = _gnncompile_exchange.{function}({arguments}, {group!r})")


class Order(Call):
    """Stands for the start of an exchange, for calls that come later. The rows of the exchange need not live on."""

    def codegen(self, wrapper: Any) -> None:
        """Writes nothing."""


class Wait(Call):
    """Ends an exchange of rows, or of gradients, which it adds. The constants are the handle and the group."""

    def codegen(self, wrapper: Any) -> None:
        """Writes the call into Inductor's wrapper."""
        handle, group = self.constant_args
        given = self.references()[:3]
        returns = len(given) == 3
        what = GRADIENTS if returns else ROWS
        wrapper.writeline(f"_gnncompile_exchange.finish({handle}, {what!r}, {group!r})")
        wrapper.writeline(f"del {handle}")
        if returns:
            wrapper.writeline(f"_gnncompile_exchange.add_arrived({', '.join(given)})")


class Borrow(Call):
    """Assigns a buffer of own rows, then room for halo rows, to its result: the memory of an input, or a copy."""

    def codegen(self, wrapper: Any) -> None:
        """Writes the call into Inductor's wrapper."""
        wrapper.add_import_once("from gnncompile.layout.halo import joined_rows as _gnncompile_joined_rows")
        (result,) = self.results
        wrapper.writeline(f"{result.get_name()} = _gnncompile_joined_rows({', '.join(self.references())})")


def _borrowed(x: Any, halo: Any, rows: Any) -> Any:
    result = Borrowed([rows, *x.get_size()[1:]], x.get_dtype(), x.get_device())
    Borrow([contiguous(x), realized(halo)], [result])
    return tensor_of(result)


_READERS = (
    _own.region_kernel.default,
    _own.halo_rows.default,
    _own.own_edges.default,
    _own.halo_edges.default,
    _own.exchange_order.default,
)


def _may_borrow(node: fx.Node) -> bool:
    """Whether an exchange may receive into memory after an input's rows: only regions of this graph read the result."""
    source: Any = node.args[0]
    return source.op == "placeholder" and all(_only_read(user) for user in node.users)


def _only_read(node: fx.Node) -> bool:
    if node.target in _READERS:
        return True
    through = node.target in (_own.exchange_wait.default, torch.ops.aten.view.default, torch.ops.aten.reshape.default)
    return through and all(map(_only_read, node.users))


def _lower_start(x: Any, send: Any, halo: Any, group: str, after: Sequence[Any]) -> Any:
    rows = x.get_size()[0] + halo.get_size()[0]
    joined = _borrowed(x, halo, rows) if _may_borrow(inductor_call.node_now()) else in_front(x, rows)
    given = [realized(joined), contiguous(send), *map(realized, after)]
    joined.data.data.started = Start(given, written=given[:1], constants=("start_exchange", group, 2))
    return joined


def _lower_wait(joined: Any, group: str) -> Any:
    given = [realized(joined)]
    Wait(given, written=given, constants=(joined.data.data.started.handle, group))
    return joined


def _lower_order(started: Any) -> Any:
    order = Result([0], started.get_dtype(), started.get_device())
    Order([realized(started)], [order])
    return tensor_of(order)


def _lower_return_start(gradient: Any, send: Any, halo: Any, group: str, after: Sequence[Any]) -> Any:
    gradient = contiguous(gradient)
    arrived = Result([send.get_size()[0], *gradient.get_size()[1:]], gradient.get_dtype(), gradient.get_device())
    Start([gradient, contiguous(send), *map(realized, after)], [arrived], constants=("start_return", group, 2))
    return tensor_of(arrived)


def _lower_return_wait(gradient: Any, arrived: Any, send: Any, halo: Any, group: str, after: Sequence[Any]) -> Any:
    own = gradient.get_size()[0] - halo.get_size()[0]
    source, started, *_, earlier = inductor_call.node_now().args
    rows = writable(gradient, inductor_call.node_now().args[0], besides=(started, *earlier, *_ordered_after(source)))
    start = arrived.data.data.call
    # The rows that leave may be another buffer, which Inductor must not use again before they have left.
    given = [rows, realized(arrived), contiguous(send), start.inputs[0], *map(realized, after)]
    Wait(given, written=[rows], constants=(start.handle, group))
    return front(tensor_of(rows), own)


def _ordered_after(node: fx.Node) -> list[fx.Node]:
    """The calls that only run after the call that makes a tensor, and do not read the tensor."""
    found = []
    while node.op == "call_function":
        found += [user for user in node.users if only_follows(user, node)]
        node = node.all_input_nodes[0]
    return found


class HaloRows(RegionCall):
    """Fills the halo rows of a region's outputs. The last input is the halo of a plan."""

    def codegen(self, wrapper: Any) -> None:
        """Writes the call into Inductor's wrapper."""
        name, (*given, halo) = self.kernel_name(wrapper), self.references()
        _write_rows(wrapper, name, self.spec, given[: self.count], given[self.count :], self.filled(wrapper), halo, 1)


class OwnRows(Call):
    """Fills the other rows. The constants are the region, and the numbers of its outputs and of its tensors."""

    def codegen(self, wrapper: Any) -> None:
        """Writes the call into Inductor's wrapper."""
        spec, outputs, tensors = self.constant_args
        *given, halo = self.references()
        walk = given[outputs + tensors :]
        name = region_name(spec, self.device.type)
        _write_rows(wrapper, name, spec, given[outputs : outputs + tensors], walk, given[:outputs], halo, 0)


def _write_rows(
    wrapper: Any,
    name: str,
    spec: str,
    tensors: Sequence[str],
    layout: Sequence[str],
    outputs: Sequence[str],
    halo: str,
    which: int,
) -> None:
    lists = ", ".join(map(tuple_text, (tensors, layout, outputs)))
    wrapper.add_import_once(_IMPORT)
    wrapper.writeline(f"_gnncompile_exchange.run_rows({name}, {spec!r}, {lists}, {halo}, {which})")


def _lower_halo_rows(tensors: Sequence[Any], layout: Sequence[Any], spec: str, halo: Any) -> list[Any]:
    return lower_region(tensors, layout, spec, [halo], HaloRows)


def _lower_own_rows(outputs: Sequence[Any], tensors: Sequence[Any], layout: Sequence[Any], spec: str, halo: Any) -> Any:
    written = [realized(out) for out in outputs]
    order = Result([0], outputs[0].get_dtype(), outputs[0].get_device())
    given = [*written, *map(contiguous, (*tensors, *layout[:3])), realized(halo)]
    OwnRows(given, [order], written, constants=(spec, len(outputs), len(tensors)))
    return tensor_of(order)


def install() -> None:
    """Registers the lowerings with Inductor."""
    inductor_call.install(_own.exchange_start.default, _lower_start)
    inductor_call.install(_own.exchange_wait.default, _lower_wait)
    inductor_call.install(_own.exchange_order.default, _lower_order)
    inductor_call.install(_own.return_start.default, _lower_return_start)
    inductor_call.install(_own.return_wait.default, _lower_return_wait)
    inductor_call.install(_own.halo_rows.default, _lower_halo_rows)
    inductor_call.install(_own.own_rows.default, _lower_own_rows)
    inductor_call.returns_argument(_own.exchange_start.default, _own.exchange_wait.default)
