"""Numbers that a model draws from Python's generators: the compiled model draws and uses the same ones."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import gnncompile

CALLS = 4


def scaled(x: Tensor, draws: Any) -> Tensor:
    return x * draws.random()


def shifted_integers(x: Tensor, draws: Any) -> Tensor:
    """The sum of whole numbers and a float has the default type."""
    return x.long() + draws.uniform(0, 1)


def compared(x: Tensor, draws: Any) -> Tensor:
    return x + int(draws.random() < 0.5)


def chosen(x: Tensor, draws: Any) -> Tensor:
    return x + (1 if draws.random() < 0.5 else 3)


def divided(x: Tensor, draws: Any) -> Tensor:
    return x * (draws.randint(1, 6) / 7)


def selected(x: Tensor, draws: Any) -> Tensor:
    bound = draws.random()
    return torch.where(x > bound, x, bound)


def cut(x: Tensor, draws: Any) -> Tensor:
    return x[draws.randrange(3) :] * 2


def dropped_layers(x: Tensor, draws: Any) -> Tensor:
    """Layers that a call leaves out at random (LayerDrop, Fan et al. 2019)."""
    for scale in (2.0, 3.0, 5.0):
        if draws.random() < 0.5:
            continue
        x = torch.tanh(x) * scale
    return x


def own_generator(x: Tensor, draws: Any) -> Tensor:
    """A generator that is made in each call, with a seed from another one."""
    own = random.Random(draws.getrandbits(16))
    return x + own.random() * own.randint(1, 9)


def rewound(x: Tensor, draws: Any) -> Tensor:
    """Draws the same number twice, then another one."""
    state = draws.getstate()
    first = draws.random()
    draws.setstate(state)
    return x * (first - 2 * draws.random()) + draws.gauss(0, 1)


def shuffled(x: Tensor, draws: Any) -> Tensor:
    order = list(range(5))
    draws.shuffle(order)
    return x[order] * draws.choice([1.0, 2.0])


def checkpointed(x: Tensor, draws: Any) -> Tensor:
    def layer(y: Tensor) -> Tensor:
        return y.tanh() * draws.random()

    return checkpoint(layer, x, use_reentrant=False, preserve_rng_state=False)


MODELS = [
    *(scaled, shifted_integers, compared, chosen, divided, selected, cut),
    *(dropped_layers, own_generator, rewound, shuffled, checkpointed),
]


@pytest.mark.parametrize("source", ["module", "generator"])
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_python_draws_as_in_eager(model: Callable[..., Tensor], source: str):
    draws: Any = random if source == "module" else random.Random()
    compiled = gnncompile.compile(model)
    for dtype in (torch.float32, torch.float64):
        x = torch.linspace(0.1, 0.9, 5, dtype=dtype)
        draws.seed(7)
        expected = [model(x, draws) for _ in range(CALLS)]
        state = draws.getstate()

        draws.seed(7)
        for want in expected:
            torch.testing.assert_close(compiled(x, draws), want)
        assert draws.getstate() == state


def test_a_draw_is_told_with_its_line():
    report = gnncompile.explain(scaled, torch.ones(3), random.Random(0))
    (told,) = report.breaks
    assert "drawn from Python's random" in told.reason
    assert "return x * draws.random()" in told.line


def test_one_graph_with_a_draw_is_an_error():
    with pytest.raises(Exception, match="drawn from Python's random"):
        gnncompile.compile(scaled, fullgraph=True)(torch.ones(3), random.Random(0))
