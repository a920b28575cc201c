"""The slots of ``queue_metrics``: who is observed, in a server and in a stage, and what ``/metrics`` shows of it."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Awaitable, Callable, Iterator
from typing import Any
from weakref import WeakSet

from omni_fastpath.declare import State
from omni_fastpath.figures import Distribution, Sample, gauge
from omni_fastpath.ledger import logger, runtime

from . import saving
from .account import Account, Line
from .fronts import Fronts
from .lag import Lag
from .pauses import Pauses

_runtime = runtime("queue_metrics")
_counters = _runtime.counters

_accounts: list[Account] = []
_fronts: WeakSet[Fronts] = WeakSet()
"""They live as long as the orchestrators that they stand on."""
_lags: list[Lag] = []
_adapters: list[weakref.ref[Any]] = []
"""No ``WeakSet``, which cannot be read while another thread adds to it."""
_pauses = Pauses()
"""Of an API process, from its orchestrator's beginning on."""


def wrapped_orchestration_output_handler(
    wrapped: Callable[..., Awaitable[None]], instance: Any, args: Any, kwargs: Any
) -> Awaitable[None]:
    """Upstream's, on the orchestrator's event loop, before either of its loops begins: it is observed from here on."""
    # One that is begun again has its fronts already.
    if not _runtime.has_failed and not any(account.orchestrator is instance for account in _accounts):
        try:
            account = Account(instance)
            account.look()
            _fronts.add(Fronts(instance, account, _step_aside))
            _accounts.append(account)
            _lags.append(_OrchestratorsLag(account))
            _pauses.start()
        except Exception as error:
            _step_aside(error)
    return wrapped(*args, **kwargs)


class _OrchestratorsLag(Lag):
    """Sees four times a second, too, whose replicas they are."""

    def __init__(self, account: Account) -> None:
        self._account = account
        super().__init__("orchestrator", asyncio.get_running_loop())

    def _look(self) -> None:
        super()._look()
        try:
            self._account.look()
        except Exception as error:
            _step_aside(error)


def wrapped_final_output_handler(wrapped: Callable[..., None], _instance: Any, args: Any, kwargs: Any) -> None:
    """Upstream's, at each request's beginning, on the front end's event loop."""
    wrapped(*args, **kwargs)
    if _runtime.has_failed:
        return
    try:
        loop = asyncio.get_running_loop()
        if not any(lag.is_of(loop) for lag in _lags):
            _lags.append(Lag("front_end", loop))
    except Exception as error:
        _step_aside(error)


def wrapped_adapter_made(wrapped: Callable[..., None], instance: Any, args: Any, kwargs: Any) -> None:
    """Upstream's, in a stage: its save queue is looked at from here on."""
    wrapped(*args, **kwargs)
    try:
        _adapters.append(weakref.ref(instance))
        _counters["observed"] += 1
    except Exception as error:
        _step_aside(error)


def figures() -> dict[str, list[Sample]]:
    """What ``/metrics`` shows now; called by a scrape and for the state file, on a thread of its own."""
    if _runtime.has_failed:
        return {}
    try:
        found: dict[str, list[Sample]] = {}
        for metric, sample in (*_of_raw_outputs(), *_of_queues(), *_of_loops(), *_of_pauses(), *_of_adapters()):
            found.setdefault(f"omni_fastpath_{metric}", []).append(sample)
    except Exception as error:
        _step_aside(error)
        return {}
    return found


def _of_raw_outputs() -> Iterator[tuple[str, Sample]]:
    raw_outputs = 0
    for account in _accounts:
        account.let_go()
        # A copy of a dict is made in one step; a list of its items is not, and a collection may fall in between.
        for (stage_id, replica_id), line in account.lines.copy().items():
            labels = _labels(stage_id, replica_id)
            raw_outputs += line.raw_outputs
            if line.is_on_this_host:
                yield "residence_seconds", line.residence.sample(labels)
            for metric, seen, is_expected in _firsts_of(line, account.firsts.is_audio.get(stage_id)):
                if (is_expected and line.is_on_this_host) or any(seen.counts):
                    yield metric, seen.sample(labels)
    if _accounts:
        _counters["observed"] = raw_outputs
        _counters["entries"] = sum(account.entries for account in _accounts)


def _firsts_of(line: Line, is_audio: bool | None) -> Iterator[tuple[str, Distribution, bool]]:
    """With whether its stage gives the user such a thing: then it is shown from nothing on, else a rate misses some."""
    yield "first_audio_residence_seconds", line.first_audio, is_audio is True
    yield "first_text_residence_seconds", line.first_text, is_audio is False
    yield "first_audio_entries_ahead", line.ahead, is_audio is True


def _of_queues() -> Iterator[tuple[str, Sample]]:
    for account in _accounts:
        for stage_id, replica_id, waiting in account.depths():
            yield "queued_raw_outputs", gauge(_labels(stage_id, replica_id), waiting)


def _of_loops() -> Iterator[tuple[str, Sample]]:
    for lag in _lags:
        lag.let_go()
        yield "event_loop_lag_seconds", lag.seen.sample({"loop": lag.name})


def _of_pauses() -> Iterator[tuple[str, Sample]]:
    if _pauses.is_watching:
        yield "gc_pause_seconds", _pauses.seen.sample({})


def _of_adapters() -> Iterator[tuple[str, Sample]]:
    for adapter in [each() for each in _adapters]:
        if adapter is None:
            continue
        queue = adapter._pending_save_reqs
        yield "save_queue_tasks", gauge({}, saving.tasks(queue))
        nbytes = saving.nbytes(queue)
        if nbytes is not None:
            yield "save_queue_bytes", gauge({}, nbytes)


def _labels(stage_id: int, replica_id: int) -> dict[str, str]:
    return {"stage": str(stage_id), "replica": str(replica_id)}


def _step_aside(error: Exception) -> None:
    """Observe no more; upstream works alone, and nothing of its is touched."""
    _end()
    if not _runtime.has_failed:
        logger.error("omni-fastpath: queue_metrics: observing failed", exc_info=error)
        _runtime.report(State.FAILED, f"observing failed: {error!r}; nothing is observed any more")


def _end() -> None:
    for fronts in list(_fronts):
        fronts.remove()
    _fronts.clear()
    for lag in _lags:
        lag.stop()
    _pauses.stop()


def taken_off() -> None:
    """Nothing stands in front of an orchestrator any more, and what was seen is forgotten."""
    _end()
    for seen in (_accounts, _lags, _adapters):
        seen.clear()
