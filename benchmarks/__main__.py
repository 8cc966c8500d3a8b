"""Run the benchmarks: `python -m benchmarks`, in the checkout."""

from .suite import command

command(prog_name="python -m benchmarks")
