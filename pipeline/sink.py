"""The sink of the format `headrace`: it publishes the rows that Spark writes exactly once, also if Spark retries.

Each task stages its rows (`pipeline/staging.py`): consumers do not see them. When all tasks are done, the driver
publishes the staged rows, once for each batch of an application (`pipeline/publishing.py`). The application is
`txnAppId`, by default the id of the streaming query. Spark numbers its batches, or `txnVersion` does.
"""

from __future__ import annotations

import re
import socket
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame
from pyspark.sql import types as spark
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from ..store.datadir import MARKER, open_data_directory
from ..streams.delays import check_delays
from ..streams.errors import InvalidArgument, NotFound
from ..streams.identity import StreamId, unquote
from .grouping import RowGrouping
from .options import as_texts, check_names
from .place import OPTIONS as PLACE_OPTIONS
from .place import ProviderPlace
from .publishing import MAX_BATCH_NUMBER, commit
from .staging import StagedFile, StagedReport, StagingFolder, staging_directory

STAGE_BYTES = 8 << 20
"""How many bytes of a task's rows, in Arrow's form, are grouped by stream at a time."""
DEFAULT_STAGING = "headrace-staging"
"""Folder in the checkpoint of a query that publishes to a silo."""

_SINK_OPTIONS = ("namespace", "txnAppId", "txnVersion", "staging", "delays")
_TEXT = "string"
_INTERVAL = "interval day to second"
_TYPES: Mapping[str, tuple[str, ...]] = {
    "namespace": (_TEXT,),
    "key": (_TEXT,),
    "payload": ("binary", _TEXT),
    "headers": ("map<string,string>",),
    "id": (_TEXT,),
    "timestamp": ("timestamp",),
    "delay": ("double", "float", "int", "bigint", _INTERVAL),
    "priority": ("int", "bigint", "smallint", "tinyint"),
}
_REQUIRED = ("key", "payload")


class SinkOptions(NamedTuple):
    """The sink's options, checked."""

    place: ProviderPlace
    namespace: str | None
    """Namespace of all rows. None: they have a column for it."""
    staging: Path
    app: str | None
    version: int | None

    def folder(self, app: str, *, once: bool = False) -> StagingFolder:
        return StagingFolder.of(self.staging, self.place.provider, app, once=once)


def batch_writer(options: Mapping[str, str], schema: spark.StructType, overwrite: bool) -> BatchWriter:
    """Return the writer of `df.write.format("headrace").mode("append")`. Raise InvalidArgument."""
    if overwrite:
        raise InvalidArgument("mode 'overwrite': streams are append only: use mode('append')")
    return BatchWriter(_sink_options(options, schema, streaming=False))


def stream_writer(options: Mapping[str, str], schema: spark.StructType, overwrite: bool) -> StreamWriter:
    """Return the writer of `df.writeStream.format("headrace")`. Raise InvalidArgument."""
    if overwrite:
        raise InvalidArgument(
            "output mode 'complete': streams are append only: use outputMode('append'), or outputMode('update') with "
            "foreachBatch(headrace.pipeline.publisher(...))"
        )
    return StreamWriter(_sink_options(options, schema, streaming=True))


def publish_batch(frame: DataFrame, batch_id: int, **options: object) -> None:
    """Publish a micro-batch, once, also if `foreachBatch` repeats it. For output modes that
    `writeStream.format("headrace")` does not support, such as `update`.

    `options` are the sink's. `txnAppId` names the query: always the same name for this query, and another name
    for every other query and every other frame of this query. Raise InvalidArgument if `txnAppId` is missing.
    """
    _check_app_given(options)
    if "txnversion" in map(str.lower, options):
        raise InvalidArgument("option 'txnVersion' is the batch's id here: leave it out")
    given = {**as_texts(options), "txnVersion": str(batch_id)}
    frame.write.format("headrace").mode("append").options(**given).save()


def publisher(**options: object) -> Callable[[DataFrame, int], None]:
    """Return a function for `foreachBatch` that publishes each micro-batch with these options: see `publish_batch`.

    query.writeStream.outputMode("update").foreachBatch(publisher(data="data", txnAppId="totals"))
    """
    _check_app_given(options)

    def publish(frame: DataFrame, batch_id: int) -> None:
        publish_batch(frame, batch_id, **options)

    return publish


