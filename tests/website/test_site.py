"""The documentation site: its pages, the reference that comes from the code, and the search without a network."""

import json
import re
import threading
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from html import unescape
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from playwright.async_api import Route, async_playwright, expect

import headrace
from headrace import adapters
from headrace.adapters import adapter_names
from headrace.cli.main import COMMANDS
from website.errors import SiteError
from website.pages import navigation, site_pages, write_pages
from website.reference import ADAPTER_OPTIONS

FLAGS = ("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")

pytestmark = [pytest.mark.timeout(300), pytest.mark.long]


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text)


def headings(site: Path, folder: str) -> set[str]:
    """The anchors of all headings of the pages of a folder."""
    pages = (site / folder).rglob("*.html")
    return {anchor for page in pages for anchor in re.findall(r'<h\d id="([^"]+)"', page.read_text(encoding="utf-8"))}


def test_each_page_is_built_and_in_the_navigation(site: Path):
    home = (site / "index.html").read_text(encoding="utf-8")
    for place in site_pages().values():
        name = place.replace(".md", ".html")
        assert (site / name).is_file()
        assert f'href="{name}"' in home or name == "index.html", name


def test_each_public_name_has_its_docstring_in_the_reference(site: Path):
    described = {anchor.rpartition(".")[2] for anchor in headings(site, "reference/python")}
    assert set(headrace.__all__) - described == set()
    assert set(adapters.__all__) - described == set()
    assert {"archive", "replay", "rollup", "audit"} <= described
    pages = (page.read_text(encoding="utf-8") for page in (site / "reference/python").glob("*.html"))
    text = " ".join(words(unescape(re.sub(r"<[^>]+>", " ", " ".join(pages)))))
    for name in headrace.__all__:
        assert " ".join(words(getattr(headrace, name).__doc__)[:5]) in text, name


def test_inherited_methods_are_in_the_reference(site: Path):
    assert "headrace.client.client.Client.dead_letters" in headings(site, "reference/python")


def test_each_command_and_each_option_is_in_the_reference(site: Path):
    commands = (site / "reference/command-line.html").read_text(encoding="utf-8")
    for name in COMMANDS:
        assert f"Usage: headrace {name}" in commands
    assert "Usage: headrace pipeline archive" in commands
    options = (site / "reference/options.html").read_text(encoding="utf-8")
    assert "HEADRACE_PROVIDERS__NAME__CACHE__MAX_BYTES" in options
    assert not re.findall(r"<td><code>(\w+)</code></td>(?:\s*<td>[^\n]*</td>){3}\s*<td></td>", options)
    assert set(ADAPTER_OPTIONS) == set(adapter_names())


def test_pages_load_nothing_from_other_servers(site: Path):
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert (
            re.findall(r'(?:src|data)="?https?:|<link[^>]*rel="?(?:stylesheet|preconnect)[^>]*https?:', text) == []
        ), page


@contextmanager
def served(folder: Path) -> Generator[str]:
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (its name in the base)
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=folder)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


async def test_the_search_finds_a_page_without_a_network(site: Path, chromium: str):
    refused: list[str] = []
    with served(site) as address:
        async with async_playwright() as playwright:
            browser = await playwright.chromium.launch(executable_path=chromium, args=FLAGS)
            page = await browser.new_page()

            async def only_this_server(route: Route) -> None:
                if route.request.url.startswith((address, "data:", "blob:")):
                    await route.continue_()
                else:
                    refused.append(route.request.url)
                    await route.abort()

            await page.route("**/*", only_this_server)
            await page.goto(f"{address}/index.html")
            await page.keyboard.press("/")
            await page.keyboard.type("retain_unfinished", delay=20)
            found = page.locator("a[href*='log.html']").filter(has_text=re.compile("retention", re.IGNORECASE))
            await expect(found.first).to_be_visible(timeout=60_000)
            await browser.close()
    assert refused == []


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with two pages."""
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/RESULTS.md", "docs/a.md", "docs/b.md"):
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"# {name}\n")
    home = "# Home\n## First\n[a](a.md) [b](b.md)\n## Second\n[a](a.md#x) [c](../README.md)\n"
    home += "[d](../CONTRIBUTING.md) [e](../CHANGELOG.md) [f](../benchmarks/RESULTS.md)\n"
    (tmp_path / "docs" / "README.md").write_text(home)
    return tmp_path


def test_the_navigation_is_the_headings_and_links_of_the_home_page(repository: Path):
    assert json.loads(json.dumps(navigation(repository))) == [
        ["First", ["a.md", "b.md"]],
        ["Second", ["overview.md", "contributing.md", "changelog.md", "results.md"]],
    ]


def test_a_page_without_a_link_from_the_home_page_is_an_error(repository: Path):
    (repository / "docs" / "new.md").write_text("# New\n")
    with pytest.raises(SiteError, match=r"docs/README.md does not link to new.md: add a row"):
        navigation(repository)


@pytest.mark.parametrize(
    ("link", "expected"),
    [
        ("[b](b.md#two)", "[b](b.md#two)"),
        ("[readme](../README.md#use-it)", "[readme](overview.md#use-it)"),
        ("[`Client`](../client/client.py)", "[`Client`](source/client/client.py.txt)"),
        ("![picture](a.svg)", "![picture](a.svg)"),
        ("the folder [`client`](../client)", "the folder `client`"),
        ("the folder [`client`](../client) has `more`", "the folder `client` has `more`"),
        ("[web](https://example.org/x.md)", "[web](https://example.org/x.md)"),
        ("`not [a](link.md)`", "`not [a](link.md)`"),
        ("```text\n[a](link.md)\n```", "```text\n[a](link.md)\n```"),
        ("`code`, [a](b.md), `more`", "`code`, [a](b.md), `more`"),
    ],
)
def test_links_out_of_the_documents_lead_to_pages_and_copies(repository: Path, link: str, expected: str):
    (repository / "client").mkdir()
    (repository / "client" / "client.py").write_text("class Client: ...\n")
    (repository / "docs" / "a.svg").write_text("<svg/>")
    (repository / "docs" / "a.md").write_text(f"# A\n{link}\n")
    write_pages(repository / "out", repository)
    assert (repository / "out" / "a.md").read_text() == f"# A\n{expected}\n"
    for place in re.findall(r"source/[\w./]+|a\.svg", expected):
        assert (repository / "out" / place).is_file()


def test_a_link_that_leads_nowhere_is_an_error(repository: Path):
    (repository / "docs" / "b.md").write_text("# B\n[x](missing.md)\n")
    with pytest.raises(SiteError, match=r"docs/b.md: the link to missing.md leads to no file"):
        write_pages(repository / "out", repository)
