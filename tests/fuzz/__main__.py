"""``python -m tests.fuzz --count N --device cuda``: tries many programs, and prints what it finds as a script."""

from __future__ import annotations

import os
import sys

if "cuda" not in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is first imported

if __name__ == "__main__":
    from tests.fuzz.campaign import main

    sys.exit(main(sys.argv[1:]))
