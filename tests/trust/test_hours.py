"""After a load beyond the limit of which a part leaves, a server is as it was before."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("vllm_omni")

from tests.trust import hours

pytestmark = [pytest.mark.upstream, pytest.mark.server, pytest.mark.more]


def test_what_a_load_took_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that were served, refused, and left in the middle: all counted; no task, descriptor or chunk more."""
    monkeypatch.setattr(hours.results, "FOLDER", tmp_path)
    side = dataclasses.replace(hours.SIDES["beyond"], load=1.0)
    found = asyncio.run(hours.run("beyond", side, tmp_path, 4.0, 20.0, asyncio.Barrier(1)))
    went = Counter(went for _, went, _ in found["seen"])
    assert set(went) == {"served", "refused", "left"}, (went, found["errors"])
    more = {each: more for each, (_, _, more) in hours.grown(found).items() if each[1] in ("tasks", "chunks")}
    assert not any(more.values()), more
    assert (found["left"], found["shutdown"].killed) == ([], ())
