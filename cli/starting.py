"""The entry point of the `headrace` command. It imports nothing else of headrace before SIGINT is handled."""

from __future__ import annotations

import signal

from .interrupts import interrupts_kill


def main() -> int:
    """Run the command line and return the exit code."""
    try:
        with interrupts_kill():
            from .main import main  # noqa: PLC0415 (SIGINT during this import must end the process)
        return main()
    except KeyboardInterrupt:  # between the import and the command, which has its own handling
        return 128 + signal.SIGINT
