"""What is remembered of graphs is never that of another graph: changed memory, threads, processes, streams."""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torch_geometric.nn import GATConv, GCNConv, global_add_pool

import gnncompile
from gnncompile import _compat
from gnncompile.capture.compile import callable_of
from gnncompile.layout import csr, identity_cache, streams
from gnncompile.layout.identity_cache import IdentityCache, never_written
from tests.harness import light

NODES, WIDTH = 6, 4


class Net(nn.Module):
    """Module-level, so that it can be pickled."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = GCNConv(WIDTH, WIDTH), GATConv(WIDTH, 3)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        return global_add_pool(self.second(self.first(x, edge_index).relu(), edge_index), batch, 2)


def edges(seed: int, count: int = 14) -> Tensor:
    return torch.randint(NODES, (2, count), generator=torch.Generator().manual_seed(seed))


def copied(value: Tensor) -> list[Tensor]:
    return [value.clone()]


BATCH = torch.tensor([0, 0, 1, 1, 1, 1])
X = torch.randn(NODES, WIDTH, generator=torch.Generator().manual_seed(0))


def equal(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def _light() -> Iterator[None]:
    with light():
        yield


@pytest.fixture(scope="module")
def model(_light: None) -> Net:
    torch.manual_seed(0)
    return Net()


@pytest.fixture(scope="module")
def compiled(model: Net) -> Any:
    made = gnncompile.compile(model)
    made(X, edges(0), BATCH)
    return made


@pytest.fixture
def cache() -> IdentityCache:
    return IdentityCache(8, 2**20)


# -- which tensor it is -------------------------------------------------------------------------------------------


def _twice(change: Callable[[Tensor, int], Tensor]) -> Callable[[Tensor, int], None]:
    """New memory behind a tensor, twice: the second may be where the first was. Its version stays."""

    def both(t: Tensor, step: int) -> None:
        t.data = change(t, step)
        t.data = change(t, step + 1)

    return both


CHANGES: dict[str, Callable[[Tensor, int], Any]] = {
    "an entry": lambda t, step: t.__setitem__((0, 0), step),
    "a row of it": lambda t, step: t[1].fill_(step),
    "through its flat view": lambda t, step: t.view(-1)[2:5].add_(step + 1),
    "out=": lambda t, step: torch.add(t, 1, out=t),
    "no_grad and detached": lambda t, step: t.detach().add_(1),
    "new data": _twice(lambda t, step: torch.full_like(t, step)),
    "data turned round": lambda t, step: setattr(t, "data", t.data.t()),
    "turned round": lambda t, step: t.t_(),
    "as strided": lambda t, step: t.as_strided_((2, 2), (step % 2, 1)),
    "other data, strided": lambda t, step: setattr(t, "data", t.data.as_strided((2, 2), (1, step % 2))),
    "set to another": lambda t, step: t.set_(torch.full((2, 2), step)),
    "swapped": lambda t, step: torch.utils.swap_tensors(t, torch.full((2, 2), step)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_noticed(change: str, cache: IdentityCache) -> None:
    value = torch.tensor([[0, 1], [2, 3]])
    for step in range(40):
        for _ in range(2):
            assert torch.equal(cache.get((value,), copied)[0], value)
        CHANGES[change](value, step)
    assert torch.equal(cache.get((value,), copied)[0], value)


def test_an_unchanged_tensor_is_found_again(cache: IdentityCache) -> None:
    value = torch.tensor([[0, 1], [2, 3]])
    first = cache.get((value, 3), lambda t, n: copied(t))[0]
    assert cache.get((value, 3), lambda t, n: pytest.fail())[0] is first
    assert cache.get((value.detach(), 3), lambda t, n: pytest.fail())[0] is first  # the same memory and version
    assert cache.get((value, 4), lambda t, n: copied(t))[0] is not first
    assert (cache.hits, cache.misses, len(cache)) == (2, 2, 2)


def test_equal_tensors_slices_and_types_are_told_apart(cache: IdentityCache) -> None:
    base = torch.arange(24)
    views = [base, base.clone(), base[:12], base[12:], base[::2], base.view(2, 12), base.view(12, 2).t(), base[1:13]]
    views += [base.view(torch.float64), base.view(torch.int32), base.view(4, 6), base[:0], base[3:3], base[5]]
    for _ in range(2):
        for view in views:
            found = cache.get((view,), copied)[0]
            assert found.dtype == view.dtype and torch.equal(found, view)
        base.add_(1)


def test_freed_memory_that_is_used_again(cache: IdentityCache) -> None:
    places = set()
    for step in range(200):
        value = torch.full((3, 40), step)
        places.add(value.data_ptr())
        assert torch.equal(cache.get((value,), copied)[0], value)
        del value
    gc.collect()
    assert len(places) < 200 and len(cache) <= 8


def test_inference_tensors_are_not_remembered(cache: IdentityCache) -> None:
    with torch.inference_mode():
        value = torch.tensor([1, 2])
    for step in range(3):
        assert torch.equal(cache.get((value,), copied)[0], value)
        with torch.inference_mode():
            value.fill_(step)
    assert len(cache) == 0 and cache.misses == 3


def test_what_changed_while_it_was_made_is_not_remembered(cache: IdentityCache) -> None:
    """As where another thread writes to the graph."""
    value = torch.tensor([1, 2])

    def slowly(t: Tensor) -> list[Tensor]:
        made = copied(t)
        t.add_(1)
        return made

    cache.get((value,), slowly)
    assert len(cache) == 0 and torch.equal(cache.get((value,), copied)[0], value)


# -- new graphs in each call ---------------------------------------------------------------------------------------


def _made(cache: IdentityCache, value: Tensor) -> list[Tensor]:
    return cache.get((value, 3), lambda t, _: copied(t))


def test_results_that_nobody_reads_are_no_longer_kept() -> None:
    cache = IdentityCache(64, 2**20)
    kept = [never_written(torch.full((9,), k)) for k in range(40)]
    for value in kept:
        assert torch.equal(_made(cache, value)[0], value)
    assert len(cache) == identity_cache._UNREAD and cache.misses == 40
    last = _made(cache, kept[-1])  # the second time
    assert _made(cache, kept[-1]) is last and (cache.hits, cache.misses) == (1, 41)
    new = never_written(torch.zeros(9))
    assert _made(cache, new) is _made(cache, new)  # something is read again, so all is kept again


def test_results_of_freed_graphs_are_not_kept_either() -> None:
    cache = IdentityCache(64, 2**20)
    alive = [never_written(torch.full((9,), k)) for k in range(6)]  # before those that are freed
    for value in alive:
        _made(cache, value)
    for k in range(300):
        _made(cache, never_written(torch.full((9,), k)))
    assert len(cache) == 6 and cache.nbytes == 6 * 72 and cache._last is None


def test_results_for_tensors_that_may_be_written_to_are_kept() -> None:
    cache, kept = IdentityCache(64, 2**20), [torch.full((9,), k) for k in range(40)]
    for value in kept:
        _made(cache, value)
    assert len(cache) == 40


def test_each_cache_meets_a_graph_by_itself() -> None:
    """As the graphs before and behind a graph break, or of training and of evaluation."""
    caches = [IdentityCache(64, 2**20) for _ in range(2)]
    for k in range(40):
        value = never_written(torch.full((9,), k))
        for cache in caches:
            _made(cache, value)
    kept = [never_written(torch.full((9,), k)) for k in range(40)]
    for value in kept:
        for cache in caches:
            _made(cache, value)
    assert all(len(cache) <= 1 for cache in caches)


def test_an_edge_list_that_comes_again_after_many_new_ones(model: Net, compiled: Any) -> None:
    (cache,) = [captured.structure.cache for captured in callable_of(compiled).backend.captured]
    for k in range(30):
        compiled(X, edges(k), BATCH)
    before = len(cache)
    kept, misses = [edges(k) for k in range(30, 33)], []
    for _ in range(3):
        for one in kept:
            equal(compiled(X, one, BATCH), model(X, one, BATCH))
        misses.append(cache.misses)
    assert before <= identity_cache._UNREAD and misses[1] == misses[2]


# -- bounds -------------------------------------------------------------------------------------------------------


def test_bytes_are_bounded_and_the_least_recently_used_goes() -> None:
    cache, kept = IdentityCache(100, 1000), [torch.full((50,), k) for k in range(6)]  # 400 bytes each
    made = lambda k: cache.get((kept[k],), copied)  # noqa: E731
    made(0), made(1)
    first = made(0)
    made(2)  # 1200 bytes: the second goes
    assert cache.nbytes == 800 and made(0) is first and cache.misses == 3
    made(1)
    assert cache.misses == 4 and len(cache) == 2
    cache.get((torch.zeros(500),), copied)  # larger than the bound by itself: kept until the next
    assert len(cache) == 1 and cache.nbytes == 2000
    made(0)
    assert cache.nbytes == 400


def test_bytes_are_those_of_the_entries() -> None:
    """After entries went for each reason: a bound, a freed input, a graph that two threads made, a failed capture."""
    cache, kept = IdentityCache(3, 10**6), [torch.full((50 + k,), k) for k in range(6)]

    def true_bytes() -> int:
        return sum(t.nbytes for entry in cache._entries.values() for t in entry.made)

    for value in kept:
        cache.get((value,), copied)
        assert cache.nbytes == true_bytes() > 0
    cache.get((torch.zeros(7),), copied)  # freed at once
    cache.get((kept[0],), copied), cache.get((kept[1],), copied)
    assert cache.nbytes == true_bytes()

    def twice(value: Tensor) -> list[Tensor]:
        cache.get((value,), copied)  # as another thread would in the meantime
        return copied(value)

    cache.get((kept[2],), twice)
    assert cache.nbytes == true_bytes() and len(cache) == 3
    with pytest.raises(ValueError), identity_cache.keeping():
        cache.get((kept[3],), copied)
        raise ValueError
    assert cache.nbytes == true_bytes() and len(cache) == 2
    cache.clear()
    assert cache.nbytes == true_bytes() == 0


def test_info_and_clear(model: Net) -> None:
    gnncompile.clear_cache()
    before = gnncompile.cache_info()
    assert before.entries == before.bytes == 0
    compiled, graph = gnncompile.compile(model), edges(1)
    expected = compiled(X, graph, BATCH)
    one = gnncompile.cache_info()
    assert one.entries > 0 and one.bytes > graph.nbytes and one.misses > before.misses
    compiled(X, graph, BATCH)
    two = gnncompile.cache_info()
    assert two.hits > one.hits and two[:2] == one[:2] and two.misses == one.misses
    gnncompile.clear_cache()
    assert gnncompile.cache_info() == two._replace(entries=0, bytes=0)
    assert torch.equal(compiled(X, graph, BATCH), expected)
    assert gnncompile.cache_info().misses > two.misses
    alive = set(map(id, identity_cache._all()))
    ours = id(callable_of(compiled).derived._copies)
    assert ours in alive
    torch._dynamo.reset()
    del compiled
    gc.collect()
    assert ours not in set(map(id, identity_cache._all()))


def test_seen_memory_is_known_until_it_is_changed_or_freed() -> None:
    seen, graph = identity_cache.Seen(2), edges(1)
    assert seen.add(graph) and not seen.add(graph) and not seen.add(graph.view_as(graph))
    graph += 1
    assert seen.add(graph) and not seen.add(graph)
    memory = _compat.StorageWeakRef(graph.untyped_storage())
    del graph
    assert memory.expired()
    for _ in range(8):  # freed memory is used again
        assert seen.add(edges(1))


def test_seen_memory_is_forgotten_if_it_was_not_seen_for_long() -> None:
    seen, held = identity_cache.Seen(2), [edges(k) for k in range(4)]
    assert seen.add(held[0]) and seen.add(held[1]) and not seen.add(held[0]) and seen.add(held[2])
    assert not seen.add(held[0]) and not seen.add(held[2]) and seen.add(held[1])
    last = identity_cache.Seen(0)
    assert all(last.add(one) and not last.add(one) for one in held)


@pytest.mark.parametrize("most", [0, 2])
def test_threads_that_see_the_same_memory(most: int) -> None:
    seen, held = identity_cache.Seen(most), [edges(k) for k in range(5)]
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda k: seen.add(held[k % 5]), range(20_000)))
    assert found.count(True) >= 5 and len(seen._owners) <= max(most, 1)


# -- threads ------------------------------------------------------------------------------------------------------


def test_threads_that_share_a_cache() -> None:
    """Each value is asked for by all of them, and changed by one between rounds."""
    cache, values = IdentityCache(4, 2**20), [torch.full((2, 9), k) for k in range(8)]
    barrier, wrong = threading.Barrier(8), []

    def work(own: int) -> None:
        for _ in range(30):
            for k in range(8):
                value = values[(own + k) % 8]
                if not torch.equal(cache.get((value,), copied)[0], value):
                    wrong.append((own, k))
            barrier.wait(30)
            values[own].add_(1)
            barrier.wait(30)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert not wrong and len(cache) <= 4


@pytest.mark.skipif(torch.__version__.startswith("2.11."), reason="torch.compile of 2.11 crashes in several threads")
def test_two_models_are_compiled_and_run_by_many_threads(_light: None) -> None:
    """Also the first calls, which capture, come at once."""
    torch.manual_seed(0)
    models = [Net(), Net()]
    both = [gnncompile.compile(model) for model in models]
    graphs = [edges(k, count) for k, count in enumerate((14, 0, 1, 30))]
    barrier = threading.Barrier(6)

    def work(own: int) -> None:
        model, compiled = models[own % 2], both[own % 2]
        barrier.wait(60)
        for step in range(8):
            mine, x = graphs[(own + step) % 4], X.clone().requires_grad_()
            out = compiled(x, mine, BATCH)
            expected = model(x, mine, BATCH)
            equal(out, expected)
            equal(*(torch.autograd.grad(o.square().sum(), x)[0] for o in (out, expected)))

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))
    assert [len(callable_of(compiled).backend.captured) for compiled in both] == [1, 1]


def test_a_call_while_another_thread_traces(_light: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tracing replaces how modules are called, for all threads."""
    model, usual = Net(), nn.Module.__call__
    compiled = gnncompile.compile(model)
    compiled(X, edges(0, 14), BATCH)
    monkeypatch.setattr(nn.Module, "__call__", lambda self, *args, **kwargs: usual(self, *args, **kwargs))
    equal(compiled(X, edges(1, 20), BATCH), model(X, edges(1, 20), BATCH))
    assert len(callable_of(compiled).backend.captured) == 1


