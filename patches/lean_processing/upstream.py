"""What upstream calls differently, or has on some releases and not on others, by looking at what is there.

Found once, and plain facts where possible: what is asked at each output must cost nothing where nothing is to be asked.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm_omni.engine import OmniEngineCoreOutput
from vllm_omni.engine.orchestrator import Orchestrator, OrchestratorRequestState

try:
    from vllm_omni.metrics.utils import count_audio_frames, iter_mm_outputs
    from vllm_omni.outputs.mm_outputs import MultimodalCompletionOutput
    from vllm_omni.outputs.multimodal_accumulation import drain_delta_payload
    from vllm_omni.outputs.output_modality import DRAINABLE_MODALITIES
    from vllm_omni.outputs.output_processor import (
        MultimodalOutputProcessor,
        OmniRequestState,
        _modality_to_type_string,
    )
except ImportError:  # up to 0.24
    from vllm_omni.engine.mm_outputs import MultimodalCompletionOutput
    from vllm_omni.engine.output_modality import DRAINABLE_MODALITIES
    from vllm_omni.engine.output_processor import MultimodalOutputProcessor, OmniRequestState

    count_audio_frames = iter_mm_outputs = drain_delta_payload = _modality_to_type_string = None

try:
    from vllm_omni.outputs.output_processor import _accumulate_segment_tpot
except ImportError:  # up to 0.28
    _accumulate_segment_tpot = None

__all__ = [
    "DRAINABLE_MODALITIES",
    "GOES_PAST",
    "HAS_COALESCED",
    "HAS_PROMPT_TOKEN_ID_LOGPROBS",
    "HAS_SAMPLING_MASK",
    "HAS_SPEC_DECODE_METRICS",
    "MAY_LEAVE_METRICS_OUT",
    "TAKES_OUT_AT_EACH_OUTPUT",
    "MultimodalCompletionOutput",
    "MultimodalOutputProcessor",
    "OmniRequestState",
    "accumulate_segment_tpot",
    "count_audio_frames",
    "drain_delta_payload",
    "is_looked_at",
    "is_session",
    "iter_mm_outputs",
    "modality_to_type_string",
]

modality_to_type_string: Any = _modality_to_type_string

GOES_PAST = drain_delta_payload is not None
"""Whether what nobody sees can go past upstream's processing; else nothing asks who sees an output."""

accumulate_segment_tpot: Any = _accumulate_segment_tpot
"""Counts the time per token of a segment; None where upstream does it another way, and counts each step itself."""

_OF_AN_ENTRY = frozenset(OmniEngineCoreOutput.__struct_fields__)

HAS_SAMPLING_MASK = "new_sampling_mask" in _OF_AN_ENTRY
HAS_SPEC_DECODE_METRICS = "spec_decode_metrics" in _OF_AN_ENTRY
HAS_PROMPT_TOKEN_ID_LOGPROBS = "prompt_token_id_logprobs" in _OF_AN_ENTRY
"""Whether an entry has these."""

HAS_COALESCED = "is_coalesced" in _OF_AN_ENTRY
"""Whether an entry may stand for several steps, whose time is no latency."""

TAKES_OUT_AT_EACH_OUTPUT = hasattr(LogprobsProcessor, "pop_prompt_token_id_logprobs")
"""Whether an output with DELTA takes out sampling masks, and log probabilities of asked-for ids of the prompt."""

MAY_LEAVE_METRICS_OUT = hasattr(Orchestrator, "collect_stage_metrics")
"""Whether a pool can be told to record nothing of its outputs."""

_HAS_OWNED_SESSIONS = "session_owned" in {field.name for field in fields(OrchestratorRequestState)}
"""Whether a request says that a session owns it; else its duplex identity does."""


def is_session(request: Any) -> bool:
    """Whether a session owns a request, whose outputs then go other ways."""
    return bool(request.session_owned) if _HAS_OWNED_SESSIONS else request.duplex_identity is not None


def is_looked_at(orchestrator: Any) -> bool:
    """Whether a duplex plane looks at every output, as up to 0.28 one may."""
    return getattr(orchestrator, "duplex_control_plane", None) is not None
