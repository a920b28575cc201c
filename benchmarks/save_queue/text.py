"""Puts that hang, and text that a user reads; and one long prompt among streams that decode."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.rigs.results import progress
from benchmarks.save_queue.component import STEP_MS
from benchmarks.save_queue.figures import Run
from benchmarks.save_queue.measure import Prompt, Text
from benchmarks.save_queue.output import save
from benchmarks.save_queue.subjects import ALONE, FASTPATH, ON, Arm, holding, subjects
from omni_fastpath.tools.ab.quantiles import quantile

BYTES = Arm("fastpath, holds: bytes", holding("bytes"))
CAPPED = Arm("the same, 1 MiB", {**holding("bytes"), "OMNI_FASTPATH_SAVE_QUEUE_CAP__TOTAL_BYTES": "1MiB"})
ALWAYS = Arm("fastpath, holds: always", FASTPATH.environment)
TEXT_ARMS = (ALONE, BYTES, CAPPED, ALWAYS)
PROMPT_ARMS = (ALONE, Arm("fastpath, defaults", ON), ALWAYS)
PROMPT = Prompt(streams=64, tokens=60, prompt_tokens=32_000)
SHORT_PROMPT = Prompt(streams=16, tokens=30, prompt_tokens=4_000)


def run_text(configs: dict[int, Path], text: Text) -> None:
    """Run each arm once, save the lines and print the table."""
    results: dict[str, Run] = {}
    with subjects(TEXT_ARMS, 0, configs[0], step_ms=STEP_MS[0], device_type="cuda") as found:
        for subject in found:
            progress(f"{text.hung} of {text.streams} streams' puts hang: {subject.arm.name}")
            results[subject.arm.name] = subject.call("text", text=text)
    save("text", load=text, runs=results)
    _check_content(results)
    table = Table(
        title=f"Thinker: {text.hung} of {text.streams} audio streams' puts hang (the first), and one request for text "
        f"alone; after {text.seconds:g} s"
    )
    for column in ("", "text of the audio requests", "text alone", "holds", "for bytes", "most bytes on their way"):
        table.add_column(column, justify="right" if column else "left")
    for name, each in results.items():
        counted = each["counters"] if each["counters"].get("tasks") else {}
        done = f"all {text.text_tokens} in {each['alone_s']:.1f} s" if each["alone_s"] else f"{each['alone']} of"
        table.add_row(
            name,
            ", ".join(map(str, each["audio"])) + f" of {text.tokens}",
            done if each["alone_s"] else f"{done} {text.text_tokens}",
            *(str(counted.get(key, "")) for key in ("holds", "holds_for_total", "max_outstanding_bytes")),
        )
    Console(width=150).print(table)


def run_prompt(configs: dict[int, Path], prompt: Prompt, payloads: str) -> None:
    """Run each arm once, save the lines and print the table."""
    results: dict[str, Run] = {}
    settings = {"step_ms": STEP_MS[0], "device_type": "cuda", "payloads": payloads}
    with subjects(PROMPT_ARMS, 0, configs[0], **settings) as found:
        for subject in found:
            progress(f"a prompt of {prompt.prompt_tokens} tokens among {prompt.streams} streams: {subject.arm.name}")
            results[subject.arm.name] = subject.call("prompt", prompt=prompt)
    save("prompt", load=prompt, settings=settings, runs=results)
    _check_content(results)
    table = Table(
        title=f"Thinker: a prompt of {prompt.prompt_tokens} tokens among {prompt.streams} streams that decode"
    )
    for column in (
        "",
        "longest schedule()",
        "its processor time",
        "others' largest gap, p50",
        "p99",
        "copied",
        "holds",
    ):
        table.add_column(column, justify="right" if column else "left")
    for name, each in results.items():
        counted = each["counters"] if each["counters"].get("tasks") else {}
        gaps = [quantile(each["gaps_s"], share) for share in (0.5, 0.99)]
        table.add_row(
            name,
            f"{each['longest_ms']:.1f} ms",
            f"{each['longest_cpu_ms']:.1f} ms",
            *(f"{gap * 1e3:.0f} ms" for gap in gaps),
            *(str(counted.get(key, "")) for key in ("copied_tensors", "holds")),
        )
    Console(width=150).print(table)


def _check_content(results: dict[str, Run]) -> None:
    """Every stream's chunks are the same in all arms.

    Raises:
        RuntimeError: They are not.
    """
    contents: Sequence[tuple[str, ...]] = [tuple(each["digests"]) for each in results.values()]
    if len(set(contents)) != 1:
        raise RuntimeError("the chunks of a stream differ between arms")