# -- processes ----------------------------------------------------------------------------------------------------


class Compiled(Dataset[Tensor]):
    """Runs a compiled model on one and the same edge list, whose values change from item to item."""

    def __init__(self, model: Any) -> None:
        self.model, self.graph = model, edges(0)

    def __len__(self) -> int:
        return 6

    def __getitem__(self, item: int) -> Tensor:
        self.graph.copy_(edges(item))
        with torch.no_grad():  # torch can't differentiate in a fork of a process that did
            return torch.cat([self.model(X, self.graph, BATCH), self.model(X, edges(item), BATCH)])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_workers_that_are_forked(model: Net, compiled: Any) -> None:
    """They have the caches of the parent, whose other threads may have been in the middle of something."""
    locked = callable_of(compiled).derived._copies._lock
    data = Compiled(compiled)
    with torch.no_grad():
        compiled(X, data.graph, BATCH)
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with locked, identity_cache._caches_lock:
            held.set()
            done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(60)
    try:
        found = iter(DataLoader(data, batch_size=None, num_workers=2, multiprocessing_context="fork", timeout=60))
    finally:
        done.set()
        thread.join(60)
    for item, out in enumerate(found):
        expected = model(X, edges(item), BATCH)
        equal(out, torch.cat([expected, expected]))


