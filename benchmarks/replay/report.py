"""The table of a cell, with ratios against upstream's event-driven loop."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.replay.subjects import BASELINE
from benchmarks.rigs import results

Lines = Sequence[dict[str, Any]]

ROWS: tuple[tuple[str, str], ...] = (
    ("first audio residence p50, ms", "first_audio.p50"),
    ("first audio residence p99, ms", "first_audio.p99"),
    ("first text residence p50, ms", "first_text.p50"),
    ("first text residence p99, ms", "first_text.p99"),
    ("first audio handled by the front end p50, ms", "user_first_audio.p50"),
    ("first audio handled by the front end p99, ms", "user_first_audio.p99"),
    ("first text handled by the front end p99, ms", "user_first_text.p99"),
    ("put until handed over p99, ms", "last_hop.p99"),
    ("put until handled p99, ms", "handled.p99"),
    ("front end's event loop late p99, ms", "front_end_late.p99"),
    ("thinker residence p99, ms", "residence.thinker.p99"),
    ("talker residence p99, ms", "residence.talker.p99"),
    ("code2wav residence p99, ms", "residence.code2wav.p99"),
    ("entries ahead of first audio, mean", "entries_ahead.mean"),
    ("end to end, later waves, p50, ms", "e2e_later.p50"),
    ("end to end, later waves, p99, ms", "e2e_later.p99"),
    ("throughput of later waves, req/s", "throughput_later_per_s"),
    ("raw outputs/s", "raw_outputs_per_s"),
    ("orchestrator CPU a raw output, us", "cpu_per_raw_us"),
    ("front end CPU a raw output, us", "front_cpu_per_raw_us"),
)
"""Figures of which a ratio says something."""

CONDITIONS: tuple[tuple[str, str], ...] = (
    ("own utilisation (orchestrator CPU)", "own_utilisation"),
    ("front end utilisation (CPU)", "front_utilisation"),
    ("feeder late p99, ms", "feeder_late.p99"),
    ("unhandled messages", "unhandled_messages"),
    ("unfinished raw outputs", "unfinished_raw_outputs"),
    ("unfinished requests", "unfinished_requests"),
)
"""What the run was like."""


def value(line: dict[str, Any], path: str) -> float | None:
    """A figure by its dotted path; None where the cell has none."""
    found: Any = line
    for part in path.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return None if found is None else float(found)


def median(lines: Lines, arm: str, path: str) -> float | None:
    """A figure's median over an arm's rounds."""
    values = [found for line in lines if line["arm"] == arm and (found := value(line, path)) is not None]
    return statistics.median(values) if values else None


def _number(found: float | None) -> str:
    if found is None:
        return "-"
    return f"{found:.0f}" if abs(found) >= 1000 or found == int(found) else f"{found:.3g}"


def show(cell: str, lines: Lines) -> None:
    """Print the table of one cell."""
    arms = list(dict.fromkeys(line["arm"] for line in lines))
    rows = []
    for title, path in (*ROWS, *CONDITIONS):
        found = {arm: median(lines, arm, path) for arm in arms}
        base = found.get(BASELINE) if (title, path) in ROWS else None
        ratios = (f" ({each / base:.2g})" if each is not None and base else "" for each in found.values())
        rows.append([title, *(_number(each) + ratio for each, ratio in zip(found.values(), ratios, strict=True))])
    title = f"{cell}: median of {len(lines) // len(arms)} round(s), in brackets against {BASELINE}"
    results.show(title, ("", *arms), rows)
    if cut := sorted({line["arm"] for line in lines if line["cut_off"]}):
        print(
            f"Cut off: {', '.join(cut)}. What was still queued counts with its residence so far, a lower bound; "
            "content is checked as far as it came."
        )
