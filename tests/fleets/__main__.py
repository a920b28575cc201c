# ruff: noqa: T201
"""``python -m tests.fleets stage --seeds 1000 --first 0``: random fleets on stock and on ours, compared."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from collections import Counter

_ENVIRONMENT = {
    "PYTHONHASHSEED": "0",  # sets of request ids: the same order in every run
    "OMNI_SIMULATED_DEVICE": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_LOGGING_LEVEL": "CRITICAL",
    "VLLM_NO_USAGE_STATS": "1",
}


def main() -> int:
    """Run the seeds; 1 if anything is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.fleets", description=__doc__)
    parser.add_argument("kind", choices=("stage",))
    parser.add_argument("--seeds", type=int, default=100, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first")
    parser.add_argument("--log", action="store_true", help="print what happened in each arm")
    given = parser.parse_args()
    if not _ENVIRONMENT.items() <= os.environ.items():
        kept = {name: value for name, value in os.environ.items() if "OMNI_FASTPATH" not in name}
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**kept, **_ENVIRONMENT})  # noqa: S606
    began, failed, counts = time.perf_counter(), 0, Counter[str]()
    kind = importlib.import_module(f"tests.fleets.{given.kind}")
    for verdict in kind.verdicts(range(given.first, given.first + given.seeds)):
        counts += verdict.counts
        failed += bool(verdict.wrong)
        if verdict.wrong or given.log:
            print(f"seed {verdict.seed}: {verdict.about}")
            for line in (*(verdict.log if given.log else ()), *verdict.wrong):
                print(f"    {line}"[:600])
            print(f"    alone: python -m tests.fleets {given.kind} --first {verdict.seed} --seeds 1 --log", flush=True)
    spent = time.perf_counter() - began
    print(f"{given.seeds} seeds in {spent:.0f} s, {failed} of them failed; {dict(sorted(counts.items()))}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
