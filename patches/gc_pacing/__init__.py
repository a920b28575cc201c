"""The API process looks through its oldest generation of objects when few requests are live, not when most are.

What:
    Python's own full collections are put off. Once a second, when one is due by Python's count, it is made if at most
    ``few`` requests and sessions are live; otherwise at the latest ``at_most_s`` seconds after the last one. Young
    objects are collected as ever.
Why:
    A full collection holds the interpreter's lock until it has looked at every object that outlived two others. After
    upstream's freeze of what the start has left Python makes them often, because the rule that delays them compares
    with what is not frozen: at 64 streams every few seconds, 10 to 70 ms of processor time each, in which no audio
    moves. They free nothing: the tokens and records of requests that run make no cycles.
Why not a hook:
    Python offers none before a collection: ``gc.callbacks`` tell of one that has begun.
Scope:
    ``vllm serve --omni``, each of its API processes for itself; a library user's process, offline ``Omni`` and the
    stages are not touched. An operator's own settings win: with ``gc.disable()``, ``gc.set_debug()`` or thresholds
    other than Python's own nothing is done, and nothing any more once they are called later; the state says so.
    ``VLLM_GC_DEBUG`` is for engines and workers. Switched on in a server that serves already, it begins with the next.
Fragility:
    What a cycle holds (memory, a file) is given back after ``at_most_s`` at the latest. Should our timer stand still,
    Python collects by itself after 10,000 collections of the middle generation. A front end is known from the first
    request that it ends; in a server of duplex sessions alone none ends, and ``at_most_s`` alone counts. Upstream's
    freeze at the end of ``lifespan``'s start is what tells that it serves. Read: ``request_states`` of the front end,
    ``sessions`` of a duplex one.
Upstream thread:
    vllm PR #24008 (the heap of the start is frozen). Elsewhere: sglang PR #28067 (collections put off to idle times).
Remove when:
    Upstream paces full collections, or every supported Python collects the oldest generation in small steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field

from omni_fastpath.declare import AnySeam, Counter, Fit, Options, Patch, Pin, Process, Wrap


class PacingOptions(Options):
    """Values of ``gc_pacing``."""

    gone: ClassVar[Mapping[str, str]] = {
        "at_most_objects": "it went: at_most_s alone bounds how long a collection waits",
        "freeze": "it went: upstream itself freezes what the start-up has left",
    }

    few: int = Field(
        default=2,
        ge=0,
        le=10_000,
        description="live requests and sessions up to which a full collection that is due is made at once",
    )
    at_most_s: float = Field(
        default=300.0,
        ge=1.0,
        le=86_400.0,
        description="seconds after the last full collection at which one that is due is made under any load",
    )


def _seams(lifespans: str) -> tuple[AnySeam, ...]:
    """With the module whose ``lifespan`` freezes."""
    return (
        Wrap(lifespans, "freeze_gc_heap", (), wrapper="wrapped_freeze_gc_heap"),
        # Where it is defined.
        Pin("vllm.utils.gc_utils", "freeze_gc_heap", (), fingerprints=("78ca8f1f45716e1d",)),
        Wrap(
            "vllm_omni.entrypoints.omni_base",
            "OmniBase._log_summary_and_cleanup",
            ("self", "request_id", "reason"),
            wrapper="wrapped_log_summary_and_cleanup",
        ),
    )


_FROM_0_30 = _seams("vllm.entrypoints.launchers.utils.server_utils")

PATCH = Patch(
    name="gc_pacing",
    summary="full collections of the API process happen when few requests are live",
    processes=frozenset({Process.SERVER}),
    docs=__doc__,
    options=PacingOptions,
    default_on=False,
    taken_off="taken_off",
    counters=(
        Counter("quiet", "full collections while few requests were live"),
        Counter("late", "full collections that could wait no longer"),
    ),
    rows=(
        Fit(releases=("0.28.0",), seams=_seams("vllm.entrypoints.serve.utils.server_utils")),
        Fit(releases=("0.30.0",), seams=_FROM_0_30),
        Fit(releases=("0.32.0rc1",), preview=True, seams=_FROM_0_30),
    ),
)
