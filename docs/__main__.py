"""`python -m docs`: writes what of the documentation is made from code, and checks the links of all pages.

Made are docs/api.md, the table of options in docs/debugging.md, that of passes in docs/how/passes.md, and the figures
that show how things work. With --check nothing is written, and the exit status is 1 if something would change. A broken
link is an error either way.
`python -m benchmarks report` and `python -m gnncompile support` make the other generated parts.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from docs.writer import api, drawn, figures, links, options, passes

ROOT = Path(__file__).resolve().parent.parent

MADE: dict[str, Callable[[Path], str]] = {
    "docs/api.md": api.page,
    "docs/debugging.md": options.page,
    "docs/how/passes.md": passes.page,
    **{f"docs/figures/{name}": make for name, make in figures.FIGURES.items()},
}
"""Files that depend on the repository alone."""


def main(argv: Sequence[str] | None = None) -> int:
    """Writes, or compares.

    Args:
        argv: The arguments; those of the process if left out.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(prog="python -m docs", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 if something would change")
    check = parser.parse_args(argv).check
    changed = [name for name, make in MADE.items() if _update(ROOT / name, make(ROOT), write=not check)]
    # What a library draws is compared by its texts: another release of it draws the same with other coordinates.
    picture = drawn.gat()
    path = ROOT / "docs" / "figures" / drawn.NAME
    if not path.exists() or drawn.texts(path.read_text(encoding="utf-8")) != drawn.texts(picture):
        changed.append(f"docs/figures/{drawn.NAME}")
        if not check:
            path.write_text(picture, encoding="utf-8")
    for name in changed:
        print(f"{'would change' if check else 'written'}: {name}")
    broken = [problem for page in links.pages(ROOT) for problem in links.broken(page, ROOT)]
    for problem in broken:
        print(problem, file=sys.stderr)
    return int(bool(broken) or (check and bool(changed)))


def _update(path: Path, text: str, write: bool) -> bool:
    """Whether a file is not what it should be; writes it then, if asked to."""
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return False
    if write:
        path.write_text(text, encoding="utf-8")
    return True


if __name__ == "__main__":
    sys.exit(main())
