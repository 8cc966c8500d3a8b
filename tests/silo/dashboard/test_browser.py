"""The dashboard in a real browser, at a silo under load.

With the variable SCREENSHOTS=FOLDER, the pictures of docs/dashboard.md are written into it.
"""

import asyncio
import os
import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

import pytest
from playwright.async_api import Page, ViewportSize, async_playwright, expect

from headrace.server.config import GrpcConfig, HttpConfig
from headrace.silo.config import ProviderConfig, SiloConfig
from tests.silo.clusters import clustered
from tests.silo.dashboard.scene import DEAD, EVIL, Scene, scene

FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
PATIENCE_MS = 20_000
PHONE = ViewportSize(width=390, height=844)
DESK = ViewportSize(width=1280, height=800)

pytestmark = pytest.mark.timeout(240)


@asynccontextmanager
async def browsing(program: str, theme: Literal["light", "dark"] = "light") -> AsyncGenerator[Page]:
    """A page in a new browser. The end fails if the page had an error, or wanted something that its policy forbids."""
    problems: list[str] = []
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=program, args=FLAGS)
        context = await browser.new_context(viewport=DESK, reduced_motion="reduce", color_scheme=theme)
        page = await context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        expect.set_options(timeout=PATIENCE_MS)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda line: problems.append(line.text) if "Content Security Policy" in line.text else None)
        yield page
        assert await page.evaluate("window.hacked === undefined")
        assert not problems
        await browser.close()


async def go(page: Page, found: Scene | str, address: str) -> None:
    url = found if isinstance(found, str) else found.url
    await page.goto(f"{url}/dashboard/#/{address}")
    await expect(page.locator("main h2, main .table").first).to_be_visible()


async def log_in(page: Page, token: str) -> None:
    await page.get_by_label("Token").fill(token)
    await page.get_by_label("Token").press("Enter")


async def picture(page: Page, name: str) -> None:
    """Keep a picture for the documentation."""
    if folder := os.environ.get("SCREENSHOTS"):
        await page.wait_for_timeout(8000)  # for lines with more than two samples
        await page.screenshot(path=Path(folder) / f"{name}.png", animations="disabled")


@pytest.mark.long
async def test_each_page_shows_what_happens(tmp_path: Path, chromium: str):
    async with scene(tmp_path) as found, browsing(chromium) as page:
        await go(page, found, "overview")
        await expect(page.locator(".health")).to_contain_text("need a look")
        await expect(page.get_by_role("row").filter(has_text="bills/a*")).to_contain_text("retrying")
        await expect(page.locator(".tile").filter(has_text="Dead letters")).to_contain_text(str(DEAD))
        await expect(page.locator(".cell")).to_have_count(4)
        await expect(page.locator("svg.spark").first).to_be_visible()
        await picture(page, "overview")

        await page.get_by_role("link", name="queue 1:").click()
        await expect(page.get_by_role("heading", level=1)).to_contain_text("Queue 1")
        cached = page.locator(".tile").filter(has_text="Cached").locator("dd")
        before = await cached.inner_text()
        await expect(cached).not_to_have_text(before)
        await expect(page.locator(".bucket").nth(1)).to_be_visible()
        await expect(page.locator(".cursor").filter(has_text="archive")).to_be_visible()
        await expect(page.get_by_role("img", name=re.compile("of 10 buckets in use"))).to_be_visible()
        await picture(page, "queue")

        await page.get_by_role("link", name="report", exact=True).click()
        await expect(page.get_by_role("img", name=re.compile("^Age of the oldest event: now"))).to_be_visible()
        await expect(page.get_by_role("table", name="Consumers and their credit")).to_contain_text("connected")
        await picture(page, "subscription")

        await go(page, found, "subscription?name=bills")
        row = page.get_by_role("row").filter(has_text="bills/a1")
        await expect(row).to_contain_text("customer 7 has no address")
        await expect(row).to_contain_text("waiting")
        await row.get_by_role("link", name="Why?").click()
        await expect(page.get_by_role("heading", level=1)).to_have_text("Stream bills/a1")
        cause = page.get_by_role("region", name="Subscription bills").get_by_role("listitem").first
        await expect(cause).to_contain_text("stream_retrying")
        await expect(cause).to_contain_text("customer 7 has no address")
        await picture(page, "stream")
        await page.get_by_label("Stream", exact=True).fill("nobody/x")
        await page.get_by_label("Subscription", exact=True).fill("")
        await page.get_by_role("button", name="Why?").click()
        await expect(page.get_by_role("region", name="No subscription")).to_contain_text("no_subscription")

        await page.get_by_role("link", name="Cluster", exact=True).click()
        await expect(page.get_by_role("link", name="queue 3, running")).to_be_visible()
        await page.get_by_role("link", name="Dead letters", exact=True).click()
        await expect(page.get_by_role("row")).to_have_count(DEAD + 1)
        await expect(page.get_by_role("button", name="Redrive")).to_have_count(0)


