"""What the terminal and the report both say beside the table."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.parity import arms
from benchmarks.parity.load import Load
from benchmarks.parity.measure import Outcome
from benchmarks.rigs.capture import differences
from omni_fastpath.compare import verdict
from omni_fastpath.compare.about import about

_MINUTES_A_START = 1.7
"""On two cores."""


def plan(starts: Sequence[str]) -> list[str]:
    """What is about to run, how long it takes, and whether it can decide anything.

    Args:
        starts: The arm of each start, in order.
    """
    minutes = _MINUTES_A_START * len(starts)
    said = f"This starts {len(starts)} servers, one after another: {', '.join(starts)}."
    lines = [f"{said} On two cores it takes about {minutes:.0f} minutes."]
    fewest, enough = min(starts.count(arm) for arm in set(starts)), verdict.STARTS
    if fewest < verdict.starts_for(0):
        command, minutes = f"python -m benchmarks.parity --starts {enough}", _MINUTES_A_START * 2 * enough
        lines.append(
            f"It shows both arms side by side; so few starts cannot tell a difference from luck. "
            f"`{command}` can, in some {minutes:.0f} minutes."
        )
    return lines


def compare(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Whether every start answered as the first one did, request by request: text, tokens, audio, usage, end."""
    first, *others = outcomes
    found = [
        f"start {place} ({outcome.start.arm}) against start 1 ({first.start.arm}): {line[:300]}"
        for place, outcome in enumerate(others, 2)
        for line in differences(outcome.captures, first.captures)
    ]
    samples = [sample for outcome in outcomes for sample in outcome.start.samples]
    return {
        "starts": len(outcomes),
        "requests": len(first.captures),
        "comparisons": len(first.captures) * len(others),
        "failed": sum(sample.error is not None for sample in samples),
        "audio_bytes": sum(sample.audio_bytes for sample in first.start.samples),
        "differences": found,
    }


def describe(load: Load, starts: Sequence[str], elapsed_s: float) -> dict[str, Any]:
    """The head of the table: what was asked of which software on which machine."""
    return {
        **about(),
        "load": load.as_json(),
        "order": list(starts),
        "replicas": arms.REPLICAS,
        "deploy": arms.BASE.name,
        "cores_of_machine": os.cpu_count(),
        "minutes": elapsed_s / 60,
    }


def heading(told: Mapping[str, Any]) -> list[str]:
    """The head of the table as lines of text."""
    load = told["load"]
    steps = ", ".join(f"{stage} {step:g} ms" for stage, step in load["step_ms"].items())
    versions = ", ".join(f"{name} {number}" for name, number in told["versions"].items())
    where = f"{told['replicas']} replicas a stage ({told['deploy']}), {told['machine']['cores']} cores"
    paced = f"{load['paced']} at {load['rate']:g} a second"
    lengths = f"{load['input_tokens']} tokens in, {load['output_tokens']} text tokens out"
    return [
        f"Qwen3-Omni on the simulated device, poll loop, {where}",
        f"concurrency {load['concurrency']}, {load['requests']} requests a measurement, then {paced}; {lengths}",
        f"steps: {steps}",
        f"starts in the order {', '.join(told['order'])}; commit {told['commit'] or 'none'}, {versions}",
    ]


def parity_line(parity: Mapping[str, Any]) -> str:
    """What the comparison of the answers says, in a sentence."""
    if parity["differences"]:
        return (
            f"THE ARMS DID NOT ANSWER ALIKE: {len(parity['differences'])} differences in {parity['comparisons']} "
            f"comparisons; the first: {parity['differences'][0]}"
        )
    return (
        f"Answers: {parity['requests']} requests in each of {parity['starts']} starts, {parity['comparisons']} "
        f"comparisons with the first start: byte-identical text and audio ({parity['audio_bytes'] / 1e6:.1f} MB of "
        f"audio a start); {parity['failed']} failed."
    )
