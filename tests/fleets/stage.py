"""Random fleets on the real stage: `save_queue_cap` and `forward_gate` against stock.

    python -m tests.fleets.stage --seeds 1000 --first 0 [--jobs 2] [--faults some|none|all]
    python -m tests.fleets.stage --seed 17 --verbose        # one that failed, alone

Real are upstream's scheduler (synchronous, asynchronous, or that of coupled streams), its adapter and save thread, the
connector and the input processor; the runner answers at once with what follows from request and position. A seed is a
script of arrivals, sessions, aborts, slow, failing and hung sends, small KV caches, adapters, and, in some, of one
exception in our own code (`stage_script`). Both arms get it; holds move their steps apart, so that streams are
compared, never times. What must hold:

- no engine step raises, no save thread ends, nothing hangs, every thread ends with the stage;
- every save task is sent once, in its stream's order, one at a time, with the payload that was queued;
- a stream that completed in both arms put the same chunks, gave the same tokens and the same visible payloads, ended
  once, left as much behind in adapter and connector; of any other, what one arm put begins what the other put (one
  that upstream ended with an error is as in the other arm in everything else);
- the patch's own counts are back at nothing, and an exception of ours is told once.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.fleets.stage_script import Fleet, Stream, fleet

PATCHES_ON = ("SAVE_QUEUE_CAP", "FORWARD_GATE")
_numbers = itertools.count()

_UPSTREAMS_RACE = "deque mutated during iteration"
"""What ends an engine of stock too: upstream's save thread cleans a request up, in the deques of parked requests, while
the scheduler's goes through them (``restore_queues``). Once in some 500 seeds, in either arm; it is run again."""

_AGAIN = 3
"""How often, at most."""


@dataclass
class Verdict:
    """A seed's outcome.

    Attributes:
        fleet: The script.
        faults: As ``--faults``; a seed's script depends on it.
        defects: What must not be; none: it passed.
        notes: What happened besides.
        counters: Of the patch.
        seconds: Both arms together.
    """

    fleet: Fleet
    faults: str = "some"
    defects: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)
    facts: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    def words(self) -> str:
        """Its seed, its shape, how to run it alone, and what was found."""
        lines = [f"seed {self.fleet.seed}: {'; '.join(self.notes) or 'no notes'}", f"  {self.fleet.words()}"]
        lines += [f"  DEFECT {each}" for each in self.defects[:12]]
        lines += (
            [f"  alone: python -m tests.fleets.stage --seed {self.fleet.seed} --faults {self.faults} --verbose"]
            if self.defects
            else []
        )
        return "\n".join(lines)


def run(seed: int, configs: dict[int, Path], *, faults: str = "some") -> Verdict:
    """A seed: its two arms and what differs; again where a race of upstream's own ended an engine."""
    verdict = _once(seed, configs, faults=faults)
    for again in range(1, _AGAIN + 1):
        if not any(_UPSTREAMS_RACE in each for each in verdict.defects):
            break
        verdict = _once(seed, configs, faults=faults)
        verdict.notes.append(f"upstream's own race ended an engine; run {again + 1}")
        verdict.facts["ended by upstream's own race"] += again
    return verdict


def _once(seed: int, configs: dict[int, Path], *, faults: str) -> Verdict:
    from tests.fleets.stage_arm import Arm, prefix_of
    from tests.fleets.stage_faults import injected
    from tests.fleets.stage_parts import Clock, clocked, our_modules

    script = fleet(seed, faults=faults)
    verdict = Verdict(script, faults)
    began = time.monotonic()
    switch_s = sys.getswitchinterval()
    died: list[str] = []
    hook, threading.excepthook = threading.excepthook, lambda args: died.append(f"{args.thread}: {args.exc_value!r}")
    config = configs[script.stage]
    try:
        sys.setswitchinterval(script.switch_s)
        clock = Clock(script.step_s) if script.step_s else None
        stock = Arm(config, script, prefix_of(next(_numbers)), clock, is_patched=False).drive()
        verdict.defects += [f"stock itself: {each}" for each in stock.defects + died]
        died.clear()
        with ExitStack() as stack:
            told = stack.enter_context(_heard())
            counters = stack.enter_context(_patched(script))
            clock = Clock(script.step_s) if script.step_s else None
            stack.enter_context(clocked(clock))
            gate_modules = [sys.modules["omni_fastpath.patches.forward_gate.wrappers"]]
            fault = stack.enter_context(injected(script.fault, our_modules() + gate_modules))
            try:
                arm = Arm(config, script, prefix_of(next(_numbers)), clock, is_patched=True)
            except Exception as error:  # a stage that does not start because of us
                verdict.defects.append(f"the stage does not start: {error!r}\n{traceback.format_exc(limit=-4)}")
                return verdict
            arm.poisons = arm.poisons and script.fault is None  # beside a fault nothing is copied
            arm.spared = fault.spared
            patched = arm.drive()
            verdict.counters = dict(counters)
            if fault.fired:
                verdict.notes.append(fault.fired)
                verdict.facts["faults fired"] += 1
            _look_at_state(verdict, told, fired=bool(fault.fired))
        verdict.defects += patched.defects + died
        verdict.notes += patched.notes
        _count(verdict, stock, patched)
        if not stock.defects:
            verdict.defects += list(_differences(script, stock, patched))
    finally:
        sys.setswitchinterval(switch_s)
        threading.excepthook = hook
        verdict.seconds = time.monotonic() - began
    return verdict


