"""Random cases: each is a program, the sizes of its graphs, and settings of its use."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from tests.fuzz.check import AUTOCAST, Case
from tests.fuzz.graphs import AWKWARD, USUAL
from tests.fuzz.grow import Choose, drawn, grow
from tests.fuzz.program import FLOATS

PRECISIONS = ("float64", "float64", "float32", "bfloat16", *AUTOCAST)
LIGHT = ("passes",) * 7 + ("op by op",) * 2 + ("inductor",)


def make_case(choose: Choose, device: str = "cpu", most: int = 14) -> Case:
    """Returns a random case.

    Args:
        choose: Makes all choices.
        device: "cpu" or "cuda".
        most: The most steps of the program.
    """
    program = grow(choose, most=most)
    sizes = dict.fromkeys(choose([*USUAL * 2, *AWKWARD]) for _ in range(choose(range(1, 4))))
    way = choose(("training",) * 5 + ("inference",) * 2 + ("reduce-overhead", "TrainStep"))
    if not any(line.setup for line in program.lines) and way == "TrainStep":
        way = "training"  # nothing to train
    dtype = choose(PRECISIONS)
    if dtype in AUTOCAST and way == "TrainStep":
        way = "training"
    engine, which = choose(LIGHT), choose(("reference", "reference", "reference", "cpp"))
    if device != "cpu":
        engine, which = "inductor", "triton"
    floats = [name for name in program.inputs if name in FLOATS]
    return Case(
        program=program,
        sizes=tuple(sizes),
        seed=choose(range(100)),
        dtype=dtype,
        way=way,
        engine=engine,
        kernels=which,
        frozen=tuple(name for name in floats if choose(range(6)) == 5),
        reuse=choose([True, False]),
        device=device,
    )


@st.composite
def cases(draw: st.DrawFn, most: int = 14, **fixed: Any) -> Case:
    """Draws cases for hypothesis. The attributes in `fixed` have given values."""
    return replace(make_case(drawn(draw), most=most), **fixed)
