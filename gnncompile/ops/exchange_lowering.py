"""Lowers exchanges for Inductor: no copy of the rows, and other work between the start of an exchange and its end.

One buffer holds own rows, then halo rows. The producer of the own rows writes into its front, and the collective
receives into its tail. In the backward, the gradients that arrive are added to the front of the region's result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gnncompile._compat import inductor_call
from gnncompile._compat.inductor_call import Call, Result, contiguous, front, in_front, realized, tensor_of, writable
from gnncompile.ops.exchange import GRADIENTS, ROWS

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
        given = self.references()
        returns = len(given) > 1
        what = GRADIENTS if returns else ROWS
        wrapper.writeline(f"_gnncompile_exchange.finish({handle}, {what!r}, {group!r})")
        wrapper.writeline(f"del {handle}")
        if returns:
            wrapper.writeline(f"_gnncompile_exchange.add_arrived({', '.join(given)})")


def _lower_start(x: Any, send: Any, halo: Any, group: str, after: Sequence[Any]) -> Any:
    joined = in_front(x, x.get_size()[0] + halo.get_size()[0])
    given = [realized(joined), contiguous(send), *map(realized, after)]
    joined.data.data.call = Start(given, written=given[:1], constants=("start_exchange", group, 2))
    return joined


def _lower_wait(joined: Any, group: str) -> Any:
    given = [realized(joined)]
    Wait(given, written=given, constants=(joined.data.data.call.handle, group))
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


def _lower_return_wait(gradient: Any, arrived: Any, send: Any, halo: Any, group: str) -> Any:
    own = gradient.get_size()[0] - halo.get_size()[0]
    start = inductor_call.node_now().args[1]
    rows = writable(gradient, 0, besides=start)
    Wait([rows, realized(arrived), contiguous(send)], written=[rows], constants=(arrived.data.data.call.handle, group))
    return front(tensor_of(rows), own)


def install() -> None:
    """Registers the lowerings with Inductor."""
    inductor_call.install(_own.exchange_start.default, _lower_start)
    inductor_call.install(_own.exchange_wait.default, _lower_wait)
    inductor_call.install(_own.exchange_order.default, _lower_order)
    inductor_call.install(_own.return_start.default, _lower_return_start)
    inductor_call.install(_own.return_wait.default, _lower_return_wait)
    inductor_call.returns_argument(_own.exchange_start.default, _own.exchange_wait.default)
