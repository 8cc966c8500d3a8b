"""The causes why the next event of a stream is not delivered: a stable code, its meaning and the remedy of each."""

from __future__ import annotations

from typing import NamedTuple


class CauseText(NamedTuple):
    """The words for a cause, for people."""

    meaning: str
    remedy: str


CAUSES: dict[str, CauseText] = {
    "store_unreachable": CauseText(
        "The control store does not answer, so leases and progress cannot be saved.",
        "Make the database of the control store reachable; the silos continue by themselves.",
    ),
    "corrupt_record": CauseText(
        "A record of the queue is damaged, and the subscription has stopped in front of it.",
        "Run `headrace check`, then `headrace repair`.",
    ),
    "no_silo_for_provider": CauseText(
        "No living silo serves the provider.", "Start a silo whose configuration has this provider."
    ),
    "owner_dead": CauseText(
        "The silo that has the lease of the queue is declared dead; another silo takes the queue when the lease ends.",
        "Wait until the lease ends, or restart the silo.",
    ),
    "owner_unreachable": CauseText(
        "The silo that has the lease of the queue does not answer.", "Look at that silo, and at the network to it."
    ),
    "no_lease": CauseText(
        "No silo has the lease of the queue.", "Start a silo, or wait until a living silo takes the queue."
    ),
    "agent_stopped": CauseText("An operator stopped the agent of the queue.", "Run `headrace cluster start-agents`."),
    "agent_faulted": CauseText(
        "The agent of the queue cannot read it, and tries again.", "Remove the fault that the evidence names."
    ),
    "no_subscription": CauseText(
        "No subscription has a pattern that matches the stream.", "Create a subscription with a matching pattern."
    ),
    "subscription_missing": CauseText(
        "The subscription does not exist.", "Check its name with `headrace subscriptions list`."
    ),
    "pattern_does_not_match": CauseText(
        "The pattern of the subscription does not match the stream.",
        "Check namespace and key, or create a subscription with a matching pattern.",
    ),
    "retained_away": CauseText(
        "Events of the queue were removed before the subscription got them.",
        "If retention removed them, raise it. If a backup was restored, publish again what came after it.",
    ),
    "no_such_stream": CauseText(
        "The queue has no event of the stream; events that are not due yet do not count.",
        "Check namespace and key, look for errors at the publisher, and for delayed events in `headrace queues`.",
    ),
    "held_by_breaker": CauseText(
        "The circuit breaker holds the subscription: many streams failed, or a dependency is unavailable.",
        "Repair the dependency that the evidence names; the subscription resumes by itself.",
    ),
    "stream_paused": CauseText(
        "The stream is paused after a failure.", "Remove the failure, then run `headrace subscriptions resume`."
    ),
    "stream_retrying": CauseText(
        "The next event failed, and waits for its next attempt.", "Remove the failure that the evidence names, or wait."
    ),
    "not_served": CauseText(
        "No handler and no consumer takes events of the subscription.",
        "Start a silo with its handler, or attach a consumer.",
    ),
    "standing_by": CauseText(
        "Another process serves the subscription. This one stands by, and knows only the saved progress.",
        "Ask the process that the evidence names; this one takes over when that process ends.",
    ),
    "not_asked": CauseText(
        "The data directory has only the saved progress: a process that serves the subscription was not asked.",
        "If a silo serves it, ask the silo with --server; otherwise start one with its handler.",
    ),
    "consumer_disconnected": CauseText(
        "The consumer that holds the stream has lost its connection; the silo waits for it.",
        "Let the consumer connect again, or wait until its session ends.",
    ),
    "queue_not_assigned": CauseText(
        "The queue is assigned to no connected consumer at present.", "Wait a moment, or attach a consumer."
    ),
    "consumer_silent": CauseText(
        "A consumer holds events of the stream and has not acknowledged them.",
        "Look at that consumer; to free the stream, end the consumer.",
    ),
    "handler_running": CauseText(
        "The handler of the stream's next event still runs.", "Look at the handler, and at its dependencies."
    ),
    "consumer_blocked": CauseText(
        "The silo sends the consumer nothing, although it has credit.", "Remove the reason that the evidence names."
    ),
    "out_of_credit": CauseText(
        "No consumer has granted enough credit.", "Let the consumers finish their events, or attach more consumers."
    ),
    "catching_up": CauseText(
        "The stream is behind the cache; a catch-up reads its events again.", "Wait until the catch-up is at the event."
    ),
    "concurrency_full": CauseText(
        "All workers of the subscription are in use; the stream waits for one.",
        "Make the handlers faster, or raise `concurrency`.",
    ),
    "throttled": CauseText(
        "The cache of the queue is full, so the agent does not read on.",
        "Make the consumer of the stream that the evidence names faster, or use `slow_consumer = detach`.",
    ),
    "dead_lettered": CauseText(
        "The last event was given up on, and is kept as a dead letter.",
        "Look at it with `headrace deadletters show ID`, then redrive or delete it.",
    ),
    "nothing_pending": CauseText(
        "Nothing waits: each event of the stream is finished, filtered or before the subscription's start, or there "
        "was none.",
        "Check namespace and key. To get earlier events, move the subscription with `headrace subscriptions seek`.",
    ),
    "undetermined": CauseText(
        "None of the known causes applies.",
        "Ask again; if it stays so, look at the log of the silo that has the queue.",
    ),
}
"""By code. The order is the rank: a cause that stops more comes first."""


class Cause(NamedTuple):
    """A cause that applies now."""

    code: str
    """A key of `CAUSES`."""
    evidence: str
    """The facts that show it."""

    @property
    def meaning(self) -> str:
        return CAUSES[self.code].meaning

    @property
    def remedy(self) -> str:
        return CAUSES[self.code].remedy