def spawned(given: Any) -> list[Tensor]:
    """In a fresh process: a compiled model, and graphs in memory that another process may write to."""
    model, graphs = given
    made = [model(X, graph, BATCH).detach() for graph in graphs]
    return [*made, model(X, graphs[0].fill_(1), BATCH).detach()]


def test_workers_that_are_spawned(model: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GNNCOMPILE_KERNELS", "reference")
    graphs = [edges(3), edges(4, 0)]
    given = gnncompile.compile(model, options={"inductor": False}), [graph.clone() for graph in graphs]
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found = pool.apply(spawned, (given,))
    for out, graph in zip(found, [*graphs, torch.ones_like(graphs[0])], strict=True):
        equal(out, model(X, graph, BATCH))


# -- streams ------------------------------------------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What is asked of a GPU's streams, where there is none."""
    state = SimpleNamespace(current=1, capturing=False, log=[])

    class Event:
        def record(self, stream: Any) -> None:
            state.log.append(("record", stream.number))

    class Stream:
        def __init__(self, number: int) -> None:
            self.number = number

        def record_event(self) -> Event:
            event = Event()
            event.record(self)
            return event

        def wait_event(self, event: Event) -> None:
            state.log.append(("wait", self.number))

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(state.current))
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: Stream(0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capturing)
    monkeypatch.setattr(_compat, "current_stream", lambda device: state.current)
    return state