@contextmanager
def _patched(script: Fleet) -> Iterator[dict[str, int]]:
    """Both patches of a stage, with the script's values."""
    from omni_fastpath import config
    from omni_fastpath.declare import Process, State
    from omni_fastpath.install import apply, uninstall
    from omni_fastpath.patches import PATCHES

    environment = {f"OMNI_FASTPATH_{name}": "1" for name in PATCHES_ON}
    apply(config.resolve([], environment, PATCHES), Process.STAGE)
    try:
        ours = _entry("save_queue_cap")
        assert {_entry(name.lower()).state for name in PATCHES_ON} == {State.APPLIED}
        before = ours.options
        ours.options = ours.patch.options(**script.options)
        for name in ours.counters:
            ours.counters[name] = 0
        try:
            yield ours.counters
        finally:
            ours.options = before
    finally:
        for patch in reversed(PATCHES):
            uninstall(patch)


def _entry(name: str) -> Any:
    from omni_fastpath.ledger import LEDGER

    return next(each for each in LEDGER if each.patch.name == name)


@contextmanager
def _heard() -> Iterator[list[str]]:
    """What our logger says at the level of an error, and nothing on the screen."""
    from omni_fastpath.ledger import logger

    told: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            words = record.getMessage()
            if record.exc_info:
                words += "\n" + "".join(traceback.format_exception(*record.exc_info)[-4:])
            told.append(words)

    listener = Listener(logging.ERROR)
    before = logger.handlers, logger.propagate, logger.level
    logger.handlers, logger.propagate = [listener], False
    logger.setLevel(logging.ERROR)
    try:
        yield told
    finally:
        logger.handlers, logger.propagate = before[0], before[1]
        logger.setLevel(before[2])


def _look_at_state(verdict: Verdict, told: Sequence[str], *, fired: bool) -> None:
    """An exception of ours is told, once, and the state says so; without one nothing is."""
    if not fired and told:
        verdict.defects.append(f"told of a failure of ours that was not injected: {told[0]}")
    if len(told) > 2:
        verdict.defects.append(f"told {len(told)} times: {Counter(told).most_common(2)}")
    state = _entry("save_queue_cap")
    verdict.facts[f"state {state.state.value}"] += 1


def _count(verdict: Verdict, stock: Any, patched: Any) -> None:
    for arm, words in ((stock, "stock"), (patched, "patched")):
        verdict.facts[f"preempted streams, {words}"] += len(arm.preempted)
        verdict.facts[f"turns, {words}"] += arm.turns
        verdict.facts[f"puts, {words}"] += sum(map(len, arm.puts.values()))
    verdict.facts.update(patched.fates.values())
    verdict.facts["seeds with holds"] += bool(verdict.counters.get("holds"))
    verdict.facts["holds"] += verdict.counters.get("holds", 0)
    verdict.facts["expired holds"] += verdict.counters.get("expired_holds", 0)


# ---- What differs ----


