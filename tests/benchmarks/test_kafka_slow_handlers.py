"""The measurement of slow handlers over Kafka, on few keys: no case handles more events than is possible."""

import pytest

from benchmarks import kafka_slow_handlers
from benchmarks.kafka_slow_handlers import GROUP
from benchmarks.slow_handlers import IDEAL, SlowSetting

pytestmark = pytest.mark.slow

SETTING = SlowSetting(streams=80, stuck=16, seconds=1.0, warm_up_s=0.5)
SECTION = kafka_slow_handlers.section(SETTING)
ROUND = 64
"""Events of all healthy keys in 100 ms: so many may end at the edge of the window."""


@pytest.mark.parametrize("name", [name for name in SECTION.cases if name != IDEAL])
def test_healthy_keys_are_handled_beside_stuck_ones(name: str) -> None:
    ideal, result = SECTION.cases[IDEAL](), SECTION.cases[name]()
    assert ideal.events == 640
    assert result.events <= result.seconds / SETTING.seconds * ideal.events + 2 * ROUND
    assert result.events > 0 or name == GROUP  # each of its partitions may be stuck by now
