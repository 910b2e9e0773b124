"""Differentiates a region. The gradient of a region is a short sequence of regions.

Cotangents are first written as one expression per input in a scratch builder, then cut into stages:
1. row stages, for row values that later stages read (the dot product of a softmax, unless stage 2 computes it);
2. a walk over the region's own rows, for inputs that live on them and for parameters. It stores values per edge if
   stage 3 would have to read wide rows to compute them;
3. a walk over the other end's rows, for inputs gathered there. It may come before stage 2, and store values for it;
4. a walk over all edges, for the weights of linear layers of edge features.

A sum over the edges of a row that does not depend on cotangents needs no walk in the backward. The forward gathers the
same rows, so it stores the sum (:mod:`gnncompile.ir.residuals`).
"""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache

from gnncompile.exc import InvalidRegionError
from gnncompile.ir import linear, tiled_stages
from gnncompile.ir.builder import Builder
from gnncompile.ir.costs import bytes_read
from gnncompile.ir.cutting import Stages, Transplant, elements
from gnncompile.ir.forward_values import ForwardValues, selected_dtype
from gnncompile.ir.reductions import gradient_of
from gnncompile.ir.region import (
    BITS,
    BOOL,
    FEATURE_MAXIMA,
    FEATURE_SUMS,
    LAYERS,
    SOFTMAX_ROWS,
    STATISTICS,
    Node,
    Region,
    Shape,
    Space,
    behind,
)
from gnncompile.ir.rules import GRADIENTS
from gnncompile.ir.stages import Backward, Gradient, Operand, share_walks
from gnncompile.ir.tiled_stages import Cotangents, Found


@lru_cache(maxsize=1024)
def vjp(region: Region, wanted: tuple[bool, ...], given: tuple[bool, ...]) -> Backward:
    """Returns the backward of a region.

    Args:
        region: The forward, with residuals.
        wanted: For each forward tensor, whether its gradient is needed.
        given: For each forward output, whether it has a cotangent.
    """
    plan = cheapest(region, wanted, given)
    if lacking := plan.missing:
        raise InvalidRegionError(
            f"region has no output for %{lacking[0]}, which its gradient reads: call with_residuals first"
        )
    return plan


def cheapest(region: Region, wanted: tuple[bool, ...], given: tuple[bool, ...]) -> Backward:
    """Returns the backward that reads less: one computes all values per edge again, one reads those that are returned.

    The arguments are those of :func:`vjp`.
    """
    plan = Differentiation(region, given).backward(wanted)
    if not any(region.per_edge(o) and o.dtype != BITS for o in region.outputs):
        return plan
    other = Differentiation(region, given, reads_states=True).backward(wanted)
    return other if not other.missing and bytes_read(other) < bytes_read(plan) else plan


