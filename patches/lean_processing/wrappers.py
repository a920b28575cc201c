"""The slots of ``lean_processing``, in the order in which a raw output reaches them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from itertools import groupby
from typing import Any

from vllm.outputs import RequestOutput
from vllm.v1.engine.output_processor import OutputProcessorOutput

from .latencies import Records
from .socket_reader import SocketReader, attached
from .step_aside import patch, step_aside
from .token_ids import TextCompletion, make_lean
from .unseen import BareOutput, Unseen, look_at, unseen_of

_counters = patch.counters


def wrapped_ensure_output_queue_task(wrapped: Callable[..., None], instance: Any, args: Any, kwargs: Any) -> None:
    """Start a client's socket reader as upstream does, once; before that, its socket gets our way of waiting."""
    reader: SocketReader | None = None
    if instance.resources.output_queue_task is None and not patch.has_failed:
        try:
            reader = attached(instance)
        except Exception as error:
            step_aside("preparing a client's socket", error)
    try:
        wrapped(*args, **kwargs)
    except BaseException:  # without an event loop, for one; a later attempt finds the socket as it was
        if reader is not None:
            vars(instance.resources.output_socket).pop("recv_multipart", None)
        raise
    if reader is not None:
        instance.resources.output_queue_task.add_done_callback(reader.leave)


def wrapped_process_llm_stage_outputs(
    wrapped: Callable[..., Awaitable[Any]], instance: Any, args: Any, kwargs: Any
) -> Awaitable[Any]:
    """Go on as upstream does; before that, find out which requests' outputs are received at this stage."""
    if len(args) == 4 and not patch.has_failed:
        try:
            look_at(instance, args[0], args[2].outputs)
        except Exception as error:
            step_aside("finding out who receives an output", error)
    return wrapped(*args, **kwargs)


def wrapped_process_outputs(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    """Process a raw output's entries in their order: those that need no output are counted, and the rest is upstream's.

    Upstream accumulates all payloads of a raw output before it makes the first output; so a raw output that names a
    request twice is left to it.
    """
    if len(args) != 3 or patch.has_failed:
        return wrapped(*args, **kwargs)
    entries, stamp, statistics = args
    states = instance.request_states
    try:
        records = instance._native_text_metrics_by_request
        if type(records) is dict:
            instance._native_text_metrics_by_request = Records(records)
        _counters["raw_outputs"] += 1
        found: list[Any] = [_looked_at(states.get(entry.request_id), entry) for entry in entries]
    except Exception as error:
        step_aside("looking at a raw output", error)
        return wrapped(*args, **kwargs)
    if not any(found) or len({entry.request_id for entry in entries}) < len(entries):
        return wrapped(*args, **kwargs)
    outputs: list[Any] = []
    aborts: list[str] = []
    for is_unseen, run in groupby(zip(found, entries, strict=True), key=lambda pair: pair[0] is not None):
        if is_unseen:
            outputs += [_count(instance, unseen, entry, stamp, statistics) for unseen, entry in run]
        else:
            done = wrapped([entry for _, entry in run], stamp, statistics)
            outputs += done.request_outputs
            aborts += done.reqs_to_abort
    return OutputProcessorOutput(outputs, aborts)


def _looked_at(state: Any, entry: Any) -> Unseen | None:
    """What is known of an entry's request, if the entry need not become an output."""
    make_lean(state)
    return unseen_of(state, entry)


def _count(processor: Any, unseen: Unseen, entry: Any, stamp: float | None, statistics: Any) -> BareOutput:
    """Do for an entry what upstream does besides making an output."""
    state = processor.request_states[entry.request_id]
    processor._update_stats_from_output(state, entry, stamp, statistics)
    state.detokenizer.update(entry.new_token_ids, False)
    _counters["not_built"] += 1
    return unseen.bare


def wrapped_record_output_timestamps(wrapped: Callable[..., None], instance: Any, args: Any, kwargs: Any) -> None:
    """Record what upstream records: of an output without a payload that is not its request's first, only a time."""
    stamp = kwargs.get("output_ts")
    if len(args) != 1 or stamp is None or patch.has_failed:
        wrapped(*args, **kwargs)
        return
    stamps, firsts = instance._output_timestamps_by_request, instance._non_empty_first_output_timestamps_by_request
    rest: list[Any] = []
    for output in args[0]:
        name = getattr(output, "request_id", None)
        if name in firsts and name in stamps and _has_no_payload(output):
            stamps[name].append(stamp)
        else:
            rest.append(output)
    if rest:
        wrapped(rest, output_ts=stamp)


def _has_no_payload(output: Any) -> bool:
    return type(output) is BareOutput or (
        type(output) is RequestOutput and len(output.outputs) == 1 and type(output.outputs[0]) is TextCompletion
    )
