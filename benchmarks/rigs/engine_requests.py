"""A request as the orchestrator submits it to a stage."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any


def engine_request(
    name: str, prompt_token_ids: Sequence[int], sampling_params: Any, *, request_id: str | None = None, **fields: Any
) -> Any:
    """Upstream's request of a stage's engine, text in, with nothing but what is said here.

    Args:
        name: The external request id.
        prompt_token_ids: The prompt.
        sampling_params: Upstream's.
        request_id: The internal one; the same unless given.
        fields: More of upstream's fields.
    """
    from vllm_omni.engine import OmniEngineCoreRequest

    return OmniEngineCoreRequest(
        request_id=request_id or name,
        external_req_id=name,
        prompt_token_ids=list(prompt_token_ids),
        mm_features=None,
        sampling_params=sampling_params,
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
        **fields,
    )