class OnGpu(SimpleNamespace):
    """Stands for a tensor."""

    def __init__(self, log: list[Any]) -> None:
        super().__init__(device=torch.device("cuda", 0), get_device=lambda: 0, log=log)

    def record_stream(self, stream: Any) -> None:
        self.log.append(("keep", stream.number))


def test_other_streams_wait_once(gpu: SimpleNamespace) -> None:
    order = streams.Ordered.after([torch.ones(1), OnGpu(gpu.log)])  # type: ignore[list-item]
    assert order is not None and gpu.log == [("record", 1)]
    order.follow()
    gpu.current = 2
    order.follow(), order.follow()
    assert gpu.log == [("record", 1), ("wait", 2), ("keep", 2)]
    gpu.capturing, gpu.current = True, 3
    order.follow()
    assert streams.Ordered.after([OnGpu(gpu.log)]) is None and len(gpu.log) == 3  # type: ignore[list-item]
    assert streams.Ordered.after([torch.ones(1)]) is None and streams.Ordered.after([]) is None


def test_other_streams_wait_for_the_default_stream(gpu: SimpleNamespace) -> None:
    """Its event is recorded when it is needed: new graphs of each call, which no other stream reads, need none."""
    gpu.current = 0
    order = streams.Ordered.after([OnGpu(gpu.log)])  # type: ignore[list-item]
    assert order is not None and gpu.log == []
    order.follow()
    assert gpu.log == []
    gpu.current = 2
    order.follow(), order.follow()
    assert gpu.log == [("record", 0), ("wait", 2), ("keep", 2)]


