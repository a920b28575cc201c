"""What the terminal and the report both say above the table."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.parity.load import BASE, REPLICAS, Load
from omni_fastpath.tools.ab.about import about


def describe(load: Load, starts: Sequence[str], elapsed_s: float) -> dict[str, Any]:
    """The head of the table: what was asked of which software on which machine."""
    return {
        **about(),
        "load": load.as_json(),
        "order": list(starts),
        "replicas": REPLICAS,
        "deploy": BASE.name,
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
