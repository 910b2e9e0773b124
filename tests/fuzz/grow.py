"""Grows random programs: the steps that may extend a program, and how often each is taken.

Programs are grown from a list of drawn numbers, so hypothesis shrinks a failure to few lines.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from math import prod
from typing import Protocol, TypeVar

from hypothesis import strategies as st

from tests.fuzz.program import (
    CHANNELS,
    EDGES,
    FLOATS,
    GRAPHS,
    NODES,
    OTHERS,
    PAIRS,
    TYPES,
    Line,
    Program,
    Value,
)
from tests.fuzz.texts import (
    ACTIVATED,
    BINARY,
    CONVS,
    ENDS,
    FEATURES,
    FLAT_REDUCTIONS,
    MATRICES,
    NODE_NORMS,
    NORMS,
    READOUTS,
    REDUCTIONS,
    UNARY,
)

THEMES = {("y",): 4, ("w",): 6, ("a",): 2, ("z", "q"): 2, ("u",): 3}
"""Inputs that a program may read beside ``x``, and how many programs in ten read them."""

WIDEST = 12

_ENDS_READ = (["src"], ["dst"], ["src", "dst"])
"""The ends of an edge whose rows a layer reads."""

T = TypeVar("T")


class Choose(Protocol):
    """Chooses one element of a sequence: drawn by hypothesis, or at random."""

    def __call__(self, among: Sequence[T], /) -> T: ...


def drawn(draw: st.DrawFn) -> Choose:
    """Returns choices that hypothesis can shrink."""
    return lambda among: draw(st.sampled_from(among))


def at_random(number: int) -> Choose:
    """Returns random choices with the seed `number`."""
    return random.Random(number).choice


class Growing:
    """A program under construction, with the values that the next step may read.

    A step adds lines and returns the last value, or returns None if no value fits.
    """

    def __init__(self, choose: Choose) -> None:
        self.choose = choose
        self.lines: list[Line] = []
        names = {"x"}
        for also, times in THEMES.items():
            if choose(range(10)) < times:
                names |= set(also)
        self.inputs = [Value(name, *FLOATS[name]) for name in FLOATS if name in names]
        self.spaces = {v.space for v in self.inputs} | {EDGES}
        self.made: list[Value] = []

    # -- the values so far ----------------------------------------------------------------------------------------

    def pick(self, fits: Callable[[Value], bool] = lambda v: True) -> Value | None:
        """Returns a fitting value, or None. Prefers results of lines to inputs, and recent results to earlier ones."""
        made, given = [v for v in reversed(self.made) if fits(v)], list(filter(fits, self.inputs))
        if not made and not given:
            return None
        return self.choose(made[:3] * 2 + made if made and (not given or self.choose(range(4))) else given)

    def where(self, space: str) -> dict[str, tuple[str, str]]:
        """Returns the entries of :data:`ENDS` for a space, limited to spaces in this program."""
        return {i: end for i, end in ENDS.get(space, {}).items() if end[0] in self.spaces}

    def flat(self, *spaces: str) -> Value | None:
        """Returns a value with a single feature axis of two features or more."""
        return self.pick(lambda v: len(v.shape) == 1 and v.shape[0] > 1 and (not spaces or v.space in spaces))

    def pair(self) -> tuple[Value, Value] | None:
        """Returns two values of one space with a single feature axis each."""
        one = self.flat()
        other = one and self.pick(lambda v: v.space == one.space and len(v.shape) == 1)
        return None if one is None or other is None else (one, other)

    def add(self, text: str, space: str, shape: tuple[int, ...], setup: Sequence[tuple[str, str]] = ()) -> Value:
        value = Value(f"v{len(self.lines)}", space, shape)
        self.lines.append(Line(value.name, text, tuple(setup)))
        self.made.append(value)
        return value

    def module(self, constructor: str, call: str, value: Value, width: int, *more: Value) -> Value:
        """Adds a call of a new module. In both texts ``c`` is the argument's width, and ``o`` the result's width."""
        known = {"c": value.shape[-1], "o": width, "k": f"f{len(self.lines)}"}
        text = call.format(value.name, *(v.name for v in more), **known)
        return self.add(text, value.space, (*value.shape[:-1], width), [(known["k"], constructor.format(**known))])

    # -- steps ----------------------------------------------------------------------------------------------------

    def unary(self) -> Value | None:
        value = self.pick()
        return value and self.add(self.choose(UNARY).format(value.name), value.space, value.shape)

    def binary(self) -> Value | None:
        one = self.pick()
        other = one and self.pick(lambda v: v.space == one.space and _broadcasts(v.shape, one.shape))
        if one is None or other is None:
            return None
        if one is other:  # two equal operands are less interesting
            other = self.pick(lambda v: v.space == one.space and _broadcasts(v.shape, one.shape)) or one
        if self.choose([False, True]):
            one, other = other, one
        shape = tuple(max(pair) for pair in zip(one.shape, other.shape, strict=True))
        return self.add(self.choose(BINARY).format(one.name, other.name), one.space, shape)

    def dot(self) -> Value | None:
        one = self.pick(lambda v: v.shape != ())
        other = one and self.pick(lambda v: v.space == one.space and v.shape == one.shape)
        if one is None or other is None:
            return None
        return self.add(f"({one.name} * {other.name}).sum(-1, keepdim=True)", one.space, (*one.shape[:-1], 1))

    def features(self) -> Value | None:
        value = self.pick(lambda v: prod(v.shape[-1:]) > 1)
        return value and self.add(self.choose(FEATURES).format(value.name), value.space, value.shape)

    def reshaped(self) -> Value | None:
        """Changes the feature axes: splits them into heads, flattens, reduces or slices them, adds or drops an axis."""
        value = self.pick()
        if value is None:
            return None
        name, shape = value.name, value.shape
        ways: list[tuple[str, tuple[int, ...]]] = []
        if len(shape) == 1 and shape[0] % 2 == 0:
            ways.append((f"{name}.view(-1, 2, {shape[0] // 2})", (2, shape[0] // 2)))
        if len(shape) == 2:
            ways += [(f"{name}.flatten(1)", (prod(shape),)), (f"{name}.mean(1)", shape[1:])]
        if shape and shape[-1] > 1:
            how = self.choose(["sum", "mean", "amax"])
            ways.append((f"{name}.{how}(-1, keepdim=True)", (*shape[:-1], 1)))
            ways.append((f"{name}[..., :{shape[-1] // 2}]", (*shape[:-1], shape[-1] // 2)))
        if shape and shape[-1] == 1:
            ways.append((f"{name}.squeeze(-1)", shape[:-1]))
        if len(shape) < 2:
            ways.append((f"{name}.unsqueeze(-1)", (*shape, 1)))
        text, shape = self.choose(ways)
        return self.add(text, value.space, shape)

    def joined(self) -> Value | None:
        found = self.pair()
        if found is None or sum(v.shape[0] for v in found) > WIDEST:
            return None
        one, other = found
        return self.add(f"torch.cat([{one.name}, {other.name}], -1)", one.space, (one.shape[0] + other.shape[0],))

    def linear(self) -> Value | None:
        value = self.pick(lambda v: v.shape != ())
        if value is None:
            return None
        width = self.choose([CHANNELS, CHANNELS, 1, 6])
        made = self.choose(
            [
                *("nn.Linear({c}, {o})",) * 3,
                "nn.Linear({c}, {o}, bias=False)",
                "nn.Sequential(nn.Linear({c}, 3), nn.ReLU(), nn.Linear(3, {o}))",
            ]
        )
        return self.module(made, "self.{k}({0})", value, width)

    def edge_layer(self) -> Value | None:
        """Computes layers of rows of nodes and edges, mostly adds the state of each edge, and reduces the result."""
        rows, state = self.flat(NODES), self.flat(EDGES)
        if rows is None:
            return None
        read = [self.add(f"{rows.name}[{index}]", EDGES, rows.shape) for index in self.choose(_ENDS_READ)]
        read += [state] if state is not None else []
        if self.choose([False, True]):
            width = sum(v.shape[0] for v in read)
            value = self.add(f"torch.cat([{', '.join(v.name for v in read)}], -1)", EDGES, (width,))
        else:
            value = self.module("nn.Linear({c}, {o})", "self.{k}({0})", read[0], CHANNELS)
            for other in read[1:]:
                made = self.choose(["nn.Linear({c}, {o})", "nn.Linear({c}, {o}, bias=False)"])
                value = self.module(made, "self.{k}({0}) + {1}", other, CHANNELS, value)
        for _ in range(self.choose([1, 1, 2])):
            value = self.module("nn.Linear({c}, {o})", f"self.{{k}}({self.choose(ACTIVATED)})", value, CHANNELS)
        if self.choose([False, False, True]):
            value = self.module("nn.LayerNorm({c})", "self.{k}({0})", value, CHANNELS)
        if state is not None and state.shape == value.shape and self.choose([True, True, False]):
            value = self.add(f"{state.name} + {value.name}", EDGES, value.shape)
        index, how = self.choose(["src", "dst", "dst"]), self.choose(["sum", "sum", "mean", "max"])
        return self.add(f"scatter({value.name}, {index}, 0, n, '{how}')", NODES, value.shape)

    def matrices(self) -> Value | None:
        """Multiplies rows by a matrix per row, which a layer makes, and sometimes sums the products over edges."""
        rows = self.flat(EDGES) or self.flat()
        other = rows and self.pick(lambda v: v.space == rows.space and len(v.shape) == 1)
        if rows is None or other is None:
            return None
        width, made = self.choose([2, 3]), self.choose(["nn.Linear({c}, {o})", "nn.Linear({c}, {o}, bias=False)"])
        matrix = self.module(made, "self.{k}({0})", other, rows.shape[0] * width).name
        text = self.choose(MATRICES).format(rows.name, matrix, k=rows.shape[0], c=width)
        product = self.add(text, rows.space, (width,))
        ends = list(self.where(rows.space).items())
        if not ends or self.choose([False, False, True]):
            return product
        index, (to, count) = self.choose(ends[:2])
        how = self.choose(["sum", "sum", "mean", "max"])
        return self.add(f"scatter({product.name}, {index}, 0, {count}, '{how}')", to, (width,))

    def parameter(self) -> Value | None:
        value = self.pick(lambda v: v.shape != ())
        if value is None:
            return None
        call = self.choose(["{0} * self.{k}", "{0} + self.{k}"])
        return self.module("nn.Parameter(torch.randn({c}))", call, value, value.shape[-1])

    def scaled_product(self) -> Value | None:
        """Adds a product with a matrix to a value, with a factor for each."""
        found = self.pair()
        if found is None:
            return None
        made = "nn.Parameter(torch.randn({c}, {o}))"
        call = "torch.addmm({1}, {0}, self.{k}, beta=0.5, alpha=0.25)"
        return self.module(made, call, found[0], found[1].shape[0], found[1])

    def recurrent(self) -> Value | None:
        """Updates a value by a cell that reads another one."""
        found = self.pair()
        if found is None:
            return None
        made = self.choose(["nn.GRUCell({c}, {o})", "nn.Bilinear({c}, {o}, {o})"])
        return self.module(made, "self.{k}({0}, {1})", found[0], found[1].shape[0], found[1])

    def state(self) -> Value | None:
        """Subtracts a sum over the rows of all calls so far, each of which halves what the calls before it added."""
        value = self.flat()
        call = "{0} - self.{k}.mul_(0.5).add_({0}.detach().sum(0), alpha=0.1)"
        return value and self.module("nn.Buffer(torch.ones({c}))", call, value, value.shape[-1])

    def embedding(self) -> Value | None:
        name, space = self.choose([("atom", NODES), ("bond", EDGES)])
        key = f"f{len(self.lines)}"
        if self.choose([False, False, True]):
            made = [(key, f"nn.Linear({TYPES}, {CHANNELS}, bias=False)")]
            text = f"self.{key}(F.one_hot({name}, {TYPES}).to(self.{key}.weight.dtype))"
            return self.add(text, space, (CHANNELS,), made)
        made = [(key, f"nn.Embedding({TYPES}, {CHANNELS})")]
        return self.add(f"self.{key}({name})", space, (CHANNELS,), made)

    def gathered(self) -> Value | None:
        ways = [(index, to, by) for by in (EDGES, PAIRS, NODES) for index, (to, _) in self.where(by).items()]
        ways = [way for way in ways if way[2] in self.spaces]
        index, to, by = self.choose([*ways[:2] * 2, *ways, ("rev", EDGES, EDGES)])
        value = self.pick(lambda v: v.space == to)
        if value is None:
            return None
        text = self.choose(["{0}[{i}]", "{0}[{i}]", "{0}.index_select(0, {i})"])
        return self.add(text.format(value.name, i=index), by, value.shape)

    def ends(self, fits: Callable[[Value], bool] = lambda v: True) -> tuple[Value, str, str, str] | None:
        """Returns a value, an index vector for its rows, the space it points to, and the size of that space."""
        value = self.pick(lambda v: bool(self.where(v.space)) and fits(v))
        if value is None:
            return None
        ends = self.where(value.space)
        index = self.choose([*ends, *list(ends)[:2]])
        return (value, index, *ends[index])

    def reduced(self) -> Value | None:
        found = self.ends()
        if found is None:
            return None
        value, index, to, count = found
        wide = f"{index}.view(-1{', 1' * len(value.shape)}).expand_as({value.name})"
        text = self.choose(REDUCTIONS).format(value.name, i=index, s=count, wide=wide)
        return self.add(text, to, value.shape)

    def aggregated(self) -> Value | None:
        found = self.ends(lambda v: len(v.shape) == 1)
        if found is None:
            return None
        value, index, to, count = found
        key = f"f{len(self.lines)}"
        text = f"self.{key}({value.name}, {index}, dim_size={count})"
        made = self.choose(FLAT_REDUCTIONS).format(c=value.shape[0])
        return self.add(text, to, value.shape, [(key, made)])

    def degree(self) -> Value | None:
        """Counts the rows that point to each target; the result depends on the graph alone."""
        found = self.ends()
        if found is None:
            return None
        value, index, to, count = found
        return self.add(f"scatter({value.name}.new_ones({value.name}.size(0)), {index}, 0, {count}, 'sum')", to, ())

    def selected(self) -> Value | None:
        """Sums over some of the rows: edges that are not self loops, or rows in which a value exceeds a threshold."""
        found = self.ends()
        if found is None:
            return None
        value, index, to, count = found
        chosen = self.pick(lambda v: v.space == value.space and v.shape == ())
        keep = "src != dst" if value.space == EDGES else None
        if chosen is not None and (keep is None or self.choose(range(2))):
            keep = f"{chosen.name} > 0.2"
        if keep is None:
            return None
        return self.add(f"scatter({value.name}[{keep}], {index}[{keep}], 0, {count}, 'sum')", to, value.shape)

    def softmax(self) -> Value | None:
        found = self.ends()
        if found is None:
            return None
        value, index, _, count = found
        return self.add(f"softmax({value.name}, {index}, num_nodes={count})", value.space, value.shape)

    def variance(self) -> Value | None:
        """Computes a variance as layers do: the mean squared difference from the mean."""
        found = self.ends()
        if found is None:
            return None
        value, index, to, count = found
        mean = self.add(f"scatter({value.name}, {index}, 0, {count}, 'mean')", to, value.shape)
        off = self.add(f"{value.name} - {mean.name}[{index}]", value.space, value.shape)
        return self.add(f"scatter({off.name}.square(), {index}, 0, {count}, 'mean')", to, value.shape)

    def attention(self) -> Value | None:
        """Computes a weighted sum, with weights from a softmax over the edges of a row."""
        found = self.ends()
        weights = found and self.pick(lambda v: v.space == found[0].space and _broadcasts(v.shape, found[0].shape))
        if found is None or weights is None:
            return None
        value, index, to, count = found
        shape = tuple(max(pair) for pair in zip(value.shape, weights.shape, strict=True))
        alpha = self.add(f"softmax({weights.name}, {index}, num_nodes={count})", value.space, weights.shape)
        return self.add(f"scatter({value.name} * {alpha.name}, {index}, 0, {count}, 'sum')", to, shape)

    def readout(self) -> Value | None:
        value = self.flat(NODES) if GRAPHS in self.spaces else None
        return value and self.add(f"{self.choose(READOUTS)}({value.name}, batch)", GRAPHS, value.shape)

    def norm(self) -> Value | None:
        value = self.flat()
        if value is None:
            return None
        ways = {**NORMS, **(NODE_NORMS if value.space == NODES else {})}
        made = self.choose(list(ways))
        return self.module(made, ways[made], value, value.shape[-1])

    def conv(self) -> Value | None:
        value = self.flat(NODES)
        edge = self.pick(lambda v: v.space == EDGES and v.shape == (CHANNELS,))
        made = self.choose(list(CONVS))
        if value is None or (edge is None and "{1}" in CONVS[made]):
            return None
        edge = edge or value  # CONVS[made] does not read it
        width = CHANNELS if "{o}" in made or "heads" in made else value.shape[-1]
        return self.module(made, CONVS[made], value, width, edge)

    def bipartite(self) -> Value | None:
        value, other = self.flat(NODES), self.flat(OTHERS)
        if value is None or other is None:
            return None
        made = self.choose(
            [
                "gnn.SAGEConv(({d}, {c}), {o})",
                "gnn.GraphConv(({d}, {c}), {o}, aggr='max')",
                "gnn.GATv2Conv(({d}, {c}), 2, heads=2, add_self_loops=False)",
            ]
        ).replace("{d}", str(value.shape[0]))
        return self.module(made, "self.{k}(({1}, {0}), pairs)", other, CHANNELS, value)

    def both_ways(self) -> Value | None:
        """Reduces over edges in both directions, or with self loops."""
        value = self.pick(lambda v: v.space == EDGES)
        if value is None:
            return None
        rows, how = value.name, self.choose(["sum", "mean", "max"])
        texts = [f"scatter(torch.cat([{rows}, {rows}.tanh()]), torch.cat([src, dst]), 0, n, '{how}')"]
        texts.append(f"scatter(torch.cat([{rows}, {rows}]), edge_index.flatten(), 0, n, '{how}')")
        texts += [f"looped({rows}, edge_index, n, {fill})" for fill in ("1.0", "'mean'", "'max'")]
        return self.add(self.choose(texts), NODES, value.shape)

    def by_degree(self) -> Value | None:
        """Scales rows by a power of the number of edges of each node."""
        value = self.flat(NODES)
        if value is None:
            return None
        index, power = self.choose(["src", "dst"]), self.choose(["-0.5", "-1", "0.5"])
        text = f"{value.name} * degree({index}, n, {value.name}.dtype).clamp(min=1).pow({power}).unsqueeze(-1)"
        return self.add(text, NODES, value.shape)

    def whole(self) -> Value | None:
        """Subtracts a tenth of an operation over all rows from each row."""
        value = self.flat()
        if value is None:
            return None
        ways = ["sum(0, keepdim=True)", "cumsum(0)", "flip(0)"]
        if value.space not in (EDGES, PAIRS):
            ways += ["mean(0, keepdim=True)", "amax(0, keepdim=True)", "softmax(0)"]
        text = f"{value.name} - 0.1 * {value.name}.{self.choose(ways)}"
        return self.add(text, value.space, value.shape)


STEPS: dict[Callable[[Growing], Value | None], int] = {
    Growing.unary: 12,
    Growing.binary: 22,
    Growing.dot: 2,
    Growing.features: 2,
    Growing.reshaped: 5,
    Growing.joined: 2,
    Growing.linear: 6,
    Growing.edge_layer: 6,
    Growing.matrices: 2,
    Growing.parameter: 2,
    Growing.scaled_product: 2,
    Growing.recurrent: 1,
    Growing.state: 1,
    Growing.embedding: 1,
    Growing.gathered: 16,
    Growing.reduced: 14,
    Growing.aggregated: 3,
    Growing.degree: 2,
    Growing.selected: 1,
    Growing.softmax: 5,
    Growing.variance: 2,
    Growing.attention: 4,
    Growing.readout: 2,
    Growing.norm: 3,
    Growing.conv: 2,
    Growing.bipartite: 1,
    Growing.whole: 2,
    Growing.both_ways: 2,
    Growing.by_degree: 1,
}
_STEPS = [step for step, weight in STEPS.items() for _ in range(weight)]


def _broadcasts(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return len(one) == len(other) and all(a == b or 1 in (a, b) for a, b in zip(one, other, strict=True))


def grow(choose: Choose, least: int = 2, most: int = 14) -> Program:
    """Returns a program of some steps. Values that no line reads are results, and sometimes other values are too."""
    p = Growing(choose)
    for _ in range(choose(range(least, most + 1))):
        choose(_STEPS)(p)
    if not p.made:
        p.unary()
    read = {name for line in p.lines for name in line.reads}
    results = [v.name for v in p.made if v.name not in read]
    results += [v.name for v in p.made if v.name in read and choose(range(10)) == 9]
    return Program(tuple(p.lines), tuple(results[-5:])).pruned()
