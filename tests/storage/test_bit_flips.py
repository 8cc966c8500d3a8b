"""Bit flips, a sample: `make chaos` tries more. See tests/storage/bit_flips.py."""

import os
import subprocess
import sys

import pytest

FLIPS = int(os.environ.get("CHAOS_FLIPS", "0"))
"""How many, of each kind of byte. 0: a sample, always of the same bits."""
CHOSEN = ("--flips", str(FLIPS)) if FLIPS else ("--flips", "1", "--seed", "3", "--calls", "15")


@pytest.mark.timeout(120 + 60 * FLIPS)
def test_a_flipped_bit_is_harmless_or_reported() -> None:
    """In processes of their own: each directory is opened in a fork, and this process has threads."""
    command = (sys.executable, "-m", "tests.storage.bit_flips", *CHOSEN)
    # Its output is not collected here: what it has printed is shown also if the time limit ends it.
    assert subprocess.run(command, check=False).returncode == 0
