"""Upstream's generator of a streamed chat answer, without a server around it."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

SERVING = "vllm_omni.entrypoints.openai.serving_chat"


def serving() -> Any:
    """The real class, with as much of an instance as a streamed answer asks for."""
    from vllm_omni.entrypoints.openai.serving_chat import OmniOpenAIServingChat

    found = object.__new__(OmniOpenAIServingChat)
    values = {
        "use_harmony": False,
        "parser_cls": None,
        "enable_auto_tools": False,
        "enable_force_include_usage": False,
        "enable_log_outputs": False,
        "enable_prompt_tokens_details": False,
        "request_logger": None,
        "response_role": "assistant",
        "model_config": SimpleNamespace(hf_config=SimpleNamespace(model_type="none")),
        "engine_client": SimpleNamespace(
            request_states={}, mod_metrics=None, engine=None, errored=False, model_config=None
        ),
    }
    vars(found).update(values)
    return found


def request(**more: Any) -> Any:
    """A request for a streamed answer of text and audio, with the usage in each event."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    given: dict[str, Any] = {
        "model": "m",
        "messages": [{"role": "user", "content": "Say it"}],
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "modalities": ["text", "audio"],
        **more,
    }
    return ChatCompletionRequest(**given)


def output(kind: str, choices: Sequence[Any], *, finished: bool = False, **more: Any) -> Any:
    """What the orchestrator sends to the front end: ``text`` or ``audio`` of one request."""
    from vllm_omni.outputs import OmniRequestOutput

    told = {"stage_id": 0 if kind == "text" else 2, "final_output_type": kind, **more}
    return OmniRequestOutput(
        request_id="one", prompt_token_ids=[1, 2, 3], outputs=list(choices), finished=finished, **told
    )


def token(text: str, number: int, *, index: int = 0, finish: str | None = None, logprobs: Any = None) -> Any:
    """A choice with one token."""
    from vllm.outputs import CompletionOutput

    return CompletionOutput(index, text, [number], None, logprobs, finish_reason=finish)


def sound(samples: int = 480, *, finish: str | None = None) -> Any:
    """A choice with a chunk of audio."""
    import torch

    found = token("", 7, finish=finish)
    found.multimodal_output = {"audio": torch.linspace(-1, 1, samples), "sr": 24000}
    return found


async def events(
    request: Any, outputs: Sequence[Any], *, model: str = "m", one: str = "chatcmpl-1"
) -> tuple[list[str], Any]:
    """The events of an answer, and the usage that the server's log gets; ``one`` is the request's id."""

    async def given() -> AsyncIterator[Any]:
        for each in outputs:
            await asyncio.sleep(0)
            yield each

    metadata = vars(importlib.import_module(SERVING))["RequestResponseMetadata"](request_id=one)
    stream = serving().chat_completion_stream_generator(
        request, given(), one, model, [], None, metadata, None, mm_token_counts=None, raw_request=None
    )
    return [event async for event in stream], metadata.final_usage_info
