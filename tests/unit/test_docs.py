"""The documentation is true: blocks of code run and print what they say, links lead somewhere, what is generated is
current, and no switch is missing.

The blocks of a page share their names. The first one of the README runs as it is; in the others what is no region runs
op by op instead of by Inductor, which takes seconds for each model: capture, passes and kernels are real.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import docs.__main__ as command
import gnncompile
from benchmarks import __main__ as benchmarks
from docs.writer import api, blocks, drawn, links, passes
from docs.writer.docstrings import markdown
from gnncompile.cli import machine
from gnncompile.cli import main as cli
from gnncompile.options import DEFAULTS, NAMES
from gnncompile.passes import manager
from tests.harness import light

ROOT = Path(__file__).resolve().parents[2]
PAGES = {page.relative_to(ROOT).as_posix(): page for page in links.pages(ROOT)}
WITH_CODE = [name for name, page in PAGES.items() if any(b.language == "python" for b in blocks.blocks(page))]


# -- blocks of code ---------------------------------------------------------------------------------------------------


def run(name: str, until: int | None = None) -> list[int]:
    """Runs the blocks of a page, up to the one at a line.

    Returns:
        The lines of those that were left out.
    """
    page = ModuleType("page")
    found = [block for block in blocks.blocks(PAGES[name]) if block.language == "python"]
    left_out = []
    with pytest.MonkeyPatch.context() as patch, ExitStack() as rest:
        patch.setitem(sys.modules, page.__name__, page)  # Dynamo imports what a function's names come from
        for number, block in enumerate(found):
            if number == (name == "README.md"):
                rest.enter_context(light(""))
            # Empty lines in front, so that an error names the line of the page.
            code = compile("\n" * (block.line - 1) + block.code, name, "exec")
            if block.needs is not None and not blocks.NEEDS[block.needs]():
                left_out.append(block.line)
                continue
            with redirect_stdout(io.StringIO()) as printed:
                exec(code, vars(page))
            if block.printed is not None:
                assert blocks.alike(printed.getvalue()) == blocks.alike(block.printed), f"{name}:{block.line}"
            if block.line == until:
                break
    return left_out


@pytest.fixture
def a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Blocks write files, and draw random numbers."""
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    torch._dynamo.reset()
    # Inductor need not try for seconds whether the compiler's vector instructions work.
    with torch._inductor.config.patch({"cpp.vec_isa_ok": True}):
        yield
    torch._dynamo.reset()


@pytest.mark.parametrize("name", WITH_CODE)
def test_blocks_run_as_printed(name: str, a_folder: None) -> None:
    run(name)


WITH_NEEDS = [
    pytest.param(name, block.line, block.needs, id=f"{name}:{block.line} needs {block.needs}")
    for name in WITH_CODE
    for block in blocks.blocks(PAGES[name])
    if block.needs is not None
]


@pytest.mark.parametrize(("name", "line", "needs"), WITH_NEEDS)
def test_blocks_that_need_something(name: str, line: int, needs: str, a_folder: None) -> None:
    """So that what was not run is told."""
    if not blocks.NEEDS[needs]():
        pytest.skip(f"{name}:{line} was not run: it needs {needs}")
    assert line not in run(name, until=line)


def test_there_is_code_on_the_pages_that_should_have_some():
    assert {"README.md", "docs/start.md", "docs/speed.md", "docs/debugging.md", "docs/api.md"} <= set(WITH_CODE)
    assert sum(b.printed is not None for name in WITH_CODE for b in blocks.blocks(PAGES[name])) >= 8


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("```python\nx = 1\n", "found no end"),
        ("```\nls\n```\n<!-- printed -->\n```text\na\n```\n", "expected Python"),
    ],
)
def test_blocks_that_are_wrong(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "page.md").write_text(text)
    with pytest.raises(ValueError, match=said):
        blocks.blocks(tmp_path / "page.md")


def test_needs_that_nobody_knows() -> None:
    with pytest.raises(ValueError, match="a unicorn"):
        _ = blocks.Block(1, "python", "# needs: a unicorn\nx = 1").needs


def test_what_is_printed_is_compared_but_for_what_differs():
    assert blocks.alike("(s33, 4)  conv/a.py:361: x\n-----  --\n") == blocks.alike(
        "(s7, 4) conv/a.py:9: x\n---  ------"
    )
    assert blocks.alike("3 regions") != blocks.alike("2 regions")


def commands() -> Iterator[tuple[str, int, list[str]]]:
    """Each command of a block that is no Python, and in the text, with its page and line."""
    for name, page in PAGES.items():
        text = page.read_text(encoding="utf-8")
        for found in re.finditer(r"^ *(python -m .*?)(?: {2,}#.*)?$|`(python -m [^`]+)`", text, re.MULTILINE):
            words = " ".join((found.group(1) or found.group(2)).split())
            yield name, text.count("\n", 0, found.start()) + 1, shlex.split(words)[2:]


