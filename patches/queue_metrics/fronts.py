"""What stands in front of an orchestrator's own two methods: one begins with a raw output, the other has routed it.

On the orchestrator itself, as attributes, and not in the class's slots: a wrapper in a slot is bound anew at each call,
which by itself costs as much as all that is to be done here. Both of upstream's loops and our drain call them by these
names. Between the two stands nothing but plain variables: one raw output is processed and routed at a time.

A nested call, by which 0.32 routes a first audio while it processes what carried it, belongs to the raw output that is
being processed: whoever runs in such a call is passed on.
"""

from __future__ import annotations

import asyncio
import weakref
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Mapping
from time import monotonic
from typing import Any

from .account import Account
from .bounds import RESIDENCE_S
from .upstream import has_had_first_audio, is_waiting

PROCESS = "_process_llm_stage_outputs"  # from 0.28 on
LOOK_FOR_KV = "_handle_kv_ready_raw_outputs"
"""Up to 0.26, where processing stands in upstream's loop: what it calls right before."""
ROUTE = "_handle_processed_outputs"
FLUSH = "_flush_upstream_first_audio"  # from 0.32 on

_Upstreams = Callable[..., Awaitable[Any]]

_CARRIER = "_omni_fastpath_first_audio"
"""On a request's state: which line, and when, carried a first audio that could not be routed at once."""