@pytest.mark.long
async def test_a_dead_letter_is_looked_into_redriven_and_discarded_by_clicking(tmp_path: Path, chromium: str):
    async with scene(tmp_path) as found, browsing(chromium) as page:
        await go(page, found, "deadletters")
        await page.get_by_role("button", name="Log in").click()
        await log_in(page, found.tokens["operator"])
        await expect(page.get_by_role("button", name="Log out operator")).to_be_visible()
        await expect(page.get_by_role("button", name="Redrive", exact=True)).to_be_visible()
        letter = page.get_by_role("row").filter(has_text="mail/order-3")
        await letter.get_by_role("button", name="show").click()
        payload = page.locator("pre")
        await expect(payload).to_have_text('{\n  "order": 3,\n  "to": "customer3@example.org"\n}')
        await expect(page.locator(".facts")).to_contain_text("receipt")
        await picture(page, "deadletters")
        await page.get_by_role("button", name="Hex").click()
        await expect(payload).to_contain_text("000000  7b 22 6f 72")
        await page.get_by_role("row").filter(has_text="picture").get_by_role("button", name="show").click()
        await expect(payload).to_contain_text("0000f0  f0 f1 f2")
        await expect(page.get_by_role("button", name="JSON")).to_have_count(0)
        await page.get_by_role("row").filter(has_text=f"mail/{EVIL}").get_by_role("button", name="show").click()
        await page.get_by_role("button", name="Text").click()
        await expect(payload).to_have_text(EVIL)
        await expect(page.locator("main img")).to_have_count(0)

        await letter.get_by_role("checkbox").check()
        await page.get_by_role("button", name="Redrive", exact=True).click()
        await expect(page.locator("#notice")).to_contain_text("1 event will be delivered once more")
        async with asyncio.timeout(PATIENCE_MS / 1000):
            while b'"order": 3' not in b"".join(found.redriven):  # noqa: ASYNC110 (a list)
                await asyncio.sleep(0.05)

        await page.get_by_label("Contains").fill("order-5")
        await page.get_by_role("button", name="Filter").click()
        await expect(page.get_by_role("row")).to_have_count(2)
        await page.get_by_role("button", name="Discard all that match").click()
        await expect(page.get_by_role("dialog")).to_contain_text("of all subscriptions that contain “order-5”")
        await page.get_by_role("dialog").get_by_role("button", name="Discard all").click()
        await expect(page.locator("#notice")).to_contain_text("1 dead letter discarded")
        await expect(page.locator("main")).to_contain_text("There are no dead letters.")
        assert not [
            one for one in await found.silo.providers["default"].dead_letters("mail") if one.stream.key == "order-5"
        ]

        await go(page, found, "subscription?name=taxes")
        await page.get_by_role("button", name="Resume").click()
        await expect(page.locator("#notice")).to_contain_text("Stream bills/b1 goes on.")