def _differences(script: Fleet, stock: Any, patched: Any) -> Iterator[str]:
    for stream in script.streams:
        fates = stock.fates[stream.name], patched.fates[stream.name]
        if "never arrived" in fates:
            # One that uses an aborted one's id again comes if that one's last chunk was not put: a matter of time.
            before = next(each for each in script.streams if each.external == stream.external)
            if fates[0] != fates[1] and stock.fates[before.name] != "aborted":
                yield f"{stream.name}: {fates[0]} in stock, {fates[1]} in the patched arm"
            continue
        if "failed" in fates and "completed" in fates:
            yield f"{stream.name}: {fates[1]} instead of {fates[0]}"
        # Upstream throws away what still waits of a session that it ends with an error, as it does after an abort.
        both = fates == ("completed", "completed")
        yield from _of_puts(script, stream, stock, patched, complete=both)
        yield from _of_outputs(stream, stock, patched, complete="aborted" not in fates, sent=both)


def _of_puts(script: Fleet, stream: Stream, stock: Any, patched: Any, *, complete: bool) -> Iterator[str]:
    name = stream.name
    expected, found = stock.puts.get(name, []), patched.puts.get(name, [])
    for arm, puts in (("stock", expected), ("patched", found)):
        ends = [place for place, put in enumerate(puts) if put.finished]
        if len(ends) > 1 or (ends and ends[0] != len(puts) - 1):
            yield f"{name}, {arm}: ends at puts {ends} of {len(puts)}"
        if wrong := [place for place, put in enumerate(puts) if put.ok == bool(stream.trouble(place).fails)]:
            yield f"{name}, {arm}: puts {wrong} of {len(puts)} did not go as the script says"
    if complete and not any(put.finished for put in found) and any(put.finished for put in expected):
        yield f"{name}: no last chunk"
    if name in stock.preempted | patched.preempted or script.spec:
        # Upstream sends what is computed again otherwise cut, or (its own processor) not at all.
        if script.processor == "plain" and script.stage == 0:
            yield from _of_positions(name, expected, found, complete=complete)
        return
    one = [(put.key, put.content, put.finished, put.segment, put.ok) for put in expected]
    other = [(put.key, put.content, put.finished, put.segment, put.ok) for put in found]
    same = one == other if complete else all(a[:4] == b[:4] for a, b in zip(one, other, strict=False))
    if not same and script.processor == "plain" and script.stage == 0:  # pieces of its prompt may be cut otherwise
        yield from _of_positions(name, expected, found, complete=complete)
    elif not same:
        place = next((n for n, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), None)
        if place is None:
            yield f"{name}: {len(other)} puts instead of {len(one)}"
        else:
            yield f"{name}: put {place} is {other[place]} instead of {one[place]}"


def _of_positions(name: str, expected: Sequence[Any], found: Sequence[Any], *, complete: bool) -> Iterator[str]:
    """Compare what was put position by position, each at its first time.

    Puts fail by their number, and a position's number follows from how its prompt was cut: those are counted too.
    """
    one, other = _positions(expected), _positions(found)
    if complete and one != other:
        yield f"{name}: positions sent differ: {_first_difference(other, one)}"
    elif not complete:
        shorter = min(len(one), len(other))
        if one[:shorter] != other[:shorter]:
            yield f"{name}: neither arm's positions begin the other's: {_first_difference(other, one)}"


def _positions(puts: Sequence[Any]) -> list[tuple[float, float]]:
    seen: dict[float, float] = {}
    for put in puts:
        for position, value in zip(put.values[::2], put.values[1::2], strict=True):
            seen.setdefault(position, value)
    return list(seen.items())


def _first_difference(found: Sequence[Any], expected: Sequence[Any]) -> str:
    place = next(
        (n for n, pair in enumerate(zip(found, expected, strict=False)) if pair[0] != pair[1]),
        min(len(found), len(expected)),
    )
    return f"at {place}: {list(found[place : place + 2])} instead of {list(expected[place : place + 2])}"


def _of_outputs(stream: Stream, stock: Any, patched: Any, *, complete: bool, sent: bool) -> Iterator[str]:
    name = stream.name
    for what in ("tokens", "visible"):
        one, other = getattr(stock, what)[name], getattr(patched, what)[name]
        shorter = len(one) if complete else min(len(one), len(other))
        if name in stock.preempted | patched.preempted and what == "visible":
            continue
        if (complete and len(one) != len(other)) or one[:shorter] != other[:shorter]:
            yield f"{name}: {what} differ: {len(other)} instead of {len(one)}, {_first_difference(other, one)}"
    if not complete:
        return
    if stock.ended[name] != patched.ended[name]:
        yield f"{name}: ended as {patched.ended[name]} instead of {stock.ended[name]}"
    if stock.prefills[name] != patched.prefills[name]:
        yield f"{name}: {patched.prefills[name]} outputs with prefill statistics instead of {stock.prefills[name]}"
    if name in patched.left and name not in stock.left:
        yield f"{name}: its chunks are left in the connector"
    if more := patched.state[name] - stock.state[name]:
        yield f"{name}: the adapter still has {sorted(more)}"
    puts = [len(arm.puts.get(name, [])) for arm in (stock, patched)]
    if sent and stock.received[name] != patched.received[name] and puts[0] == puts[1]:
        yield f"{name}: {patched.received[name]} chunks received instead of {stock.received[name]}"