def _check_app_given(options: Mapping[str, object]) -> None:
    if "txnappid" not in map(str.lower, options):
        raise InvalidArgument("option 'txnAppId' is missing: name the query, else a repeated batch is published twice")


@dataclass
class TaskMessage(WriterCommitMessage):
    """A task's result for the driver."""

    app: str
    staged: StagedReport


class BatchWriter(DataSourceArrowWriter):
    """Writes a DataFrame: as batch `txnVersion` of `txnAppId`, or as the only batch of a new application."""

    def __init__(self, options: SinkOptions) -> None:
        self._options = options
        self._app = uuid.uuid4().hex if options.app is None else options.app
        self._folder = options.folder(self._app, once=options.app is None)
        self._batch = options.version or 0

    def write(self, iterator: Iterator[pa.RecordBatch]) -> TaskMessage:
        return TaskMessage(self._app, _stage(self._options, self._folder, iterator))

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        commit(self._options.place, self._folder, self._app, self._batch, _staged(messages))

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        self._folder.discard([staged.name for staged in _staged(messages)])


class StreamWriter(DataSourceStreamArrowWriter):
    """Writes the micro-batches of a query. Spark makes one writer for the tasks of a batch, and one to commit it."""

    def __init__(self, options: SinkOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> TaskMessage:
        app = self._options.app or _context().getLocalProperty("sql.streaming.queryId")
        if not app:
            raise InvalidArgument("Spark gives no id of the query: give the option 'txnAppId'")
        return TaskMessage(app, _stage(self._options, self._options.folder(app), iterator))

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        app = _app(messages)
        if app is not None:
            commit(self._options.place, self._options.folder(app), app, batchId, _staged(messages))

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Discard staged files. Spark may also abort a published batch, if it did not learn of the commit: it stays."""
        app = _app(messages)
        if app is not None:
            self._options.folder(app).discard([staged.name for staged in _staged(messages)])


def _app(messages: Sequence[WriterCommitMessage | None]) -> str | None:
    return next((message.app for message in messages if isinstance(message, TaskMessage)), None)


def _staged(messages: Sequence[WriterCommitMessage | None]) -> list[StagedReport]:
    """Return the staged files of the tasks that did not fail."""
    return [message.staged for message in messages if isinstance(message, TaskMessage)]


# ---- in a task -------------------------------------------------------------------------------------------------------


def _stage(options: SinkOptions, folder: StagingFolder, iterator: Iterator[pa.RecordBatch]) -> StagedReport:
    """Write a task's rows to a file of its own."""
    _check_shared(options)
    context, grouping = _context(), RowGrouping(options.namespace)
    file = StagedFile(folder.path, context.partitionId(), context.taskAttemptId())
    try:
        for rows in _gathered(iterator):
            file.add(grouping.of(rows))
        return file.finish()
    except BaseException:
        file.discard()
        raise


def _check_shared(options: SinkOptions) -> None:
    """Raise NotFound if this machine has no such data directory. Creating one would separate it from the driver's."""
    data = options.place.data
    if data is not None and not (Path(data) / MARKER).exists():
        raise NotFound(
            f"option 'data': {data} is not a data directory on {socket.gethostname()}, the machine of a task; if "
            "executors run on other machines, publish to a silo, with the option 'server'"
        )


def _context() -> TaskContext:
    context = TaskContext.get()
    assert context is not None  # Spark calls `write` in tasks only
    return context


def _gathered(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield all rows, about `STAGE_BYTES` at a time: more rows of a stream together make fewer batches."""
    some: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        if batch.num_rows:
            some.append(batch)
            size += batch.nbytes
        if size >= STAGE_BYTES:
            yield pa.concat_batches(some)
            some, size = [], 0
    if some:
        yield pa.concat_batches(some)


# ---- options and columns ---------------------------------------------------------------------------------------------


def _sink_options(given: Mapping[str, str], schema: spark.StructType, *, streaming: bool) -> SinkOptions:
    check_names(given, (*PLACE_OPTIONS, *_SINK_OPTIONS))
    options = {name.lower(): value for name, value in given.items()}
    place = _with_delays(ProviderPlace.of(given), options.get("delays"))
    namespace = _namespace(options.get("namespace"))
    _check_columns(schema, namespace)
    app, version = _transaction(options, streaming=streaming)
    if place.data is not None:
        open_data_directory(place.data)  # tasks stage in it; raises if it is not empty and not a data directory
    return SinkOptions(place, namespace, _staging(options, place, streaming=streaming), app, version)


def _with_delays(place: ProviderPlace, delays: str | None) -> ProviderPlace:
    if delays is None:
        return place
    if place.data is None:
        raise InvalidArgument("option 'delays' is for 'data': a silo's providers have it in their configuration")
    check_delays(delays)
    return place._replace(delays=delays)


def _namespace(text: str | None) -> str | None:
    if text is None:
        return None
    if "*" in text or "?" in text:
        raise InvalidArgument(
            f"option 'namespace': {text!r} stands for several: name one, with %2A for a * in its name"
        )
    try:
        return StreamId(unquote(text, text), "").namespace
    except InvalidArgument as error:
        raise InvalidArgument(f"option 'namespace': {error}") from None


def _check_columns(schema: spark.StructType, namespace: str | None) -> None:
    """Raise InvalidArgument for columns that the sink does not take."""
    names = [field.name for field in schema]
    for field in schema:
        _check_column(field)
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise InvalidArgument(f"column {twice!r} is there twice: drop one")
    if missing := next((name for name in _REQUIRED if name not in names), None):
        raise InvalidArgument(
            f"column {missing!r} is missing: a row is an event, with its 'payload' and the 'key' of its stream, so "
            f"select one AS {missing}"
        )
    if ("namespace" in names) == (namespace is not None):
        found = "both are there: leave one out" if namespace is not None else "give one of them"
        raise InvalidArgument(f"the namespace of the streams, as column 'namespace' or option 'namespace': {found}")


def _check_column(field: spark.StructField) -> None:
    wanted = _TYPES.get(field.name)
    if wanted is None:
        raise InvalidArgument(
            f"column {field.name!r} is not a column of events, which have {', '.join(_TYPES)}: drop it, or make it a "
            "part of the payload"
        )
    found = field.dataType.simpleString()
    if isinstance(field.dataType, spark.StringType):
        found = _TEXT
    elif isinstance(field.dataType, spark.DayTimeIntervalType):
        found = _INTERVAL
    if found not in wanted:
        raise InvalidArgument(f"column {field.name!r} is {' or '.join(wanted)}, not {found}: cast it")


def _transaction(options: Mapping[str, str], *, streaming: bool) -> tuple[str | None, int | None]:
    app, version = options.get("txnappid"), options.get("txnversion")
    if app == "":
        raise InvalidArgument("option 'txnAppId' is empty: name the application, or leave it out")
    if streaming:
        if version is not None:
            raise InvalidArgument("option 'txnVersion' is for df.write: a query's batches have numbers, leave it out")
        return app, None
    if (app is None) != (version is None):
        raise InvalidArgument("options 'txnAppId' and 'txnVersion' go together: give both, or neither")
    return app, None if version is None else _version(version)


def _version(text: str) -> int:
    if not re.fullmatch(r"\d{1,18}", text, re.ASCII) or int(text) > MAX_BATCH_NUMBER:
        raise InvalidArgument(f"option 'txnVersion' is a number from 0 to {MAX_BATCH_NUMBER}, not {text!r}")
    return int(text)


def _staging(options: Mapping[str, str], place: ProviderPlace, *, streaming: bool) -> Path:
    chosen = options.get("staging")
    if chosen is not None:
        return staging_directory("option 'staging':", chosen)
    if place.data is not None:
        return Path(place.data).absolute() / "staging"
    checkpoint = options.get("checkpointlocation")
    if not streaming or checkpoint is None:
        raise InvalidArgument(
            "option 'staging' is missing: name a directory that the driver and all executors share, where rows wait "
            "until they are published"
        )
    return staging_directory("the checkpoint", checkpoint) / DEFAULT_STAGING
