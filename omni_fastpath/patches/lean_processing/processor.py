"""An output processor that counts a step in the middle of a request with less work than upstream's statistics."""

from __future__ import annotations

from typing import Any

from vllm.v1.metrics.stats import IterationStats
from vllm_omni.engine import OmniEngineCoreOutput
from vllm_omni.outputs import output_processor
from vllm_omni.outputs.output_processor import MultimodalOutputProcessor

from omni_fastpath.ledger import state_of

from .latencies import Records, Samples
from .token_ids import LeanState

_patch = state_of("lean_processing")

_HAS_COALESCED = "is_coalesced" in OmniEngineCoreOutput.__struct_fields__
"""Whether an entry may represent several steps, whose time is not a latency."""

_accumulate: Any = getattr(output_processor, "_accumulate_segment_tpot", None)
"""Upstream's sum of the time per token. None on 0.28, whose records differ, so that upstream counts there."""


class LeanProcessor(MultimodalOutputProcessor):  # type: ignore[misc]
    """Upstream's processor of a stage, whose class is changed to this one at its first raw output.

    Attributes:
        stage: The orchestrator, and the number of the stage. None before they are known.
    """

    stage: tuple[Any, int] | None = None

    def _update_stats_from_output(self, req_state: Any, entry: Any, stamp: float | None, statistics: Any) -> Any:
        """Upstream's statistics of an entry. Those of a step with only tokens are counted here."""
        try:
            record = self._native_text_metrics_by_request.get(req_state.external_req_id)
            given = (req_state, entry, stamp, statistics)
            if record is not None and not _patch.has_failed and _is_step(*given, record):
                return _count_step(*given, record)
        except Exception as error:
            _patch.fail("counting a step", error)
        return super()._update_stats_from_output(req_state, entry, stamp, statistics)


if _accumulate is None:
    del LeanProcessor._update_stats_from_output


def _is_step(state: Any, entry: Any, stamp: float | None, statistics: Any, record: dict[str, Any]) -> bool:
    reported = getattr(entry, "num_generation_tokens", None)
    return (
        type(state) is LeanState
        and type(entry) is OmniEngineCoreOutput
        and type(statistics) is IterationStats
        and type(record["vllm_itls_ms"]) is Samples
        and stamp is not None
        and not state.is_prefilling
        and entry.events is None
        and not entry.num_nans_in_logits
        and (reported is None or (type(reported) is int and reported >= 0))
        and not (_HAS_COALESCED and entry.is_coalesced)
        and state.native_text_stats.last_token_ts > 0
    )


def _count_step(state: Any, entry: Any, stamp: Any, statistics: Any, record: dict[str, Any]) -> None:
    """Count a step as upstream does, or nothing of it if that fails."""
    native, samples, latencies = state.native_text_stats, record["vllm_itls_ms"], statistics.inter_token_latencies_iter
    tokens, reported = len(entry.new_token_ids), entry.num_generation_tokens
    latency = stamp - native.last_token_ts
    latency_ms = max(latency * 1000.0, 0.0)
    counted, taken = len(latencies), len(samples.all)
    before = statistics.num_generation_tokens, native.num_generation_tokens, native.last_token_ts
    try:
        statistics.num_generation_tokens += tokens
        latencies.append(latency)
        native.num_generation_tokens += tokens
        native.last_token_ts = stamp
        record["num_generation_tokens"] = native.num_generation_tokens if reported is None else reported
        samples.append(latency_ms)
        _accumulate(record, elapsed_ms=latency_ms, new_tokens=tokens)
    except Exception:
        statistics.num_generation_tokens, native.num_generation_tokens, native.last_token_ts = before
        del latencies[counted:]
        samples.cut(taken)
        raise


def make_lean(processor: Any) -> None:
    """Make a stage's processor a ``LeanProcessor``, if it is upstream's own, and replace its records."""
    if type(processor) is MultimodalOutputProcessor:
        processor.__class__ = LeanProcessor
    if type(processor._native_text_metrics_by_request) is dict:
        processor._native_text_metrics_by_request = Records(processor._native_text_metrics_by_request)
