"""What the patch needs of upstream, found by looking: names differ between releases, and some have no such thing."""

from __future__ import annotations

from typing import Any

__all__ = [
    "CLIENT_ROOTS",
    "PAYLOAD",
    "get_stage_connector_role",
    "partition_flat_payload",
    "serves_duplex",
    "stage_sends_async_output",
    "visible_to_client",
]

try:
    from vllm_omni.utils.mm_outputs import partition_flat_payload
except ImportError:  # releases before the split: all that is sent is sent twice
    partition_flat_payload = None

try:
    from vllm_omni.distributed.omni_connectors.utils.config import get_stage_connector_role, stage_sends_async_output
except ImportError:  # releases before a connector's role: who sends chunks is known by its processor alone
    get_stage_connector_role = stage_sends_async_output = None

CLIENT_ROOTS = frozenset(
    ("model_outputs", "sr", "audio", "image", "images", "video", "videos", "trajectory_latents", "latents")
)
"""What clients may see, where upstream has no function to ask: the roots of its first split."""

PAYLOAD = "pooling_output" if partition_flat_payload is None else "multimodal_output"
"""The parameter with a step's payload of an input processor that makes chunks."""


def visible_to_client(payload: dict[str, Any]) -> dict[str, Any]:
    """What of a flat payload goes to the client."""
    if partition_flat_payload is not None:
        client: dict[str, Any] = partition_flat_payload(payload)[1]
        return client
    return {key: value for key, value in payload.items() if key.partition(".")[0] in CLIENT_ROOTS}


def serves_duplex(model_config: Any, processor: Any) -> bool:
    """Whether a stage may serve duplex sessions, whose payloads the orchestrator reads.

    A release that lets the deployment choose says so in the stage's configuration. In the first one with such sessions
    a pipeline has them or not, and a stage knows its pipeline by the input processor alone.

    Args:
        model_config: Of the stage.
        processor: The stage's input processor for chunks.
    """
    mode = getattr(model_config, "session_mode", None)
    if mode is not None:
        return bool(mode != "turn")
    from vllm_omni.config.stage_config import PipelineConfig  # noqa: PLC0415 - once a stage, on few releases

    if not hasattr(PipelineConfig, "duplex_control_enabled"):
        return False
    from vllm_omni.config.pipeline_registry import OMNI_PIPELINES  # noqa: PLC0415 - as above

    path = f"{getattr(processor, '__module__', None)}.{getattr(processor, '__qualname__', None)}"
    return any(
        stage.async_chunk_process_next_stage_input_func == path
        for pipeline in OMNI_PIPELINES.values()
        if getattr(pipeline, "duplex_control_enabled", False)
        for stage in pipeline.stages
    )