class Fronts:
    """The fronts of one orchestrator.

    Args:
        orchestrator: Upstream's.
        account: What is seen.
        failed: Told of an exception of ours, after which upstream works alone.
    """

    def __init__(self, orchestrator: Any, account: Account, failed: Callable[[Exception], None]) -> None:
        self._orchestrator = weakref.ref(orchestrator)
        self._account = account
        self._failed = failed
        self._is_over = False
        self._apart: set[Any] = set()
        """Tasks in a nested call; never empty again when it is over, for whoever has kept a front."""
        self._theirs: dict[str, Any] = {}
        self._ours: dict[str, Any] = {}
        begins = PROCESS if hasattr(orchestrator, PROCESS) else LOOK_FOR_KV
        ours = self._around(getattr(orchestrator, begins), getattr(orchestrator, ROUTE))
        for name in (begins, ROUTE):
            self._put(orchestrator, name, ours[name])
        if hasattr(orchestrator, FLUSH):
            self._put(orchestrator, FLUSH, self._around_flush(getattr(orchestrator, FLUSH), *ours["carrier"]))

    def remove(self) -> None:
        """Give the orchestrator what it had, unless somebody has put something in front of ours."""
        self._is_over = True
        self._apart.add(None)
        orchestrator = self._orchestrator()
        for name, ours in list(self._ours.items()):  # a scrape's thread may be at it, too
            if orchestrator is None or vars(orchestrator).get(name) is not ours:
                continue
            if name in self._theirs:
                setattr(orchestrator, name, self._theirs[name])
            else:
                delattr(orchestrator, name)
        self._ours.clear()
        self._theirs.clear()

    def _put(self, orchestrator: Any, name: str, ours: Any) -> None:
        if name in vars(orchestrator):
            self._theirs[name] = vars(orchestrator)[name]
        self._ours[name] = ours
        setattr(orchestrator, name, ours)

    def _is_apart(self) -> bool:
        return self._is_over or asyncio.current_task() in self._apart

    def _around(self, process: _Upstreams, route: _Upstreams) -> dict[str, Any]:  # noqa: C901, PLR0915 - flat functions
        """By name what stands in front; and as ``carrier`` who is being processed, and what is to be said to forget."""
        account, apart, is_apart, failed = self._account, self._apart, self._is_apart, self._failed
        firsts, lines, note_routed = account.firsts, account.lines, account.routed.append
        had: Mapping[str, Any] = {}  # upstream's record of who has had a first of that stage
        due = -1  # the stage of the raw output that is processed and not yet routed
        replica = entries = before = 0
        constructed_s = 0.0

        def note(stage_id: int, replica_id: int, raw_outputs: Any) -> None:
            nonlocal due, replica, constructed_s, entries, had, before
            if apart and is_apart():
                return
            try:
                constructed_s = raw_outputs.timestamp
                entries = len(raw_outputs.outputs)
                had = firsts[stage_id]
                before = len(had)
                replica = replica_id
                due = stage_id
            except Exception as error:
                failed(error)

        def process_llm_stage_outputs(
            stage_id: int, replica_id: int, raw_outputs: Any, raw_terminal_request_ids: set[str]
        ) -> Awaitable[Any]:
            nonlocal due, replica, constructed_s, entries, had, before
            if not apart or not is_apart():  # as in note, without a call: it runs for each raw output
                try:
                    constructed_s = raw_outputs.timestamp
                    entries = len(raw_outputs.outputs)
                    had = firsts[stage_id]
                    before = len(had)
                    replica = replica_id
                    due = stage_id
                except Exception as error:
                    failed(error)
            return process(stage_id, replica_id, raw_outputs, raw_terminal_request_ids)

        def handle_kv_ready_raw_outputs(stage_id: int, raw_outputs: Any) -> Awaitable[Any]:
            note(stage_id, -1, raw_outputs)
            return process(stage_id, raw_outputs)

        async def handle_processed_outputs(stage_id: int, replica_id: int, outputs: list[Any]) -> Any:
            nonlocal due
            if due != stage_id or (apart and is_apart()):  # a diffusion stage's, or nested
                return await route(stage_id, replica_id, outputs)
            due = -1
            began_s, count, new = constructed_s, entries, len(had) - before
            result = await route(stage_id, replica_id, outputs)
            try:
                now_s = monotonic()
                try:
                    line = lines[stage_id, replica_id]
                except KeyError:
                    line = account.line(stage_id, replica_id)
                if line.is_on_this_host:
                    residence, seconds = line.residence, now_s - began_s
                    residence.counts[bisect_left(RESIDENCE_S, seconds)] += 1  # no call: it runs for each raw output
                    residence.sum += seconds
                    if new > 0:
                        account.note_firsts(line, stage_id, began_s, now_s)
                else:
                    line.elsewhere += 1
                before_it = account.entries
                note_routed((now_s, before_it))
                account.entries = before_it + count
            except Exception as error:
                failed(error)
            return result

        def carrier() -> tuple[int, int, float] | None:
            return None if due < 0 else (due, replica, constructed_s)

        def forget_firsts() -> None:
            nonlocal before
            if due >= 0:
                before = len(had)

        return {
            PROCESS: process_llm_stage_outputs,
            LOOK_FOR_KV: handle_kv_ready_raw_outputs,
            ROUTE: handle_processed_outputs,
            "carrier": (carrier, forget_firsts),
        }

    def _around_flush(
        self, flush: _Upstreams, carrier: Callable[[], tuple[int, int, float] | None], forget_firsts: Callable[[], None]
    ) -> _Upstreams:
        """In front of what routes a first audio by itself, inside of a raw output's processing or later."""
        account, apart, failed = self._account, self._apart, self._failed

        async def flush_upstream_first_audio(req_state: Any) -> Any:
            if self._is_apart():
                return await flush(req_state)
            try:
                if is_waiting(req_state) and not hasattr(req_state, _CARRIER):
                    setattr(req_state, _CARRIER, carrier())
            except Exception as error:
                failed(error)
                return await flush(req_state)
            task = asyncio.current_task()
            apart.add(task)
            try:
                result = await flush(req_state)
            finally:
                apart.discard(task)
            try:
                carried = vars(req_state).get(_CARRIER)
                if carried is not None and has_had_first_audio(req_state):
                    setattr(req_state, _CARRIER, None)
                    stage_id, replica_id, constructed_s = carried
                    line = account.line(stage_id, replica_id)
                    if line.is_on_this_host:
                        account.note_first_audio(line, constructed_s, monotonic())
                    forget_firsts()
            except Exception as error:
                failed(error)
            return result

        return flush_upstream_first_audio
