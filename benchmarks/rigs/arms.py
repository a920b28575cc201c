"""The arms that several benchmarks have; one in this process builds its pipeline with ``event_driven``."""

from __future__ import annotations

from benchmarks.rigs.arm import Arm

STOCK = Arm("stock")
EVENT = Arm("stock, event-driven", event_driven=True)
STOCK_AGAIN = Arm("stock again")
FASTPATH = Arm("fastpath", {"OMNI_FASTPATH": "1"})
FASTPATH_AGAIN = Arm("fastpath again", FASTPATH.environment)
IN_TURN = Arm("fastpath, stage_order", {"OMNI_FASTPATH": "1", "OMNI_FASTPATH_BUDGETED_DRAIN__ORDER": "stage_order"})
LEAN_PROCESSING = Arm("lean_processing", {"OMNI_FASTPATH_LEAN_PROCESSING": "1"})

ARMS = {arm.name: arm for arm in (STOCK, STOCK_AGAIN, EVENT, FASTPATH, FASTPATH_AGAIN, IN_TURN, LEAN_PROCESSING)}
