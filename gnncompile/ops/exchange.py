"""The ops by which processes exchange rows: halos and their gradients, sums over all processes.

Each op names its process group by a string (:func:`gnncompile.layout.halo.name_group`). Its argument `after` holds
results of earlier exchanges and is not read: a pass chains all exchanges of a graph, because every process must run
them in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gnncompile import _compat
from gnncompile.codegen import exchanged_rows
from gnncompile.exc import PartitionError
from gnncompile.ir.region import BITS, Space, parse
from gnncompile.layout.halo import group_of, own_and_halo, splits
from gnncompile.ops.region import LIBRARY

_OPS: Any = torch.ops.gnncompile
_TAGS = (torch.Tag.pt2_compliant_tag,)

LIBRARY.define("partitioned(Tensor row, Tensor col, Tensor send, Tensor halo, str group) -> (Tensor, Tensor)")
_EXCHANGE = "(Tensor x, Tensor send, Tensor halo, str group, Tensor[] after) -> Tensor"
_RETURN = "(Tensor gradient, Tensor send, Tensor halo, str group, Tensor[] after) -> Tensor"
LIBRARY.define("halo_exchange" + _EXCHANGE, tags=_TAGS)
LIBRARY.define("halo_return" + _RETURN, tags=_TAGS)
# The two halves of each exchange. Compiled graphs do other work between them (gnncompile.ops.exchange_lowering).
LIBRARY.define("exchange_start" + _EXCHANGE, tags=_TAGS)
LIBRARY.define("exchange_wait(Tensor joined, str group) -> Tensor", tags=_TAGS)
LIBRARY.define("return_start" + _RETURN, tags=_TAGS)
LIBRARY.define("exchange_order(Tensor started) -> Tensor", tags=_TAGS)
LIBRARY.define(
    "return_wait(Tensor gradient, Tensor arrived, Tensor send, Tensor halo, str group, Tensor[] after) -> Tensor",
    tags=_TAGS,
)
# The two halves of a region whose halo rows are sent to their owners while the own rows are computed.
LIBRARY.define("halo_rows(Tensor[] tensors, Tensor[] layout, str spec, Tensor halo) -> Tensor[]", tags=_TAGS)
LIBRARY.define(
    "own_rows(Tensor[] outputs, Tensor[] tensors, Tensor[] layout, str spec, Tensor halo) -> Tensor", tags=_TAGS
)
LIBRARY.define("all_reduce(Tensor x, str kind, str group, Tensor[] after) -> Tensor", tags=_TAGS)
LIBRARY.define("count_rows(SymInt rows, Tensor like, str group, Tensor[] after) -> Tensor", tags=_TAGS)
LIBRARY.define("sum_gradients(Tensor[] gradients, str group, Tensor[] after) -> Tensor[]", tags=_TAGS)

ROWS, GRADIENTS = "an exchange of halo rows", "an exchange of gradients of halo rows"
"""Names of exchanges in errors."""

_KINDS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


@contextmanager
def _told(what: str, group: str) -> Iterator[None]:
    """A context manager: an error of a collective says which exchange failed, and what may be the reason."""
    try:
        yield
    except RuntimeError as error:
        rank, size = dist.get_rank(group_of(group)), dist.get_world_size(group_of(group))
        raise PartitionError(
            f"rank {rank} of {size}: {what} failed, because a process has ended, is late, or runs another graph: "
            f"{error}. See the errors of the other ranks. The time-out is that of init_process_group."
        ) from error


def start_exchange(joined: Tensor, send: Tensor, group: str, wait: bool = False) -> Any:
    """Starts to send own rows and to receive halo rows.

    Args:
        joined: Own rows, then room for halo rows, ``[own + num_halo, ...]``, contiguous. Until the exchange is over,
            own rows may be read, and halo rows may not.
        send: The own rows that others read, int64 ``[num_sent]``, of a plan.
        group: The name of the process group.
        wait: Whether the exchange is over when the function returns, for work that is ordered after it.

    Returns:
        The exchange, for :func:`finish`; None with `wait`.

    Raises:
        PartitionError: The rows are not those of the plan's own nodes, or the exchange failed.
    """
    sent, received, own = splits(send)
    if joined.size(0) != own + sum(received):
        raise PartitionError(
            f"an edge list reads rows of {joined.size(0) - sum(received)} nodes, expected rows of the {own} own nodes "
            "of its sources' type. Pass the tensors of one part, and edges with the node type that they begin at."
        )
    packed = exchanged_rows.packed(joined, send)
    with _told(ROWS, group):
        return dist.all_to_all_single(
            joined[own:], packed, list(received), list(sent), group=group_of(group), async_op=not wait
        )


def start_return(gradient: Tensor, arrived: Tensor, send: Tensor, group: str, wait: bool = False) -> Any:
    """Starts to send the gradients of halo rows to their owners.

    Args:
        gradient: The gradients of own rows, then of halo rows, ``[own + num_halo, ...]``, contiguous.
        arrived: Receives the others' gradients of own rows, ``[num_sent, ...]``.
        send: The own rows that others read, int64 ``[num_sent]``, of a plan.
        group: The name of the process group.
        wait: Whether the exchange is over when the function returns, for work that is ordered after it.

    Returns:
        The exchange, for :func:`finish`; None with `wait`.

    Raises:
        PartitionError: The exchange failed.
    """
    sent, received, own = splits(send)
    with _told(GRADIENTS, group):
        return dist.all_to_all_single(
            arrived, gradient[own:], list(sent), list(received), group=group_of(group), async_op=not wait
        )


def finish(exchange: Any, what: str, group: str) -> None:
    """Lets later work on the device wait for an exchange. The host waits only where the device is a CPU.

    Raises:
        PartitionError: The exchange failed.
    """
    with _told(what, group):
        exchange.wait()


def add_arrived(gradient: Tensor, arrived: Tensor, send: Tensor) -> None:
    """Adds the gradients that arrived to those of own rows, rank by rank, so the sums are the same bits every time."""
    sent = list(splits(send).sent)
    for rows, part in zip(send.split(sent), arrived.split(sent), strict=True):
        if rows.size(0):
            exchanged_rows.add_rows(gradient, rows, part)  # each row once, so no order is left to chance


def run_rows(
    kernel: Callable[..., None],
    spec: str,
    tensors: Sequence[Tensor],
    layout: Sequence[Tensor],
    outputs: Sequence[Tensor],
    halo: Tensor,
    which: int,
) -> None:
    """Runs a region's kernel on some of its rows.

    Args:
        kernel: The region's :class:`gnncompile.runtime.launch.Call`.
        spec: The region as a string. All outputs have a row per row of the region.
        tensors: Its tensors.
        layout: rowptr ``[own + num_halo + 1]``, col and edge ``[num_edges]`` of its walk, int32: own rows come first.
        outputs: Its outputs ``[own + num_halo, ...]``.
        halo: The halo of a plan ``[num_halo, 0]``.
        which: 0 for own rows, 1 for halo rows.
    """
    rowptr, col, edge = layout
    own = rowptr.size(0) - 1 - halo.size(0)
    rows = own_and_halo(rowptr, own)[which]
    at, edges = (slice(own), slice(own, None))[which], slice(rows.first, rows.last)
    of_rows, of_edges = _places(spec)
    given = [t[at] if k in of_rows else t[edges] if k in of_edges else t for k, t in enumerate(tensors)]
    kernel(given, (rows.rowptr, col[edges], edge[edges]), [out[at] for out in outputs])


@lru_cache(maxsize=4096)
def _places(spec: str) -> tuple[frozenset[int], frozenset[int]]:
    """The positions of a region's tensors that have rows of the region, and of those in the order of its walk."""
    region = parse(spec)
    rows = {int(n.value or 0) for n in region.inputs if n.space is region.by}
    return frozenset(rows), frozenset(int(n.value or 0) for n in region.inputs if n.space is Space.ORDERED)


