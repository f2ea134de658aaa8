"""`python -m fmms ...`: the `fmms` command from a checkout that is not installed."""

import sys

from fmms.cli import main

if __name__ == "__main__":
    sys.exit(main())
