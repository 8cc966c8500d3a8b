"""Rounds, ratios, and their report for people."""

from dataclasses import replace

import pytest

from benchmarks.harness import Latency, NotAvailable, Result, Rounds, count, interleaved, machine, table


def result(rate: float) -> Result:
    return Result(events=int(rate), seconds=1.0)


def test_every_round_runs_every_case_once_and_begins_with_another():
    order: list[str] = []
    cases = {name: lambda name=name: order.append(name) or result(1) for name in "abc"}
    interleaved(cases, 3)
    assert "".join(order) == "abcbcacab"


def test_ratios_are_taken_within_a_round():
    # The machine gets ten times slower: the ratio stays.
    speeds = {"ours": [1000, 100], "theirs": [500, 50]}
    rounds = Rounds([{name: result(speeds[name][number]) for name in speeds} for number in range(2)])
    assert rounds.ratio("ours", "theirs", lambda r: r.events_per_s) == (2.0, 2.0, 2.0)


def test_a_case_that_is_not_available_is_noted_and_the_others_go_on():
    def missing() -> Result:
        raise NotAvailable("no such server")

    rounds = interleaved({"here": lambda: result(1), "away": missing}, 2)
    assert rounds.names == ["here"]
    assert len(rounds.of("here")) == 2
    assert rounds.not_available == {"away": "no such server"}
    assert "- away: not available: no such server" in table(rounds)


def test_a_case_that_fails_otherwise_ends_the_run():
    def broken() -> Result:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        interleaved({"broken": broken}, 1)


def test_a_table_has_a_row_for_each_case_and_the_ratio_to_the_chosen_one():
    ours = replace(result(2_000_000), size=100, cpu_s={"a": 1.0, "b": 1.0}, latency=Latency(0.5, 1.25))
    lines = table(Rounds([{"ours": ours, "theirs": result(1_000_000)}]), ratio_to="theirs").splitlines()
    assert len({line.count("|") for line in lines}) == 1
    row = [cell.strip() for cell in lines[2].split("|")[1:-1]]
    assert row[:5] == ["ours", "2.00 M (2.00 M–2.00 M)", "2.00 (2.00–2.00)", "200", "1.00"]
    assert row[5:7] == ["0.50 (0.50–0.50)", "1.25 (1.25–1.25)"]


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"), (950, "950"), (999.6, "1.0 k"), (1234, "1.2 k"), (12_345, "12 k"), (999_400, "999 k"),
        (999_600, "1.00 M"), (1_234_567, "1.23 M"), (12_345_678, "12.3 M"), (123_456_789, "123 M"),
    ],
)  # fmt: skip
def test_rates_are_short(number: float, text: str):
    assert count(number) == text


def test_percentiles_need_enough_samples():
    assert Latency.of([float(n) for n in range(1, 102)]) == (51.0, 100.0, 101.0)
    with pytest.raises(ValueError, match="too few"):
        Latency.of([1.0] * 99)


def test_the_machine_line_names_the_installed_versions():
    line = machine(["pytest", "no-such-package"])
    assert f"pytest {pytest.__version__}" in line
    assert "no-such-package (not installed)" in line
