"""The slots of ``budgeted_drain``: both loops, and the attach of a replica at run time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from omni_fastpath.declare import State
from omni_fastpath.hooks import HOOKS
from omni_fastpath.ledger import logger, runtime

from .dispatch import Hooks
from .drain import DrainLoop
from .upstream import default_policy, gauge_of

_runtime = runtime("budgeted_drain")

_Loop = Callable[..., Awaitable[None]]


def drain_loop(orchestrator: Any, *, event_driven: bool = False) -> DrainLoop:
    """The loop for one orchestrator, with the values in force and the hooks that plugins implement now.

    Args:
        orchestrator: Upstream's orchestrator.
        event_driven: Whether it replaces the event-driven loop, which tells the monitor how many raw outputs wait.
    """
    names = ("on_dequeued", "on_pass_end", "on_routed")
    hooks = Hooks(HOOKS.policy(default_policy()), HOOKS.chooser(), *(HOOKS.observer(name) for name in names))
    gauge = gauge_of(orchestrator) if event_driven else None
    return DrainLoop(orchestrator, _runtime.options, _runtime.counters, hooks, gauge)


def wrapped_orchestration_loop(wrapped: _Loop, instance: Any, args: Any, kwargs: Any) -> Awaitable[None]:
    """Run our loop in place of upstream's poll loop; upstream's, if ours cannot even be built."""
    return _instead(wrapped, instance, args, kwargs, event_driven=False)


def wrapped_orchestration_loop_event_driven(wrapped: _Loop, instance: Any, args: Any, kwargs: Any) -> Awaitable[None]:
    """Run our loop in place of upstream's readers, queue and dispatcher; upstream's, if ours cannot even be built."""
    return _instead(wrapped, instance, args, kwargs, event_driven=True)


def _instead(wrapped: _Loop, orchestrator: Any, args: Any, kwargs: Any, *, event_driven: bool) -> Awaitable[None]:
    try:
        loop = drain_loop(orchestrator, event_driven=event_driven)
    except Exception as error:
        logger.exception("omni-fastpath: the drain cannot start; upstream's loop runs")
        _runtime.report(State.FAILED, f"it could not start, upstream's loop runs: {error!r}")
        return wrapped(*args, **kwargs)
    return loop.run()


def wrapped_add_client(wrapped: Callable[..., int], instance: Any, args: Any, kwargs: Any) -> int:
    """Attach as upstream does, then let the loop that serves this pool look at the new replica."""
    replica_id = wrapped(*args, **kwargs)
    for loop in DrainLoop.running:
        loop.attached(instance)
    return replica_id
