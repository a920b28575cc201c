"""The slots of ``budgeted_drain``: both loops, and the attach of a replica at run time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import FinishReason
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.engine.exceptions import EngineDeadError
from vllm_omni.diffusion.data import is_diffusion_request_started_output
from vllm_omni.engine.orchestrator_monitor import OrchestratorMonitor
from vllm_omni.outputs.output_modality import DRAINABLE_MODALITIES

from omni_fastpath.declare import State
from omni_fastpath.hooks import HOOKS
from omni_fastpath.ledger import logger, runtime

from .dispatch import Observers
from .drain import DrainLoop, Upstream
from .routable import DefaultPolicy

_runtime = runtime("budgeted_drain")
_DRAINABLE = tuple(sorted(str(modality) for modality in DRAINABLE_MODALITIES))


def default_policy() -> DefaultPolicy:
    """A fresh default policy with upstream's names in it."""
    return DefaultPolicy(_DRAINABLE, RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE)


def drain_loop(orchestrator: Any, *, event_driven: bool = False) -> DrainLoop:
    """The loop for one orchestrator, with the values in force and the hooks that somebody implements now.

    Args:
        orchestrator: Upstream's orchestrator.
        event_driven: Whether it replaces the event-driven loop, which tells the monitor how many raw outputs wait.
    """
    observers = Observers(*(HOOKS.observer(name) for name in Observers._fields))
    policy, ask = HOOKS.policy(default_policy()), HOOKS.chooser()
    monitor = orchestrator._orch_monitor
    gauge = monitor.set_dispatch_queue_size if event_driven and isinstance(monitor, OrchestratorMonitor) else None
    return DrainLoop(orchestrator, _runtime.options, _runtime.counters, policy, ask, observers, _upstream(), gauge)


def _upstream() -> Upstream:
    dequeue = AsyncMPClient.get_output_nowait  # nonblocking_dequeue's, or one of upstream's that behaves like it
    waiting = AsyncMPClient.get_output_async

    def can_dequeue(client: Any) -> bool:
        """Only where both dequeues are the ones that were verified: a subclass with its own knows why it has it."""
        kind = type(client)
        return (
            getattr(kind, "get_output_nowait", None) is dequeue and getattr(kind, "get_output_async", None) is waiting
        )

    return Upstream(EngineDeadError, is_diffusion_request_started_output, dequeue, can_dequeue, FinishReason.ERROR)


def wrapped_orchestration_loop(
    wrapped: Callable[..., Awaitable[None]], instance: Any, args: Any, kwargs: Any
) -> Awaitable[None]:
    """Run our loop in place of upstream's poll loop; upstream's, if ours cannot even be built."""
    return _instead(wrapped, instance, args, kwargs, event_driven=False)


def wrapped_orchestration_loop_event_driven(
    wrapped: Callable[..., Awaitable[None]], instance: Any, args: Any, kwargs: Any
) -> Awaitable[None]:
    """Run our loop in place of upstream's readers, queue and dispatcher; upstream's, if ours cannot even be built."""
    return _instead(wrapped, instance, args, kwargs, event_driven=True)


def _instead(
    wrapped: Callable[..., Awaitable[None]], orchestrator: Any, args: Any, kwargs: Any, *, event_driven: bool
) -> Awaitable[None]:
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


def in_use() -> str | None:
    """Who would be left without the patch, if it were taken off now."""
    return "a running orchestrator is served by it" if DrainLoop.running else None
