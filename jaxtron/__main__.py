"""``python -m jaxtron <verb>`` is ``jaxtron <verb>``."""

import sys

from jaxtron.cli import main

if __name__ == "__main__":
    sys.exit(main())
