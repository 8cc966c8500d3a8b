"""The screen of `headrace top`: drawing and keys, without a terminal."""

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from headrace.cli.top.cells import number, seconds, sparkline
from headrace.cli.top.screen import TABLES, TopScreen
from headrace.cli.top.terminal import keys_in

TEXT = st.text(max_size=30)
COUNT = st.one_of(st.none(), st.integers(0, 10**14))
SUBSCRIPTION = st.fixed_dictionaries(
    {
        "provider": TEXT,
        "name": TEXT,
        "selector": TEXT,
        "mode": st.just("shared"),
        "state": st.sampled_from(["running", "paused", "faulted", "behind", "caught up"]),
        "reason": TEXT,
        "lag_events": COUNT,
        "lag_ms": COUNT,
        "rate": st.floats(0, 1e9),
        "in_flight": COUNT,
        "retries": COUNT,
        "dead_letters": COUNT,
        "connected_count": COUNT,
    }
)
QUEUE = st.fixed_dictionaries(
    {
        "provider": TEXT,
        "index": st.integers(0, 100),
        "silo": TEXT,
        "state": st.sampled_from(["running", "unserved", "throttled"]),
        "reason": TEXT,
        "epoch": COUNT,
        "lag_events": COUNT,
        "lag_ms": COUNT,
        "cached_bytes": st.integers(0, 1000),
        "cache_limit_bytes": st.sampled_from([0, 1000]),
    }
)
SILO = st.fixed_dictionaries(
    {"name": TEXT, "state": st.sampled_from(["active", "dead"]), "queues": COUNT, "silent_ms": COUNT, "address": TEXT}
)
CONTENT = st.fixed_dictionaries(
    {
        "subscriptions": st.lists(SUBSCRIPTION, max_size=40),
        "queues": st.lists(QUEUE, max_size=40),
        "silos": st.lists(SILO, max_size=5),
        "problems": st.lists(
            st.fixed_dictionaries({"severity": st.sampled_from(["bad", "odd"]), "text": TEXT}), max_size=6
        ),
    }
)
KEY = st.sampled_from(
    ["1", "2", "3", "up", "down", "s", "r", "/", "a", "enter", "escape", "backspace", "p", "?", "+", "-"]
)


def row(name: str, **values: Any) -> Mapping[str, Any]:
    usual = {"provider": "default", "selector": "n/*", "mode": "shared", "state": "running", "reason": "", "lag_ms": 0}
    return {"name": name, **usual, **values}


def content(*subscriptions: Mapping[str, Any]) -> dict[str, Any]:
    return {"subscriptions": list(subscriptions), "queues": [], "silos": [], "problems": []}


def shown(screen: TopScreen, of: Mapping[str, Any], width: int = 80, height: int = 24) -> list[str]:
    return [line.plain for line in screen.draw(of, None, width, height)]


@given(CONTENT, st.lists(KEY, max_size=12), st.integers(40, 200), st.integers(5, 60))
def test_it_always_fits_and_no_text_reaches_the_terminal_as_a_command(
    of: Mapping[str, Any], keys: list[str], width: int, height: int
) -> None:
    screen = TopScreen("here")
    for key in keys:
        screen.press(key, of)
        if screen.target is not None:
            screen.target = None
        lines = shown(screen, of, width, height)
        assert len(lines) == height
        assert all(cell_len(line) <= width for line in lines)
        assert all(line.isprintable() for line in lines)


def test_the_worst_subscription_is_first_and_its_reason_is_shown() -> None:
    of = content(
        row("fine"),
        row("late", lag_ms=5000),
        row("stuck", state="blocked", reason="consumer c1 gets no events"),
        row("slow", state="retrying"),
    )
    lines = shown(TopScreen("here"), of)
    assert [line.split()[0] for line in lines[4:8]] == ["stuck", "slow", "late", "fine"]
    assert lines[8].strip() == "consumer c1 gets no events"


def test_a_column_is_sorted_by_and_turned_around() -> None:
    of = content(row("a", rate=1.0), row("b", rate=30.0), row("c", rate=None))
    screen = TopScreen("here")
    while not any("OUT/S▾" in line for line in shown(screen, of)):
        screen.press("s", of)
    assert [one["name"] for one in screen.rows(of)] == ["b", "a", "c"]
    screen.press("r", of)
    assert [one["name"] for one in screen.rows(of)] == ["c", "a", "b"]


def test_the_filter_is_typed_kept_and_dropped() -> None:
    of = content(row("orders"), row("invoices"))
    screen = TopScreen("here")
    for key in "/invx":
        screen.press(key, of)
    assert shown(screen, of)[-1].startswith("filter: invx")
    screen.press("backspace", of)
    screen.press("enter", of)
    assert [one["name"] for one in screen.rows(of)] == ["invoices"]
    screen.press("q", of)
    assert screen.quitting
    screen.press("escape", of)
    assert len(screen.rows(of)) == 2


