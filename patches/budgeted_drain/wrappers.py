"""The slots of ``budgeted_drain``: the loop itself, and the attach of a replica at run time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.exceptions import EngineDeadError
from vllm_omni.diffusion.data import is_diffusion_request_started_output
from vllm_omni.outputs.output_modality import DRAINABLE_MODALITIES

from omni_fastpath.hooks import HOOKS
from omni_fastpath.ledger import runtime
from omni_fastpath.patches.budgeted_drain.drain import DrainLoop, Observers, Upstream
from omni_fastpath.patches.budgeted_drain.routable import DefaultPolicy

_runtime = runtime("budgeted_drain")
_UPSTREAM = Upstream(dead_error=EngineDeadError, is_diffusion_start=is_diffusion_request_started_output)
_DRAINABLE = tuple(sorted(str(modality) for modality in DRAINABLE_MODALITIES))


def default_policy() -> DefaultPolicy:
    """A fresh default policy with upstream's names in it."""
    return DefaultPolicy(_DRAINABLE, RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE)


def drain_loop(orchestrator: Any) -> DrainLoop:
    """The loop for one orchestrator, with the values in force and the hooks that somebody implements now."""
    HOOKS.load()
    observers = Observers(*(HOOKS.observer(name) for name in Observers._fields))
    policy = HOOKS.policy(default_policy())
    return DrainLoop(orchestrator, _runtime.options, _runtime.counters, policy, observers, _UPSTREAM)


def wrapped_orchestration_loop(
    _wrapped: Callable[..., Awaitable[None]], instance: Any, _args: Any, _kwargs: Any
) -> Awaitable[None]:
    """Run our loop in place of upstream's poll loop."""
    return drain_loop(instance).run()


def wrapped_add_client(wrapped: Callable[..., int], instance: Any, args: Any, kwargs: Any) -> int:
    """Attach as upstream does, then let the loop that serves this pool look at the new replica."""
    replica_id = wrapped(*args, **kwargs)
    for loop in list(DrainLoop.running):
        loop.attached(instance)
    return replica_id
