"""The demo's picture: its text about a run, without a terminal."""

from io import StringIO

from rich.console import Console

from headrace.cli.demo.picture import DemoPicture, JobView, PictureFrame
from headrace.silo.views import ProviderStatistics


def drawn(published: int, *jobs: JobView) -> str:
    statistics = ProviderStatistics([], [], published, 0)
    frame = PictureFrame("title", 1.0, 100, published, statistics, [], jobs, {})
    console = Console(file=StringIO(), width=100)
    with console.capture() as captured:
        console.print(DemoPicture().draw(frame))
    return captured.get()


def test_a_legend_explains_the_letters_on_one_line():
    (legend,) = [line for line in drawn(0, *(JobView(name, 0, 0) for name in ("delays", "order", "slow"))).splitlines()
                 if "left the cache" in line]  # fmt: skip
    for part in ("d = delays", "o = order", "s = slow", "◂ left the cache", "▸ finished all events"):
        assert part in legend


def test_a_job_says_how_many_events_it_has_still_to_do():
    picture = drawn(10, JobView("delays", 10, 0), JobView("order", 9, 0), JobView("slow", 4, 0))
    assert [line.split("/s")[1].strip() for line in picture.splitlines() if "/s" in line] == [
        "", "", "1 event to go", "6 events to go",
    ]  # fmt: skip