def splits_by_rows(spec: str) -> bool:
    """Whether a region can run on some of its rows: it gives rows only, and none of its bools per edge are packed."""
    region = parse(spec)
    packed = any(n.space is Space.ORDERED and n.dtype == BITS for n in region.inputs)
    return not region.tiled and not packed and all(map(region.per_row, region.outputs))


def _exchange(x: Tensor, send: Tensor, halo: Tensor, group: str, after: list[Tensor]) -> Tensor:
    """Sends own rows ``[own, ...]``. Returns own rows, then halo rows by owner, ``[own + num_halo, ...]``."""
    joined = x.new_empty((x.size(0) + halo.size(0), *x.shape[1:]))
    joined[: x.size(0)] = x
    start_exchange(joined, send, group, wait=True)
    return joined


def _start_return(gradient: Tensor, send: Tensor, halo: Tensor, group: str, after: list[Tensor]) -> Tensor:
    """Sends gradients of halo rows to their owners, and returns the gradients that arrive ``[num_sent, ...]``."""
    arrived = gradient.new_empty((send.size(0), *gradient.shape[1:]))
    start_return(gradient.contiguous(), arrived, send, group, wait=True)
    return arrived


def _wait_return(
    gradient: Tensor, arrived: Tensor, send: Tensor, halo: Tensor, group: str, after: list[Tensor]
) -> Tensor:
    """Returns the gradients of own rows ``[own, ...]``, with those that arrived added."""
    out = gradient[: gradient.size(0) - halo.size(0)].clone(memory_format=torch.contiguous_format)
    add_arrived(out, arrived, send)
    return out


