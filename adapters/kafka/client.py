"""The part of confluent-kafka that the adapter uses, with types: clients, their settings, errors, and awaitable
answers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from operator import methodcaller
from typing import Any, Protocol, TypeVar, cast

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from ...streams.errors import HeadraceError, InvalidArgument, StorageError
from .client_log import ClientLog
from .connection_errors import ConnectionErrors
from .options import KafkaOptions
from .secrets import ClientSettings, check_names

log = logging.getLogger("headrace.adapters.kafka")
_client_log = logging.getLogger("headrace.adapters.kafka.client")

MAX_RECORD_BYTES = 8 << 20
"""Largest record of a topic that the adapter creates, in bytes."""
_LARGEST_RECORD_BYTES = 500_000_000
"""Half of the largest `message.max.bytes` of librdkafka, because `producer` sets twice as much."""
FETCH_BYTES = 1 << 20
FETCHED_RECORDS = 5000
"""librdkafka fetches no more of a partition while it holds this many records. Each takes about 500 bytes besides its
value, which its limit in bytes does not count: with its default of 100,000, a silo that caught up on 8 partitions of
small records took 170 MB more."""

Settings = dict[str, Any]
_T = TypeVar("_T")
_UNAUTHORIZED = {
    KafkaError.TOPIC_AUTHORIZATION_FAILED: "{needs} on the topic",
    KafkaError.GROUP_AUTHORIZATION_FAILED: "Read and Describe on the group",
    KafkaError.CLUSTER_AUTHORIZATION_FAILED: "Create on the cluster, or on the topic",
}


RecordHeaders = Sequence[tuple[str, bytes | None]]


class KafkaRecord(Protocol):
    """A message that a consumer has received."""

    def __len__(self) -> int: ...
    def error(self) -> KafkaError | None: ...
    def offset(self) -> int: ...
    def partition(self) -> int: ...
    def key(self) -> bytes | None: ...
    def value(self) -> bytes | None: ...
    def timestamp(self) -> tuple[int, int]: ...
    def leader_epoch(self) -> int | None: ...


_headers = methodcaller("headers")


def headers_of(record: KafkaRecord) -> RecordHeaders:
    """Return the headers of a record. Raises InvalidArgument if the name of one is not UTF-8.

    Do not call `record.headers()` in another way: with such a name, confluent-kafka 2.16 sets an error, and returns a
    list with a null pointer, too. Only a call by C code notices the error."""
    try:
        return _headers(record) or ()
    except (SystemError, UnicodeDecodeError):
        raise InvalidArgument("the name of a header is not text in UTF-8") from None


class PartitionConsumer(Protocol):
    """A consumer that reads assigned partitions. One thread uses it."""

    def assign(self, partitions: Sequence[TopicPartition]) -> None: ...
    def poll(self, timeout: float) -> KafkaRecord | None: ...
    def consume(self, num_messages: int, timeout: float) -> Sequence[KafkaRecord]: ...
    def commit(self, *, offsets: Sequence[TopicPartition], asynchronous: bool) -> object: ...
    def committed(self, partitions: Sequence[TopicPartition], timeout: float) -> Sequence[TopicPartition]: ...
    def close(self) -> None: ...


class KafkaClients:
    """Makes the clients of one provider."""

    def __init__(self, options: KafkaOptions, settings: ClientSettings) -> None:
        self.options = options
        self._settings = settings
        self._largest = MAX_RECORD_BYTES
        self._connections = ConnectionErrors()
        self._log = ClientLog(_client_log, settings.without_secrets)
        self._administrators: list[Any] = []
        check_names(settings.values())

    def fit(self, largest: int) -> None:
        """Fit the clients that are made from now on to a topic whose records have at most `largest` bytes."""
        self._largest = min(largest, _LARGEST_RECORD_BYTES)

    def producer(self) -> Any:
        """Make a producer. Raises InvalidArgument for wrong settings."""
        options = self.options
        return self._made(
            Producer,
            {
                "acks": "all",
                "enable.idempotence": True,
                "linger.ms": options.linger_ms,
                "compression.type": options.compression,
                "delivery.timeout.ms": int(options.publish_timeout_s * 1000),
                "message.max.bytes": max(MAX_RECORD_BYTES, self._largest) * 2,
                "queue.buffering.max.messages": 2_000_000,
                "queue.buffering.max.kbytes": 1 << 20,
                "batch.size": min(1 << 20, self._largest),
            },
        )

    def commit(self, group: str, offsets: Sequence[TopicPartition], timeout_s: float) -> None:
        """Commit offsets for a group of which no consumer is a member. Blocks. Raises StorageError.

        An administrative client is not used: librdkafka 2.16 may end the process if such a request times out.
        """
        doing = f"group {group!r} cannot commit"
        outcome: list[KafkaError | None] = []

        def committed(error: KafkaError | None, partitions: Sequence[TopicPartition]) -> None:
            outcome.append(error or next((each.error for each in partitions if each.error is not None), None))

        # Closing the consumer waits for the commit, for as long as the session timeout.
        timeout = {"session.timeout.ms": max(1000, int(timeout_s * 1000))}
        consumer = self.consumer(group, {"on_commit": committed, **timeout})
        try:
            consumer.commit(offsets=offsets, asynchronous=True)
            deadline = time.monotonic() + timeout_s
            while not outcome:
                if time.monotonic() > deadline:
                    raise StorageError(f"{doing}: the brokers do not answer")
                consumer.poll(0.05)
        except KafkaException as error:
            raise self.failure(doing, error) from None
        finally:
            consumer.close()
        if outcome[0] is not None:
            raise self.failure(doing, outcome[0])

    def consumer(self, group: str = "headrace", more: Mapping[str, Any] | None = None) -> PartitionConsumer:
        """Make a consumer of assigned partitions, which commits nothing. It is no member of the group."""
        return cast(
            PartitionConsumer,
            self._made(
                Consumer,
                {
                    "group.id": group,
                    "enable.auto.commit": False,
                    "enable.auto.offset.store": False,
                    "enable.partition.eof": True,
                    "auto.offset.reset": "error",
                    "isolation.level": "read_committed",
                    "check.crcs": True,
                    "fetch.message.max.bytes": FETCH_BYTES,
                    "fetch.queue.backoff.ms": 10,
                    "queued.max.messages.kbytes": 8192,
                    "queued.min.messages": FETCHED_RECORDS,
                    "receive.message.max.bytes": max(MAX_RECORD_BYTES, self._largest) * 4,
                    **(more or {}),
                },
            ),
        )

    def admin(self) -> AdminClient:
        # Its log would only repeat the errors of its requests.
        client = self._made(AdminClient, {"log_level": 0})
        self._administrators.append(client)
        return cast(AdminClient, client)

    def note_answer(self) -> None:
        """Forget the errors of connections, because the brokers have answered."""
        self._serve()
        self._connections.forget()

    def _serve(self) -> None:
        """Have the administrative clients report their errors. The other clients are polled by their threads."""
        for client in self._administrators:
            client.poll(0)

    def _made(self, kind: Any, own: Settings) -> Any:
        settings: Settings = {
            "client.id": "headrace",
            "allow.auto.create.topics": False,
            "log.connection.close": False,
            "log_level": 4,
            **self._settings.values(),
            "bootstrap.servers": self.options.bootstrap,
            "error_cb": self._connections.note,
            **own,
        }
        if kind is not Consumer:
            del settings["allow.auto.create.topics"]
        try:
            return kind(settings, logger=self._log)
        except KafkaException as error:
            raise InvalidArgument(
                f"adapter 'kafka': {self._settings.without_secrets(error.args[0].str())}", option="options"
            ) from None
        except (TypeError, ValueError) as error:
            raise InvalidArgument(
                f"adapter 'kafka': {self._settings.without_secrets(str(error))}", option="options"
            ) from None

    def failure(
        self, doing: str, error: KafkaError | Exception, *, needs: str = "Describe, Read and Write"
    ) -> HeadraceError:
        """Return the error of headrace for an error of the client. The text is one line that begins with `doing`.

        `needs`: the operations on the topic to which the request needs a right.

        If the brokers have not answered, it has the reason why connections to them failed.
        """
        cause = error.args[0] if isinstance(error, KafkaException) else error
        if not isinstance(cause, KafkaError):
            return StorageError(f"{doing}: {self._settings.without_secrets(str(error))}")
        text = self._settings.without_secrets(cause.str())
        code = cause.code()
        if code in (KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE):
            # Not PayloadTooLarge: other records of the call may be stored.
            text = "a record is above max.message.bytes of the topic, which was higher when it was opened: raise it"
        if code in _UNAUTHORIZED:
            text = f"{text}: give this user the ACL {_UNAUTHORIZED[code].format(needs=needs)}"
        if code < 0:  # an error of the client, not an answer of a broker
            self._serve()
            if reason := self._connections.reason():
                text = f"{self._settings.without_secrets(reason)} ({text})"
        return StorageError(f"{doing}: {text}")


async def answer_of(
    future: Future[_T], clients: KafkaClients, doing: str, *, needs: str = "Describe, Read and Write"
) -> _T:
    """Wait for an answer of an administrative client. `needs`: see `KafkaClients.failure`.

    Raises StorageError. Cancelling does not cancel the request.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[None] = loop.create_future()

    def settle() -> None:
        if not answer.done():
            answer.set_result(None)

    def done(_: object) -> None:
        try:
            loop.call_soon_threadsafe(settle)
        except RuntimeError:  # the loop is closed
            pass

    future.add_done_callback(done)
    await answer
    try:
        found = future.result()
    except KafkaException as error:
        raise clients.failure(doing, error, needs=needs) from None
    clients.note_answer()
    return found
