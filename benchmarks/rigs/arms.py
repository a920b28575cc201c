"""The arms that several benchmarks have."""

from __future__ import annotations

from benchmarks.rigs.arm import Arm

STOCK = Arm("stock")
STOCK_AGAIN = Arm("stock again")
FASTPATH = Arm("fastpath", {"OMNI_FASTPATH": "1"})