def _return(gradient: Tensor, send: Tensor, halo: Tensor, group: str, after: list[Tensor]) -> Tensor:
    """Sends gradients of halo rows to their owners, and returns the sums of own rows ``[own, ...]``."""
    arrived = _start_return(gradient, send, halo, group, after)
    return _wait_return(gradient, arrived, send, halo, group, [])


def _all_reduce(x: Tensor, kind: str, group: str, after: list[Tensor]) -> Tensor:
    out = x.clone(memory_format=torch.contiguous_format)
    with _told(f"a {kind} over all parts", group):
        dist.all_reduce(out, _KINDS[kind], group=group_of(group))
    return out


def _count_rows(rows: int, like: Tensor, group: str, after: list[Tensor]) -> Tensor:
    """Returns the number of rows of all parts, int64 without dimensions."""
    return _all_reduce(torch.full((), rows, device=like.device), "sum", group, after)


def _sum_gradients(gradients: list[Tensor], group: str, after: list[Tensor]) -> list[Tensor]:
    """Returns the sums of gradients over all parts, with one collective for each dtype."""
    found: list[Tensor] = [g.new_empty(g.shape) for g in gradients]
    for dtype in dict.fromkeys(g.dtype for g in gradients):
        chosen = [k for k, g in enumerate(gradients) if g.dtype == dtype]
        flat = torch.cat([gradients[k].reshape(-1) for k in chosen])
        with _told("the sum of gradients over all parts", group):
            dist.all_reduce(flat, group=group_of(group))
        for k, part in zip(chosen, flat.split([gradients[k].numel() for k in chosen]), strict=True):
            found[k].copy_(part.view(found[k].shape))
    return found


def _fake_exchange(x: Tensor, send: Tensor, halo: Tensor, group: str, after: list[Tensor]) -> Tensor:
    return x.new_empty((x.size(0) + halo.size(0), *x.shape[1:]))


def _fake_return(gradient: Tensor, send: Tensor, halo: Tensor, group: str, after: list[Tensor]) -> Tensor:
    return gradient.new_empty((gradient.size(0) - halo.size(0), *gradient.shape[1:]))


def _fake_halo_rows(tensors: list[Tensor], layout: list[Tensor], spec: str, halo: Tensor) -> list[Tensor]:
    return _OPS.region(tensors, layout, spec)  # type: ignore[no-any-return]


