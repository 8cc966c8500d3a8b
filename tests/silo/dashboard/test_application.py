"""The dashboard's interface over HTTP: access, protection, actions and live pages."""

import asyncio
import base64
import ssl
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from headrace.server.config import HttpConfig
from headrace.silo.config import ProviderConfig, SiloConfig
from headrace.silo.dashboard.application import SharedPage
from headrace.silo.host import Silo
from tests.certificates import Authority
from tests.silo.dashboard.scene import DEAD, EVIL, PATIENCE_S, Scene, scene
from tests.silo.services.calling import Allowed, make_tokens

API = "/dashboard/api"
MARK = {"x-headrace": "1"}


@asynccontextmanager
async def browsing(directory: Path, **http: Any) -> AsyncGenerator[tuple[Scene, httpx.AsyncClient]]:
    async with scene(directory, **http) as found, httpx.AsyncClient(base_url=found.url) as client:
        yield found, client


async def log_in(client: httpx.AsyncClient, token: str) -> httpx.Response:
    return await client.post(f"{API}/login", json={"token": token}, headers=MARK)


async def act(client: httpx.AsyncClient, action: str, **options: Any) -> httpx.Response:
    return await client.post(f"{API}/action/{action}", json={"provider": "default", **options}, headers=MARK)


async def page(client: httpx.AsyncClient, name: str, /, **options: Any) -> Any:
    answer = await client.get(f"{API}/page/{name}", params=options)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_a_guest_on_loopback_reads_and_changes_nothing(tmp_path: Path):
    async with browsing(tmp_path) as (_, client):
        assert (await client.get("/")).headers["location"] == "/dashboard/"
        index = await client.get("/dashboard/")
        assert "text/html" in index.headers["content-type"]
        assert "default-src 'none'" in index.headers["content-security-policy"]
        again = await client.get("/dashboard/", headers={"if-none-match": index.headers["etag"]})
        assert (again.status_code, again.text) == (304, "")
        session = (await client.get(f"{API}/session")).json()
        assert (session["logged_in"], session["may_manage"]) == (False, False)

        overview = await page(client, "overview")
        names = [one["name"] for one in overview["subscriptions"]]
        assert names == ["archive", "bills", "mail", "prices", "report", "taxes"]
        assert {one["name"]: one["dead_letters"] for one in overview["subscriptions"]}["mail"] == DEAD
        letters = (await page(client, "deadletters"))["letters"]
        assert len(letters) == DEAD
        assert all("payload" not in one and "headers" not in one for one in letters)
        searched = (await page(client, "deadletters", text="no such text"))["letters"]
        assert len(searched) == DEAD  # the filter would tell what is in payloads

        for action in ("redrive", "discard"):
            refused = await act(client, action, ids={"mail": [letters[0]["id"]]})
            assert (refused.status_code, refused.json()["code"]) == (403, "permission_denied")
        assert len((await page(client, "deadletters"))["letters"]) == DEAD


@pytest.mark.long
async def test_requests_of_other_sites_are_refused(tmp_path: Path):
    async with browsing(tmp_path) as (found, client):
        assert (await client.get(f"{API}/page/overview", headers={"host": "evil.example"})).status_code == 403
        assert (await client.get("/dashboard/", headers={"host": "evil.example"})).status_code == 403
        assert (await client.get("/metrics", headers={"host": "evil.example"})).status_code == 200
        assert (await log_in(client, found.tokens["operator"])).status_code == 200
        for headers in ({}, {**MARK, "origin": "http://evil.example"}, {**MARK, "sec-fetch-site": "cross-site"}):
            for path in ("login", "logout", "action/discard"):
                refused = await client.post(f"{API}/{path}", json={}, headers=headers)
                assert (refused.status_code, "own page" in refused.text) == (403, True)
        form = await client.post(f"{API}/action/discard", data={"provider": "default"}, headers=MARK)
        assert form.status_code == 403
        assert len((await page(client, "deadletters"))["letters"]) == DEAD


async def test_a_login_is_a_cookie_that_scripts_cannot_read(tmp_path: Path):
    async with browsing(tmp_path) as (found, client):
        wrong = await log_in(client, "hr_wrong")
        assert (wrong.status_code, wrong.json()["code"]) == (401, "unauthenticated")
        answer = await log_in(client, f" {found.tokens['operator']}\n")
        cookie = answer.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=strict" in cookie
        assert found.tokens["operator"] not in cookie
        session = (await client.get(f"{API}/session")).json()
        assert (session["name"], session["may_manage"]) == ("operator", True)
        (letter, *_) = (await page(client, "deadletters", text="order-3"))["letters"]
        assert b'"order": 3' in base64.b64decode(letter["payload"])
        assert letter["headers"] == {"type": "receipt"}
        await client.post(f"{API}/logout", json={}, headers=MARK)
        assert (await client.get(f"{API}/session")).json()["logged_in"] is False


