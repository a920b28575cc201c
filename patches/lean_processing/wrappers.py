"""The slots of ``lean_processing``, in the order in which a raw output reaches them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from itertools import groupby
from typing import Any

from vllm.outputs import RequestOutput
from vllm.v1.engine.output_processor import OutputProcessorOutput
from vllm_omni.metrics.utils import count_audio_frames, iter_mm_outputs
from vllm_omni.outputs.mm_outputs import MultimodalCompletionOutput

from .processor import make_lean
from .socket_reader import SocketReader, attached
from .step_aside import patch, step_aside
from .token_ids import DeferredMultimodalCompletion, TextCompletion
from .unseen import BareOutput, look_at, unseen_of

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
    """Go on as upstream does; before that, tell the stage's processor of the orchestrator."""
    if len(args) == 4 and not patch.has_failed:
        try:
            look_at(instance, args[0])
        except Exception as error:
            step_aside("telling a processor of its stage", error)
    return wrapped(*args, **kwargs)


def wrapped_process_outputs(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    """Process a raw output's entries in their order: those that need no output are counted, and the rest is upstream's.

    Upstream accumulates all payloads of a raw output before it makes the first output; so a raw output that names a
    request twice is left to it, unless all of its entries are counted.
    """
    if len(args) != 3 or patch.has_failed:
        return wrapped(*args, **kwargs)
    entries, stamp, statistics = args
    states = instance.request_states
    try:
        make_lean(instance)
        _counters["raw_outputs"] += 1
        found = [unseen_of(instance, states.get(entry.request_id), entry) for entry in entries]
    except Exception as error:
        step_aside("looking at a raw output", error)
        return wrapped(*args, **kwargs)
    if all(found):
        pairs = zip(found, entries, strict=True)
        return OutputProcessorOutput([_count(instance, *pair, stamp, statistics) for pair in pairs], [])
    if not any(found) or len({entry.request_id for entry in entries}) < len(entries):
        return wrapped(*args, **kwargs)
    outputs: list[Any] = []
    aborts: list[str] = []
    for is_unseen, run in groupby(zip(found, entries, strict=True), key=lambda pair: pair[0] is not None):
        if is_unseen:
            outputs += [_count(instance, *pair, stamp, statistics) for pair in run]
        else:
            done = wrapped([entry for _, entry in run], stamp, statistics)
            outputs += done.request_outputs
            aborts += done.reqs_to_abort
    return OutputProcessorOutput(outputs, aborts)


def _count(processor: Any, unseen: Any, entry: Any, stamp: float | None, statistics: Any) -> BareOutput:
    """Do for an entry what upstream does besides making an output."""
    state = processor.request_states[entry.request_id]
    processor._update_stats_from_output(state, entry, stamp, statistics)
    state.detokenizer.update(entry.new_token_ids, False)
    _counters["not_built"] += 1
    bare: BareOutput = unseen.bare
    return bare


def wrapped_record_output_timestamps(wrapped: Callable[..., None], instance: Any, args: Any, kwargs: Any) -> None:
    """Record what upstream records: of an output that is not its request's first, only a time and audio frames."""
    stamp = kwargs.get("output_ts")
    if len(args) != 1 or stamp is None or patch.has_failed:
        wrapped(*args, **kwargs)
        return
    stamps, firsts = instance._output_timestamps_by_request, instance._non_empty_first_output_timestamps_by_request
    frames, rates = instance._audio_frames_by_request, instance._audio_sample_rate_by_request
    rest: list[Any] = []
    for output in args[0]:
        kind, name = type(output), getattr(output, "request_id", None)
        made = type(output.outputs[0]) if kind is RequestOutput and len(output.outputs) == 1 else kind
        if name not in firsts or name not in stamps or made not in _KNOWN:
            rest.append(output)
        elif made in _WITHOUT_PAYLOAD:
            stamps[name].append(stamp)
        elif rates.get(name, 0) > 0:  # found once, a rate stays
            count = sum(map(count_audio_frames, iter_mm_outputs(output)))
            stamps[name].append(stamp)
            if count > 0:
                frames[name] = frames.get(name, 0) + count
        else:
            rest.append(output)
    if rest:
        wrapped(rest, output_ts=stamp)


_WITHOUT_PAYLOAD = frozenset({BareOutput, TextCompletion})
_KNOWN = _WITHOUT_PAYLOAD | {MultimodalCompletionOutput, DeferredMultimodalCompletion}
"""Outputs and completions of which it is known where a payload stands."""
