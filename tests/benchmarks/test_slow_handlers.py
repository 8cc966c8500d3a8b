"""The measurement with slow handlers, on few streams: no system handles more events than is possible."""

import pytest

from benchmarks import slow_handlers
from benchmarks.slow_handlers import ANY_ORDER, IDEAL, SlowSetting

SETTING = SlowSetting(streams=50, stuck=5, seconds=0.5, warm_up_s=0.2)
SECTION = slow_handlers.section(["redis", "nats"], SETTING)
ROUND = 50
"""Events of all streams in 100 ms: so many may end at the edge of the window."""


PEERS = ("Redis", "NATS")


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name.startswith(PEERS) else [])
        for name in SECTION.cases
        if name != IDEAL
    ],
)
def test_healthy_streams_are_handled_beside_stuck_ones(name: str) -> None:
    ideal, result = SECTION.cases[IDEAL](), SECTION.cases[name]()
    assert ideal.events == 225
    assert result.events <= result.seconds / SETTING.seconds * ideal.events + 2 * ROUND
    assert result.events > 0 or name.endswith(ANY_ORDER)  # each of its workers may be stuck by now
    assert result.cpu_s["consumer"] > 0
