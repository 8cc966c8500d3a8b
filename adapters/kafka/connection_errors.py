"""The reasons why connections to the brokers fail, for the errors of requests that get no answer."""

from __future__ import annotations

from confluent_kafka import KafkaError

from .client_log import SINCE

_REMEDIES = {
    KafkaError._AUTHENTICATION: "check kafka.sasl.mechanism, kafka.sasl.username and kafka.sasl.password",  # noqa: SLF001
    KafkaError._SSL: "check kafka.ssl.ca.location, kafka.ssl.certificate.location and kafka.ssl.key.location",  # noqa: SLF001
}
_NO_CONNECTION = "no connection to a broker lasts: check bootstrap and kafka.security.protocol"


class ConnectionErrors:
    """Keeps the last error of a connection. Clients report to it from their threads."""

    def __init__(self) -> None:
        self._last: KafkaError | None = None

    def note(self, error: KafkaError) -> None:
        """Note an error that a client reports. "All brokers are down" does not replace another one."""
        if error.code() != KafkaError._ALL_BROKERS_DOWN or self._last is None:  # noqa: SLF001 (its name)
            self._last = error

    def forget(self) -> None:
        self._last = None

    def reason(self) -> str:
        """Return the reason and the remedy in one line, "" if no connection has failed. It may contain secrets."""
        error = self._last
        if error is None:
            return ""
        if error.code() == KafkaError._ALL_BROKERS_DOWN:  # noqa: SLF001 (its name)
            return _NO_CONNECTION
        text = SINCE.sub("", " ".join(error.str().split()))
        remedy = _REMEDIES.get(error.code())
        return f"{text}: {remedy}" if remedy else text
