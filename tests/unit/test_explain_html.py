"""The report's page: well formed, self-contained, safe, complete; looked at by a browser where there is one.

And what it tells: bytes, times, and which kernel belongs to which region.
"""

from __future__ import annotations

import base64
import hashlib
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
import torch
from torch import nn
from torch_geometric.nn import BatchNorm, EdgeConv, GATv2Conv, GCNConv, GINConv, SAGEConv, SimpleConv
from torch_geometric.nn.models import GAT

import gnncompile
from gnncompile.codegen.cpp import plan as cpp_plan
from gnncompile.codegen.triton import plan as triton_plan
from gnncompile.codegen.triton.tile import choose_tile
from gnncompile.codegen.triton.writer import writer_of
from gnncompile.ir.builder import Builder
from gnncompile.ir.region import Output, Region, Space, parse
from gnncompile.passes.log import Skip
from gnncompile.report import launches, traffic
from gnncompile.report.html import page
from gnncompile.runtime import launch
from tests.graphs import layout
from tests.unit.test_draw import edges, explained

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
VOID = {"meta", "br"}


class Strict(HTMLParser):
    """Elements must nest and end, attributes be written once, ids be unique."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.ids: list[str] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text: dict[str, str] = {}
        self.feed(text)
        self.close()
        assert not self.open, f"not closed: {self.open}"
        assert len(self.ids) == len(set(self.ids))

    def handle_starttag(self, tag, attrs):
        assert len(attrs) == len(dict(attrs)), (tag, attrs)
        self.found.append((tag, dict(attrs)))
        self.ids += [value for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, tag

    def handle_data(self, data):
        for tag in set(self.open):
            self.text[tag] = self.text.get(tag, "") + data


def checked(report) -> Strict:
    """The page, found to be well formed, and to ask for nothing from elsewhere."""
    text = page(report)
    strict = Strict(text)
    for svg in re.findall(r"<svg.*?</svg>", text, re.S):
        ElementTree.fromstring(svg)
    names = {name for _, attributes in strict.found for name in attributes}
    assert not names & {"src", "href", "style", "srcset", "data", "action"}
    assert not any(name.startswith("on") for name in names)
    assert {tag for tag, _ in strict.found}.isdisjoint({"link", "img", "iframe", "object", "base", "image", "use"})
    assert not re.search(r"@import|url\(|https?://(?!www\.w3\.org/2000/svg\")", text)
    policy = next(a["content"] for tag, a in strict.found if a.get("http-equiv") == "Content-Security-Policy")
    for tag, rule in (("style", "style-src"), ("script", "script-src")):
        inside = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.S)
        digest = base64.b64encode(hashlib.sha256(inside[0].encode()).digest()).decode()
        assert len(inside) == 1 and f"{rule} 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'")
    abouts = [a["data-about"] for _, a in strict.found if "data-about" in a]
    assert set(abouts) <= set(strict.ids) and len(abouts) == len(set(abouts))
    return strict


@pytest.fixture(scope="module")
def gat():
    torch.manual_seed(0)
    return explained(GAT(8, 8, 2, out_channels=3, heads=2), torch.randn(20, 8), edges(20, 90), measure=True)


# -- the page ---------------------------------------------------------------------------------------------------------


def test_page_holds_everything(gat, tmp_path):
    gat.to_html(tmp_path / "gat.html")
    assert (tmp_path / "gat.html").read_text(encoding="utf-8") == page(gat)
    strict = checked(gat)
    text = strict.text["body"]
    for k, region in enumerate(gat.regions):
        assert f"region-{k}" in strict.ids and region.what in text and region.line in text and len(region.kernels) == 2
        for kernel in region.kernels:
            assert kernel.source in strict.text["pre"] and kernel.program in strict.text["pre"]
            assert kernel.generator == "cpp" and "#include" in kernel.source
    drawn = [a["data-region"] for tag, a in strict.found if tag == "g"]
    assert {"", "0", "1"} == set(drawn)
    assert "2 regions" in text and "0 graph breaks" in text and "Nothing was skipped" in text
    assert re.search(r"forward [\d.]+ ms, [\d.]+ ms of it in regions; backward [\d.]+ ms", text)


def test_light_and_dark(gat):
    style = checked(gat).text["style"]
    assert style.count("prefers-color-scheme: dark") == 2 and "color-scheme: light dark" in style
    used = set(re.findall(r"var\((--\w[\w-]*)", style))
    for name in used - {"--c", "--f"}:
        assert len(re.findall(rf"{name}:", style)) == 2, f"{name} is not set for light and dark"


def test_nothing_of_a_users_code_is_markup(gat):
    evil = '"\'></pre></title><script>alert(1)</script><img src=x onerror="alert(2)">&amp;\x00\x1b]]>'
    region = replace(gat.regions[0], what=evil, line=evil, result=evil)
    kernels = [replace(k, source=evil, program=evil) for k in region.kernels]
    hostile = replace(
        gat,
        model=evil,
        device=evil,
        notes=(evil,),
        skipped=(Skip(evil, evil, evil),),
        regions=(replace(region, kernels=tuple(kernels)), gat.regions[1]),
    )
    graph = gat.graphs[0].before.copy()
    for _, data in graph.nodes(data=True):
        operations = tuple(replace(o, name=evil, result=evil, line=evil) for o in data["box"].operations)
        data["box"] = replace(data["box"], label=evil, module=evil, operations=operations)
    strict = checked(replace(hostile, graphs=(replace(gat.graphs[0], before=graph),)))
    tags = [tag for tag, _ in strict.found]
    assert tags.count("script") == 1 and "img" not in tags and "alert" not in strict.text["script"]
    shown = evil.replace("\x00", "�").replace("\x1b", "�")
    assert shown in strict.text["h1"] and shown in strict.text["pre"] and shown in strict.text["td"]
    assert shown in strict.text["title"]


class Odd(nn.Module):
    """What can't be fused, and says so."""

    def __init__(self):
        super().__init__()
        self.conv = SimpleConv("mul")

    def forward(self, x, edge_index):
        return self.conv(x, edge_index)


