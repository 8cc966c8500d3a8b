"""How many bytes may wait to be sent, for a consumer, a client, and the process."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.agents import Edge, SendAccount, SendBudget
from headrace.agents.delivery import member
from headrace.agents.delivery.unsent import PARCEL_OVERHEAD_BYTES
from tests.simulation.groups import Consumer, SimulatedGroup
from tests.simulation.virtual_time import virtual_time

LIMIT = 1000
LARGE = 60_000


def filled(account: SendAccount, size: int = 1) -> int:
    """How much it takes in pieces of a size."""
    while account.fits(size):
        account.add(size)
    return account.held


def proven(account: SendAccount) -> SendAccount:
    account.prove()
    return account


def test_one_consumer_alone_takes_a_good_part_and_leaves_most() -> None:
    budget = SendBudget(LIMIT)
    assert LIMIT // 8 < filled(proven(budget.account("client"))) < LIMIT // 4


def test_clients_that_do_not_read_leave_space_to_the_next_one() -> None:
    budget = SendBudget(LIMIT)
    deaf = [budget.account(number) for number in range(20)]
    for account in deaf:
        filled(account)
    assert budget.held <= LIMIT // 2
    assert budget.account("new").fits(LIMIT // 2 // 20)
    assert proven(budget.account("reads")).fits(LIMIT // 2)


def test_consumers_of_a_client_that_do_not_read_leave_space_to_the_next_one() -> None:
    budget = SendBudget(LIMIT)
    for _ in range(20):
        filled(budget.account("client"))
    assert budget.account("client").fits(LIMIT // 2 // 20)


@pytest.mark.parametrize("clients", [1, 2, 5])
@pytest.mark.parametrize("proven", [False, True])
def test_clients_whose_many_consumers_do_not_read_leave_a_share_to_the_next_client(clients: int, proven: bool) -> None:
    budget = SendBudget(1200)
    for number in range(100):
        account = budget.account(f"client {number % clients}")
        if proven:
            account.prove()
        if account.fits(10):
            account.add(10)
    limit = 1200 if proven else 600
    newcomer = budget.account("another")
    if proven:
        newcomer.prove()
    assert newcomer.fits(limit // (clients + 1) - 10)


def test_a_message_larger_than_the_limit_goes_alone() -> None:
    budget = SendBudget(LIMIT)
    account, other = budget.account(), budget.account()
    assert account.fits(2 * LIMIT)
    account.add(2 * LIMIT)
    assert not other.fits(1)
    account.free(2 * LIMIT)
    assert other.fits(1)


def test_many_that_wait_are_not_looked_at_with_each_message(monkeypatch: pytest.MonkeyPatch) -> None:
    budget, looks = SendBudget(1 << 20), list[SendAccount]()
    for _ in range(100):
        account = budget.account()
        account.add(1)
        account.wait(1 << 20, lambda: None)
    fits = SendAccount.fits

    def counted(account: SendAccount, size: int) -> bool:
        looks.append(account)
        return fits(account, size)

    monkeypatch.setattr(SendAccount, "fits", counted)
    reads = proven(budget.account())
    for _ in range(100):
        reads.add(1 << 10)
        reads.free(1 << 10)
    assert len(looks) == 100


def test_who_waits_is_told_once_when_there_is_space() -> None:
    budget, told = SendBudget(LIMIT), list[str]()
    holder, small, large = budget.account(), budget.account(), budget.account()
    holder.add(LIMIT // 2)
    small.wait(10, lambda: told.append("small"))
    large.wait(LIMIT // 2, lambda: told.append("large"))
    holder.free(100)
    assert told == ["small"]
    holder.free(100)
    assert told == ["small"]
    holder.close()
    assert told == ["small", "large"]
    assert not budget.waiting


def test_who_has_acknowledged_something_need_not_wait_for_the_half_of_new_consumers() -> None:
    budget, told = SendBudget(LIMIT), list[str]()
    budget.account().add(LIMIT // 2)
    waiting = budget.account()
    waiting.wait(10, lambda: told.append("told"))
    waiting.prove()
    assert told == ["told"]


def test_a_client_is_forgotten_with_its_last_consumer() -> None:
    budget = SendBudget(LIMIT)
    accounts = [budget.account("client") for _ in range(2)]
    for account in accounts:
        account.add(100)
        account.close()
        account.close()
    assert not budget.clients
    assert budget.held == 0


sizes = st.integers(1, LIMIT // 4)


@given(st.lists(st.tuples(st.integers(0, 9), sizes, st.booleans()), max_size=200))
def test_the_limit_holds_whatever_is_asked_for(wishes: list[tuple[int, int, bool]]) -> None:
    budget = SendBudget(LIMIT)
    accounts = [budget.account(number % 3) for number in range(10)]
    for number, size, frees in wishes:
        account = accounts[number]
        if frees:
            account.free(min(size, account.held))
        elif account.fits(size):
            account.add(size)
        assert budget.held == sum(each.held for each in accounts) <= LIMIT
        assert all(client.held <= LIMIT // 2 for client in budget.clients.values())


# ---- members of groups ---------------------------------------------------------------------------------------------


def deaf(circle: SimulatedGroup, name: str) -> Consumer:
    """A consumer whose messages are begun, and never end."""
    consumer = Consumer(circle.group, name)
    consumer.connect(0, 0)
    begin_and_never_end(consumer)
    consumer.grant(1000, 1 << 40)
    return consumer


def begin_and_never_end(consumer: Consumer) -> None:
    def begin() -> None:
        consumer.member.collect()

    consumer.member.on_outbox = begin


@virtual_time
async def test_consumers_that_do_not_read_are_handed_no_more_than_the_limit() -> None:
    budget = SendBudget(20 * LARGE)
    async with SimulatedGroup(edge=Edge(budget=budget)) as circle:
        for number in range(100):
            deaf(circle, f"deaf {number}")
        circle.lane.publish_all([(str(number), ("x" * LARGE,)) for number in range(400)])
        await circle.rest()
        assert 5 * LARGE < budget.held <= 20 * LARGE


@virtual_time
async def test_small_parcels_count_with_their_objects() -> None:
    budget = SendBudget(100 * PARCEL_OVERHEAD_BYTES)
    async with SimulatedGroup(edge=Edge(budget=budget)) as circle:
        consumer = deaf(circle, "deaf")
        circle.lane.publish_all([(str(number), ("x",)) for number in range(400)])
        await circle.rest()
        assert 10 < len(consumer.member.in_flight) < 100
        while consumer.member.sending_bytes:
            circle.group.sent(consumer.member)
            await circle.rest()
            consumer.member.collect()
        assert len(consumer.member.in_flight) == 400
        assert budget.held == 0


@virtual_time
async def test_a_consumer_that_reads_gets_events_beside_consumers_that_do_not() -> None:
    budget = SendBudget(20 * LARGE)
    async with SimulatedGroup(edge=Edge(budget=budget)) as circle:
        healthy = circle.consumer("healthy")
        circle.lane.publish_all([("first", ("x",))])
        await circle.rest()
        healthy.ack_all()
        for number in range(100):
            deaf(circle, f"deaf {number}")
        circle.lane.publish_all([(str(number), ("x" * LARGE,)) for number in range(400)])
        await circle.rest()
        assert len(healthy.inbox) > 300


@virtual_time
async def test_a_consumer_that_waits_goes_on_when_another_is_gone() -> None:
    budget = SendBudget(4 * LARGE)
    async with SimulatedGroup(edge=Edge(budget=budget)) as circle:
        first = deaf(circle, "deaf")
        circle.lane.publish_all([(str(number), ("x" * LARGE,)) for number in range(20)])
        await circle.rest()
        healthy = circle.consumer("healthy")
        await circle.rest()
        assert not healthy.inbox
        first.leave()
        await circle.rest()
        assert len(healthy.inbox) == 20


@virtual_time
async def test_redelivered_events_wait_for_space_too() -> None:
    budget = SendBudget(8 * LARGE)
    async with SimulatedGroup(edge=Edge(budget=budget)) as circle:
        consumer = circle.consumer("c")
        circle.lane.publish_all([(str(number), ("x" * LARGE,)) for number in range(20)])
        await circle.rest()
        assert len(consumer.inbox) == 20
        consumer.disconnect()
        consumer.connect(0, 0)
        begin_and_never_end(consumer)
        consumer.grant(1000, 1 << 40)
        await circle.rest()
        assert LARGE <= budget.held <= 8 * LARGE
        assert member.OUTBOX_BYTES < 20 * LARGE
