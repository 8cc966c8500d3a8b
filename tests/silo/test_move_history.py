"""The history of the owners of queues."""

from typing import Any

from headrace.silo.move_history import KEPT_MOVES, MoveHistory
from headrace.streams.cluster import ClusterView, Lease, SiloRecord, SiloState


def silo(name: str, state: SiloState = SiloState.ACTIVE) -> SiloRecord:
    return SiloRecord(name, 1, "127.0.0.1:1", ("default",), state, 0, 0)


def see(moves: MoveHistory, at_us: int, owner: str, epoch: int, *silos: SiloRecord, over: bool = False) -> None:
    lease = Lease("default", 3, owner, 1, epoch, 0)
    moves.update(ClusterView(0, silos, [lease], frozenset({("default", 3)}) if over else frozenset()), at_us)


def shown(moves: MoveHistory) -> list[Any]:
    return [(move.at_us, move.epoch, move.from_silo, move.to_silo, move.reason) for move in moves.moves]


def test_the_owners_at_the_start_are_no_moves():
    moves = MoveHistory()
    see(moves, 1, "a", 1, silo("a"))
    see(moves, 2, "a", 1, silo("a"))
    assert shown(moves) == []


def test_a_planned_move_is_one_row():
    moves = MoveHistory()
    silos = silo("a"), silo("b")
    see(moves, 1, "a", 1, *silos)
    see(moves, 2, "", 1, *silos)
    see(moves, 3, "b", 2, *silos)
    assert shown(moves) == [(3, 2, "a", "b", "balanced between the silos")]


def test_a_queue_of_a_dead_silo_is_unserved_until_another_one_has_it():
    moves = MoveHistory()
    dead = silo("a", SiloState.DEAD), silo("b")
    see(moves, 1, "a", 1, silo("a"), silo("b"))
    for at in (2, 3):
        see(moves, at, "a", 1, *dead, over=True)
    see(moves, 4, "b", 2, *dead)
    why = "the silo a was declared dead"
    assert shown(moves) == [(4, 2, "a", "b", why), (2, 1, "a", "", why)]


def test_a_silo_that_left_is_the_reason():
    moves = MoveHistory()
    see(moves, 1, "a", 1, silo("a"), silo("b"))
    see(moves, 2, "b", 2, silo("a", SiloState.LEFT), silo("b"))
    assert shown(moves) == [(2, 2, "a", "b", "the silo a left the cluster")]


def test_only_the_last_moves_are_kept():
    moves = MoveHistory()
    for at in range(KEPT_MOVES + 10):
        see(moves, at, "ab"[at % 2], at, silo("a"), silo("b"))
    assert len(moves.moves) == KEPT_MOVES
    assert moves.moves[0].at_us == KEPT_MOVES + 9
