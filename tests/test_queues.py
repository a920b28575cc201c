"""Overriding a method of one queue, by two patches."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from omni_fastpath.queues import override


@pytest.mark.parametrize("inner_first", [False, True])
def test_overrides_are_put_back_in_any_order(inner_first: bool) -> None:
    """The outer one puts the inner one back. An inner one stays until then, and calls upstream's as before."""
    queue, seen = asyncio.Queue[int](), list[str]()

    def layer(name: str) -> Any:
        below = queue._put

        def put(item: int) -> None:
            seen.append(name)
            below(item)

        return override(queue, "_put", put)

    inner, outer = layer("inner"), layer("outer")
    for put_back in (inner, outer) if inner_first else (outer, inner):
        put_back()
        queue.put_nowait(1)
    assert seen == (["outer", "inner", "inner"] if inner_first else ["inner"])
    assert queue.qsize() == 2
    inner()
    assert "_put" not in vars(queue)
