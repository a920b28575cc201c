"""What the orchestrator's messages say, without what is a time: for comparing two arms."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

# What is a time, or counts a stage's ends (the last one).
_TIMES = ("_ms", "_ts", "timings", "stage_stats", "tokens_per_s", "audio_rtf", "batch_id")


def plain(value: Any) -> Any:
    """Plain, comparable data: tensors as dtype, shape and numbers."""
    if hasattr(value, "detach"):
        return (str(value.dtype), tuple(value.shape), value.detach().flatten().tolist())
    if isinstance(value, dict) or (hasattr(value, "items") and hasattr(value, "keys")):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else repr(value)


def metrics(stats: Any) -> Any:
    """The counts of a stage's metrics, without its times."""
    if stats is None:
        return None
    return {f.name: plain(getattr(stats, f.name)) for f in dataclasses.fields(stats) if not f.name.endswith(_TIMES)} | {
        "itls": len(stats.vllm_itls_ms or [])
    }


def completion(output: Any) -> dict[str, Any]:
    """One completion: text, tokens, audio and other metadata, reasons."""
    names = ("index", "text", "finish_reason", "stop_reason", "multimodal_output")
    ids = {name: list(getattr(output, name, ())) for name in ("token_ids", "cumulative_token_ids")}
    return ids | {name: plain(getattr(output, name, None)) for name in names}


def message(found: Any) -> tuple[Any, ...]:
    """One message without the request-level ``finished``, which is in the message of the stage that ends last."""
    kind = type(found).__name__
    if kind == "ErrorMessage":
        return (kind, found.error, found.status_code, found.error_type, found.fatal)
    if kind == "StageMetricsMessage":
        return (kind, found.replica_id, metrics(found.metrics))
    output = found.engine_outputs
    return kind, found.replica_id, output.finished, list(map(completion, output.outputs)), metrics(found.metrics)


def sequences(messages: Iterable[Any]) -> dict[tuple[str, int | None], list[tuple[Any, ...]]]:
    """The sequence of messages of each request and stage."""
    found: dict[tuple[str, int | None], list[tuple[Any, ...]]] = defaultdict(list)
    for each in messages:
        found[each.request_id, each.stage_id].append(message(each))
    return dict(found)
