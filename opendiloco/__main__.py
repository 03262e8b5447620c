"""`python -m opendiloco` is the command `opendiloco`."""

import sys

from .cli import main

sys.exit(main())
