"""A backend for Django's tasks: `enqueue` publishes an event, and the handler `run_task` runs the task.

The namespace of the event is the name of the task's queue, and its key is the id of the task, so that tasks do not wait
for each other. Needs Django 6, or Django 4.2 and later with the package `django-tasks`.
"""

from __future__ import annotations

import inspect
import logging
import traceback
from collections.abc import Mapping
from datetime import timedelta
from importlib import import_module
from typing import Any, cast

import msgspec

from ..effects.outbox import Outbox
from ..streams.errors import NotSupported, PayloadInvalid
from ..streams.events import Event
from ..streams.identity import StreamId
from .asgi import AppProvider

log = logging.getLogger("headrace.frameworks")

OPTIONS = ("provider", "outbox")
MAX_DJANGO_PRIORITY, MAX_PRIORITY = 100, 99


def _tasks_package() -> str:
    """Return the name of the package of Django's tasks. Raise NotSupported if neither is installed."""
    for name in ("django.tasks", "django_tasks"):
        try:
            import_module(name)
        except ModuleNotFoundError as error:
            if error.name not in (name, "django"):
                raise
        else:
            return name
    raise NotSupported(
        "headrace.frameworks.django_tasks needs Django 6, or an older Django with the package django-tasks: install one"
    )


# Django has no types of its own.
_package = _tasks_package()
_base: Any = import_module(f"{_package}.base")
_signals: Any = import_module(f"{_package}.signals")
_BaseTaskBackend: Any = import_module(f"{_package}.backends.base").BaseTaskBackend
_asgiref: Any = import_module("asgiref.sync")
_db: Any = import_module("django.db")
_timezone: Any = import_module("django.utils.timezone")
_import_string: Any = import_module("django.utils.module_loading").import_string
_random_string: Any = import_module("django.utils.crypto").get_random_string
_ImproperlyConfigured: Any = import_module("django.core.exceptions").ImproperlyConfigured


class EnqueuedTask(msgspec.Struct):
    """A task as the payload of an event, in JSON."""

    task: str
    """The module and the name of its function."""
    args: list[Any]
    kwargs: dict[str, Any]
    backend: str


class HeadraceBackend(_BaseTaskBackend):
    """Publishes tasks. In `OPTIONS` of the setting `TASKS`, one of:

    - `"provider"`: the import path of the `AppProvider` that publishes, such as "shop.asgi.shop". For code that runs in
      the server;
    - `"outbox"`: the alias of the database whose outbox gets the task, in the current transaction. For any process.

    `run_after` needs delays, and a priority needs an adapter with priorities: else `enqueue` raises NotSupported. The
    outbox takes no priorities, and a task with `run_after` stays in it if its provider has no delays.
    Results are not stored: `get_result` raises NotImplementedError.
    """

    supports_defer = True
    supports_async_task = True
    supports_priority = True

    def __init__(self, alias: str, params: Mapping[str, Any]) -> None:
        base: Any = super()
        base.__init__(alias, params)
        if len(self.options) != 1 or not self.options.keys() <= {*OPTIONS}:
            raise _ImproperlyConfigured(
                f"TASKS[{alias!r}]: OPTIONS = {self.options!r}: expected one of "
                "{'provider': 'MODULE.NAME'}, an AppProvider, and {'outbox': 'ALIAS'}, a database"
            )
        self.supports_priority = "outbox" not in self.options

    def enqueue(self, task: Any, args: Any, kwargs: Any) -> Any:
        """Publish a task. Raises as `Stream.publish`, and as `AppProvider` if its provider is not open here."""
        result = self._result(task, args, kwargs)
        if "outbox" in self.options:
            stream, event = _stream_of(result), self._event(result, None)
            alias = self.options["outbox"]
            with _db.transaction.atomic(using=alias):
                Outbox().publish(stream, event, connection=_db.connections[alias])
        else:
            _asgiref.async_to_sync(self._publish)(result)
        _signals.task_enqueued.send(type(self), task_result=result)
        return result

    async def aenqueue(self, task: Any, args: Any, kwargs: Any) -> Any:
        """Do as `enqueue`."""
        if "outbox" in self.options:
            base: Any = super()
            return await base.aenqueue(task, args, kwargs)
        result = self._result(task, args, kwargs)
        await self._publish(result)
        await _signals.task_enqueued.asend(type(self), task_result=result)
        return result

    def _result(self, task: Any, args: Any, kwargs: Any) -> Any:
        self.validate_task(task)
        now = _timezone.now()
        return _new_result(task, _random_string(32), self.alias, args, kwargs, enqueued_at=now)

    async def _publish(self, result: Any) -> None:
        found = _import_string(self.options["provider"])
        if not isinstance(found, AppProvider):
            raise _ImproperlyConfigured(
                f"TASKS[{self.alias!r}]: OPTIONS['provider'] = {self.options['provider']!r} is no AppProvider"
            )
        provider, priority = found(), result.task.priority
        # Without any priority a task needs no adapter that has priorities; with one, 0 is in their middle.
        needed = priority or provider.adapter.capabilities.priority
        event = self._event(result, priority_of(priority) if needed else None)
        await provider.publish(_stream_of(result), event)

    def _event(self, result: Any, priority: int | None) -> Event:
        task = result.task
        enqueued = EnqueuedTask(task.module_path, result.args, result.kwargs, self.alias)
        delay = None if task.run_after is None else max(task.run_after - _timezone.now(), timedelta())
        return Event(msgspec.json.encode(enqueued), id=result.id, delay=delay or None, priority=priority)


