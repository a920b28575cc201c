"""After a load above the limit, of which some clients left, a server has no more tasks, descriptors and chunks."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("vllm_omni")

from tests.trust import hours

pytestmark = [pytest.mark.upstream, pytest.mark.server, pytest.mark.more]


def test_what_a_load_took_is_given_back(tmp_path: Path) -> None:
    """After served, refused and aborted requests no task, descriptor or chunk of a client that stayed is left."""
    found = asyncio.run(hours.run("beyond", tmp_path, 1.6, 20.0, asyncio.Barrier(1)))
    went = Counter(went for _, went, _ in found["seen"])
    assert set(went) == {"served", "refused", "left"}, (went, found["errors"])
    # Of some eighty requests: a task or a descriptor of each would be many; upstream's own tasks come and go.
    grown = hours.grown(found)
    more = {each: more for each, (_, _, more) in grown.items() if each[1] in ("tasks", "descriptors")}
    assert max(more.values()) < 4, more
    assert grown["all", "chunks"] == (0, 0, 0)
    assert [each for each in found["left"] if hours.LEAVER not in each] == []
    assert found["shutdown"]["killed"] == ()