class Broken(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = SAGEConv(8, 8), GATv2Conv(8, 4)

    def forward(self, x, edge_index):
        x = self.a(x, edge_index)
        torch._dynamo.graph_break()
        return self.b(x, edge_index)


@pytest.mark.parametrize(
    "name, nodes, number", [("odd", 9, 30), ("broken", 9, 30), ("gat", 1, 3), ("gat", 7, 0), ("bipartite", 9, 30)]
)
def test_awkward_reports(name: str, nodes: int, number: int):
    torch.manual_seed(0)
    models = {"odd": Odd, "broken": Broken, "bipartite": lambda: SAGEConv((8, 8), 4, "max")}
    model = models.get(name, lambda: GATv2Conv(8, 4))()
    x, found = torch.randn(nodes, 8), edges(nodes, number) if number else torch.empty(2, 0, dtype=torch.long)
    if name == "bipartite":
        x, found = (x, torch.randn(4, 8)), torch.stack([found[0], found[1] % 4])
    report = explained(model, x, found, measure=True)
    text = checked(report).text["body"]
    if name == "odd":
        assert not report.regions and "the reduction 'mul' has no kernel yet" in text and "Regions" not in text
    if name == "broken":
        assert f"Graph {len(report.graphs)} of {len(report.graphs)}" in text and len(report.graphs) > 1
    assert not report.others


def test_reference_interpreter_has_no_source(monkeypatch):
    monkeypatch.setenv("GNNCOMPILE_KERNELS", "reference")
    launch.kernel.cache_clear()
    launch.runner.cache_clear()
    try:
        report = explained(SAGEConv(8, 4), torch.randn(9, 8), edges(9, 30))
    finally:
        launch.kernel.cache_clear()
        launch.runner.cache_clear()
    assert [k.moved for r in report.regions for k in r.kernels] == [None]
    assert "The reference interpreter runs it; there is no source." in checked(report).text["p"]


# -- in a browser -----------------------------------------------------------------------------------------------------


def in_browser(path, *flags: str) -> tuple[str, str]:
    """What a browser makes of a page, and what it says of it."""
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--v=0"]
    command += ["--virtual-time-budget=2000", f"--user-data-dir={path.parent / 'profile'}", *flags, path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


@pytest.mark.skipif(BROWSER is None, reason="needs chromium or google-chrome")
def test_in_a_browser(gat, tmp_path):
    path = tmp_path / "gat.html"
    gat.to_html(path)
    dom, said = in_browser(path, "--dump-dom")
    assert said == "" and 'class="box region r0"' in dom
    assert dom.count("<title>") == 1  # the script ran: boxes lost theirs


@pytest.mark.skipif(BROWSER is None, reason="needs chromium or google-chrome")
def test_pointing_at_a_region_shows_its_kernel(gat, tmp_path):
    point = """
    const region = [...document.querySelectorAll("g.box.region")].pop();
    region.dispatchEvent(new MouseEvent("mouseenter"));
    document.title = document.getElementById("panel").textContent;
    region.dispatchEvent(new MouseEvent("click"));
    boxes[0].dispatchEvent(new MouseEvent("mouseenter"));
    document.title += panel.classList.contains("pinned") + " " + panel.querySelector("h3").textContent;
    document.dispatchEvent(new KeyboardEvent("keydown", {key: "Escape"}));
    document.title += " then " + panel.textContent;
    """
    text = re.sub(r"<meta http-equiv[^>]*>", "", page(gat)).replace("</script>", f"{point}</script>")
    path = tmp_path / "point.html"
    path.write_text(text, encoding="utf-8")
    dom, said = in_browser(path, "--dump-dom")
    title = re.search(r"<title>(.*?)</title>", dom, re.S)
    assert said == "" and title is not None
    assert "region 1" in title[1] and "self.propagate(" in title[1] and "#include" in title[1]
    assert "true region 1" in title[1] and "then Point at a box" in title[1]


# -- bytes ------------------------------------------------------------------------------------------------------------


def test_bytes_of_a_sum():
    """Rows of 3 sources for 5 edges by 4 destinations, times a value per edge, plus a row per destination."""
    b = Builder(Space.DESTINATION)
    x, w = b.input(0, Space.SOURCE, (1, 6), "float32"), b.input(1, Space.EDGE, (1, 1), "float32")
    total = b.op("add", b.reduce("sum", b.op("mul", x, w)), b.input(2, Space.DESTINATION, (1, 6), "float32"))
    region = b.finish([Output(total, "float32", (6,))])
    tensors = [torch.randn(3, 6), torch.randn(5), torch.randn(4, 6)]
    walk = layout(torch.tensor([0, 3, 3, 0, 1]), torch.tensor([0, 2, 2, 1, 0]), 4)
    work = traffic.counted(region, traffic.least(region), tensors, walk, [torch.empty(4, 6)])
    assert work.gathered == 5 * 6 * 4
    index, weights, rowptr, rows = 5 * (4 + 4), 5 * 4, 5 * 4, 2 * 4 * 6 * 4
    assert work.streamed == index + weights + rowptr + rows and work.bytes == work.gathered + work.streamed
    twice = traffic.counted(region, traffic.least(region) * 2, tensors, walk, [torch.empty(4, 6)])
    assert twice.gathered == 2 * work.gathered and twice.streamed == work.streamed + index + weights


def attention() -> Region:
    """Logits of both ends, and a row of the source, of 2 heads with 4 channels."""
    b = Builder(Space.DESTINATION)
    x, y = b.input(0, Space.SOURCE, (2, 4), "float32"), b.input(1, Space.DESTINATION, (2, 4), "float32")
    logits = b.sum_axis(b.op("mul", x, y), 1)
    values = b.input(2, Space.SOURCE, (2, 4), "float32")
    return b.finish([Output(b.reduce("sum", b.op("mul", b.softmax(logits), values)), "float32", (2, 4))])


def test_loops_of_generated_kernels():
    """What is read in a loop over the edges is what the generators say."""
    region = attention()
    plan = triton_plan.schedule(region)
    text = writer_of(region, plan, choose_tile(region, plan), triton_plan.Part("all")).module()
    passes = text.split("over the edges\n")[1:]
    assert len(passes) == plan.passes == len(plan.loops)
    for one, loop in zip(passes, plan.loops, strict=True):
        for i, node in enumerate(region.nodes):
            if node.op == "input" and node.space is Space.SOURCE:
                assert (f"tl.load(t{node.value} " in one) == (i in loop.gathered)
    assert {i for loop in plan.loops for i in loop.gathered} == set(traffic.least(region)[0])
    assert {i for loop in cpp_plan.plan(region).gathered for i in loop} == set(traffic.least(region)[0])


def test_moved_is_no_less_than_the_limit(gat):
    for region in gat.regions:
        for kernel in region.kernels:
            assert kernel.moved.bytes >= kernel.limit.bytes > 0 and kernel.milliseconds > 0
        assert region.unfused > region.kernels[0].limit.bytes
    assert gat.forward > 0 and gat.backward > 0


# -- times, and whose they are ----------------------------------------------------------------------------------------


def test_layers_alike_share_their_launches():
    """Two layers with one program: each has its own launch of forward and gradient."""
    torch.manual_seed(0)
    model = nn.ModuleList([SAGEConv(8, 8), SAGEConv(8, 8)])

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = model

        def forward(self, x, edge_index):
            for layer in self.layers:
                x = layer(x, edge_index)
            return x

    report = explained(Two(), torch.randn(9, 8).requires_grad_(), edges(9, 30), measure=True)
    assert [[(k.gradient, k.launches) for k in r.kernels] for r in report.regions] == [[(False, 1), (True, 1)]] * 2
    assert not report.others


def test_kernels_with_an_epilogue_are_known():
    """Through Inductor, which runs row-wise arithmetic in the kernel."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    report = gnncompile.explain(GINConv(nn.Identity()), torch.randn(9, 8).requires_grad_(), edges(9, 30), measure=True)
    (region,) = report.regions
    assert not report.others and [(k.gradient, k.launches) for k in region.kernels] == [(False, 1), (True, 1)]
    assert region.kernels[0].program != region.program
    checked(report)


def test_rows_that_the_backward_makes_again_are_known():
    torch.manual_seed(0)
    layer = EdgeConv(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)))
    # A region with layers makes its rows again by itself.
    compiled = gnncompile.compile(layer, options={"inductor": False, "edge_layers": False})
    report = gnncompile.explain(compiled, torch.randn(9, 8).requires_grad_(), edges(9, 30), measure=True)
    runs = [(k.gradient, k.program) for r in report.regions for k in r.kernels]
    assert not report.others and {p for g, p in runs if g} & {p for g, p in runs if not g}


def test_measuring_leaves_the_model_as_it_was():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm, self.drop = GCNConv(8, 8), BatchNorm(8), nn.Dropout(0.5)

        def forward(self, x, edge_index):
            return self.drop(self.norm(self.conv(x, edge_index)))

    def state(measure: bool) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(0)
        model = Model()
        explained(model, torch.randn(9, 8), edges(9, 30), measure=measure)
        assert all(p.grad is None for p in model.parameters())
        return model.norm.module.running_mean.clone(), torch.rand(3)

    assert all(torch.equal(a, b) for a, b in zip(state(True), state(False), strict=True))


def test_times_are_printed_only_when_measured(gat):
    plain = str(replace(gat, forward=None))
    assert "  ms " in str(gat) and "  ms " not in plain and len(str(gat).splitlines()) == len(plain.splitlines())


def test_launches_of_no_region_are_others():
    region = attention()
    one = launches.Launch(region, None, False, None, traffic.Work(()))
    found = launches.assigned([one, replace(one, gradient=True)], [region.spec], [()])
    assert [len(f) for f in found] == [2, 0]  # a backward may run the forward again
    b = Builder(Space.SOURCE)
    other = b.finish([Output(b.reduce("max", b.input(0, Space.DESTINATION, (1, 3), "float32")), "float32", (3,))])
    found = launches.assigned([replace(one, region=other)], [region.spec], [()])
    assert [len(f) for f in found] == [0, 1] and parse(other.spec) == other


def test_recordings_pause_while_measured(recording):
    torch.manual_seed(0)
    model = gnncompile.compile(SAGEConv(8, 4), options={**{"inductor": False}, "record": True})
    report = gnncompile.explain(model, torch.randn(9, 8), edges(9, 30), measure=True)
    assert report.regions and report.regions[0].milliseconds is not None
    assert not any("being measured" in note for note in report.notes)