def _setup_exchange(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, send, halo, group, after = inputs
    ctx.save_for_backward(send, halo)
    ctx.group, ctx.after = group, len(after)


def _exchange_backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    send, halo = ctx.saved_tensors
    return _OPS.halo_return(gradient, send, halo, ctx.group, []), None, None, None, [None] * ctx.after


def _return_backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    send, halo = ctx.saved_tensors
    return _OPS.halo_exchange(gradient, send, halo, ctx.group, []), None, None, None, [None] * ctx.after


def _setup_all_reduce(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.kind, ctx.group, after = inputs
    ctx.after = len(after)


def _all_reduce_backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    if ctx.kind != "sum":
        return None, None, None, [None] * ctx.after
    return _OPS.all_reduce(gradient, "sum", ctx.group, []), None, None, [None] * ctx.after


class SumGradients(torch.autograd.Function):
    """Returns parameters as they are. Their gradients are summed over all parts, all in one collective."""

    @staticmethod
    def forward(ctx: Any, group: str, *parameters: Tensor) -> Any:
        """Returns views of the parameters."""
        ctx.group = group
        return tuple(p.view_as(p) for p in parameters)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Returns the sums of the gradients."""
        return None, *_OPS.sum_gradients(list(gradients), ctx.group, [])


def parameters_of_all_parts(group: str, *parameters: Tensor) -> Any:
    """Returns parameters as they are; their gradients are summed over all parts."""
    return SumGradients.apply(group, *parameters)  # type: ignore[no-untyped-call]


def counted_once(x: Tensor, size: int) -> Tensor:
    """Returns a value that all `size` processes have alike, of whose gradient each process takes an equal share."""
    return x.detach() + (x - x.detach()).nan_to_num() / size  # an infinity minus itself is NaN


LIBRARY.impl("partitioned", lambda row, col, *_: (row.clone(), col.clone()), "CompositeExplicitAutograd")
torch.library.register_fake(
    "gnncompile::partitioned", lambda row, col, *_: (row.new_empty(row.shape), col.new_empty(col.shape)), lib=LIBRARY
)
for _name, _function, _fake in (
    ("halo_exchange", _exchange, _fake_exchange),
    ("halo_return", _return, _fake_return),
    ("exchange_start", _exchange, _fake_exchange),
    ("exchange_wait", lambda joined, group: joined.clone(), lambda joined, group: joined.new_empty(joined.shape)),
    ("return_start", _start_return, lambda gradient, send, *_: gradient.new_empty((send.size(0), *gradient.shape[1:]))),
    ("exchange_order", lambda started: started.new_empty(0), lambda started: started.new_empty(0)),
    (
        "return_wait",
        _wait_return,
        lambda gradient, arrived, send, halo, group, after: _fake_return(gradient, send, halo, group, after),
    ),
    ("halo_rows", lambda tensors, layout, spec, halo: _OPS.region(tensors, layout, spec), _fake_halo_rows),
    ("own_rows", lambda outputs, *_: outputs[0].new_empty(0), lambda outputs, *_: outputs[0].new_empty(0)),
    ("all_reduce", _all_reduce, lambda x, kind, group, after: x.new_empty(x.shape)),
    ("count_rows", _count_rows, lambda rows, like, group, after: like.new_empty((), dtype=torch.int64)),
    ("sum_gradients", _sum_gradients, lambda gradients, group, after: [g.new_empty(g.shape) for g in gradients]),
):
    LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"gnncompile::{_name}", _fake, lib=LIBRARY)
for _name, _backward, _setup in (
    ("halo_exchange", _exchange_backward, _setup_exchange),
    ("halo_return", _return_backward, _setup_exchange),
    ("all_reduce", _all_reduce_backward, _setup_all_reduce),
):
    torch.library.register_autograd(f"gnncompile::{_name}", _backward, setup_context=_setup, lib=LIBRARY)
    for _one in (_backward, _setup):
        _compat.run_uncompiled(_one)
