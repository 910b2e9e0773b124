"""The op that runs a torch function uncompiled inside a captured graph: ``gnncompile::opaque``.

These functions choose their algorithm, or their number of steps, by sizes. Tracing them would guard on the sizes. As an
op they read the sizes in each call. The op's gradient runs the function again under autograd.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnncompile import _compat
from gnncompile.ops.region import LIBRARY

LIBRARY.define("opaque(Tensor[] tensors, str how) -> Tensor[]", tags=(torch.Tag.pt2_compliant_tag,))
LIBRARY.define(
    "opaque_backward(Tensor?[] cotangents, Tensor[] tensors, bool[] wanted, str how) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)


class Function(NamedTuple):
    """A function of tensors and settings.

    Attributes:
        run: Computes the results.
        shapes: Computes the shapes of the results; all results have the dtype and device of the first tensor.
    """

    run: Callable[..., Sequence[Tensor]]
    shapes: Callable[..., Sequence[Sequence[int]]]


@torch.compiler.assume_constant_result
def _described(name: str, settings: tuple[tuple[str, Any], ...]) -> str:
    return json.dumps([name, dict(settings)])


def opaque(name: str, tensors: Sequence[Tensor], **settings: Any) -> list[Tensor]:
    """Calls one of :data:`FUNCTIONS` by its name, as an op; traced by Dynamo."""
    found: list[Tensor] = torch.ops.gnncompile.opaque(list(tensors), _described(name, tuple(settings.items())))
    return found


# -- the functions ------------------------------------------------------------------------------------------------


def _distances(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Distances ``[..., n, m]`` between all rows of ``[..., n, channels]`` and ``[..., m, channels]``."""
    return [torch.cdist(tensors[0], tensors[1])]


def _distances_shapes(tensors: Sequence[Tensor]) -> list[list[int]]:
    one, other = tensors
    return [[*torch.broadcast_shapes(one.shape[:-2], other.shape[:-2]), one.size(-2), other.size(-2)]]


_RECURRENT: dict[str, Callable[..., Any]] = {
    "LSTM": torch.lstm,
    "GRU": torch.gru,
    "RNN_TANH": torch.rnn_tanh,
    "RNN_RELU": torch.rnn_relu,
}


def _recurrent(
    tensors: Sequence[Tensor], mode: str, layers: int, biases: bool, both_ways: bool, batch_first: bool
) -> Any:
    """A recurrent layer over all steps of its sequences.

    `tensors` are the sequences, the initial states (two for an LSTM, else one), then the weights.
    """
    states = 2 if mode == "LSTM" else 1
    initial, weights = tensors[1 : 1 + states], list(tensors[1 + states :])
    hidden = tuple(initial) if states == 2 else initial[0]
    # Dropout 0.0: else the gradient would need the forward's random numbers again.
    # Training mode: torch differentiates in no other.
    return _RECURRENT[mode](tensors[0], hidden, weights, biases, layers, 0.0, True, both_ways, batch_first)


def _recurrent_shapes(tensors: Sequence[Tensor], mode: str, both_ways: bool, **_: Any) -> list[Sequence[int]]:
    states = tensors[1:3] if mode == "LSTM" else tensors[1:2]
    width = states[0].size(2) * (2 if both_ways else 1)
    return [[*tensors[0].shape[:2], width], *(state.shape for state in states)]


def _paired(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Applies a GRU cell to pairs of rows ``[rows, nodes, channels]``, in both orders, until one row is left.

    This is the tree of :class:`torch_geometric.nn.LCMAggregation`. A last row without a partner joins the next level.
    """
    x, *weights = tensors
    while x.size(0) > 1:
        pairs = x[: x.size(0) // 2 * 2].unflatten(0, (-1, 2))
        made = torch.gru_cell(pairs.flatten(0, 2), pairs.flip(1).flatten(0, 2), *weights)
        x = torch.cat([made.view_as(pairs).mean(1), x[2 * pairs.size(0) :]])
    return [x.squeeze(0)]


FUNCTIONS = {
    "distances": Function(_distances, _distances_shapes),
    "recurrent": Function(_recurrent, _recurrent_shapes),
    "paired": Function(_paired, lambda tensors: [tensors[0].shape[1:]]),
}
"""The functions that :func:`opaque` calls, by name."""


# -- the ops ------------------------------------------------------------------------------------------------------


def _function(how: str) -> tuple[Function, dict[str, Any]]:
    name, settings = json.loads(how)
    return FUNCTIONS[name], settings


def _run(tensors: list[Tensor], how: str) -> list[Tensor]:
    function, settings = _function(how)
    # Results that are views of an input are copied: the results of an op must not share memory with its inputs.
    memory = {t.untyped_storage().data_ptr() for t in tensors}
    found = [t.contiguous() for t in function.run(tensors, **settings)]
    return [t.clone() if t.untyped_storage().data_ptr() in memory else t for t in found]


def _fake(tensors: list[Tensor], how: str) -> list[Tensor]:
    function, settings = _function(how)
    return [tensors[0].new_empty(tuple(shape)) for shape in function.shapes(tensors, **settings)]


def _run_backward(cotangents: list[Tensor | None], tensors: list[Tensor], wanted: list[bool], how: str) -> list[Tensor]:
    function, settings = _function(how)
    with _compat.inside_an_op_with_autograd():
        leaves = [t.detach().requires_grad_(w) for t, w in zip(tensors, wanted, strict=True)]
        results = function.run(leaves, **settings)
        given = [(r, c) for r, c in zip(results, cotangents, strict=True) if c is not None and r.requires_grad]
        asked = [leaf for leaf in leaves if leaf.requires_grad]
        outputs, weights = [r for r, _ in given], [c for _, c in given]
        found = torch.autograd.grad(outputs, asked, weights, allow_unused=True) if given else [None] * len(asked)
    zeros = (torch.zeros_like(a) if f is None else f for f, a in zip(found, asked, strict=True))
    return [f.clone(memory_format=torch.contiguous_format) for f in zeros]


def _fake_backward(
    cotangents: list[Tensor | None], tensors: list[Tensor], wanted: list[bool], how: str
) -> list[Tensor]:
    return [t.new_empty(t.shape) for t, w in zip(tensors, wanted, strict=True) if w]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    tensors, ctx.how = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, cotangents: list[Tensor | None]) -> tuple[list[Tensor | None], None]:
    wanted = list(ctx.needs_input_grad[0])
    found = torch.ops.gnncompile.opaque_backward(cotangents, list(ctx.saved_tensors), wanted, ctx.how)
    rest = iter(found)
    return [next(rest) if w else None for w in wanted], None


LIBRARY.impl("opaque", _run, "CompositeExplicitAutograd")
LIBRARY.impl("opaque_backward", _run_backward, "CompositeExplicitAutograd")
torch.library.register_fake("gnncompile::opaque", _fake, lib=LIBRARY)
torch.library.register_fake("gnncompile::opaque_backward", _fake_backward, lib=LIBRARY)
torch.library.register_autograd("gnncompile::opaque", _backward, setup_context=_setup, lib=LIBRARY)
