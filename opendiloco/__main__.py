"""`python -m opendiloco` is the command `opendiloco`."""

import sys

from opendiloco.cli import main

sys.exit(main())
