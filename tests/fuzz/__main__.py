"""``python -m tests.fuzz --count N --device cuda`` tries N programs, and prints each finding as a script."""

from __future__ import annotations

import os
import sys

if "cuda" not in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # read at the first import of Triton

if __name__ == "__main__":
    from tests.fuzz.campaign import main

    sys.exit(main(sys.argv[1:]))
