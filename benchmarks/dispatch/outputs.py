"""Outputs as upstream's processing makes them."""

from __future__ import annotations

from typing import Any


def request_output(name: str, heard: bool) -> Any:
    """What upstream's processing makes of such an entry; made once, because making it is not dispatch."""
    import torch
    from vllm.outputs import RequestOutput
    from vllm_omni.outputs.mm_outputs import MultimodalCompletionOutput, MultimodalPayload

    from benchmarks.rigs.inprocess import SAMPLE_RATE

    payload = MultimodalPayload({"audio": torch.ones(1 if heard else 0)}, {"sr": SAMPLE_RATE})
    completion = MultimodalCompletionOutput(
        multimodal_output=payload, index=0, text="", token_ids=[], cumulative_logprob=None, logprobs=None
    )
    return RequestOutput(name, None, [], None, [completion], finished=False)