class Differentiation:
    """Computes the cotangents of all values of a region, as expressions of a scratch builder.

    Args:
        region: The forward.
        given: For each forward output, whether it has a cotangent.
        reads_states: As for :class:`~gnncompile.ir.forward_values.ForwardValues`.
    """

    def __init__(self, region: Region, given: tuple[bool, ...], reads_states: bool = False) -> None:
        self.region = region
        self.b = Builder(region.by, region.unmasked, region.tiled)
        self.forward = ForwardValues(region, self.b, reads_states)
        self.operands = self.forward.operands
        self.compute = region.compute
        self.stages = Stages(self.b, self.operands, self.compute)
        self.deferred_rows: dict[int, int] = {}  # from the placeholder of a row value to the row value
        self.cotangents = [Cotangents() for _ in region.nodes]
        self._seed(given)
        for at in reversed(range(len(region.nodes))):
            self._visit(at)

    # Cotangents, from outputs to inputs.

    def _seed(self, given: tuple[bool, ...]) -> None:
        for k, out in enumerate(self.region.outputs):
            node = self.region.nodes[out.node]
            if not given[k] or node.op == "softmax_max":
                continue  # softmax does not depend on the maximum that it subtracts
            on_edges = node.space is Space.EDGE
            space = node.space if on_edges or node.op == "outer" else self.region.by
            cotangent = self.forward.operand(Operand("cotangent", k), space, node, out.dtype)
            self._accumulate(out.node, cotangent, on_edges, node.shape)

    def _accumulate(self, at: int, cotangent: int | None, on_edges: bool, shape: Shape) -> None:
        """Adds `cotangent` to a value's cotangent. `cotangent` broadcasts to `shape`, and may have axes of length 1."""
        node = self.region.nodes[at]
        if cotangent is None or not node.differentiable or node.op in ("const", "dropout", "ties"):
            return
        cotangent = self.b.sum_to(cotangent, node.shape, shape)
        total = self.cotangents[at]
        if on_edges:
            total.edge = cotangent if total.edge is None else self.b.op("add", total.edge, cotangent)
        else:
            total.row = cotangent if total.row is None else self.b.op("add", total.row, cotangent)

    def _visit(self, at: int) -> None:
        node, total = self.region.nodes[at], self.cotangents[at]
        if total.edge is not None and node.op.startswith(("reduce_", "softmax_")):
            raise InvalidRegionError(f"%{at} {node.op} is read on edges again: such a region has no gradient, form two")
        for cotangent, on_edges in ((total.edge, True), (total.row, False)):
            if cotangent is None or node.op == "input" or node.op in FEATURE_MAXIMA:
                continue
            if node.op in GRADIENTS:
                parts = GRADIENTS[node.op](
                    self.b, [self.forward.value(a) for a in node.args], self.forward.value(at), cotangent
                )
                for arg, part in zip(node.args, parts, strict=True):
                    self._accumulate(arg, part, on_edges, node.shape)
            elif node.op in FEATURE_SUMS:
                self._accumulate(node.args[0], cotangent, on_edges, self.region.nodes[node.args[0]].shape)
            elif node.op in LAYERS:
                self._through_layer(node, cotangent)
            else:
                self._through_rows(at, node, cotangent)

    def _through_rows(self, at: int, node: Node, cotangent: int) -> None:
        """Passes the cotangent of a reduction or a softmax on to its argument per edge."""
        logits = node.args[0]
        if gradient_of(node.op) == "edges":
            per_edge = cotangent
        elif gradient_of(node.op) == "ties":
            per_edge = self._ties(at, node, cotangent)
        elif node.op == "softmax":
            per_edge = self.b.op(
                "mul", self.forward.value(at), self.b.op("sub", cotangent, self._softmax_dot(at, cotangent))
            )
        else:
            assert node.op == "softmax_sum", f"{node.op} is not differentiable"
            logits = self.region.nodes[node.args[0]].args[0]
            per_edge = self.b.op("mul", cotangent, self.forward.exponential(node.args[0]))
        self._accumulate(logits, per_edge, True, node.shape)

    def _through_layer(self, node: Node, cotangent: int) -> None:
        """Passes a cotangent through ``linear``, ``transposed`` or ``outer``, which are bilinear in their arguments."""
        b, (first, other) = self.b, node.args
        shapes = [self.region.nodes[a].shape for a in node.args]
        if node.op == "linear":
            self._accumulate(first, b.transposed(cotangent, self.forward.value(other), shapes[0][1]), True, shapes[0])
            self.cotangents[other].layers.append(b.outer(self.forward.value(first), cotangent, node.shape))
        elif node.op == "transposed":
            self._accumulate(first, b.linear(cotangent, self.forward.value(other)), True, shapes[1])
            self.cotangents[other].layers.append(b.outer(cotangent, self.forward.value(first), shapes[1]))
        else:
            value = self.forward.value(other)
            self._accumulate(first, b.transposed(value, cotangent, shapes[0][1]), True, shapes[0])
            self._accumulate(other, b.linear(self.forward.value(first), cotangent), True, node.shape)

    def _ties(self, at: int, node: Node, cotangent: int) -> int:
        """The cotangent of an extremum per edge: edges that reach it share its cotangent equally. Where it is 0, the
        zero that ``scatter_reduce`` starts from takes a share as well, as in torch's ``scatter_reduce_backward``.
        """
        b, forward = self.b, Builder.of(self.region)
        reaches = forward.op("eq", node.args[0], at)
        if reaches < len(self.region.nodes):
            reached = self.forward.value(reaches)
        else:
            reached = b.op("eq", self.forward.value(node.args[0]), self.forward.value(at))
        one, counted = b.const(1), forward.sharers(at)
        if counted >= len(self.region.nodes):
            raise InvalidRegionError(f"region does not count the ties of %{at} {node.op}: call with_residuals first")
        count = self.forward.saved(counted)
        share = b.op("div", cotangent, b.op("where", b.op("gt", count, one), count, one))
        # A row stage divides once per row, not once per edge. In torch, shares have the dtype of what was reduced.
        given = b.nodes[cotangent].dtype
        dtype = given if given == selected_dtype(self.region.nodes, at) else self.compute
        (temporary,) = self.stages.add(self.region.by, [(share, False, dtype)])
        return b.op("where", reached, self.stages.load(temporary, self.region.by, share, dtype), b.const(0))

    def _softmax_dot(self, at: int, cotangent: int) -> int:
        """The sum of alpha * d(alpha) over a row's edges; computed from outputs if alpha is only a factor of sums."""
        b, shape = self.b, self.region.nodes[at].shape
        if not self.region.tiled and (sums := self._weighted_sums(at)):
            products = [(b.op("mul", self.cotangents[s].row or 0, self.forward.saved(s)), s) for s in sums]
            value, *others = [b.sum_to(product, shape, self.region.nodes[s].shape) for product, s in products]
            for other in others:
                value = b.op("add", value, other)
            return self._deferred_row(value)
        value = b.op("mul", self.forward.value(at), cotangent)
        # This stage comes before all walks, so it also computes the deferred row values that it reads.
        (temporary,) = self.stages.add(
            self.region.by, [(self._substitute(self.deferred_rows)(value), True, self.compute)]
        )
        return self.stages.load(temporary, self.region.by, value)

    def _deferred_row(self, value: int) -> int:
        """Returns a placeholder for a row value, used until a stage is chosen to compute it."""
        self.operands.append(Operand("deferred_row", len(self.deferred_rows)))
        at = self.b.input(len(self.operands) - 1, self.region.by, self.b.nodes[value].shape, self.compute)
        self.deferred_rows[at] = value
        return at

    def _weighted_sums(self, at: int) -> list[int]:
        """The sums that a value is a factor of, each as often as it is a factor; none if anything else reads it."""
        nodes, found = self.region.nodes, []
        outputs = {o.node for o in self.region.outputs}
        for user in self._contributing(at):
            if nodes[user].op == "reduce_sum" and user in outputs:
                below = [user]
            elif nodes[user].op == "mul" and nodes[user].args != (at, at):
                below = self._weighted_sums(user)
            else:
                below = []
            if not below or at in outputs:
                return []
            found += below
        return found

    def _contributing(self, at: int) -> list[int]:
        """Nodes that read a value and have a cotangent, without statistics of a softmax or an extremum."""
        readers = [i for i, n in enumerate(self.region.nodes) if at in n.args and n.op not in STATISTICS]
        return [i for i in readers if self.cotangents[i].edge is not None or self.cotangents[i].row is not None]

    # Sums that the forward can store.

    def sums_of_the_forward(self, b: Builder, wanted: tuple[bool, ...] | None) -> list[int]:
        """Returns values per edge whose sums the forward should store, so that the gradient gathers no wide rows.

        Args:
            b: A builder that holds the region's nodes; the values are added to it.
            wanted: For each tensor, whether a gradient may be asked for. None means all tensors.
        """
        inputs = self._inputs(wanted)
        if self.region.tiled or self.region.sums_all or any(n.space is Space.EDGE for _, n in inputs):
            return []  # the gradient of an edge input computes the same values per edge, and stores them
        copy = Transplant(self.b, b, self.operands, {self.forward.value(at): at for at in self._known()})
        biases = self._biases(wanted)
        own = [at for at, n in inputs if n.space is not self.region.by.opposite and at not in biases]
        edges = [self.cotangents[at].edge for at in own]
        sums = {edge: self._sums(self._sum_over_edges(edge)) for edge in edges if edge is not None}
        free = {e: arguments for e, arguments in sums.items() if all(map(self._known_to_the_walk, arguments))}
        if len(free) < len(sums) or not self._pays(free):
            free = {e: arguments for e, arguments in free.items() if self._hand_over(e)}
        return [copy(a) for arguments in free.values() for a in arguments]

    def _inputs(self, wanted: tuple[bool, ...] | None) -> list[tuple[int, Node]]:
        """The inputs whose gradients are wanted, with their nodes; all inputs if `wanted` is None."""
        inputs = [(at, n) for at, n in enumerate(self.region.nodes) if n.op == "input" and n.differentiable]
        return [(at, n) for at, n in inputs if wanted is None or wanted[int(n.value or 0)]]

    def _biases(self, wanted: tuple[bool, ...] | None) -> set[int]:
        """Parameters whose cotangent per edge is also an operand of a weight gradient, which sums it over all edges
        times features. The same walk then sums the plain cotangent.
        """
        inputs = self._inputs(wanted)
        summed = {self.b.nodes[sum_].args[1] for at, _ in inputs for sum_ in self.cotangents[at].layers}
        parameters = [(at, self.cotangents[at]) for at, n in inputs if n.space is Space.PARAMETER]
        return {at for at, total in parameters if total.edge in summed and total.row is None}

    def _pays(self, sums: dict[int, list[int]]) -> bool:
        """Whether storing sums costs less than a walk that gathers their operands, at a few edges per row."""
        gathered = {n for edge in sums for n in self._behind(edge) if n.space is self.region.by.opposite}
        kept = {self.b.nodes[a] for arguments in sums.values() for a in arguments}
        return elements(kept) <= elements(n for n in gathered if n.op == "input")

    def _known(self) -> list[int]:
        """Forward values that the backward can compute without another walk."""
        kept = {o.node for o in self.region.outputs}
        nodes = self.region.nodes
        late = [i for i, n in enumerate(nodes) if n.op.startswith("reduce_")]
        for i, n in enumerate(nodes):
            if i not in late and any(a in late and a not in kept for a in n.args):
                late.append(i)
        return [i for i in range(len(nodes)) if i in kept or i not in late]

    def _sum_over_edges(self, value: int) -> int:
        """The sum over each row's edges. Row cotangents that are factors multiply the sum from outside."""
        inputs = [(at, n) for at, n in enumerate(self.b.nodes) if n.op == "input" and n.space is self.region.by]
        kinds = {at: self.operands[int(n.value or 0)].kind for at, n in inputs}
        cotangents = {at for at, kind in kinds.items() if kind == "cotangent"}
        finite = {at for at, kind in kinds.items() if kind != "input"}
        return linear.sum_over_edges(self.b, value, cotangents, finite)

    def _sums(self, value: int) -> list[int]:
        """The values per edge whose sums a row value of the scratch builder contains."""
        return [n.args[0] for n in self._behind(value) if n.op == "reduce_sum"]

    def _known_to_the_walk(self, value: int) -> bool:
        """Whether the forward's walk can compute a value per edge: it reads no cotangent and no reduction."""
        read = [self.operands[int(n.value or 0)] for n in self._behind(value) if n.op == "input"]
        late = [k for k, o in enumerate(self.region.outputs) if self.region.nodes[o.node].op not in SOFTMAX_ROWS]
        return all(o.kind == "input" or (o.kind == "output" and o.index not in late) for o in read)

    def _without_walk(self, total: Cotangents) -> Cotangents:
        """The same cotangents, only per row if the forward has stored every sum over edges that they need."""
        if total.edge is None:
            return total
        kept = {o.node for o in self.region.outputs if o.dtype == self.compute}
        kept_sums = [at for at in kept if self.region.nodes[at].op == "reduce_sum"]
        sums = {self.forward.value(self.region.nodes[at].args[0]): at for at in kept_sums}
        value = self._sum_over_edges(total.edge)
        if not set(self._sums(value)) <= set(sums):
            return total
        saved = {self.b.reduce("sum", argument): self.forward.saved(at) for argument, at in sums.items()}
        value = self._substitute(saved)(value)
        return Cotangents(None, value if total.row is None else self.b.op("add", total.row, value))

    # Stages.

    def backward(self, wanted: tuple[bool, ...]) -> Backward:
        """Cuts the cotangents of the wanted inputs into stages; returns the backward."""
        gradients: list[Gradient | None] = [None] * len(wanted)
        if self.region.tiled:
            inputs = [(int(n.value or 0), n, self.cotangents[at]) for at, n in self._inputs(wanted)]
            for position, gradient in tiled_stages.cut(self.stages, self.region, inputs).items():
                gradients[position] = gradient
            return share_walks(Backward(tuple(self.stages.stages), tuple(gradients)))
        found, layers = [], list[tuple[int, Node, list[int]]]()
        biases = self._biases(wanted)
        for at, node in self._inputs(wanted):
            total = self.cotangents[at]
            if at in biases:
                layers.append((int(node.value or 0), node, [self.b.over_all_edges(total.edge or 0, node.shape)]))
            elif total.edge is not None or total.row is not None:
                found.append((int(node.value or 0), node, total))
            elif total.layers:
                layers.append((int(node.value or 0), node, total.layers))
        opposite = [f for f in found if f[1].space is self.region.by.opposite]
        edges = [f for f in found if f[1].space is Space.EDGE]
        rows = [(k, n, self._without_walk(t)) for k, n, t in found if n.space in (self.region.by, Space.PARAMETER)]
        ours, theirs = ([t.edge for _, _, t in fs if t.edge is not None] for fs in (rows, opposite + edges))
        others = [t.row for _, _, t in rows if t.row is not None] + [sum_ for _, _, sums in layers for sum_ in sums]
        if not opposite:
            given = self._row_stage(rows, edges, {}, self._awaited(others), gradients)
        elif (handed := self._stored_edge_values(ours)) or not ours:
            given = self._rows_ahead(self._awaited([*ours, *theirs, *others]))
            given |= self._walk(self.region.by.opposite, opposite, edges, given, handed, gradients)
            self._row_stage(rows, [], given, [], gradients)
        else:
            shared = self._shared(ours, theirs)
            stored = [*shared, *self._awaited([*theirs, *others], shared)]
            given = self._row_stage(rows, [], {}, stored, gradients)
            self._walk(self.region.by.opposite, opposite, edges, given, [], gradients)
        put = self._substitute({**self.deferred_rows, **self._loads(given)})
        roots = [
            (put(sum_), False, tiled_stages.sum_dtype(node, sums, self.compute))
            for _, node, sums in layers
            for sum_ in sums
        ]
        made = self.stages.add(self.region.by, roots)
        for k, node, sums in layers:
            gradients[k] = Gradient(tuple(made[: len(sums)]), node.space is Space.PARAMETER)
            made = made[len(sums) :]
        return share_walks(Backward(tuple(self.stages.stages), tuple(gradients)))

    def _walk(
        self,
        by: Space,
        summed: list[Found],
        edges: list[Found],
        given: dict[int, int],
        stored: list[int],
        gradients: list[Gradient | None],
    ) -> dict[int, int]:
        """Adds a stage with the gradients of `summed` inputs, which are sums over edges, and of `edges` inputs.

        The stage reads the values in `given` from temporaries. Returns the temporary of each value in `stored`.
        """
        put = self._substitute({**self.deferred_rows, **self._loads(given)})
        roots = [(put(t.edge or 0), True, self._row_dtype(n)) for _, n, t in summed]
        roots += [(self.b.on_edges(put(t.edge or 0)), False, n.dtype) for _, n, t in edges]
        roots += [(put(value), False, self.compute) for value in stored]
        made = self.stages.add(by, roots)
        count = len(summed) + len(edges)
        for (k, _, _), temporary in zip(summed + edges, made[:count], strict=True):
            gradients[k] = Gradient((temporary,), False)
        return dict(zip(stored, made[count:], strict=True))

    def _row_stage(
        self,
        rows: list[Found],
        edges: list[Found],
        given: dict[int, int],
        stored: list[int],
        gradients: list[Gradient | None],
    ) -> dict[int, int]:
        """Adds the walk over the region's own rows, and a stage for gradients per row that need no walk."""
        walked = [f for f in rows if f[2].edge is not None]
        kept = self._walk(self.region.by, walked, edges, given, stored, gradients)
        direct = [f for f in rows if f[2].row is not None]
        put = self._substitute({**self.deferred_rows, **self._loads({**given, **kept})})
        made = self.stages.add(self.region.by, [(put(t.row or 0), False, self._row_dtype(n)) for _, n, t in direct])
        for (k, _, _), temporary in zip(direct, made, strict=True):
            summed = gradients[k]
            gradients[k] = Gradient((*(summed.temporaries if summed else ()), temporary), False)
        for k, node, _ in rows:
            made_of = gradients[k]
            if node.space is Space.PARAMETER and made_of is not None:
                gradients[k] = Gradient(made_of.temporaries, True)
        return kept

    def _loads(self, given: dict[int, int]) -> dict[int, int]:
        """For each value that a temporary holds, per edge or per row, the expression that reads the temporary."""
        spaces = {value: self.region.by if value in self.deferred_rows else Space.EDGE for value in given}
        return {value: self.stages.load(temporary, spaces[value], value) for value, temporary in given.items()}

    def _rows_ahead(self, awaited: list[int]) -> dict[int, int]:
        """Adds a stage that computes deferred row values before all walks; returns their temporaries."""
        made = self.stages.add(self.region.by, [(self.deferred_rows[at], False, self.compute) for at in awaited])
        return dict(zip(awaited, made, strict=True))

    def _awaited(self, values: list[int], stored: Collection[int] = ()) -> list[int]:
        """The deferred row values that `values` depend on, other than through values that are `stored`."""
        met, todo = set(stored), list(values)
        while todo:
            at = todo.pop()
            if at not in met:
                met.add(at)
                todo.extend(self.b.nodes[at].args)
        return [at for at in self.deferred_rows if at in met]

    def _substitute(self, replaced: dict[int, int]) -> Transplant:
        """Returns a function that rewrites expressions, with the keys of `replaced` replaced by their values."""
        inputs = {at: at for at, n in enumerate(self.b.nodes) if n.op == "input"}
        return Transplant(self.b, self.b, self.operands, {**inputs, **replaced})

    def _shared(self, ours: list[int], theirs: list[int]) -> list[int]:
        """Values per edge and head that both walks need, if it pays that the own-row walk stores them; else nothing."""
        nodes, common = self.b.nodes, behind(self.b.nodes, ours)
        found, left, todo = [], set(), list(theirs)
        while todo:
            at = todo.pop()
            node = nodes[at]
            computed = bool(node.args) and node.op != "input" and node.dtype != BOOL
            if at in common and node.space is Space.EDGE and node.shape[1] == 1 and computed:
                found.append(at)
            elif at not in left:
                left.add(at)
                todo.extend(node.args)
        read = [at for at in behind(nodes, theirs) - left if nodes[at].op == "input"]
        saved = elements(nodes[at] for at in read if nodes[at].space in (self.region.by, Space.EDGE))
        found = list(dict.fromkeys(found))
        return found if saved > 4 * elements(nodes[at] for at in found) else []

    def _row_dtype(self, node: Node) -> str:
        return self.compute if node.space is Space.PARAMETER else node.dtype

    def _stored_edge_values(self, values: list[int]) -> list[int]:
        """The values per edge to store for the walk over the region's own rows, if it does not gather them anyway."""
        others = [v for v in values if not self._hand_over(v)]
        gathered = {n for v in others for n in self._gathered(v)}
        return [v for v in values if v not in others and not gathered.issuperset(self._gathered(v))]

    def _hand_over(self, value: int) -> bool:
        """Whether storing a value per edge costs less than gathering its operands again."""
        return elements(self._gathered(value)) > 2 * elements([self.b.nodes[value]])

    def _gathered(self, value: int) -> list[Node]:
        return [n for n in self._behind(value) if n.op == "input" and n.space is self.region.by.opposite]

    def _behind(self, value: int) -> list[Node]:
        return [self.b.nodes[at] for at in sorted(behind(self.b.nodes, [value]))]
