"""The example of a bank: as a process, and with the testing kit."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine, create_engine

from examples import bank
from headrace import Unavailable
from headrace.testing import TestProvider

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "bank.py"


@pytest.mark.long
def test_each_run_moves_the_same_money_once(tmp_path: Path):
    for printed in ("a: 75\nb: 80\nc: 145\n", "a: 50\nb: 60\nc: 190\n"):
        ran = subprocess.run([sys.executable, EXAMPLE], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert (ran.returncode, ran.stdout) == (0, printed), ran.stderr


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = create_engine(f"sqlite:///{tmp_path / 'bank.db'}")
    bank.create_tables(engine)
    yield engine
    engine.dispose()


async def test_transfers_are_made_once_although_they_are_delivered_again(
    headrace: TestProvider, engine: Engine
) -> None:
    await bank.serve(headrace, engine)
    headrace.fail_handler("bank", times=2, error=Unavailable("the connection is lost"), after=True)
    await bank.order_transfers(headrace)
    await headrace.settled()
    await headrace.redeliver("bank")
    assert bank.balances(engine) == {"a": 75, "b": 80, "c": 145}
    headrace.assert_nothing_lost()