# ---- From the command line ----


def _environment() -> None:
    os.environ.update(
        {
            "OMNI_SIMULATED_DEVICE": "1",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "VLLM_LOGGING_LEVEL": "CRITICAL",
            "VLLM_NO_USAGE_STATS": "1",
        }
    )
    for name in [each for each in os.environ if each.startswith(("OMNI_FASTPATH", "_OMNI_FASTPATH"))]:
        del os.environ[name]


@contextmanager
def quiet() -> Iterator[None]:
    """Upstream's loggers say nothing: failures are made by the thousand."""
    import vllm_omni  # noqa: F401 - makes its loggers, and replaces vLLM's Request before anything takes it
    from vllm_omni.distributed.omni_connectors.connectors import shm_connector
    from vllm_omni.distributed.omni_connectors.transfer_adapter import base, chunk_transfer_adapter

    modules = (shm_connector, base, chunk_transfer_adapter)
    loggers = [logging.getLogger(name) for name in ("vllm", "vllm_omni")] + [each.logger for each in modules]
    levels = [each.level for each in loggers]
    for each in loggers:
        each.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for each, level in zip(loggers, levels, strict=True):
            each.setLevel(level)


def runs(seeds: Sequence[int], configs: dict[int, Path], *, faults: str = "some") -> Iterator[Verdict]:
    """Seed after seed."""
    with quiet():
        for number, seed in enumerate(seeds):
            yield run(seed, configs, faults=faults)
            if number % 20 == 19:
                gc.collect()


def _configs(folder: str | None) -> dict[int, Path]:
    from benchmarks.save_queue.rig import stage_configs

    place = Path(folder) if folder else Path(tempfile.gettempdir()) / f"omni-fastpath-fleets-{os.getuid()}"
    place.mkdir(exist_ok=True)
    return stage_configs(place)


def main() -> None:
    """From the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, help="this one alone")
    parser.add_argument("--faults", choices=("some", "none", "all"), default="some")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--configs", help="folder of the stages' configs; made when it is empty")
    parser.add_argument("--verbose", action="store_true")
    given = parser.parse_args()
    _environment()
    configs = _configs(given.configs)
    if given.jobs > 1 and given.seed is None:
        sys.exit(_in_processes(given))
    seeds = [given.seed] if given.seed is not None else range(given.first, given.first + given.seeds)
    facts: Counter[str] = Counter()
    failed = 0
    began = time.monotonic()
    for verdict in runs(list(seeds), configs, faults=given.faults):
        facts += verdict.facts
        facts["seeds"] += 1
        if verdict.defects:
            failed += 1
        if verdict.defects or given.verbose:
            print(verdict.words(), flush=True)  # noqa: T201
            if given.verbose:
                print(f"  {verdict.seconds:.2f} s; {verdict.counters}", flush=True)  # noqa: T201
    print(  # noqa: T201
        f"{failed} of {facts['seeds']} seeds failed in {time.monotonic() - began:.0f} s; "
        + ", ".join(f"{name} {count}" for name, count in sorted(facts.items())),
        flush=True,
    )
    sys.exit(bool(failed))


def _in_processes(given: argparse.Namespace) -> int:
    share = -(-given.seeds // given.jobs)
    started = []
    for job in range(given.jobs):
        first = given.first + job * share
        count = min(share, given.first + given.seeds - first)
        command = [sys.executable, "-W", "ignore", "-m", "tests.fleets.stage", "--first", str(first)]
        command += ["--seeds", str(count), "--faults", given.faults]
        command += ["--configs", given.configs] if given.configs else []
        command += ["--verbose"] if given.verbose else []
        started.append(subprocess.Popen(command))
    return max(each.wait() for each in started)


if __name__ == "__main__":
    main()
