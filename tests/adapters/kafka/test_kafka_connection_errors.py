"""The reason why connections fail, which requests that get no answer report."""

from confluent_kafka import KafkaError

from headrace.adapters.kafka.connection_errors import ConnectionErrors


def test_refusal_counts_for_more_than_that_no_broker_is_connected() -> None:
    errors = ConnectionErrors()
    assert errors.reason() == ""
    errors.note(KafkaError(KafkaError._ALL_BROKERS_DOWN))
    assert "check bootstrap and kafka.security.protocol" in errors.reason()
    errors.note(KafkaError(KafkaError._AUTHENTICATION, "host: refused\nfor ever"))
    errors.note(KafkaError(KafkaError._ALL_BROKERS_DOWN))
    assert errors.reason().startswith("host: refused for ever: check kafka.sasl.mechanism")
    errors.forget()
    assert errors.reason() == ""
