"""Gradients that the model itself computes (``torch.autograd.grad``) are written out in the graph.

Before: ``d = norm(pos[i] - pos[j]); energy = segment_reduce(f(d), i, n, "sum").sum(); g = gradient([energy], [pos])``
After:  ``u = f'(d) * (pos[i] - pos[j]) / d; g = segment_reduce(u, i, n, "sum") - segment_reduce(u, j, n, "sum")``
Why it pays: forces are message passing as well: the gradient of a gather is a reduction, and becomes a region.

Torch's autograd differentiates the operations between the inputs and the outputs, on fake tensors. The forward values
that its formulas read stay nodes of the graph, so AOTAutograd can differentiate the gradient once more.
"""

from __future__ import annotations

import operator
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from gnncompile import _compat
from gnncompile.passes.analysis import (
    aten,
    is_one,
    is_tensor,
    mutates,
    needed_for,
    own,
    switches_gradients,
    value,
    with_grad_mode,
)
from gnncompile.passes.context import Context
from gnncompile.passes.log import user_line
from gnncompile.passes.pre_grad import canonicalize, dropout, functionalize, normalize_sizes
from gnncompile.passes.pre_grad.differentiable import RULES, TABLE


def run(ctx: Context) -> None:
    """Rewrites the graph in place.

    Raises:
        Recapture: An operation between the inputs and the outputs cannot be differentiated here.
    """
    calls = list(ctx.graph.find_nodes(op="call_function", target=own.gradient.default))
    for call in calls:
        _Written(ctx, call).put()
        for one in (functionalize, normalize_sizes, canonicalize):
            one.run(ctx)
        ctx.__dict__.pop("written", None)
        for node in ctx.graph.nodes:
            if _NEW in node.meta and node.op == "call_function" and mutates(node):
                raise _compat.gradient_not_captured(f"{user_line(node)}: the gradient writes to memory ({node.target})")
    if calls:
        _drop_switches(ctx.graph)


def _drop_switches(graph: fx.Graph) -> None:
    """Removes switches of grad mode that change nothing, or all of them if grad mode is off at the start."""
    graph_enabled = enabled = torch.is_grad_enabled()
    for node in list(graph.nodes):
        if switches_gradients(node):
            before, enabled = enabled, bool(node.args[0])
            if not graph_enabled or before == enabled:
                graph.erase_node(node)


_NEW = "written out"
"""The key in a node's ``meta`` that marks nodes of a gradient."""


