"""Random fleets on the real stage: `save_queue_cap` and `forward_gate` against stock.

Real are upstream's scheduler (synchronous or asynchronous), its adapter and save thread, the connector and the input
processor; the runner answers at once with what follows from request and position. A seed is a script of arrivals,
sessions, aborts, slow, failing and hung sends, small KV caches, adapters, and, in some, of one exception in our own
code (`stage_script`). Both arms get it; holds move their steps apart, so that streams are compared, never times. What
must hold:

- no engine step raises, no save thread ends, nothing hangs, every thread ends with the stage;
- every save task is sent once, in its stream's order, with the payload that was queued;
- a stream that completed in both arms put the same chunks, gave the same tokens and the same visible payloads, ended
  once, left as much behind in adapter and connector; of any other, what one arm put begins what the other put (one
  that upstream ended with an error is as in the other arm in everything else);
- the patch's own counts are back at nothing, and it fails only where an exception was injected.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.save_queue.rig import stage_configs
from tests.fleets.report import Verdict, difference, quiet
from tests.fleets.stage_faults import injected
from tests.fleets.stage_script import Fleet, fleet
from tests.patches.drive import only

_UPSTREAMS_RACE = "deque mutated during iteration"
"""What ends an engine of stock too: upstream's save thread cleans a request up, in the deques of parked requests, while
the scheduler's goes through them (``restore_queues``). Once in some 500 seeds, in either arm; it is run again."""


def verdicts(seeds: Sequence[int], folder: Path | None = None) -> Iterator[Verdict]:
    """Play and judge the fleet of each seed.

    Args:
        seeds: Which.
        folder: Where the stages' configs are made unless they are there; one for all runs of this user by default.
    """
    import vllm_omni  # noqa: F401 - replaces vLLM's Request before anything takes it

    folder = folder or Path(tempfile.gettempdir()) / f"omni-fastpath-fleets-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    configs = stage_configs(folder)
    with quiet():
        for number, seed in enumerate(seeds):
            for _ in range(4):
                verdict = _verdict(fleet(seed), configs)
                if not any(_UPSTREAMS_RACE in each for each in verdict.wrong):
                    break
            yield verdict
            if number % 20 == 19:
                gc.collect()


def _verdict(script: Fleet, configs: dict[int, Path]) -> Verdict:
    from omni_fastpath.declare import Process, State
    from tests.fleets.stage_arm import Arm
    from tests.fleets.stage_parts import Clock

    verdict = Verdict(script.seed, f"{len(script.streams)} streams, {replace(script, streams=())}")
    config, wrong = configs[script.stage], verdict.wrong
    with _switched(script.switch_s) as died:
        stock = Arm(config, script, Clock())
        stock.drive()
        stock.finish()
        wrong += [f"stock itself: {each}" for each in (*stock.defects, *died)]
        died.clear()
        names = ("forward_gate", "save_queue_cap")
        with only(*names, process=Process.STAGE, **script.options) as entry, _clocked() as clock:
            with injected(script.fault, _our_modules()) as fault:
                ours = Arm(config, script, clock)
                ours.drive()
            ours.finish()
            if entry.state is not State.APPLIED and fault.fired is None:
                wrong.append(f"{entry.state.value}, and nothing was injected: {entry.reason}")
            verdict.counts.update({name: entry.counters[name] for name in ("holds", "expired_holds")})
        wrong += [*ours.defects, *died]
    if not stock.defects:
        wrong += _differences(stock, ours)
    verdict.counts.update(each.fate for each in ours.records.values())
    verdict.counts.update({"faults": fault.fired is not None, "puts": sum(map(len, ours.gate.puts.values()))})
    verdict.log = [
        f"{name} {arm}: {made.records[name]}"
        for name in ours.records
        for arm, made in (("stock", stock), ("ours", ours))
    ] + [str(fault)]
    return verdict


@contextmanager
def _switched(interval_s: float) -> Iterator[list[str]]:
    """Threads take turns at this interval; what ended one of them."""
    before, died = sys.getswitchinterval(), list[str]()
    with mock.patch.object(threading, "excepthook", lambda args: died.append(f"{args.thread}: {args.exc_value!r}")):
        sys.setswitchinterval(interval_s)
        try:
            yield died
        finally:
            sys.setswitchinterval(before)


@contextmanager
def _clocked() -> Iterator[Any]:
    """The patch's modules see the clock that is given."""
    from omni_fastpath.patches.save_queue_cap import save_queue, wrappers
    from tests.fleets.stage_parts import Clock

    clock = Clock()
    with mock.patch.object(save_queue, "time", clock), mock.patch.object(wrappers, "time", clock):
        yield clock


def _our_modules() -> list[Any]:
    """The modules of both patches that are imported."""
    packages = ("omni_fastpath.patches.save_queue_cap", "omni_fastpath.patches.forward_gate.")
    return [sys.modules[name] for name in sorted(sys.modules) if name.startswith(packages)]


# ---- What differs ----


def _differences(stock: Any, ours: Any) -> Iterator[str]:
    for name, one in stock.records.items():
        other = ours.records[name]
        for arm, record in (("stock", one), ("ours", other)):
            ends = [place for place, put in enumerate(record.puts) if put.finished]
            if ends not in ([], [len(record.puts) - 1]):
                yield f"{name}, {arm}: ends at puts {ends} of {len(record.puts)}"
        fates = {one.fate, other.fate}
        if fates == {"completed", "failed"}:
            yield f"{name}: {other.fate} instead of {one.fate}"
        completed, aborted = fates == {"completed"}, "aborted" in fates
        # Upstream sends what is computed again after a preemption otherwise cut, or not at all.
        compared = ["tokens"] if one.is_preempted or other.is_preempted else ["tokens", "visible", "puts"]
        for what in compared:
            # Upstream throws away what still waits of a session that it ends with an error, as it does after an abort.
            complete = completed if what == "puts" else not aborted
            if differs := difference(getattr(one, what), getattr(other, what), complete=complete):
                yield f"{name}: {what} differ: {differs}"
        if not aborted:
            for what in ("ended", "prefills", *(["received"] if completed and "puts" in compared else [])):
                if getattr(one, what) != getattr(other, what):
                    yield f"{name}: {what}: {getattr(other, what)} instead of {getattr(one, what)}"
            if more := other.left - one.left:
                yield f"{name}: left in {sorted(more)}"
