"""Chooses the tests that only `make test-all` runs, from the time that each test took.

    python -m pytest -n 2 --durations=0 --durations-min=0.05 > log.txt
    python -m tests.slow log.txt        # writes tests/slow.txt, which tests/conftest.py reads

`make test` runs every test function. If a function has parameters, `make test` runs its quickest variants: at least
one, and as many as take :data:`MOST_OF_A_FUNCTION` seconds together.
"""

from __future__ import annotations

import re
import sys
from collections import Counter, defaultdict
from pathlib import Path

FILE = Path(__file__).with_name("slow.txt")

MOST_OF_A_FUNCTION = 2.0

_LINE = re.compile(r"([\d.]+)s (?:call|setup|teardown) +(tests/\S+?::.+)")


def seconds(log: str) -> Counter[str]:
    """Returns the seconds that each test took, with its fixtures, by node id."""
    found: Counter[str] = Counter()
    for line in log.splitlines():
        parts = _LINE.match(line.strip())
        if parts is not None:
            found[parts[2].strip()] += float(parts[1])  # type: ignore[assignment]
    return found


def chosen(times: Counter[str]) -> list[str]:
    """Returns the node ids of the slow tests, sorted."""
    functions = defaultdict(list)
    for test, took in times.items():
        functions[test.partition("[")[0]].append((took, test))
    slow = []
    for variants in functions.values():
        together = 0.0
        for at, (took, test) in enumerate(sorted(variants)):
            together += took
            if at > 0 and together > MOST_OF_A_FUNCTION:
                slow.append(test)
    return sorted(slow)


def main() -> int:
    """Writes tests/slow.txt, and prints the time that the other tests took."""
    times = seconds(Path(sys.argv[1]).read_text(encoding="utf-8"))
    slow = chosen(times)
    FILE.write_text("\n".join(slow) + "\n", encoding="utf-8")
    left = sum(times.values()) - sum(times[test] for test in slow)
    print(f"{len(slow)} slow tests; the others took {left:.0f} of {sum(times.values()):.0f} s of all processes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