class _Written:
    """Writes the operations of one gradient into the graph."""

    def __init__(self, ctx: Context, call: fx.Node) -> None:
        self.ctx, self.call = ctx, call
        self.create_graph: Any = call.args[3]
        self._read_arguments()
        self._give_seeds()
        self.between = self._between()
        self.edge = self._edge()
        self.enabled = dict(with_grad_mode(ctx.graph))

    def _read_arguments(self) -> None:
        arguments: Any = self.call.args
        self.outputs: list[fx.Node] = arguments[0]
        self.inputs: list[fx.Node] = arguments[1]
        self.cotangents: list[fx.Node | None] = arguments[2]

    def put(self) -> None:
        """Inserts the operations of the gradient before its marker, and removes the marker."""
        for node in self.between:
            if node in self.ctx.written or mutates(node):
                self._refuse(f"the model writes in place to what the gradient goes through ({node.target})")
        if not self.enabled[self.call] and self.create_graph:
            self._refuse("it is to be differentiated again, but is taken under no_grad()")
        traced = self._trace()
        made = self._copy(traced)
        for user in list(self.call.users):
            assert user.target is operator.getitem
            user.replace_all_uses_with(made[user.args[1]])  # type: ignore[index]
            self.ctx.graph.erase_node(user)
        self.ctx.graph.erase_node(self.call)

    def _refuse(self, reason: str) -> NoReturn:
        raise _compat.gradient_not_captured(f"{user_line(self.call)}: {reason}")

    def _between(self) -> list[fx.Node]:
        """Returns the nodes on a path from the inputs to the outputs, in order, without the first inputs."""
        after: set[fx.Node] = set()
        for node in self.ctx.graph.nodes:
            if any(n in after or n in self.inputs for n in node.all_input_nodes):
                after.add(node)
        before, todo = set(), [n for n in self.outputs if n in after]
        while todo:
            node = todo.pop()
            if node in after and node not in before:
                before.add(node)
                todo += node.all_input_nodes
        return [node for node in self.ctx.graph.nodes if node in before]

    def _give_seeds(self) -> None:
        """Gives each dropout between inputs and outputs a seed, from which the gradient makes the mask again."""
        for node in self._between():
            if node.target is aten.dropout.default and 0 < node.args[1] < 1:  # type: ignore[operator]
                seed = dropout.seed_of(self.ctx, node)
                with self.ctx.graph.inserting_before(node):
                    seeded = self.ctx.call(own.edge_dropout.default, node.args[0], seed, node.args[1], like=node)
                node.replace_all_uses_with(seeded)
                self.ctx.graph.erase_node(node)
                del self.ctx.seeds[node]
        self._read_arguments()

    def _edge(self) -> list[fx.Node]:
        """Returns the nodes that the differentiated part reads from outside, the inputs first."""
        inside = set(self.between)
        found = dict.fromkeys(n for n in self.inputs if n not in inside)
        for node in self.between:
            found.update(dict.fromkeys(n for n in node.all_input_nodes if n not in inside))
        ends = [*self.outputs, *(c for c in self.cotangents if c is not None)]
        found.update(dict.fromkeys(n for n in ends if n not in inside))
        return list(found)

    def _trace(self) -> fx.GraphModule:
        """Traces a graph that returns the gradients, followed by the tensors of all nodes in between."""
        tensors = [node for node in self.between if is_tensor(node)]

        def run(*values: Any) -> list[Any]:
            env: dict[fx.Node, Any] = dict(zip(self.edge, values, strict=True))
            for node in self.inputs:
                if node in env:
                    env[node].requires_grad_()
            for node in self.between:
                args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: env[n])
                with torch.set_grad_enabled(self.enabled[node]), self.ctx.autocast_of(node):
                    made = cast(Any, RULES.get(node.target, node.target))(*args, **kwargs)
                if node in self.inputs and not made.requires_grad:
                    made = made.detach().requires_grad_()
                env[node] = made
            return [*self._gradients(env), *(env[node] for node in tensors)]

        with self.ctx.fake_mode:
            values = [v.detach() if isinstance(v, Tensor) else v for v in map(value, self.edge)]
            trace: Any = make_fx(run, decomposition_table=TABLE)
            try:
                return trace(*values)  # type: ignore[no-any-return]
            except Exception as error:  # a formula may need values that fake tensors do not have
                self._refuse(str(error).strip().splitlines()[0] if str(error) else type(error).__name__)

    def _gradients(self, env: dict[fx.Node, Any]) -> list[Any]:
        pairs = zip(self.outputs, self.cotangents, strict=True)
        kept: list[Any] = [(env[o], None if c is None else env[c]) for o, c in pairs if env[o].requires_grad]
        inputs = [env[node] for node in self.inputs]
        if not kept:
            return [torch.zeros_like(one) for one in inputs]
        outputs, cotangents = [o for o, _ in kept], [c for _, c in kept]
        with torch.enable_grad(), self.ctx.autocast_of(self.call):
            found: Any = torch.autograd.grad(outputs, inputs, cotangents, create_graph=True, allow_unused=True)
        return [torch.zeros_like(i) if g is None else g for i, g in zip(inputs, found, strict=True)]

    def _copy(self, traced: fx.GraphModule) -> list[fx.Node]:
        """Copies the operations that the gradients need and the graph lacks. Returns the nodes of the gradients."""
        graph, (output,) = traced.graph, traced.graph.find_nodes(op="output")
        results: Any = output.args[0]
        count, tensors = len(self.inputs), [node for node in self.between if is_tensor(node)]
        env = dict(zip(graph.find_nodes(op="placeholder"), self.edge, strict=True))
        for inner, node in zip(results[count:], tensors, strict=True):
            env.setdefault(inner, node)
        needed = needed_for(results[:count], env)
        for inner in graph.nodes:
            if inner not in needed or inner in env:
                continue
            if inner.target is aten.detach.default:
                env[inner] = env[inner.args[0]]  # a forward value that autograd saved
                continue
            self._judge(inner)
            with self.ctx.graph.inserting_before(self.call):
                copied = env[inner] = self.ctx.graph.node_copy(inner, lambda n: env[n])
                copied.meta = {"val": inner.meta["val"], _NEW: True, "origins": (self.call.name,)}
                if "stack_trace" in self.call.meta:
                    copied.meta["stack_trace"] = self.call.meta["stack_trace"]
                if inner.target is aten.mm.default:
                    self._as_layer(copied)
        found = [env[inner] for inner in results[:count]]
        if self.create_graph:
            return found
        with self.ctx.graph.inserting_before(self.call):
            return [self.ctx.call(aten.detach.default, node, like=self.call) for node in found]

    def _as_layer(self, product: fx.Node) -> None:
        """Turns a product of rows with a matrix into a linear layer, or a multiplication if rows have one column."""
        rows: Any = product.args[0]
        matrix: Any = product.args[1]
        if rows.target is aten.t.default:
            return  # a sum over rows
        if is_one(value(rows).shape[1]):
            product.target = aten.mul.Tensor
            return
        if matrix.target is aten.t.default:
            weight = matrix.args[0]
        else:
            with self.ctx.graph.inserting_before(product):
                weight = self.ctx.call(aten.t.default, matrix, like=self.call)
        product.target, product.args = aten.linear.default, (rows, weight)

    def _judge(self, inner: fx.Node) -> None:
        if inner.op != "call_function":
            self._refuse(f"its gradient reads a constant ({inner.target})")
        if torch.Tag.nondeterministic_seeded in getattr(inner.target, "tags", ()):
            self._refuse(f"its gradient would draw random numbers again ({inner.target})")
