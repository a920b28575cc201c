"""What differs between the releases of vLLM-Omni that the simulated device runs on, found by looking at what is there.

Not for the platform modules, which must not import vllm_omni.
"""

import dataclasses
from typing import Any

import torch
from vllm_omni.outputs import OmniModelRunnerOutput

try:
    from vllm_omni.core.sched.omni_ar_scheduler import _should_emit_engine_output as emits_output
except ImportError:  # up to 0.28 every stage sends what it makes

    def emits_output(model_config: Any, *, stopped: bool, has_control: bool) -> bool:  # noqa: ARG001
        """Whether a stage sends an output that ends nothing."""
        return True


try:
    from vllm_omni.distributed.omni_connectors.utils.config import stage_sends_async_output
except ImportError:  # up to 0.24 every stage's payload is split

    def stage_sends_async_output(model_config: Any) -> bool:  # noqa: ARG001 - upstream's signature
        """Whether what a stage puts out is split between the next stage and the client."""
        return True


__all__ = [
    "PAYLOAD",
    "SPLITS",
    "Payload",
    "Payloads",
    "client_gets_payload",
    "emits_output",
    "payload_fields",
    "split",
    "stage_sends_async_output",
]

Payload = dict[str, torch.Tensor]
Payloads = list[Payload | None] | None

SPLITS = any(field.name == "inter_stage_outputs" for field in dataclasses.fields(OmniModelRunnerOutput))
"""Whether there is one payload for the next stage and one for the client; on 0.22 both get the very same one."""


def split(payloads: list[Payload]) -> tuple[Payloads, Payloads]:
    """What goes to the next stage and what to the client, where a stage splits that."""
    if not SPLITS:
        return list(payloads), list(payloads)
    from vllm_omni.utils.mm_outputs import partition_payload_list

    inter_stage, client = partition_payload_list(payloads)
    return inter_stage, client


def payload_fields(inter_stage: Payloads, client: Payloads) -> dict[str, Any]:
    """A runner's output as far as it says what `split` found."""
    if SPLITS:
        return {"inter_stage_outputs": inter_stage, "multimodal_outputs": client}
    return {"pooler_output": client}


PAYLOAD = "multimodal_output" if SPLITS else "pooling_output"
"""The field of an engine's output that has the client's payload."""


def client_gets_payload(model_config: Any) -> bool:
    """Whether what a stage makes for the next one is sent to the orchestrator too."""
    return not (SPLITS and stage_sends_async_output(model_config))