def test_commands_are_known(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Their options as well; they are not run."""
    modules: tuple[ModuleType, ...] = (*cli.COMMANDS, *benchmarks.SUBCOMMANDS)
    for module in modules:
        monkeypatch.setattr(module, "run", lambda args: 0)
    monkeypatch.setattr(command, "MADE", {})
    monkeypatch.setattr(command.drawn, "gat", lambda: (ROOT / "docs" / "figures" / drawn.NAME).read_text())
    mains = {"gnncompile": cli.main, "benchmarks": benchmarks.main, "docs": command.main}
    seen = set()
    for name, line, (module, *words) in commands():
        if module not in mains or not words or words[0].startswith(("{", "...")) or "|" in words:
            continue
        try:
            status = mains[module](words)
        except SystemExit as exit:
            status = exit.code
        assert status == 0, f"{name}:{line}: python -m {module} {' '.join(words)}: {capsys.readouterr().err}"
        seen.add((module, words[0]))
    assert {("gnncompile", "doctor"), ("gnncompile", "explain"), ("benchmarks", "guide")} <= seen


# -- links ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name: str) -> None:
    assert links.broken(PAGES[name], ROOT) == []


def test_every_page_is_reached_from_the_readme():
    seen, todo = set(), [ROOT / "README.md"]
    while todo:
        page = todo.pop()
        if page in seen or page.suffix != ".md":
            continue
        seen.add(page)
        targets = [target.partition("#")[0] for _, target in links.links(page.read_text(encoding="utf-8"))]
        todo += [(page.parent / target).resolve() for target in targets if target and "://" not in target]
    assert set(PAGES.values()) <= seen


def test_broken_links_are_found(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# A `b`, c\n\n## Twice\n\n## Twice\n\n```\n# no heading\n```\n")
    (tmp_path / "page.md").write_text(
        "[fine](other.md#a-b-c) [fine](other.md#twice-1) [fine](#here) [fine](https://nowhere.invalid/x#y)\n"
        "`[code](nope.md)` ![no](nope.png) [no](other.md#twice-2)\n```\n[code](nope.md)\n```\n"
        "[no](other.md#no-heading) [no](../outside.md) [no](#there)\n# Here\n[defined]: gone.md\n"
    )
    found = [problem.split(": ")[:2] for problem in links.broken(tmp_path / "page.md", tmp_path)]
    assert sorted(found) == sorted(
        [
            ["page.md:2", "nope.png"],
            ["page.md:2", "other.md#twice-2"],
            ["page.md:6", "other.md#no-heading"],
            ["page.md:6", "../outside.md"],
            ["page.md:6", "#there"],
            ["page.md:8", "gone.md"],
        ]
    )


# -- what is generated ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", command.MADE)
def test_generated_parts_are_current(name: str) -> None:
    assert (ROOT / name).read_text(encoding="utf-8") == command.MADE[name](ROOT), "run `python -m docs`"


def test_the_picture_is_what_draw_draws():
    pytest.importorskip("matplotlib")
    path = ROOT / "docs" / "figures" / drawn.NAME
    assert drawn.texts(path.read_text(encoding="utf-8")) == drawn.texts(drawn.gat()), "run `python -m docs`"


def test_figures_are_small_and_shown():
    texts = "".join(page.read_text(encoding="utf-8") for page in PAGES.values())
    for path in (ROOT / "docs" / "figures").iterdir():
        assert path.stat().st_size < 100_000 and f"figures/{path.name})" in texts, path.name


def test_the_reference_has_every_public_name():
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert set(api.public(ROOT)["gnncompile"]) == {name for name in gnncompile.__all__ if not name.startswith("_")}
    for names in api.public(ROOT).values():
        for name in names:
            assert f"### {name}\n" in text


def test_docstrings_become_markdown():
    text = inspect.cleandoc(
        """Does it, see :func:`~a.b.c` and ``x``.

        Follows :math:`x^2` of `"A Paper" <https://arxiv.org/abs/1>`_, as a caller has it::

            y = c(x)

        Args:
            x, y: rows, ``[n]``,
                of a kind.
            *z: more.

        Returns:
            A number.
        """
    )
    assert markdown(text).split("\n\n") == [
        "Does it, see `c` and `x`.",
        "Follows $x^2$ of [A Paper](https://arxiv.org/abs/1), as a caller has it:",
        "```python\ny = c(x)\n```",
        "**Args**",
        "- `x`, `y`: rows, `[n]`,\n  of a kind.\n- `*z`: more.",
        "**Returns**",
        "A number.",
    ]


def test_passes_say_what_they_do():
    found = passes.in_order(ROOT)
    assert [one.name for one in found] == [one.name for one in (*manager.PRE_GRAD, *manager.JOINT, *manager.POST_GRAD)]
    assert {one.option for one in found if one.option} <= set(NAMES)
    with pytest.raises(ValueError, match="expected Before, After and Why it pays"):
        passes.described("nope", "Does something.\n\nBefore: ``a``\nAfter: ``b``")


# -- what is said of the code -----------------------------------------------------------------------------------------


def switches() -> str:
    text = PAGES["docs/debugging.md"].read_text(encoding="utf-8")
    table = text.partition("## Switches")[2].partition("\n## ")[0]
    return "\n".join(line.split(" | ")[0] for line in table.splitlines() if line.startswith("| `"))


def test_every_option_and_argument_has_a_row():
    table = switches()
    assert set(re.findall(r'options=\{"(\w+)"', table)) == set(NAMES)
    arguments = set(inspect.signature(gnncompile.compile).parameters) - {"model"}
    assert arguments == set(re.findall(r"`([a-z]+)=(?!.*\{\")", table)) | {"options"}


def test_switches_can_be_set_as_they_are_written():
    for line in re.findall(r"options=(\{\"[^}]+\})", switches()):
        gnncompile.compile(torch.nn.Linear(1, 1), options=ast.literal_eval(line))


def read_variables() -> set[str]:
    """Environment variables that gnncompile reads, by its sources."""
    found = set()
    for path in (ROOT / "gnncompile").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        reads = [node for node in ast.walk(tree) if _reads_environment(node)]
        for node in reads:
            key = node.args[0] if isinstance(node, ast.Call) else node.slice  # type: ignore[attr-defined]
            # A name stands for one of the module's constants, wherever it has it from.
            of = key if isinstance(key, ast.Constant) else tree
            texts = [n.value for n in ast.walk(of) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
            names = {text for text in texts if re.fullmatch(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+|CXX", text)}
            assert names, f"{path.name}:{node.lineno}: which variable is read can't be told"
            found |= names
    return found


def _reads_environment(node: ast.AST) -> Any:
    if isinstance(node, ast.Call):
        return ast.unparse(node.func) in ("os.environ.get", "os.getenv", "environ.get", "getenv")
    return isinstance(node, ast.Subscript) and ast.unparse(node.value) in ("os.environ", "environ")


def test_every_environment_variable_has_a_row():
    named = set(re.findall(r"\b([A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+|CXX)\b", switches()))
    read = read_variables()
    assert {"GNNCOMPILE_KERNELS", "GNNCOMPILE_CACHE_DIR", "CXX", "TORCHDYNAMO_DISABLE"} <= read
    assert read <= named, f"docs/debugging.md lacks {read - named}"
    text = PAGES["docs/debugging.md"].read_text(encoding="utf-8")
    assert all(f"`{kernels}`" in text or f"={kernels}`" in text for kernels in machine.KERNELS if kernels)


def test_reasons_are_those_of_the_code():
    """What stands in the table of reasons is found in the sources, but for the parts that differ."""
    sources = "".join(
        node.value
        for path in (ROOT / "gnncompile").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    page = PAGES["docs/sharp-edges.md"].read_text(encoding="utf-8")
    table = page.partition("## What is right but not fused")[2].partition("\n## ")[0]
    reasons = re.findall(r"^\| `(.+?)` \|", table, re.MULTILINE)
    assert len(reasons) > 8
    for reason in reasons:
        for part in re.split(r"\.\.\.|\b\d+\b|torch\.int64", reason):
            assert part.strip() in sources, f"{reason}: no reason of the code has {part!r}"


def test_numbers_that_are_said_are_those_of_the_code():
    from gnncompile import tuning
    from gnncompile.batches import buckets, hops, loader
    from gnncompile.cudagraphs import pool
    from gnncompile.layout import csr

    def has(name: str, text: str) -> bool:
        return text in " ".join(PAGES[name].read_text(encoding="utf-8").split())

    assert buckets.SLACK > 0 and loader.MOST == 4 and has("docs/how/steps.md", "to a few sizes, four at most")
    assert hops.MOST == 4 and has("docs/speed.md", "At most four hops")
    assert tuning.TILES.layer_features == 32 and has("docs/sharp-edges.md", "of up to 32 edge features")
    few = tuning.TILES.layer_features_of_vectors
    assert has("docs/sharp-edges.md", f"layers of more than {few} features that scale vectors")
    assert has("docs/sharp-edges.md", f"At most {csr.MAX_INDEX:,} edges")
    assert has("docs/how/codegen.md", f"with more than {tuning.TILES.hub_edges} edges is a *hub*")
    assert has("docs/how/runtime.md", f"not replayed for {pool.LONG} calls") and pool.WARM == 2
    assert has("docs/how/runtime.md", f'options={{"recordings": {DEFAULTS.recordings}}}')


def test_check_says_what_would_change(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "MADE", {"docs/api.md": lambda root: "other"})
    monkeypatch.setattr(command.drawn, "gat", lambda: (ROOT / "docs" / "figures" / drawn.NAME).read_text())
    before = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    with contextlib.suppress(SystemExit):
        assert command.main(["--check"]) == 1
    assert capsys.readouterr().out == "would change: docs/api.md\n"
    assert (ROOT / "docs" / "api.md").read_text(encoding="utf-8") == before