@pytest.mark.long
async def test_a_login_shows_what_the_token_allows_and_nothing_is_shown_without_one(tmp_path: Path, chromium: str):
    async with scene(tmp_path, auth="tokens") as found, browsing(chromium) as page:
        await page.goto(f"{found.url}/dashboard/")
        dialog = page.get_by_role("dialog")
        await expect(dialog).to_contain_text("headrace tokens create")
        await expect(page.locator("main")).not_to_contain_text("prices")
        await log_in(page, "hr_wrong")
        await expect(dialog.get_by_role("alert")).to_contain_text("the token is unknown or was revoked")
        await log_in(page, found.tokens["tenant"])
        await expect(page.get_by_role("row").filter(has_text="prices")).to_be_visible()
        await expect(page.locator("main")).not_to_contain_text("bills")
        await page.goto(f"{found.url}/dashboard/#/subscription?name=bills")
        await expect(page.locator("#notice")).to_contain_text("client 'tenant' may")
        await page.get_by_role("button", name="Log out tenant").click()
        await expect(dialog).to_be_visible()
        await log_in(page, found.tokens["reader"])
        await go(page, found, "subscription?name=taxes")
        await expect(page.get_by_role("row").filter(has_text="bills/b1")).to_contain_text("paused")
        await expect(page.get_by_role("button", name="Resume")).to_have_count(0)


@pytest.mark.long
async def test_both_themes_a_phone_and_the_keyboard(tmp_path: Path, chromium: str):
    async with scene(tmp_path) as found, browsing(chromium, "dark") as page:
        await go(page, found, "overview")

        async def background() -> str:
            return await page.evaluate("getComputedStyle(document.body).backgroundColor")

        dark = await background()
        await go(page, found, "queue?queue=1")
        await expect(page.locator(".bucket").nth(2)).to_be_visible()
        await picture(page, "queue-dark")
        await page.get_by_label("Theme").select_option("light")
        light = await background()
        assert light != dark
        await page.reload()
        assert await background() == light
        await page.get_by_label("Theme").select_option("auto")
        assert await background() == dark

        await page.reload()
        await expect(page.locator("main h2").first).to_be_visible()
        await page.keyboard.press("Tab")
        await expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
        await page.keyboard.press("Enter")
        await expect(page.locator("main")).to_be_focused()
        await expect(page.get_by_role("heading", level=1)).to_contain_text("Queue 1")
        await page.get_by_role("link", name="Dead letters", exact=True).focus()
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("heading", level=1)).to_have_text("Dead letters")
        await expect(page.locator("main")).to_be_focused()

        await page.set_viewport_size(PHONE)
        for address in ("overview", "queue?queue=1", "subscription?name=bills", "deadletters", "cluster"):
            await go(page, found, address)
            assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth"), address
            if address == "overview":
                await picture(page, "phone")


@pytest.mark.long
async def test_any_silo_shows_the_whole_cluster_and_the_moves(tmp_path: Path, chromium: str):
    config = SiloConfig(
        data=str(tmp_path),
        drain_s=1,
        http=HttpConfig(port=0),
        grpc=GrpcConfig(port=0),
        providers={"default": ProviderConfig(queues=8)},
    )
    async with clustered(config, 3) as silos, browsing(chromium) as page:
        await go(page, silos[1].address or "", "cluster")
        await expect(page.get_by_role("table", name="Silos").get_by_role("row")).to_have_count(4)
        for silo in ("silo-0", "silo-1", "silo-2"):
            await expect(page.get_by_role("row").filter(has_text=silo).first).to_contain_text("running")
        await silos.stop(2)
        await silos.shared([0, 1])
        moves = page.get_by_role("table", name="Moves of queues")
        await expect(moves.get_by_role("row").filter(has_text="silo-2").first).to_be_visible()
        await expect(page.get_by_role("link", name=re.compile("^queue .*, (idle|running)$"))).to_have_count(8)
        await picture(page, "cluster")
        await silos.start(2)
