"""One ledger for all ranks: rank 0 reads and writes the file, the others learn what came of it.

A rank goes on only when rank 0's line is on disk, so that no rank draws the noise of a step that is not written down.
"""

from collections.abc import Callable
from typing import Any

from lsg.accounting.ledger import Ledger, Record
from lsg.distributed.group import Group


class SharedLedger:
    """Rank 0's ledger, with the same words as a `Ledger` of one's own. Each call but the properties is a collective."""

    def __init__(self, ledger: Ledger, group: Group) -> None:
        self._ledger, self._group = ledger, group
        self.path = ledger.path
        self.position, self.chain = ledger.position, ledger.chain

    def check(self, position: int, chain: str) -> Record:
        return self._have(lambda: self._ledger.check(position, chain))

    def go_on(self, record: Record, *, replay: bool) -> None:
        self._have(lambda: self._ledger.go_on(record, replay=replay))

    def record(self, entry: Callable[[], dict[str, Any]]) -> None:
        self._have(lambda: self._ledger.record(**entry()))

    def _have(self, work: Callable[[], Any]) -> Any:
        def on_first() -> tuple[Any, int, str]:
            return work(), self._ledger.position, self._ledger.chain

        result, self.position, self.chain = self._group.on_first(on_first)
        return result
