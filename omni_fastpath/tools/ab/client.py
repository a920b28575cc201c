"""The user's benchmark client, run against one server, and what it wrote."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omni_fastpath.tools.ab import measures
from omni_fastpath.tools.ab.errors import MeasureError
from omni_fastpath.tools.ab.interrupts import Interrupts
from omni_fastpath.tools.ab.serving import Child, tail

_STOP_TIMEOUT_S = 5.0


def run(
    command: Sequence[str],
    result: Path,
    *,
    environment: Mapping[str, str],
    log: Path,
    interrupts: Interrupts,
    server: Child | None,
    timeout_s: float | None,
) -> dict[str, Any]:
    """Run the client to its end and read its result.

    Args:
        command: The client's, placeholders filled in.
        result: Where it writes its JSON.
        environment: The client's: the same in both arms.
        log: Where its output goes.
        interrupts: Of this program.
        server: What it asks; None where somebody else started it.
        timeout_s: How long it may take; None: as long as it likes.

    Raises:
        MeasureError: It failed or wrote nothing, or the server ended meanwhile.
    """
    result.parent.mkdir(parents=True, exist_ok=True)
    result.unlink(missing_ok=True)  # of a series that ended here before: it would be read where this client writes none
    client = Child(
        "benchmark client",
        command,
        environment=environment,
        log=log,
        interrupts=interrupts,
        stop_timeout_s=_STOP_TIMEOUT_S,
    )
    with client:
        status = client.wait(timeout_s, [server] if server is not None else [])
    if status:
        raise MeasureError(f"the benchmark client ended with status {status}{tail(log)}")
    try:
        # With --append-result one document follows another: the last one is this run's.
        documents = [line for line in result.read_text(encoding="utf-8").splitlines() if line.strip()]
        found = json.loads(documents[-1] if len(documents) > 1 and _whole(documents[-1]) else "\n".join(documents))
    except (OSError, ValueError, IndexError) as error:
        raise MeasureError(f"the benchmark client wrote no result that can be read ({error}){tail(log)}") from error
    if not isinstance(found, dict) or not measures.read(found):
        raise MeasureError(f"the benchmark client's result has no number that could be compared: {result}")
    if found.get("completed") == 0:
        raise MeasureError(f"the benchmark client completed no request{tail(log)}")
    return found


def _whole(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def scalars(result: Mapping[str, Any]) -> dict[str, Any]:
    """What of a result is worth keeping beside every start: no lists of requests, and no number that JSON has not."""
    single = {key: value for key, value in result.items() if not isinstance(value, (list, dict))}
    return {key: value for key, value in single.items() if not isinstance(value, float) or math.isfinite(value)}
