"""The slots of ``queue_metrics``: what is observed in a server and in a stage, and what ``/metrics`` shows of it."""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from omni_fastpath.figures import Sample, gauge
from omni_fastpath.ledger import runtime

from .account import Account
from .delays import Lag, Pauses

_counters = runtime("queue_metrics").counters

_accounts: list[Account] = []
_observed: WeakKeyDictionary[Any, Account] = WeakKeyDictionary()
"""The accounts by orchestrator; empty once observing has ended."""
_delays: list[Lag | Pauses] = []
"""Of the API process: its event loops', and its collections' from its first orchestrator's beginning on."""
_loops: WeakSet[asyncio.AbstractEventLoop] = WeakSet()
"""Event loops whose lag is measured."""
_adapters: list[weakref.ref[Any]] = []
"""No ``WeakSet``, which cannot be read while another thread adds to it."""


# ---- The orchestrator ----


def wrapped_orchestration_output_handler(
    wrapped: Callable[..., Awaitable[None]], instance: Any, args: Any, kwargs: Any
) -> Awaitable[None]:
    """Upstream's, on the orchestrator's event loop, before either of its loops begins: it is observed from here on."""
    _begin(instance)
    return wrapped(*args, **kwargs)


def _begin(orchestrator: Any) -> None:
    if orchestrator in _observed:
        return
    if not _accounts:
        _delays.append(Pauses())
    _accounts.append(Account(orchestrator))
    _observed[orchestrator] = _accounts[-1]
    _measure_lag("orchestrator")


async def wrapped_process_llm_stage_outputs(
    wrapped: Callable[..., Awaitable[Any]], instance: Any, args: Any, kwargs: Any
) -> Any:
    """Upstream's processing of one raw output; what it routes meanwhile belongs to this one."""
    account = _observed.get(instance)
    if account is None:
        return await wrapped(*args, **kwargs)
    dispatch = account.processing(*args, **kwargs)
    processed = await wrapped(*args, **kwargs)
    account.processed(dispatch)
    return processed


async def wrapped_handle_processed_outputs(
    wrapped: Callable[..., Awaitable[Any]], instance: Any, args: Any, kwargs: Any
) -> Any:
    """Upstream's routing of what was just processed."""
    account = _observed.get(instance)
    dispatch = None if account is None else account.routing(*args, **kwargs)
    result = await wrapped(*args, **kwargs)
    if account is not None and dispatch is not None:
        account.routed(dispatch)
    return result


# ---- The front end, and a stage ----


def wrapped_final_output_handler(wrapped: Callable[..., None], _instance: Any, args: Any, kwargs: Any) -> None:
    """Upstream's, at each request's beginning, on the front end's event loop."""
    wrapped(*args, **kwargs)
    _measure_lag("front_end")


def wrapped_adapter_made(wrapped: Callable[..., None], instance: Any, args: Any, kwargs: Any) -> None:
    """Upstream's, in a stage: its save queue is looked at from here on."""
    wrapped(*args, **kwargs)
    _adapters.append(weakref.ref(instance))
    _counters["observed"] += 1


def _measure_lag(name: str) -> None:
    loop = asyncio.get_running_loop()
    if loop not in _loops:
        _loops.add(loop)
        _delays.append(Lag(name, loop))


# ---- What is shown ----


def figures() -> dict[str, list[Sample]]:
    """What ``/metrics`` shows now; called by a scrape and for the state file, on a thread of its own."""
    found: dict[str, list[Sample]] = {}
    for metric, sample in _samples():
        found.setdefault(f"omni_fastpath_{metric}", []).append(sample)
    return found


def _samples() -> Iterator[tuple[str, Sample]]:
    for account in _accounts:
        for stage_id, replica_id, waiting in account.depths():
            yield "queued_raw_outputs", gauge(_labels(stage_id, replica_id), waiting)
        # A copy of a dict is made in one step; a list of its items is not.
        for (stage_id, replica_id), replica in account.replicas.copy().items():
            labels = _labels(stage_id, replica_id)
            if replica.is_on_this_host:
                yield "residence_seconds", replica.residence.sample(labels)
                if replica.gives in ("audio", "text"):  # from nothing on, else a rate misses the first
                    yield f"first_{replica.gives}_residence_seconds", replica.firsts.sample(labels)
    if _accounts:
        _counters["observed"] = sum(account.raw_outputs for account in _accounts)
    for delay in _delays:
        yield delay.metric, delay.seen.sample(delay.labels)
    for adapter in [each() for each in _adapters]:
        if adapter is not None:
            yield "save_queue_tasks", gauge({}, tasks_in(adapter._pending_save_reqs))


def tasks_in(queue: Any) -> int:
    """How many tasks wait in a save queue; from 0.32 on one entry may have those of a step of the scheduler."""
    if type(queue) is not deque:
        return len(queue)
    entries = list(queue)  # in one step of the interpreter: no other thread changes it meanwhile
    return sum(len(entry["batch"]) if "batch" in entry else 1 for entry in entries)


def _labels(stage_id: int, replica_id: int) -> dict[str, str]:
    return {"stage": str(stage_id), "replica": str(replica_id)}


# ---- The end ----


def taken_off() -> None:
    """Nothing is observed any more, and what was seen is forgotten."""
    for delay in _delays:
        delay.stop()
    for seen in (_observed, _accounts, _delays, _loops, _adapters):
        seen.clear()
