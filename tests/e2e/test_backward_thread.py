"""The backward of a compiled model runs in the thread that asks for it, and other backwards where they did."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.autograd import is_multithreading_enabled, set_multithreading_enabled
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn import GCNConv

import gnncompile
from gnncompile.cudagraphs import backward_thread, native

EDGES = torch.tensor([[0, 1, 2, 3, 0], [1, 2, 3, 0, 2]])
WAYS = {"default": {}, "op by op": {"inductor": False}, "twice": {"double_backward": True}}


@pytest.fixture
def as_on_gpu(monkeypatch: pytest.MonkeyPatch):
    """CPU tensors count as on a GPU; and what a test leaves behind is undone."""
    monkeypatch.setattr(backward_thread, "has_thread", lambda tensor: True)
    assert is_multithreading_enabled()
    yield
    set_multithreading_enabled(True)


def _model(**options: bool) -> nn.Module:
    torch.manual_seed(0)
    return gnncompile.compile(GCNConv(4, 4), options=options)


def _run(model: nn.Module) -> torch.Tensor:
    return model(torch.ones(4, 4), EDGES)


@pytest.mark.usefixtures("as_on_gpu")
@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_as_long_as_a_result_is_alive(options: dict[str, bool]):
    model = _model(**options)
    for _ in range(3):
        first, second = _run(model), _run(model)
        assert not is_multithreading_enabled()
        first.sum().backward()
        del first
        assert not is_multithreading_enabled()
        loss = second.sum()
        del second
        assert not is_multithreading_enabled()
        del loss
        assert is_multithreading_enabled()


@pytest.mark.usefixtures("as_on_gpu")
def test_without_gradients():
    model = _model()
    with torch.no_grad():
        kept = [_run(model)]
        assert is_multithreading_enabled()
    model.requires_grad_(False)
    kept.append(_run(model))
    assert is_multithreading_enabled()


@pytest.mark.usefixtures("as_on_gpu")
def test_the_choice_of_the_user_stays():
    model = _model()
    with set_multithreading_enabled(False):
        out = _run(model)
        del out
        assert not is_multithreading_enabled()
    assert is_multithreading_enabled()


@pytest.mark.usefixtures("as_on_gpu")
def test_not_wanted():
    out = _run(_model(backward_in_caller=False))
    assert is_multithreading_enabled()
    out.sum().backward()


@pytest.mark.usefixtures("as_on_gpu")
def test_an_error_in_the_backward():
    out = _run(_model())
    out.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        out.sum().backward()
    del out
    assert is_multithreading_enabled()


@pytest.mark.usefixtures("as_on_gpu")
@pytest.mark.parametrize("reentrant", [True, False])
def test_computed_again_in_a_backward(reentrant: bool):
    """What a checkpoint runs in a backward begins and ends there."""
    model, x = _model(), torch.ones(4, 4, requires_grad=True)
    checkpoint(model, x, EDGES, use_reentrant=reentrant).sum().backward()
    again = x.grad.clone()
    x.grad = None
    model(x, EDGES).sum().backward()
    assert torch.equal(again, x.grad) and is_multithreading_enabled()


@pytest.mark.usefixtures("as_on_gpu")
def test_results_that_end_in_another_thread():
    """It is that of the first thread that was changed, and it is set again at the next chance."""
    model, kept = _model(), []
    kept.append(_run(model))
    seen: list[bool] = []

    def end() -> None:
        kept.clear()
        seen.append(is_multithreading_enabled())

    thread = threading.Thread(target=end)
    thread.start()
    thread.join()
    assert seen == [True] and not is_multithreading_enabled()
    out = _run(model)
    del out
    assert is_multithreading_enabled()


def test_on_a_cpu():
    """Nothing changes: there are no threads."""
    out = _run(_model())
    assert is_multithreading_enabled()
    out.sum().backward()


@pytest.mark.usefixtures("as_on_gpu")
def test_what_began_before_the_code_in_cpp_was_there(monkeypatch: pytest.MonkeyPatch):
    """What Python has turned off, and could not turn on again, that code does."""
    assert not native.wait()
    model = _model()
    with monkeypatch.context() as before:
        before.setattr(native, "module", lambda: None)
        kept = [_run(model)]
        thread = threading.Thread(target=kept.clear)
        thread.start()
        thread.join()
    assert not is_multithreading_enabled()
    out = _run(model)
    assert not is_multithreading_enabled()
    del out
    assert is_multithreading_enabled()


@pytest.mark.gpu
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_thread_on_a_gpu(mode: str | None):
    """In a thread of its own, where no result of another test is alive."""
    with ThreadPoolExecutor(1) as other:
        other.submit(_train_on_a_gpu, mode).result()


def _train_on_a_gpu(mode: str | None) -> None:
    torch.manual_seed(0)
    conv, x, edges = GCNConv(4, 4).cuda(), torch.randn(4, 4, device="cuda"), EDGES.cuda()
    model = gnncompile.compile(conv, mode=mode)
    threads: list[int] = []
    conv.lin.weight.register_hook(lambda _: threads.append(threading.get_ident()))
    for _ in range(6):
        model(x, edges).square().sum().backward()
    given, conv.lin.weight.grad = conv.lin.weight.grad / 6, None
    assert threads == [threading.get_ident()] * 6 and is_multithreading_enabled()
    conv(x, edges).square().sum().backward()
    torch.testing.assert_close(given, conv.lin.weight.grad)
    assert threads[-1] != threading.get_ident()
