"""Where the queue and the holds stand in upstream's stage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from omni_fastpath.config import ConfigError
from omni_fastpath.declare import State
from omni_fastpath.ledger import logger, runtime

from .attach import attach, calm_of, obstacle_to_counting
from .calm import Calm
from .credits import Credits, limits_of
from .holdable import not_applicable, obstacle_to_holds, refuse
from .payload import KeptPayload
from .queue import SaveQueue
from .sending import make_again, send_managed
from .upstream import PAYLOAD

if TYPE_CHECKING:
    from . import SaveQueueOptions

_runtime = runtime("save_queue_cap")
_counters = _runtime.counters

_ATTRIBUTE = "_omni_fastpath_save_queue"


@dataclass(slots=True)
class _Stage:
    """What stands on a scheduler: its adapter's queue, and the holds where streams may be held."""

    queue: SaveQueue
    credits: Credits | None


def wrapped_scheduler_made(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    """Put the queue in place right after the adapter was made: with the scheduler or with part of its state.

    Raises:
        ConfigError: The values do not go with this stage's scheduling.
    """
    result = wrapped(*args, **kwargs)
    adapter = instance.chunk_transfer_adapter
    before = getattr(adapter, "_pending_save_reqs", None)
    try:
        _set_up(instance)
    except ConfigError as error:
        _runtime.report(State.FAILED, str(error))
        raise
    except Exception as error:  # the stage starts as upstream's
        if adapter is not None:
            adapter._pending_save_reqs = before
        logger.exception("omni-fastpath: save_queue_cap could not be set up")
        _runtime.report(State.FAILED, f"setting up failed: {error!r}; this stage's save queue is upstream's")
    return result


def _set_up(scheduler: Any) -> None:
    reason = not_applicable(scheduler)
    if reason is not None:
        _runtime.report(State.NOT_APPLICABLE, reason)
        return
    options: SaveQueueOptions = _runtime.options
    adapter = scheduler.chunk_transfer_adapter
    unheld = obstacle_to_holds(scheduler, options)
    if unheld is None:
        refuse(options, scheduler.vllm_config)
    queue = _attach(adapter, scheduler.vllm_config, options)
    credits_ = None
    if unheld is None and limits_of(options):
        credits_ = Credits(scheduler, queue.fair, adapter, options, _counters)
    setattr(scheduler, _ATTRIBUTE, _Stage(queue, credits_))
    helper = ", with a helper for slow sends" if len(queue.lanes) > 1 else ""
    uncounted = obstacle_to_counting(adapter.connector)
    shared = f"; unfetched chunks are not counted: {uncounted}" if uncounted is not None else ""
    if unheld is not None:
        held = f"; no stream is held: {unheld}"
    elif credits_ is None:
        held = "; no stream is held: no limit does"
    else:
        held = f"; streams are held for {', '.join(limits_of(options))}"
    _runtime.report(
        State.APPLIED,
        f"this stage's save queue is ours{helper}{held}{shared}; the model runner's own "
        "save queue (synchronous full payloads) is not covered",
    )


def _attach(adapter: Any, vllm_config: Any, options: SaveQueueOptions, calm: Calm | None = None) -> SaveQueue:
    calm = calm or calm_of(options)
    return attach(adapter, vllm_config, options, _counters, calm=calm, stepped_aside=_stepped_aside)


def _stepped_aside(reason: str) -> None:
    _counters["stepped_aside"] = 1
    _runtime.report(State.FAILED, f"stepped aside: {reason}")


def wrapped_schedule(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    """See how the queue is, renew the holds, then schedule."""
    stage: _Stage | None = getattr(instance, _ATTRIBUTE, None)
    if stage is not None:
        try:
            _before_step(stage)
        except Exception as error:  # the step is taken all the same
            stage.queue.step_aside(error)
    return wrapped(*args, **kwargs)


def _before_step(stage: _Stage) -> None:
    queue = stage.queue
    if not queue.before_step():
        return
    credits_ = stage.credits
    if credits_ is not None:
        credits_.hold()
    queue.calm_down(is_holding=credits_ is not None and credits_.is_holding)


def wrapped_send_single_request(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    """Send, measure, and see what of the stream lies in shared memory."""
    queue = instance._pending_save_reqs
    if type(queue) is not SaveQueue:
        return wrapped(*args, **kwargs)
    task = args[0] if args else kwargs["task"]
    if not queue.is_calm and not queue.is_aside:
        return send_managed(wrapped, instance, args, kwargs, queue, task)
    # Nothing afterwards: that the lane asks for more says that it is done. It runs once a task.
    if type(task.get(PAYLOAD)) is KeptPayload:
        make_again(queue, task)
    return wrapped(*args, **kwargs)