@pytest.mark.gpu
def test_a_structure_that_another_stream_made(_light: None) -> None:
    """The making stream is kept busy: who does not wait reads what is not there yet."""
    model = Net().cuda()
    compiled = gnncompile.compile(model, options={"inductor": False})
    x, batch = X.cuda(), BATCH.cuda()
    compiled(x, edges(0).cuda(), batch)
    sides = [torch.cuda.Stream(), torch.cuda.Stream()]
    for seed in range(20):
        graph = edges(seed, 3000).cuda()
        expected = model(x, graph, batch)
        torch.cuda.synchronize()
        with torch.cuda.stream(sides[0]):
            torch.cuda._sleep(20_000_000)
            one = compiled(x, graph, batch)
        with torch.cuda.stream(sides[1]):
            two = compiled(x, graph, batch)
            if seed % 2:
                gnncompile.clear_cache()
                torch.full((2, 3000), -1, device="cuda")
        torch.cuda.synchronize()
        equal(one, expected), equal(two, expected)


@pytest.mark.gpu
def test_lists_that_another_stream_made() -> None:
    row = torch.arange(4000, device="cuda") % 7
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        rowptr = csr.csr(row, row, 7, 7, None)[0]
        csr.rows_of_edges(rowptr, 4000)
    found = csr.rows_of_edges(rowptr, 4000).clone()
    hubs = csr.hubs(rowptr, 4000)
    assert hubs is not None
    lengths = hubs.rows.clone()
    torch.cuda.synchronize()
    assert torch.equal(found.long(), row.sort().values) and int((lengths[:, 2] > 0).sum()) == 7


def test_what_a_failed_capture_made_is_forgotten() -> None:
    cache, values = IdentityCache(8, 2**20), [edges(k) for k in range(3)]
    cache.get([values[0]], copied)
    with pytest.raises(RuntimeError), identity_cache.keeping() as kept:
        cache.get([values[0]], copied)
        with identity_cache.keeping():
            cache.get([values[1]], copied)
        assert cache.misses == 2 and len(kept) == 1
        raise RuntimeError("the capture waits for the device")
    for value, misses in ((values[0], 2), (values[1], 3)):
        equal(cache.get([value], copied)[0], value)
        assert cache.misses == misses
    with identity_cache.keeping():
        cache.get([values[2]], copied)
    cache.get([values[2]], copied)
    assert cache.misses == 4
