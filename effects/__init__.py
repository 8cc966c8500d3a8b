"""Effects of handlers in a database of the user, each applied exactly once. See docs/effects.md."""

from .effects import Effects as Effects
from .outbox import Outbox as Outbox
from .state import StreamState as StreamState
from .transaction import Transaction as Transaction

__all__ = ("Effects", "Outbox", "StreamState", "Transaction")