@pytest.mark.long
async def test_a_revoked_token_ends_the_login_and_the_open_page(tmp_path: Path):
    async with browsing(tmp_path, auth="tokens") as (found, client):
        await log_in(client, found.tokens["reader"])
        async with client.stream("GET", f"{API}/live/overview") as live:
            await found.silo.providers["default"].store.delete_token("reader")
            async with asyncio.timeout(PATIENCE_S):
                lines = [line async for line in live.aiter_lines() if line.startswith(("event:", "data:"))]
        assert lines[-2] == "event: refused"
        assert "unauthenticated" in lines[-1]
        assert (await client.get(f"{API}/page/overview")).status_code == 401


async def test_with_tokens_nothing_is_shown_without_one(tmp_path: Path):
    async with browsing(tmp_path, auth="tokens") as (found, client):
        assert (await client.get("/dashboard/")).status_code == 200  # the page itself, which asks for a token
        for path in ("session", "page/overview", "live/overview", "page/cluster"):
            assert (await client.get(f"{API}/{path}")).status_code == 401
        bearer = {"authorization": f"Bearer {found.tokens['operator']}"}
        assert (await client.get(f"{API}/page/overview", headers=bearer)).status_code == 200
        assert (await client.get("/healthz")).status_code == 200


async def test_a_tenant_sees_and_changes_what_its_token_allows(tmp_path: Path):
    async with browsing(tmp_path, auth="tokens") as (found, client):
        await log_in(client, found.tokens["tenant"])
        overview = await page(client, "overview")
        assert [one["name"] for one in overview["subscriptions"]] == ["archive", "prices", "report"]
        assert all(one["lag_events"] is None for one in overview["subscriptions"])
        assert all("lag_events" not in one or one["lag_events"] is None for one in overview["queues"])
        for path, options in (("queue", {"queue": 0}), ("subscription", {"name": "mail"})):
            refused = await client.get(f"{API}/page/{path}", params=options)
            assert (refused.status_code, refused.json()["code"]) == (403, "permission_denied")
        assert (await page(client, "deadletters"))["letters"] == []
        refused = await act(client, "redrive", ids={"mail": [1]})
        assert refused.status_code == 403
        assert (await act(client, "discard", subscription="mail")).status_code == 403
        await log_in(client, found.tokens["reader"])
        assert (await act(client, "discard", ids={"mail": [1]})).status_code == 403
        assert (await client.get(f"{API}/page/deadletters")).status_code == 403


@pytest.mark.long
async def test_dead_letters_are_redriven_and_discarded_in_bulk(tmp_path: Path):
    async with browsing(tmp_path) as (found, client):
        await log_in(client, found.tokens["operator"])
        assert (await act(client, "redrive", text="ORDER-1")).json() == {"count": 1}
        async with asyncio.timeout(PATIENCE_S):
            while not found.redriven:  # noqa: ASYNC110 (a list)
                await asyncio.sleep(0.02)
        assert b'"order": 1' in found.redriven[0]
        async with asyncio.timeout(PATIENCE_S):
            while len((await page(client, "deadletters"))["letters"]) == DEAD:  # noqa: ASYNC110 (a call)
                await asyncio.sleep(0.02)
        assert len((await page(client, "deadletters", text=EVIL.upper()))["letters"]) == DEAD - 1
        assert (await act(client, "discard", ids={"mail": []})).json() == {"count": 0}
        before = len((await page(client, "deadletters"))["letters"])
        assert (await act(client, "discard", subscription="mail", text="order-2")).json() == {"count": 1}
        assert len((await page(client, "deadletters"))["letters"]) == before - 1
        assert (await act(client, "discard")).json() == {"count": before - 1}
        assert (await page(client, "deadletters"))["letters"] == []


async def test_a_paused_stream_goes_on(tmp_path: Path):
    async with browsing(tmp_path) as (found, client):
        await log_in(client, found.tokens["operator"])
        shown = await page(client, "subscription", name="taxes")
        (paused,) = shown["blocked"]
        assert (paused["state"], paused["stream"]) == ("paused", {"namespace": "bills", "key": "b1"})
        (why,) = (await page(client, "stream", stream="bills/b1", subscription="taxes"))["explanations"]
        assert why["subscription"] == "taxes"
        assert why["causes"][0]["code"] == "stream_paused"
        assert "resume" in why["causes"][0]["remedy"]
        done = await act(client, "resume", subscription="taxes", **paused["stream"])
        assert done.json() == {"count": 1}


