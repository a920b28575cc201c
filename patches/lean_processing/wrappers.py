"""The slots of ``lean_processing``: a request's admission to an output processor, its time stamps, a raw output."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any
from weakref import ref

from vllm_omni.engine.orchestrator import Orchestrator
from vllm_omni.metrics.definitions import _SAMPLE_RATE_KEYS

from omni_fastpath.ledger import runtime

from .aside import patch, step_aside
from .latencies import Records
from .processor import LeanProcessor
from .states import BareOutput, LeanState, Unseen, UnseenState, unseen_kind
from .upstream import (
    GOES_PAST,
    MAY_LEAVE_METRICS_OUT,
    MultimodalOutputProcessor,
    OmniRequestState,
    count_audio_frames,
    is_looked_at,
    is_session,
    iter_mm_outputs,
)

_counters = runtime("lean_processing").counters

_SEARCHED = "_omni_fastpath_searched"
"""Attribute of a pool: in whose client and configuration a sample rate was looked for, and what was found."""


def wrapped_add_request(wrapped: Callable[..., None], instance: Any, args: Any, kwargs: Any) -> None:
    """Add a request as upstream does, then let its state, the processor and its records be lean ones."""
    wrapped(*args, **kwargs)
    if patch.has_failed:
        return
    try:
        _make_lean(instance, args[0] if args else kwargs["request"])
    except Exception as error:
        step_aside("making a request's processing lean", error)


def _make_lean(instance: Any, request: Any) -> None:
    state = instance.request_states.get(request.request_id)
    if type(state) is OmniRequestState:
        state.__class__ = LeanState
        _counters["requests"] += 1
    if GOES_PAST and type(instance) is MultimodalOutputProcessor:
        instance.__class__ = LeanProcessor
    records = instance._native_text_metrics_by_request
    if type(records) is dict:
        instance._native_text_metrics_by_request = Records(records)


def wrapped_record_output_timestamps(wrapped: Callable[..., None], instance: Any, args: Any, kwargs: Any) -> None:
    """Record what upstream records; whether an output is the first with something in it, only until one was."""
    stamp = kwargs.get("output_ts")
    # A diffusion stage's, or a caller that we do not know.
    if (
        stamp is None
        or len(args) != 1
        or patch.has_failed
        or (MAY_LEAVE_METRICS_OUT and not instance.collect_stage_metrics)
    ):
        wrapped(*args, **kwargs)
        return
    stamps, firsts = instance._output_timestamps_by_request, instance._non_empty_first_output_timestamps_by_request
    for output in args[0]:
        request_id = getattr(output, "request_id", None)
        if request_id is None:
            continue
        name = str(request_id)
        known = stamps.get(name)
        if known is None:
            stamps[name] = [stamp]
        else:
            known.append(stamp)
        if type(output) is BareOutput:
            continue
        if name not in firsts and instance._has_non_empty_output(output):
            firsts[name] = stamp
        payloads = iter_mm_outputs(output)
        if payloads:
            _record_audio(instance, name, output, payloads)


def _record_audio(pool: Any, name: str, output: Any, payloads: list[Any]) -> None:
    rates = pool._audio_sample_rate_by_request
    try:
        searches = rates.get(name, 0) <= 0 and _may_say_a_rate(pool, payloads)
    except Exception as error:
        step_aside("finding out where a sample rate is said", error)
        searches = True
    frames = sum(count_audio_frames(payload) for payload in payloads)
    if frames > 0:
        pool._audio_frames_by_request[name] = pool._audio_frames_by_request.get(name, 0) + frames
    if searches and rates.get(name, 0) <= 0:
        _, rate, _ = pool._collect_audio_metrics([output], use_default_sample_rate=False)
        if rate > 0:
            rates[name] = rate


def _may_say_a_rate(pool: Any, payloads: list[Any]) -> bool:
    """Whether a search for the sample rate can find one: what a stage's client and configuration say stays as it is."""
    client, config = pool.stage_client, pool.stage_vllm_config
    searched = vars(pool).get(_SEARCHED)
    if searched is None or searched[0]() is not client or searched[1] is not config:
        try:
            whose = ref(client) if client is not None else _nobody
        except TypeError:  # a client of somebody else's, of which nobody can say later whether it is the same one
            return True
        rate = pool._infer_audio_sample_rate(None, use_default=False)
        searched = vars(pool)[_SEARCHED] = (whose, config, rate)
    return searched[2] > 0 or any(key in payload for payload in payloads for key in _SAMPLE_RATE_KEYS)


def _nobody() -> None:
    return None


def wrapped_process_llm_stage_outputs(
    wrapped: Callable[..., Awaitable[Any]], instance: Any, args: Any, kwargs: Any
) -> Awaitable[Any]:
    """Go on as upstream does; before that, find out whether anybody sees the outputs of requests that are new.

    Of ``_process_llm_stage_outputs``, as both of upstream's loops call it; up to 0.26 processing stands in the loop
    itself, and this is of ``_handle_kv_ready_raw_outputs``, which it calls right before.
    """
    given = len(args)
    if given in (4, 2) and not patch.has_failed:
        stage_id, raw_outputs = args[0], args[2] if given == 4 else args[1]
        try:
            states = instance.stage_pools[stage_id].output_processor.request_states
            for entry in raw_outputs.outputs:
                state = states.get(entry.request_id)
                if type(state) is LeanState and state.unseen is None:
                    _decide(instance, stage_id, state, entry.request_id)
        except Exception as error:
            step_aside("finding out whether anybody sees an output", error)
    return wrapped(*args, **kwargs)


def _decide(orchestrator: Any, stage_id: int, state: LeanState, name: str) -> None:
    """Say of a request at one stage whether anybody sees what it makes there; not before its first output with content.

    The first output with something in it is a time that users may be told of, so that upstream makes it.
    """
    pool = orchestrator.stage_pools[stage_id]
    firsts = pool._non_empty_first_output_timestamps_by_request
    if name in firsts:
        unseen = _is_unseen(orchestrator, stage_id, pool, state, name)
        state.unseen = unseen and Unseen(orchestrator.request_states[name], name, firsts)
        if unseen:
            state.__class__ = UnseenState
            pool.output_processor.unseen = True


def _is_unseen(orchestrator: Any, stage_id: int, pool: Any, state: LeanState, name: str) -> bool:
    request = orchestrator.request_states.get(name)
    companions = orchestrator._cfg_tracker
    return (
        # Not a subclass: a duplex orchestrator's plugins look at every output.
        type(orchestrator) is Orchestrator
        and not is_looked_at(orchestrator)
        and orchestrator.async_chunk
        and orchestrator._pd_pair is None
        and stage_id + 1 < orchestrator.num_stages
        and pool.stage_client is not None
        and not pool.final_output
        and orchestrator._stage_receives_async_chunks(stage_id + 1)
        and request is not None
        and not request.streaming.enabled
        and not is_session(request)
        and state.external_req_id == name
        and not companions.is_companion(name)
        and not companions.has_companions(name)
        and unseen_kind(state)
    )
