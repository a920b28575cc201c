"""The slots of ``queue_metrics``: what is observed in a server and in a stage, and what ``/metrics`` shows of it."""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from omni_fastpath.declare import State
from omni_fastpath.figures import Sample, gauge
from omni_fastpath.ledger import logger, runtime

from .account import Account
from .delays import Lag, Pauses

_runtime = runtime("queue_metrics")
_counters = _runtime.counters

_accounts: list[Account] = []
_observed: WeakKeyDictionary[Any, Account] = WeakKeyDictionary()
"""The accounts by orchestrator; empty once observing has ended."""
_lags: list[Lag] = []
_loops: WeakSet[asyncio.AbstractEventLoop] = WeakSet()
"""Event loops whose lag is measured."""
_adapters: list[weakref.ref[Any]] = []
"""No ``WeakSet``, which cannot be read while another thread adds to it."""
_pauses = Pauses()
"""Of an API process, from its orchestrator's beginning on."""


# ---- The orchestrator ----


def wrapped_orchestration_output_handler(
    wrapped: Callable[..., Awaitable[None]], instance: Any, args: Any, kwargs: Any
) -> Awaitable[None]:
    """Upstream's, on the orchestrator's event loop, before either of its loops begins: it is observed from here on."""
    if not _runtime.has_failed and instance not in _observed:
        try:
            account = Account(instance)
            account.look()
            _accounts.append(account)
            _observed[instance] = account
            _measure_lag("orchestrator")
            _pauses.start()
        except Exception as error:
            _step_aside(error)
    return wrapped(*args, **kwargs)


async def wrapped_process_llm_stage_outputs(
    wrapped: Callable[..., Awaitable[Any]], instance: Any, args: Any, kwargs: Any
) -> Any:
    """Upstream's processing of one raw output; what it routes meanwhile belongs to this one."""
    account = _observed.get(instance)
    if account is None:
        return await wrapped(*args, **kwargs)
    dispatch = None
    try:
        dispatch = account.processing(*args, **kwargs)
    except Exception as error:
        _step_aside(error)
    processed = await wrapped(*args, **kwargs)
    if dispatch is not None:
        account.processed(dispatch)
    return processed


async def wrapped_handle_processed_outputs(
    wrapped: Callable[..., Awaitable[Any]], instance: Any, args: Any, kwargs: Any
) -> Any:
    """Upstream's routing of what was just processed."""
    account = _observed.get(instance)
    dispatch = account.routing(*args, **kwargs) if account is not None else None
    if account is None or dispatch is None:
        return await wrapped(*args, **kwargs)
    new = len(dispatch.had_first) - dispatch.before  # routing forgets a request that ends
    result = await wrapped(*args, **kwargs)
    try:
        account.routed(dispatch, new)
    except Exception as error:
        _step_aside(error)
    return result


# ---- The front end, and a stage ----


def wrapped_final_output_handler(wrapped: Callable[..., None], _instance: Any, args: Any, kwargs: Any) -> None:
    """Upstream's, at each request's beginning, on the front end's event loop."""
    wrapped(*args, **kwargs)
    if _runtime.has_failed:
        return
    try:
        _measure_lag("front_end")
    except Exception as error:
        _step_aside(error)


def wrapped_adapter_made(wrapped: Callable[..., None], instance: Any, args: Any, kwargs: Any) -> None:
    """Upstream's, in a stage: its save queue is looked at from here on."""
    wrapped(*args, **kwargs)
    _adapters.append(weakref.ref(instance))
    _counters["observed"] += 1


def _measure_lag(name: str) -> None:
    loop = asyncio.get_running_loop()
    if loop not in _loops:
        _loops.add(loop)
        _lags.append(Lag(name, loop))


# ---- What is shown ----


def figures() -> dict[str, list[Sample]]:
    """What ``/metrics`` shows now; called by a scrape and for the state file, on a thread of its own."""
    if _runtime.has_failed:
        return {}
    found: dict[str, list[Sample]] = {}
    try:
        for metric, sample in (*_of_orchestrators(), *_of_processes(), *_of_adapters()):
            found.setdefault(f"omni_fastpath_{metric}", []).append(sample)
    except Exception as error:
        _step_aside(error)
        return {}
    return found


def _of_orchestrators() -> Iterator[tuple[str, Sample]]:
    for account in _accounts:
        account.look()
        # A copy of a dict is made in one step; a list of its items is not.
        for (stage_id, replica_id), replica in account.replicas.copy().items():
            labels = _labels(stage_id, replica_id)
            if replica.is_on_this_host:
                yield "residence_seconds", replica.residence.sample(labels)
                if replica.gives in ("audio", "text"):  # from nothing on, else a rate misses the first
                    yield f"first_{replica.gives}_residence_seconds", replica.firsts.sample(labels)
        for stage_id, replica_id, waiting in account.depths():
            yield "queued_raw_outputs", gauge(_labels(stage_id, replica_id), waiting)
    if _accounts:
        _counters["observed"] = sum(account.raw_outputs for account in _accounts)


def _of_processes() -> Iterator[tuple[str, Sample]]:
    for lag in _lags:
        yield "event_loop_lag_seconds", lag.seen.sample({"loop": lag.name})
    if _pauses.is_watching:
        yield "gc_pause_seconds", _pauses.seen.sample({})


def _of_adapters() -> Iterator[tuple[str, Sample]]:
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


def _step_aside(error: Exception) -> None:
    """Observe no more; upstream works alone."""
    _end()
    if not _runtime.has_failed:
        logger.error("omni-fastpath: queue_metrics: observing failed", exc_info=error)
        _runtime.report(State.FAILED, f"observing failed: {error!r}; nothing is observed any more")


def _end() -> None:
    _observed.clear()
    for lag in _lags:
        lag.stop()
    _pauses.stop()


def taken_off() -> None:
    """Nothing is observed any more, and what was seen is forgotten."""
    _end()
    for seen in (_accounts, _lags, _loops, _adapters):
        seen.clear()
