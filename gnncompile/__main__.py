"""``python -m gnncompile``: see :mod:`gnncompile.cli.main`."""

import sys

from gnncompile.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