async def test_wrong_requests_are_one_clear_line(tmp_path: Path):
    async with browsing(tmp_path) as (found, client):
        assert (await client.get(f"{API}/page/other")).status_code == 404
        assert (await client.get("/dashboard/static/other.js")).status_code == 404
        assert (await client.get("/dashboard/static/..%2Fpages.py")).status_code == 404
        assert (await client.get(f"{API}/page/queue", params={"queue": "x"})).json()["error"] == (
            "queue: expected a whole number, not 'x'"
        )
        assert (await client.get(f"{API}/page/queue", params={"queue": 99})).status_code == 400
        assert (await client.get(f"{API}/page/subscription", params={"name": "other"})).status_code == 404
        assert "namespace/key" in (await client.get(f"{API}/page/stream", params={"stream": "x"})).json()["error"]
        assert (await page(client, "stream"))["explanations"] == []
        await log_in(client, found.tokens["operator"])
        assert (await act(client, "explode")).status_code == 404
        assert "unknown field" in (await act(client, "redrive", everything=True)).json()["error"]
        huge = await client.post(f"{API}/action/redrive", content=b'"' + b"x" * 300_000, headers={**MARK, **JSON})
        assert huge.json()["error"] == "the request has more than 262,144 bytes"
        deep = b'{"ids":' + b"[" * 100_000
        nested = await client.post(f"{API}/action/redrive", content=deep, headers={**MARK, **JSON})
        assert nested.json()["error"] == "the request is no JSON object: it is nested too deeply"
        broken = await client.post(f"{API}/action/redrive", content=b"[]", headers={**MARK, **JSON})
        assert broken.status_code == 400


JSON = {"content-type": "application/json"}


async def test_a_live_page_sends_frames_and_ends_when_the_silo_stops(tmp_path: Path):
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        config = SiloConfig(http=HttpConfig(port=0), providers={"default": ProviderConfig(adapter="memory", queues=1)})
        async with Silo.opened(config) as silo:
            request = client.build_request("GET", f"{silo.address}{API}/live/queue?queue=0")
            live = await client.send(request, stream=True)
            lines = live.aiter_lines()
            frames: list[Any] = []
            async for line in lines:
                if line.startswith("data: "):
                    frames.append(msgspec.json.decode(line.removeprefix("data: ")))
                if len(frames) == 2:
                    break
        assert [one["index"] for one in frames] == [0, 0]
        assert "event: refused" not in [line async for line in lines]
        await live.aclose()


async def test_viewers_with_the_same_permissions_share_the_work():
    class Counted:
        rendered = 0

        async def render(self) -> dict[str, int]:
            self.rendered += 1
            await asyncio.sleep(0)
            return {"rendered": self.rendered}

    source: Any = Counted()
    shared = SharedPage(source, fresh_s=60)
    assert await asyncio.gather(*(shared.content() for _ in range(10))) == [{"rendered": 1}] * 10
    shared = SharedPage(source, fresh_s=-1)
    assert [await shared.content(), await shared.content()] == [{"rendered": 2}, {"rendered": 3}]


async def test_a_cookie_over_tls_is_sent_with_tls_only(tmp_path: Path):
    authority = Authority(tmp_path)
    files = authority.issue("127.0.0.1")
    context = ssl.create_default_context(cafile=authority.certificate)
    tokens = await make_tokens(tmp_path / "data", operator=Allowed(manage=["*"]))
    config = SiloConfig(
        data=str(tmp_path / "data"),
        http=HttpConfig(port=0, certificate=str(files.certificate), key=str(files.key)),
        providers={"default": ProviderConfig(queues=1)},
    )
    async with Silo.opened(config) as silo, httpx.AsyncClient(base_url=silo.address or "", verify=context) as client:
        assert "Secure" in (await log_in(client, tokens["operator"])).headers["set-cookie"]
        assert (await client.get(f"{API}/session")).json()["name"] == "operator"


async def test_without_the_dashboard_only_metrics_and_health_are_served():
    config = SiloConfig(
        http=HttpConfig(port=0, dashboard=False), providers={"default": ProviderConfig(adapter="memory", queues=1)}
    )
    async with Silo.opened(config) as silo, httpx.AsyncClient(base_url=silo.address or "") as client:
        assert (await client.get("/dashboard/")).status_code == 404
        assert (await client.get("/healthz")).status_code == 200
