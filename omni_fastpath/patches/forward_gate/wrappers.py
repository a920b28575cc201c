"""The wrappers of ``forward_gate``: outputs leave the scheduler without what the connector sends."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any
from weakref import WeakSet

from vllm_omni.distributed.omni_connectors.utils.config import get_stage_connector_role, stage_sends_async_output
from vllm_omni.utils.mm_outputs import partition_flat_payload

from omni_fastpath.declare import State
from omni_fastpath.guard import Call
from omni_fastpath.ledger import state_of

_patch = state_of("forward_gate")
_counters = _patch.counters

_CFG_COMPANION = "__cfg_"
"""Part of the id of every companion that upstream's input processors make. Its output is bundled with its parent's."""

_gating: WeakSet[Any] = WeakSet()
"""The schedulers whose outputs are gated. A scheduler that was made before the patch was installed is not one."""


# ---- Judging a stage ----


def wrapped_ar_init(wrapped: Call, instance: Any, args: Any, kwargs: Any) -> None:
    """Make the scheduler, then judge its stage and report the result."""
    wrapped(*args, **kwargs)
    state, reason = verdict(instance)
    if state is State.APPLIED:
        _gating.add(instance)
    _patch.report(state, reason)


def wrapped_generation_init(wrapped: Call, instance: Any, args: Any, kwargs: Any) -> None:
    """Make the scheduler, and report that its stage sends nothing to another one."""
    wrapped(*args, **kwargs)
    stage = _stage_name(getattr(instance.vllm_config, "model_config", None))
    _patch.report(State.NOT_APPLICABLE, f"{stage} is a generation stage, whose outputs are sent to the client")


def verdict(scheduler: Any) -> tuple[State, str]:
    """Whether the outputs of this scheduler are gated, and the reason."""
    model_config = scheduler.vllm_config.model_config
    stage = _stage_name(model_config)
    if not getattr(model_config, "async_chunk", False):
        return State.NOT_APPLICABLE, f"{stage} runs without async-chunk, so that the orchestrator passes its payload on"
    if getattr(model_config, "use_v2_model_runner", False):
        return State.NOT_APPLICABLE, f"{stage} runs on model runner v2, which sends no payload to the orchestrator"
    if stage_sends_async_output(model_config):
        return _splits_itself(model_config)
    for found, obstacle in _obstacles(scheduler, model_config):
        if found:
            return State.NOT_APPLICABLE, f"{stage} {obstacle}"
    return State.APPLIED, f"what {stage} sends to the next stage is not sent to the orchestrator as well"


def _splits_itself(model_config: Any) -> tuple[State, str]:
    return State.SUPERSEDED, f"upstream's model runner splits the payload of {_stage_name(model_config)} itself"


def _obstacles(scheduler: Any, model_config: Any) -> Iterator[tuple[bool, str]]:
    """Each reason why the payload may be needed in the outputs, and whether it is so here."""
    worker_type = getattr(model_config, "worker_type", None)
    output_type = getattr(model_config, "engine_output_type", None)
    yield worker_type not in (None, "ar"), f"has worker type {worker_type}, and only AR stages send chunks"
    yield bool(getattr(model_config, "final_output", False)), "is a final-output stage, which sends to the client"
    yield output_type in ("audio", "image", "video"), f"makes {output_type}, which is sent to the client"
    duplex = getattr(model_config, "session_mode", "turn") != "turn"
    yield duplex, "serves duplex sessions, which read its payload in the orchestrator"
    prefill = scheduler.vllm_config.kv_transfer_config is not None
    yield prefill, "transfers its KV cache (PD prefill), and the orchestrator passes its payload to the decode stage"
    unconnected = get_stage_connector_role(model_config) is None
    yield unconnected, "has no connector, so that the orchestrator passes its payload on"
    adapter = getattr(scheduler, "chunk_transfer_adapter", None)
    processor = getattr(adapter, "custom_process_next_stage_input_func", None)
    yield not _makes_chunks(processor), "makes no chunks, so that the orchestrator passes its payload on"


def _makes_chunks(processor: Any) -> bool:
    """Whether an input processor makes chunks from the output of a step.

    One for whole payloads lacks the parameter for the step's payload, or that for the last chunk.
    """
    if processor is None:
        return False
    return {"multimodal_output", "is_finished"} <= set(inspect.signature(processor).parameters)


def _stage_name(model_config: Any) -> str:
    return f"stage {getattr(model_config, 'stage_id', '?')} ({getattr(model_config, 'model_stage', '?')})"


# ---- Gating a step ----


def wrapped_update_from_output(wrapped: Call, instance: Any, args: Any, kwargs: Any) -> Any:
    """Let upstream make the step's outputs, then remove what the connector sends.

    It is removed afterwards, because what the runner returned decides whether an output is made and when prefill
    statistics are taken. The payloads are not changed, because the connector's save tasks have them.
    """
    if instance not in _gating:
        return wrapped(*args, **kwargs)
    kept = _kept_in_step(instance, *args, **kwargs)
    outputs = wrapped(*args, **kwargs)
    if kept is not None:
        for batch in outputs.values():
            for output in batch.outputs:
                if output.request_id not in kept:
                    _gate_output(output)
    return outputs


def _kept_in_step(scheduler: Any, scheduler_output: Any, model_runner_output: Any) -> frozenset[str] | None:
    """The requests that keep their payload in this step, or None if the step is left alone.

    Called before the step is processed, because a request that ends in it is gone afterwards. A step without scheduled
    tokens returns vLLM's own ``EMPTY_MODEL_RUNNER_OUTPUT``, which has neither payload. Upstream's scheduler reads both
    with a default, too. If the runner filters what clients get, the patch has nothing to do in this stage and says so.
    """
    sent = getattr(model_runner_output, "inter_stage_outputs", None)
    if sent is None:
        return None
    # The same list, also after pickling. One that was filtered for the client is another list.
    if getattr(model_runner_output, "multimodal_outputs", None) is not sent:
        _gating.discard(scheduler)
        _patch.report(*_splits_itself(scheduler.vllm_config.model_config))
        return None
    requests = scheduler.requests
    return frozenset(each for each in scheduler_output.num_scheduled_tokens if _needs_payload(requests.get(each)))


def _needs_payload(request: Any) -> bool:
    """Whether the orchestrator reads this request's payload."""
    return request is not None and (
        request.pooling_params is not None
        or request.resumable
        # A session is still one when its last segment is not resumable.
        or request.streaming_queue is not None
        or _CFG_COMPANION in request.request_id
        or _CFG_COMPANION in (request.external_req_id or "")
    )


def _gate_output(output: Any) -> None:
    payload = getattr(output, "multimodal_output", None)
    if not isinstance(payload, dict):
        return
    _, visible = partition_flat_payload(payload)
    if len(visible) == len(payload):
        return
    output.multimodal_output = visible or None
    _counters["multimodal_outputs"] += 1
