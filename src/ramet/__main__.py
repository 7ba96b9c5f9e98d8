"""``python -m ramet`` is the ``ramet`` command."""

import sys

from ramet.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
