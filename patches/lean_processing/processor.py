"""An output processor of ours: upstream's, past which goes what nobody sees and what brings no more than tokens."""

from __future__ import annotations

from typing import Any

from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.engine.output_processor import OutputProcessorOutput
from vllm.v1.metrics.stats import IterationStats
from vllm_omni.engine import OmniEngineCoreOutput

from .aside import patch, step_aside
from .latencies import Samples
from .states import LeanState, UnseenState
from .upstream import (
    HAS_COALESCED,
    HAS_PROMPT_TOKEN_ID_LOGPROBS,
    HAS_SAMPLING_MASK,
    HAS_SPEC_DECODE_METRICS,
    MultimodalOutputProcessor,
    accumulate_segment_tpot,
    modality_to_type_string,
)

_STATES = (LeanState, UnseenState)


class LeanProcessor(MultimodalOutputProcessor):  # type: ignore[misc]
    """Upstream's processor of a stage, whose class is changed to this one when it is given a request.

    Attributes:
        unseen: Whether it ever had a request of which nobody sees what it makes here.
    """

    unseen = False

    def process_outputs(
        self,
        engine_core_outputs: list[Any],
        engine_core_timestamp: float | None = None,
        iteration_stats: Any = None,
    ) -> Any:
        """What upstream makes, in the order of the entries; for what goes past it, the bare object of its request."""
        if (
            not self.unseen
            or patch.has_failed
            or len({entry.request_id for entry in engine_core_outputs}) < len(engine_core_outputs)
        ):
            # Upstream accumulates all payloads of a raw output before it makes the first output.
            return super().process_outputs(engine_core_outputs, engine_core_timestamp, iteration_stats)
        states, kind = self.request_states, modality_to_type_string(self.output_modality)
        made: list[Any] = []
        aborts: list[str] = []
        rest: list[Any] = []

        def upstreams() -> None:
            done = super(LeanProcessor, self).process_outputs(rest, engine_core_timestamp, iteration_stats)
            made.extend(done.request_outputs)
            aborts.extend(done.reqs_to_abort)
            rest.clear()

        for entry in engine_core_outputs:
            state = states.get(entry.request_id)
            if type(state) is not UnseenState or not _is_plain(state, entry):
                rest.append(entry)
                continue
            if rest:
                upstreams()
            if self._pass(state, entry, kind, engine_core_timestamp, iteration_stats):
                made.append(state.unseen.bare)
            else:  # its payload is accumulated already
                payload, entry.multimodal_output = entry.multimodal_output, None
                rest.append(entry)
                upstreams()
                entry.multimodal_output = payload
        if len(rest) == len(engine_core_outputs):  # nothing went past, and upstream gets its own list
            return super().process_outputs(engine_core_outputs, engine_core_timestamp, iteration_stats)
        if rest:
            upstreams()
        return OutputProcessorOutput(made, aborts)

    def _pass(self, state: UnseenState, entry: Any, kind: str, stamp: float | None, iteration_stats: Any) -> bool:
        """Do for an entry what upstream would besides making an output; False where it must make one."""
        if entry.multimodal_output is not None:
            state.add_multimodal_tensor(entry.multimodal_output, kind)
        if not state.unseen.went_by(state):
            return False
        self._update_stats_from_output(state, entry, stamp, iteration_stats)
        state.detokenizer.token_ids.extend(entry.new_token_ids)
        return True

    def _update_stats_from_output(
        self, req_state: Any, engine_core_output: Any, engine_core_timestamp: float | None, iteration_stats: Any
    ) -> None:
        """Upstream's statistics of an entry; those of a step that only brings tokens are counted here."""
        stamp = engine_core_timestamp
        try:  # nothing is changed in it
            record = self._native_text_metrics_by_request.get(req_state.external_req_id)
            is_ours = not (
                record is None
                or stamp is None
                or type(samples := record["vllm_itls_ms"]) is not Samples
                or type(iteration_stats) is not IterationStats
                or type(req_state) not in _STATES
                or type(engine_core_output) is not OmniEngineCoreOutput
                or req_state.is_prefilling
                or engine_core_output.events is not None
                or engine_core_output.num_nans_in_logits
                or engine_core_output.num_generation_tokens is not None
                or (HAS_COALESCED and engine_core_output.is_coalesced)
                or (last := (native := req_state.native_text_stats).last_token_ts) <= 0
                or patch.has_failed
            )
            if is_ours:
                tokens, latency = len(engine_core_output.new_token_ids), stamp - last
        except Exception as error:
            step_aside("counting a step's tokens", error)
            is_ours = False
        if not is_ours:
            super()._update_stats_from_output(req_state, engine_core_output, stamp, iteration_stats)
            return
        iteration_stats.num_generation_tokens += tokens
        iteration_stats.inter_token_latencies_iter.append(latency)
        native.num_generation_tokens += tokens
        native.last_token_ts = stamp
        record["num_generation_tokens"] = native.num_generation_tokens
        latency_ms = max(latency * 1000.0, 0.0)
        samples.append(latency_ms)
        accumulate_segment_tpot(record, elapsed_ms=latency_ms, new_tokens=tokens)


if accumulate_segment_tpot is None:
    del LeanProcessor._update_stats_from_output  # upstream's records hold other things there, which it counts itself


def _is_plain(state: UnseenState, entry: Any) -> bool:
    """Whether an entry in the middle of a request brings tokens, a payload of known keys, and nothing else."""
    try:
        return _brings_no_more(state, entry)
    except Exception as error:
        step_aside("looking at what an entry brings", error)
        return False


def _brings_no_more(state: UnseenState, entry: Any) -> bool:
    return (
        type(entry) is OmniEngineCoreOutput
        and entry.finish_reason is None
        and (entry.multimodal_output is None or state.unseen.knows(entry.multimodal_output))
        and entry.pooling_output is None
        and entry.kv_transfer_params is None
        and entry.events is None
        and entry.new_logprobs is None
        and entry.new_prompt_logprobs_tensors is None
        and entry.routed_experts is None
        and not (HAS_SPEC_DECODE_METRICS and entry.spec_decode_metrics is not None)
        and not (HAS_SAMPLING_MASK and entry.new_sampling_mask is not None)
        and not (HAS_PROMPT_TOKEN_ID_LOGPROBS and entry.prompt_token_id_logprobs is not None)
        and not state.is_prefilling
        and type(state.detokenizer) is IncrementalDetokenizer  # no text, so no stop strings
    )
