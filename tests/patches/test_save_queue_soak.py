"""The soak, short; ``SAVE_QUEUE_SOAK_CHUNKS=1000000`` or ``python -m tests.patches.soak`` for the long one."""

from __future__ import annotations

import os

import pytest

from tests.patches.soak_stage import shared_memory

pytestmark = [pytest.mark.upstream, pytest.mark.more]

CHUNKS = int(os.environ.get("SAVE_QUEUE_SOAK_CHUNKS", "20000"))


@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_every_chunk_once_and_in_order_whatever_happens() -> None:
    """Stalls, aborts, preemptions, failures, ids used again, stops: the model of each stream and stage holds."""
    from tests.patches.soak import soak

    report = soak(CHUNKS, shared=0.1)
    assert report.chunks >= CHUNKS
    assert report.received > CHUNKS // 4
    happenings = "aborted reused_ids preemptions lost_to_failures held_steps stopped_rounds managed"
    for happened in happenings.split():
        assert getattr(report, happened) > 0, happened
    assert not shared_memory()
