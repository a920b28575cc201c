"""What the demo and the parity run stand on: arms as a user has them; no server is started."""

from __future__ import annotations

import pytest

pytest.importorskip("omni_simulated_device")

from benchmarks.rigs import user_arms
from benchmarks.rigs.arm import WrongArmError
from benchmarks.rigs.arms import FASTPATH, STOCK


def test_each_arm_is_on_by_the_means_that_a_user_has() -> None:
    """Stock by OMNI_FASTPATH=0, fastpath by its deploy YAML alone; anything else is not that arm."""
    user_arms.check_means(STOCK, {"OMNI_FASTPATH": "0", "HOME": "/"})
    user_arms.check_means(FASTPATH, {"HOME": "/"})
    with pytest.raises(WrongArmError, match=r"no fastpath arm.*OMNI_FASTPATH_BUDGETED_DRAIN"):
        user_arms.check_means(FASTPATH, {"OMNI_FASTPATH_BUDGETED_DRAIN": "1"})
    with pytest.raises(WrongArmError, match="no stock arm"):
        user_arms.check_means(STOCK, {})


def test_applied_but_idle_is_refused() -> None:
    """A counter of the API server that moved less than once a request means that the patch did not do the work."""
    before, after = ({name: {event: count} for name, event in user_arms.ENGAGED.items()} for count in (5, 15))
    assert user_arms.check_engaged(before, after, 10)["nonblocking_dequeue"] == {"dequeued": 10}
    with pytest.raises(WrongArmError, match="items moved by 10 during 11 requests"):
        user_arms.check_engaged(before, after, 11)
