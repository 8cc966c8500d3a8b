"""The example of orders: with the testing kit, and as a process."""

import subprocess
import sys
from pathlib import Path

import pytest

from examples import orders
from headrace.testing import TestProvider

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "orders.py"


async def test_orders_are_followed_and_one_that_cannot_be_shipped_becomes_a_dead_letter(
    headrace: TestProvider, capsys: pytest.CaptureFixture[str]
) -> None:
    await orders.serve(headrace)
    await orders.place(headrace, 0, "nl")
    await orders.place(headrace, 1, "nowhere")
    await headrace.settled()
    assert capsys.readouterr().out.splitlines().count("order 0: shipped") == 1
    headrace.assert_delivered("follow", "orders/1", ["placed", "paid", "shipped"])
    headrace.assert_delivered("ship", "orders/1", ["placed", "shipped"])
    headrace.assert_dead_letter("ship", "orders/1", "paid", reason="no carrier delivers there", attempts=2)
    headrace.assert_failed_deliveries("ship", "orders/0", 0)


async def test_following_counts_a_step_twice_if_it_is_delivered_again(headrace: TestProvider) -> None:
    """It is not idempotent, and the kit shows it."""
    orders.steps.clear()
    await orders.serve(headrace)
    await orders.place(headrace, 0, "nl")
    await headrace.settled()
    assert orders.steps["0"] == 3
    await headrace.redeliver("follow")
    assert orders.steps["0"] == 6


@pytest.mark.long
def test_the_example_runs_as_it_is(tmp_path: Path) -> None:
    ran = subprocess.run([sys.executable, EXAMPLE], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "order 2: shipped" in ran.stdout
    assert ran.stdout.endswith("given up on orders/1 'paid': ValueError: no carrier delivers there\n")
