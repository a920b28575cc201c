# ruff: noqa: T201
"""``python -m tests.fleets_dispatch --seeds 1000 --first 0``: random fleets on stock and on ours, compared."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter


def main() -> int:
    """Run the seeds; 1 if anything is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.fleets_dispatch", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first")
    parser.add_argument("--stock", action="store_true", help="also say where stock's two modes differ, or break a rule")
    parser.add_argument("--log", action="store_true", help="print what happened on each arm")
    given = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":  # sets of request ids: the same order in every run
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, "PYTHONHASHSEED": "0"})  # noqa: S606
    for name in [name for name in os.environ if name.startswith(("OMNI_FASTPATH", "_OMNI_FASTPATH"))]:
        del os.environ[name]
    from tests.fleets_dispatch import compare

    began, failed, counts = time.perf_counter(), 0, Counter[str]()
    for verdict in compare.verdicts(range(given.first, given.first + given.seeds)):
        counts += verdict.counts
        if given.log:
            verdict.print_logs()
        said = [*verdict.ours, *(verdict.stock if given.stock else ())]
        if verdict.ours:
            failed += 1
        if said:
            print(f"seed {verdict.seed}: {verdict.about}")
            for line in said:
                print(f"    {line}"[:600])
            print(f"    alone: python -m tests.fleets_dispatch --first {verdict.seed} --seeds 1", flush=True)
    spent = time.perf_counter() - began
    print(f"{given.seeds} seeds in {spent:.0f} s, {failed} of them failed; {dict(sorted(counts.items()))}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
