"""After a load above the limit, of which some clients left, a server has no more descriptors and chunks."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("vllm_omni")

from benchmarks.trust import hours

pytestmark = [pytest.mark.upstream, pytest.mark.server, pytest.mark.more]


def test_what_a_load_took_is_given_back(tmp_path: Path) -> None:
    """After served, refused and aborted requests no descriptor or chunk of a client that stayed is left."""
    found = hours.run("beyond", tmp_path, 20.0, threading.Barrier(1))
    assert set(Counter(went for _, went, _ in found["seen"])) == {"served", "refused", "left"}
    # Of some eighty requests: a descriptor of each would be many.
    more = {key: more for key, more in found["growth"].items() if key[1] in ("descriptors", hours.CHUNKS)}
    assert all(each < 4 for each in more.values()), more
    assert more["all", hours.CHUNKS] == 0
    assert [each for each in found["left"] if hours.LEAVER not in each] == []
    assert found["killed"] == ()