def priority_of(priority: int) -> int:
    """Return the priority of an event, 0 to 99, for that of a task, -100 to 100."""
    return (priority + MAX_DJANGO_PRIORITY) * MAX_PRIORITY // (2 * MAX_DJANGO_PRIORITY)


def _stream_of(result: Any) -> StreamId:
    return StreamId(result.task.queue_name, result.id)


async def run_task(event: Event) -> None:
    """Run the task of an event: a handler for the namespaces of the backend's queues. A function that is not async runs
    in a thread. A task that fails is tried again, as the subscription's retry policy says.

    Raises PayloadInvalid if the event is no task, or its function is missing; the error of the task.
    """
    task, enqueued = _task_of(event)
    assert event.id is not None
    result = _new_result(
        task, event.id, enqueued.backend, enqueued.args, enqueued.kwargs, status="RUNNING", started_at=_timezone.now()
    )
    sender = cast("Any", type(task.get_backend()))
    await _signals.task_started.asend(sender, task_result=result)
    try:
        value = await _called(task, result)
    except Exception as error:
        _finish(result, "FAILED", errors=[_error(error)])
        await _signals.task_finished.asend(sender, task_result=result)
        raise
    _finish(result, "SUCCESSFUL", _return_value=value)
    await _signals.task_finished.asend(sender, task_result=result)


def _task_of(event: Event) -> tuple[Any, EnqueuedTask]:
    try:
        enqueued = msgspec.json.decode(event.payload, type=EnqueuedTask)
    except msgspec.MsgspecError as error:
        raise PayloadInvalid(f"the event is no task of Django: {error}") from None
    try:
        task = _import_string(enqueued.task)
    except ImportError as error:
        raise PayloadInvalid(f"task {enqueued.task!r} cannot be imported: {error}") from None
    if not isinstance(task, _base.Task):
        raise PayloadInvalid(f"{enqueued.task!r} is no task of Django: decorate it with @task")
    return task, enqueued


async def _called(task: Any, result: Any) -> Any:
    context = (_base.TaskContext(task_result=result),) if task.takes_context else ()
    if inspect.iscoroutinefunction(task.func):
        return await task.func(*context, *result.args, **result.kwargs)
    from asgiref.sync import sync_to_async  # noqa: PLC0415 (Django brings it)

    # Not `asyncio.to_thread`: there, a task that enqueues another one would get an event loop of its own from asgiref.
    return await sync_to_async(_with_fresh_connections, thread_sensitive=False)(task, context, result)


def _with_fresh_connections(task: Any, context: tuple[Any, ...], result: Any) -> Any:
    """Call a function as Django does for a request: it gets no connection of a database that is broken or too old."""
    _db.close_old_connections()
    try:
        return task.func(*context, *result.args, **result.kwargs)
    finally:
        _db.close_old_connections()


def _new_result(  # noqa: PLR0917 (the fields of a result)
    task: Any,
    id: str,  # noqa: A002 (the word of the field)
    backend: str,
    args: Any,
    kwargs: Any,
    status: str = "READY",
    enqueued_at: Any = None,
    started_at: Any = None,
) -> Any:
    return _base.TaskResult(
        task=task, id=id, status=_base.TaskResultStatus[status], enqueued_at=enqueued_at, started_at=started_at,
        finished_at=None, last_attempted_at=started_at, args=args, kwargs=kwargs, backend=backend, errors=[],
        worker_ids=[] if started_at is None else ["headrace"],
    )  # fmt: skip


def _finish(result: Any, status: str, **fields: Any) -> None:
    """Set the outcome of a result, which is frozen for its readers."""
    fields |= {"status": _base.TaskResultStatus[status], "finished_at": _timezone.now()}
    for name, value in fields.items():
        object.__setattr__(result, name, value)


def _error(error: Exception) -> Any:
    kind = type(error)
    return _base.TaskError(
        exception_class_path=f"{kind.__module__}.{kind.__qualname__}",
        traceback="".join(traceback.format_exception(error)),
    )
