"""Tries many random programs, one after the other. The seed of a program is its number."""

from __future__ import annotations

import argparse
import collections
import logging
import time
import traceback
import warnings
from dataclasses import replace
from typing import Any

import torch

from tests.fuzz.cases import make_case
from tests.fuzz.check import Case, Finding, NotComparable, check
from tests.fuzz.grow import at_random
from tests.fuzz.shrink import shrink


def main(args: list[str]) -> int:
    """Runs the fuzzer with command-line arguments; returns 1 if there is a finding."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--count", type=int, default=100, help="how many programs are tried (default: 100)")
    parser.add_argument("--seed", type=int, default=0, help="the number of the first program (default: 0)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--engine", help="one engine for all programs: passes, 'op by op' or inductor")
    parser.add_argument("--kernels", help="one way to run regions for all programs: reference, cpp or triton")
    parser.add_argument("--dtype", help="one precision for all programs, such as float64, or 'autocast within'")
    parser.add_argument("--way", help="one use for all programs: training, inference, reduce-overhead or TrainStep")
    parser.add_argument("--go-on", action="store_true", help="tell all findings, as they are, and shrink none")
    given = parser.parse_args(args)
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    torch.set_num_threads(1)
    return Campaign(given).run()


class Campaign:
    """Tries programs, and counts their settings and results."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.counts: collections.Counter[str] = collections.Counter()
        self.findings = 0
        self.start = time.perf_counter()

    def run(self) -> int:
        for done, number in enumerate(range(self.args.seed, self.args.seed + self.args.count), 1):
            if self.tried(number) is not None and not self.args.go_on:
                break
            if done % 50 == 0:
                self.tell()
        self.tell()
        return int(self.findings > 0)

    def case(self, number: int) -> Case:
        names = ("engine", "kernels", "dtype", "way")
        fixed: dict[str, Any] = {n: getattr(self.args, n) for n in names if getattr(self.args, n) is not None}
        return replace(make_case(at_random(number), self.args.device), **fixed)

    def tried(self, number: int) -> Finding | None:
        """Tries a program; prints and returns the finding, or returns None."""
        case = self.case(number)
        try:
            check(case)
        except NotComparable as why:
            self.counts[f"not comparable: {str(why)[:50]}"] += 1
        except Finding as found:
            self.findings += 1
            self.show(number, case, found)
            return found
        else:
            self.counts["right"] += 1
            for name in (case.engine, case.dtype, case.way, case.kernels):
                self.counts[name] += 1
        return None

    def show(self, number: int, case: Case, found: Finding) -> None:
        if not self.args.go_on:
            print(f"# program {number}: {found}; shrinking", flush=True)
            case = shrink(case)
            try:
                check(case)
            except Finding as small:
                found = small
        print(f"# --- program {number}: {found}", flush=True)
        if found.__cause__ is not None:
            traceback.print_exception(found.__cause__, limit=-6)
        print(case, flush=True)

    def tell(self) -> None:
        print(f"# {time.perf_counter() - self.start:.0f} s, {self.findings} findings, {dict(self.counts)}", flush=True)
