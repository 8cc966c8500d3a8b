"""`python -m headrace`: the command line."""

from __future__ import annotations

import sys

from headrace.cli.starting import main

sys.exit(main())
