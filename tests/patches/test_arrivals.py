"""The numbers of what waits at one replica, and which requests it is of."""

from __future__ import annotations

import math
from collections import deque
from itertools import count
from types import SimpleNamespace
from typing import Any

from omni_fastpath.patches.budgeted_drain.arrivals import Arrivals


def test_numbers_agree_with_the_queue_whoever_puts_and_takes() -> None:
    """What waits already is numbered; what somebody else took is past, and what he put is numbered when it is seen."""
    waiting: deque[Any] = deque(["a", "b", "c"])
    arrivals = Arrivals(waiting, count(10))
    assert (arrivals.first_waiting(), arrivals.taken) == (10, -1)
    waiting.popleft()  # somebody else's take
    assert (arrivals.first_waiting(), arrivals.taken) == (11, 10)
    waiting.popleft()
    arrivals.note_taken()
    assert (arrivals.first_waiting(), arrivals.taken) == (12, 11)
    waiting.append("d")  # somebody else's put
    waiting.popleft()
    arrivals.note_taken()
    assert (arrivals.first_waiting(), arrivals.taken) == (13, 12)
    waiting.clear()
    assert (arrivals.first_waiting(), arrivals.taken) == (math.inf, 13)


def test_one_count_orders_arrivals_at_all_replicas() -> None:
    """Who came before whom is one comparison, also between replicas."""
    clock = count()
    queues: list[deque[Any]] = [deque(), deque()]
    replicas = [Arrivals(queue, clock) for queue in queues]
    for replica in (1, 0, 1):
        queues[replica].append("put")
        replicas[replica].note_put()
    assert [each.first_waiting() for each in replicas] == [1, 0]


def test_what_is_remembered_of_requests_is_bounded() -> None:
    """In a queue that never runs empty, requests that are past are forgotten; an empty one is never read."""
    waiting: deque[Any] = deque()
    arrivals = Arrivals(waiting, count())
    for number in range(5000):
        waiting.append(
            SimpleNamespace(outputs=[SimpleNamespace(request_id=f"r{number}", finish_reason=number % 2 or None)])
        )
        arrivals.note_put()
        if number >= 10:
            waiting.popleft()
            arrivals.note_taken()
            assert arrivals.taken == number - 10
        assert arrivals.last_of(f"r{number}") == number
        assert arrivals.last_of(f"r{number}", ends=True) == (number if number % 2 else None)
        assert arrivals.last_of(f"r{number - 10}") is None or number < 20
    assert len(arrivals._last_number) + len(arrivals._last_end) < 400
    waiting.clear()
    waiting.append(object())  # no raw output: whoever read it would break
    arrivals.note_put()
    waiting.clear()
    assert arrivals.last_of("r4999") is None
