"""The backend for Django's tasks, in a process of its own. `test_frameworks_docs.py` runs tasks in a server."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SETUP = """
import asyncio, contextlib, sys
import django
from django.conf import settings
from django.db import connection, transaction

BACKEND = "headrace.frameworks.django_tasks.HeadraceBackend"
settings.configure(
    USE_TZ=True,
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "shop.db"}},
    TASKS={
        "default": {"BACKEND": BACKEND, "OPTIONS": {"provider": "__main__.shop"}},
        "outbox": {"BACKEND": BACKEND, "OPTIONS": {"outbox": "default"}},
        "none": {"BACKEND": BACKEND, "OPTIONS": {"provider": "__main__.settings"}},
        "wrong": {"BACKEND": BACKEND, "OPTIONS": {"provider": "__main__.shop", "url": "redis://"}},
    },
)
django.setup()

from headrace import Event, HeadraceError, Outbox, PayloadInvalid, StreamId
from headrace.effects.schema import ddl
from headrace.frameworks import AppProvider, lifespan
from headrace.frameworks.django_tasks import priority_of, run_task
try:
    from django.tasks import task, task_backends
except ImportError:
    from django_tasks import task, task_backends

shop = AppProvider(adapter="memory")

@task
def add(*args, **kwargs):
    print("added", args, kwargs)

def fails(work):
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no failure"
"""

PROVIDER = """
print(fails(lambda: add.enqueue(1)))  # no lifespan runs
print(fails(lambda: task_backends["wrong"]))
print(fails(lambda: add.using(backend="none").enqueue(1)))
print(fails(lambda: add.get_result("1")))

async def main():
    async with lifespan(shop)(None):
        result = await add.aenqueue(1, by="mail")
        print(result.status, end=" ")
        got = asyncio.get_running_loop().create_future()
        async def keep(event):
            got.set_result(event)
        await shop().subscribe("tasks", "default/*", keep, start="earliest")
        event = await asyncio.wait_for(got, 60)
        print(event.stream == StreamId("default", result.id), event.id == result.id, event.payload.decode())
        await run_task(event)
        for payload in (b"{", b'{"task": "nosuch.add", "args": [], "kwargs": {}, "backend": "default"}',
                        b'{"task": "os.getcwd", "args": [], "kwargs": {}, "backend": "default"}'):
            try:
                await run_task(Event(payload, id="1"))
            except PayloadInvalid as error:
                print(error)
        try:
            await add.using(priority=1).aenqueue()
        except HeadraceError as error:
            print(error)

asyncio.run(main())
"""

OUTBOX = """
with connection.cursor() as cursor:
    for statement in ddl("sqlite"):
        cursor.execute(statement)
queued = add.using(backend="outbox")
with contextlib.suppress(ZeroDivisionError), transaction.atomic():
    queued.enqueue("lost")
    1 / 0
result = queued.enqueue("kept")
with transaction.atomic():
    ((stream, payload),) = Outbox().published(connection=connection)
print(stream == StreamId("default", result.id), payload.decode())

async def main():
    await queued.aenqueue("too")

asyncio.run(main())
with transaction.atomic():
    print(len(Outbox().published(connection=connection)))
"""

PRIORITIES = "print([priority_of(each) for each in (-100, -1, 0, 1, 50, 100)])"


def run(directory: Path, script: str) -> list[str]:
    """Run a script with Django, and return the lines that it prints."""
    (directory / "script.py").write_text(SETUP + script)
    ran = subprocess.run([sys.executable, "script.py"], cwd=directory, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


@pytest.mark.long
def test_tasks_are_published_and_run_by_the_provider_of_the_application(tmp_path: Path) -> None:
    closed, wrong, none, result, event, added, *invalid, priority = run(tmp_path, PROVIDER)
    assert closed.startswith("Closed: provider 'default' is not open")
    assert wrong.startswith("ImproperlyConfigured: TASKS['wrong']: OPTIONS = ")
    assert none.endswith("OPTIONS['provider'] = '__main__.settings' is no AppProvider")
    assert result.startswith("NotImplementedError")
    assert event == ('READY True True {"task":"__main__.add","args":[1],"kwargs":{"by":"mail"},"backend":"default"}')
    assert added == "added (1,) {'by': 'mail'}"
    assert [line.partition(":")[0] for line in invalid] == [
        "the event is no task of Django",
        "task 'nosuch.add' cannot be imported",
        "'os.getcwd' is no task of Django",
    ]
    assert "priorit" in priority


@pytest.mark.long
def test_tasks_are_written_into_the_outbox_and_priorities_are_those_of_headrace(tmp_path: Path) -> None:
    kept, count, priorities = run(tmp_path, OUTBOX + PRIORITIES)
    assert kept == 'True {"task":"__main__.add","args":["kept"],"kwargs":{},"backend":"outbox"}'
    assert (count, priorities) == ("2", "[0, 49, 49, 49, 74, 99]")
