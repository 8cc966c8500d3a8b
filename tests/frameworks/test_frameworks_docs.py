"""docs/frameworks.md: its examples run as they are written, in real servers."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.frameworks.server import Uvicorn

TEXT = (Path(__file__).parents[2] / "docs" / "frameworks.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)

SETTINGS = """
SECRET_KEY = "secret"
DEBUG = True
ALLOWED_HOSTS = ["127.0.0.1"]
ROOT_URLCONF = "urls"
USE_TZ = True
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "shop.db"}}
"""
URLS = """
from django.urls import path
import views, work
urlpatterns = [
    path("orders/<key>", views.order), path("pay/<key>", views.pay), path("refund/<key>", views.refund),
    path("tasks/aadd/<int:number>", work.aview), path("tasks/<kind>/<int:number>", work.view),
]
"""
WORK = """
from django.http import HttpResponse

try:
    from django.tasks import task
    from django.tasks.signals import task_finished
except ImportError:
    from django_tasks import task
    from django_tasks.signals import task_finished
from django.utils import timezone
from datetime import timedelta


@task
def add(number, *, queue="default"):
    print("task add", number, queue, flush=True)


@task(takes_context=True)
async def context(context, number):
    print("task context", number, "attempt", context.attempt, context.task_result.id, flush=True)


@task
def fail(number):
    print("task fail", number, flush=True)
    raise ValueError("no such customer")


def view(request, kind, number):
    if kind == "later":
        due = timezone.now() + timedelta(milliseconds=50)
        result = add.using(run_after=due, queue_name="emails").enqueue(number, queue="emails")
    elif kind == "urgent":
        result = add.using(priority=100).enqueue(number)
    else:
        result = {"add": add, "context": context, "fail": fail}[kind].enqueue(number)
    return HttpResponse(result.id)


async def aview(request, number):
    return HttpResponse((await add.aenqueue(number)).id)
"""
TABLES = """
import sqlite3
from headrace.effects.schema import ddl
connection = sqlite3.connect("shop.db")
for statement in ["CREATE TABLE payment (customer TEXT NOT NULL)", *ddl("sqlite")]:
    connection.execute(statement)
connection.commit()
"""


def example(containing: str) -> str:
    (found,) = [each for each in EXAMPLES if containing in each]
    return found


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Callable[..., Uvicorn]]:
    """Write files, and start a server in their directory. It is killed at the end."""
    started: list[Uvicorn] = []

    def serve(application: str, files: Mapping[str, str]) -> Uvicorn:
        for name, text in files.items():
            (tmp_path / name).write_text(text)
        started.append(Uvicorn(tmp_path, application))
        started[-1].start()
        return started[-1]

    yield serve
    for one in started:
        one.clean_up()


@contextmanager
def client(url: str) -> Generator[httpx.Client]:
    with httpx.Client(base_url=url, trust_env=False, timeout=60) as opened:
        yield opened


@pytest.mark.parametrize(
    "marker",
    [
        pytest.param("FastAPI(lifespan", id="fastapi"),
        pytest.param("app = Starlette(", id="starlette", marks=pytest.mark.slow),  # the same lifespan
        pytest.param("Litestar(", id="litestar", marks=pytest.mark.slow),
    ],
)
def test_an_application_publishes_and_its_handlers_run(serving: Callable[..., Uvicorn], marker: str):
    server = serving("shop:app", {"shop.py": example(marker), "handlers.py": example("async def bill")})
    with client(server.url) as shop:
        for number in range(10):
            answer = shop.post(f"/orders/{number}")
            assert answer.is_success, server.log
            assert re.fullmatch(r'"?\d+"?', answer.text)
    server.until_logged(r"bill \d ordered", 10)
    server.stop()
    assert "Busy" not in server.log
    assert "Traceback" not in server.log


@pytest.fixture
def django_shop(serving: Callable[..., Uvicorn], tmp_path: Path) -> Uvicorn:
    subprocess.run([sys.executable, "-c", TABLES], cwd=tmp_path, check=True)
    return serving(
        "asgi:application",
        {
            "asgi.py": example("get_asgi_application").replace('"store")', '"store", outbox="sqlite:///shop.db")'),
            "settings.py": SETTINGS + example("HeadraceBackend"),
            "urls.py": URLS,
            "views.py": example("async def order(request: HttpRequest"),
            "work.py": WORK,
            "handlers.py": example("async def bill") + example("run_task)"),
        },
    )


@pytest.mark.long
def test_django_publishes_in_views_after_commits_and_by_its_outbox_and_runs_its_tasks(django_shop: Uvicorn):
    with client(django_shop.url) as shop:
        for action, said in (("orders", "ordered"), ("pay", "paid"), ("refund", "refunded")):
            answer = shop.get(f"/{action}/42")
            assert answer.is_success, answer.text
            django_shop.until_logged(f"bill 42 {said}")
        for path in ("add/1", "aadd/2", "later/3", "context/4"):
            answer = shop.get(f"/tasks/{path}")
            assert answer.is_success, answer.text
        for said in ("add 1 default", "add 2 default", "add 3 emails", "context 4 attempt 1"):
            django_shop.until_logged(f"task {said}")
        assert shop.get("/tasks/fail/5").is_success
        django_shop.until_logged("task fail 5", 2)  # tried again
        answer = shop.get("/tasks/urgent/6")
        assert answer.status_code == 500
        assert "priorit" in answer.text