def test_enter_looks_into_the_chosen_row_and_escape_goes_back() -> None:
    of = content(row("a"), row("b"))
    screen = TopScreen("here")
    screen.press("down", of)
    screen.press("down", of)
    screen.press("enter", of)
    assert screen.target == ("default", "b")
    screen.press("escape", of)
    assert screen.target is None
    assert TopScreen("here", table="silos").target is None


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0, "0"),
        (9999, "9,999"),
        (10_000, "10.0k"),
        (1_234_567, "1.2M"),
        (999_960, "1.0M"),
        (0.4, "0.4"),
        (5e9, "5.0G"),
        (1e15, "many"),
    ],
)
def test_numbers_are_short(value: float | None, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (None, "–"),
        (300, "0.3s"),
        (45_000, "45s"),
        (720_000, "12m"),
        (11_160_000, "3.1h"),
        (60 * 86_400_000, "60d"),
        (119_600, "120s"),
    ],
)
def test_times_are_short(ms: float | None, text: str) -> None:
    assert seconds(ms) == text


def details(blocked: int, total: int) -> dict[str, Any]:
    stream = {"namespace": "n", "key": "k"}
    waiting = {"stream": stream, "state": "waiting", "attempts": 1, "next_in_ms": 500, "reason": "no"}
    usual: dict[str, Any] = {
        "selector": "n/*",
        "mode": "shared",
        "state": "retrying",
        "reason": "",
        "consumers": [],
        "gaps": 77,
    }
    many = dict.fromkeys(("lag_ms", "lag_events", "rate", "in_flight", "ready", "parked", "dead_letters"), 1_234_567)
    return {**usual, **many, "blocked": [waiting] * blocked, "blocked_total": total}


def test_rows_that_do_not_fit_are_announced() -> None:
    of = content(*(row(f"s{number:02}", reason="busy") for number in range(40)))
    lines = shown(TopScreen("here"), of)
    assert sum(line.startswith("s") for line in lines) == 18
    assert "  rows 1–18 of 40  busy" in [line.rstrip() for line in lines]
    assert not any("rows 1" in line for line in shown(TopScreen("here"), content(row("a"))))


def test_details_are_scrolled_and_say_how_much_is_missing() -> None:
    of = content(row("a"))
    screen = TopScreen("here")
    screen.press("enter", of)

    def lines() -> list[str]:
        return [line.plain for line in screen.draw(of, details(50, 209), 80, 24)]

    first = lines()
    assert any("gaps 77" in line for line in first)
    assert any("lines 1–" in line and "of 56" in line for line in first)
    assert not any("more" in line for line in first)
    for _ in range(100):
        screen.press("down", of)
    assert "and 159 more" in lines()
    screen.press("up", of)
    assert "and 159 more" not in lines()
    screen.press("escape", of)
    screen.press("enter", of)
    assert lines() == first


def test_long_names_differ_at_their_ends() -> None:
    of = content(*(row(f"orders-of-the-warehouse-{number:02}") for number in range(5)))
    names = [line.split()[0] for line in shown(TopScreen("here"), of)[4:9]]
    assert len(set(names)) == 5
    assert names[0].startswith("orders-")
    assert "orders-of-the-warehouse-03" in shown(TopScreen("here"), of, width=120)[7]


def test_subscriptions_of_several_providers_are_shown_with_the_provider() -> None:
    of = content(row("bills"), row("bills", provider="shop", state="paused"))
    screen = TopScreen("here")
    assert [line.split()[0] for line in shown(screen, of)[4:6]] == ["shop/bills", "default/bills"]
    screen.press("enter", of)
    assert screen.target == ("shop", "bills")
    assert screen.draw(of, details(0, 0), 80, 24)[3].plain.startswith("subscription shop/bills")


def test_the_header_counts_the_silos_that_answer_and_no_unknown_rate() -> None:
    silos = [{"name": "a", "state": "active"}, {"name": "b", "state": "dead"}]
    of = {**content(row("s", rate=None)), "silos": silos}
    assert shown(TopScreen("here"), of)[1].startswith("1 of 2 silos · 0/0 queues served · out –/s")
    assert shown(TopScreen("here"), {**of, "silos": silos[:1]})[1].startswith("1 silo ·")


def test_a_new_filter_replaces_the_old_one() -> None:
    of = content(row("orders"), row("invoices"))
    screen = TopScreen("here")
    for key in ["/", "i", "n", "enter", "/", "o", "r", "enter"]:
        screen.press(key, of)
    assert screen.filter == "or"


def test_a_long_reason_is_one_line_of_a_printed_page() -> None:
    of = {**content(row("s")), "problems": [{"severity": "bad", "text": "x" * 20_000}]}
    assert all(cell_len(line.plain) <= 80 for line in TopScreen("here").page(of, 80))


def test_a_sparkline_shows_the_last_values() -> None:
    assert sparkline([8, 0, 4, 8], 3) == " ▄█"
    assert sparkline([0, 0], 5) == "  "


def test_keys_have_names_and_unknown_sequences_have_no_effect() -> None:
    assert keys_in(b"\x1b[A") == ["up"]
    assert keys_in(b"\x1b[B\x1b[Bj\x1bOA\x1b") == ["down", "down", "j", "up", "escape"]
    assert keys_in(b"\x1b[200~ab\x1b[201~") == ["a", "b"]
    assert keys_in(b"\x1b") == ["escape"]
    assert keys_in(b"a\rq") == ["a", "enter", "q"]
    assert keys_in(b"\x1b[15~") == []
    assert keys_in("é".encode()) == ["é"]


def test_every_table_fits_into_eighty_columns_with_all_its_columns() -> None:
    for columns in TABLES.values():
        assert sum(one.width + 1 for one in columns) - 1 <= 80
