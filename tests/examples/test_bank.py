"""The example of a bank, as a process."""

import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "bank.py"


def test_each_run_moves_the_same_money_once(tmp_path: Path):
    for printed in ("a: 75\nb: 80\nc: 145\n", "a: 50\nb: 60\nc: 190\n"):
        ran = subprocess.run([sys.executable, EXAMPLE], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert (ran.returncode, ran.stdout) == (0, printed), ran.stderr
