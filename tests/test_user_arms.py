"""What the demo and the parity run stand on: arms as a user has them; no server is started."""

from __future__ import annotations

import pytest

pytest.importorskip("omni_simulated_device")

from benchmarks.rigs import user_arms
from benchmarks.rigs.arm import WrongArmError


def test_applied_but_idle_is_refused() -> None:
    """A counter of the API server that moved less than once a request means that the patch did not do the work."""
    before, after = ({name: {event: count} for name, event in user_arms.ENGAGED.items()} for count in (5, 15))
    assert user_arms.check_engaged(before, after, 10)["nonblocking_dequeue"] == {"dequeued": 10}
    with pytest.raises(WrongArmError, match="items moved by 10 during 11 requests"):
        user_arms.check_engaged(before, after, 11)
