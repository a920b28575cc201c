"""Lends the interpreter's lock to the front end while the orchestrator is far ahead of it.

The orchestrator and the front end are threads of one process, of which one runs at a time. A thread that gives the lock
up often and briefly, as an event loop does at each look at its sockets, starves one that waits for it: the waiter is
woken, finds the lock taken again, and starts its five milliseconds (``sys.getswitchinterval``) anew. So above
saturation the front end stands still while what it has to deliver grows, in a queue that no order reaches. A real sleep
gives the lock away: nobody takes it back meanwhile, and if the front end has it by then, the orchestrator goes on when
the front end looks at its own sockets, or after the five milliseconds.

Watched is how deep the queue to the front end is, in which only the orchestrator puts: if it falls during a loan, the
reader reads. A reader that does not (``Omni`` offline reads when its user iterates; a reader may be gone, or busy with
something else) is not waited for: after a loan in vain the orchestrator works ``PAY_BACK`` times as long before it
lends again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from omni_fastpath.ledger import logger

AHEAD = 64
"""Messages waiting for the front end from which on it is lent the lock. A loan costs some 50 µs of nobody running; with
half of this it cost 5 % of the throughput in batches of 32, and with twice this the front end was later."""

LOAN_NS = 50_000
"""Length of a loan: time to wake. The kernel adds some 50 µs, and the front end as long as it holds the lock."""

PAY_BACK = 64
"""How many times as long as a loan in vain the orchestrator works before the next: with what the kernel adds, such
loans cost it some 3 %."""

AT_ONCE_NS = 5_000_000
"""Longest that dispatch stands still for a reader that reads and does not catch up, beyond the last loan."""


class Pace:
    """Lends to the reader of one queue.

    Args:
        queue: The queue to the front end, of which ``qsize()`` is used; nothing is lent to one without.
        counters: ``lent`` counts loans during which the reader read, ``lent_in_vain`` the others.
        sleep: A sleep that gives the interpreter's lock away, in seconds.
        now_ns: The clock.
    """

    def __init__(
        self,
        queue: Any,
        counters: dict[str, int],
        sleep: Callable[[float], None] = time.sleep,
        now_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self._depth: Callable[[], int] = getattr(queue, "qsize", _no_depth)
        self._counters = counters
        self._sleep = sleep
        self._now_ns = now_ns
        self._not_before_ns = 0

    def is_far_ahead(self) -> bool:
        """Whether so many messages wait that whoever reads them should run first."""
        return self._waiting() >= AHEAD

    async def let_catch_up(self) -> None:
        """Lend until the reader has caught up, does not read, or has had its time.

        The event loop gets a turn after each loan. Nothing is lent while a loan in vain is not paid back.
        """
        now_ns = self._now_ns()
        until_ns = now_ns + AT_ONCE_NS
        while self._not_before_ns <= now_ns < until_ns and self.is_far_ahead():
            self._lend()
            await asyncio.sleep(0)
            now_ns = self._now_ns()

    def _waiting(self) -> int:
        try:
            return int(self._depth())
        except Exception:  # a queue of somebody else's: the orchestrator must not end by it
            logger.exception("omni-fastpath: the queue to the front end does not say how deep it is; nothing is lent")
            self._depth = _no_depth
            return 0

    def _lend(self) -> None:
        depth = self._waiting()
        self._sleep(LOAN_NS / 1e9)
        if self._waiting() < depth:
            self._counters["lent"] += 1
        else:
            self._counters["lent_in_vain"] += 1
            # What others held the lock beyond the loan was not in vain for them, and is not paid back.
            self._not_before_ns = self._now_ns() + PAY_BACK * LOAN_NS


def _no_depth() -> int:
    return 0
