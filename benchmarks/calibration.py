"""Stock's server on the simulated H100 against public tables of real ones.

    python -m benchmarks.calibration [--rows 1,2] [--short] [--arm event]

The rows are in ``calibration.yaml``: nightly benchmarks of vllm-omni, its blog of 2026-07-01, and pull request #7781.
Each level is a server of its own, on light engines. Beside the public value and ours stands the limit
(`benchmarks.limit`), which is what the engines give with no server around them.

Real-time factor, end-to-end time and throughput must be within their tolerance before anything else is measured. First
text and first audio are shown beside them and the limit, and nothing is fitted to them.

Lengths are those of the public load. Where text and audio go together they vary by a tenth around them, as speech does:
equal ones would end and begin together, in bursts.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import yaml

from benchmarks.ab.capture import Capture, Request, chat_request, speech_request
from benchmarks.limit import limit_of
from benchmarks.rigs import about, results, server_arms, side_by_side, whole_server
from benchmarks.rigs.arm import Arm
from benchmarks.rigs.captures import run_closed_loop, run_open_loop, ttfp_s, ttft_s
from benchmarks.server.arms import ARMS
from benchmarks.server.figures import BYTES_A_SECOND
from benchmarks.server.measure import LATE_MS, WARM_TOKENS, kept_time, used_s

START_S = 30.0
"""About what a server takes to start, warm up and stop."""
WARM = 5
ROLE_TOKENS = 8
"""What the chat template adds to a message."""

LEFT_OUT = """Light engines leave out: copies of hidden states and codes from the GPU, their way through connectors (20
MB for a prompt of 2,500 tokens), the save thread's waits for them, and all Python of stage processes. So save_queue_cap
does nothing here, and of forward_gate only what the API process saves shows."""

Measure = Callable[[Sequence[Capture]], float]


def _audio_s(capture: Capture) -> float:
    return len(capture.audio) / BYTES_A_SECOND


def _tpot_ms(capture: Capture) -> float:
    times = [piece.at_s for piece in capture.pieces if piece.text]
    return 1000 * (times[-1] - times[0]) / (len(capture.text) - 1)


def _mean(what: Callable[[Capture], float]) -> Measure:
    return lambda captures: statistics.fmean(map(what, captures))


def _half(what: Callable[[Capture], float]) -> Measure:
    return lambda captures: statistics.median(map(what, captures))


def _span_s(captures: Sequence[Capture]) -> float:
    began = min(each.started_at_s for each in captures)
    return max(each.started_at_s + each.e2e_s for each in captures) - began


MEASURES: Mapping[str, Measure] = {
    "RTF": _mean(lambda each: each.audio_pieces[-1].at_s / _audio_s(each)),
    "E2E, s": _mean(lambda each: each.e2e_s),
    "E2E p50, s": _half(lambda each: each.e2e_s),
    "audio s/s": lambda captures: sum(map(_audio_s, captures)) / _span_s(captures),
    "TPOT, ms": _mean(_tpot_ms),
    "TTFT, ms": _mean(lambda each: 1000 * (ttft_s(each) or 0.0)),
    "TTFP, ms": _mean(lambda each: 1000 * (ttfp_s(each) or 0.0)),
    "TTFP p50, ms": _half(lambda each: 1000 * (ttfp_s(each) or 0.0)),
}
MUST = ("RTF", "E2E, s", "E2E p50, s", "audio s/s")
"""What must be within its tolerance."""


@dataclass(frozen=True)
class Level:
    """Streams of a closed loop, or requests a second of an open one; how many requests; what was published."""

    at: float
    requests: int
    public: dict[str, float]
    frames_per_token: float = 2.1
    open: bool = False

    @property
    def loop(self) -> dict[str, Any]:
        """As `limit_of` has it."""
        starts_s = [number / self.at for number in range(self.requests)]
        return {"starts_s": starts_s} if self.open else {"streams": int(self.at)}

    def shortened(self) -> Level:
        """Of two waves at most."""
        return replace(self, requests=min(self.requests, 20 if self.open else max(2, 2 * int(self.at))))


@dataclass(frozen=True)
class Row:
    """One row of public values.

    Attributes:
        number: As it is asked for.
        title: What it is.
        preset: The device.
        deploy: Name of the deploy YAML.
        tolerance: By measure.
        levels: One after the other.
        prompt: Tokens of a prompt, about.
        tokens: Text tokens of an answer, or codec frames of speech.
        vary: Lengths lie evenly in ``tokens`` times (1 - vary) to (1 + vary).
        modalities: Of chat; none for speech.
    """

    number: int
    title: str
    preset: str
    deploy: str
    tolerance: dict[str, float]
    levels: list[Level]
    prompt: int = 2500
    tokens: int = 900
    vary: float = 0.1
    modalities: list[str] = field(default_factory=lambda: ["text", "audio"])

    @property
    def model(self) -> str:
        """Which of `omni_simulated_device.models`."""
        return "qwen3_omni" if self.modalities else "qwen3_tts"

    def device(self, level: Level) -> dict[str, Any]:
        """Settings of the simulated device."""
        least, most = round(self.tokens * (1 - self.vary)), round(self.tokens * (1 + self.vary))
        speech = {"qwen3_tts": {"min_frames": least, "max_frames": most}}
        talker = {"talker": {"frames_per_token": level.frames_per_token}}
        return {"preset": self.preset, "stages": talker if self.modalities else speech}

    def asked(self, count: int) -> list[Request]:
        """So many requests, whose lengths have the right mean."""
        texts = [f"Number {number}" + " word" * (self.prompt // 5) for number in range(count)]
        texts = [text[: self.prompt - ROLE_TOKENS] for text in texts]
        if not self.modalities:
            return [speech_request(text) for text in texts]
        lengths = [round(self.tokens * (1 + self.vary * ((2 * place + 1) / count - 1))) for place in range(count)]
        random.Random(count).shuffle(lengths)
        asked = zip(texts, lengths, strict=True)
        return [chat_request(text, modalities=self.modalities, max_tokens=n, ignore_eos=True) for text, n in asked]


def rows() -> list[Row]:
    """All of them."""
    given = Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
    return msgspec.convert(yaml.safe_load(given), list[Row])


def devices(row: Row, level: Level) -> list[Capture]:
    """What the devices alone would give."""
    return limit_of(row.asked(level.requests), row.model, row.deploy, row.device(level), **level.loop)


def measure(row: Row, level: Level, arm: Arm) -> tuple[Sequence[Capture], dict[str, float]]:
    """One server: what came back; the cores of API process and client; how late the engines were, milliseconds."""
    requests, run = row.asked(level.requests), run_open_loop if level.open else run_closed_loop
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with whole_server.server(arm, row.model, row.deploy, row.device(level), light=True, log_path=log) as server:
            server_arms.prove(server, arm, {"api", "engines"})
            run_closed_loop(server.url, replace(row, tokens=WARM_TOKENS).asked(WARM), WARM)
            before, mine_s = used_s(server), time.process_time()
            captures = run(server.url, requests, *level.loop.values())
            api_s, mine_s = used_s(server) - before, time.process_time() - mine_s
            whole_server.checked(captures, audio=row.modalities != ["text"])
        late_ms = max(each["late_p99_ms"] for each in kept_time(log).values())
    span_s = _span_s(captures)
    return captures, {"api": api_s / span_s, "client": mine_s / span_s, "late_p99_ms": late_ms}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the rows and print the table; 1 where a value that must be is not within its tolerance."""
    parser = side_by_side.parser("benchmarks.calibration", __doc__)
    parser.add_argument("--rows", default="1,2,3,4,5,6", help="which of them, with commas")
    parser.add_argument("--short", action="store_true", help="two waves of each level at most")
    parser.add_argument("--arm", choices=ARMS, default="poll", help="as benchmarks.server has them")
    options = parser.parse_args(argv)
    asked = [(row, level) for row in rows() if str(row.number) in options.rows.split(",") for level in row.levels]
    if options.short:
        asked = [(row, level.shortened()) for row, level in asked]
    limits = [devices(row, level) for row, level in asked]
    takes_s = sum(START_S + _span_s(limit) for limit in limits)
    results.progress(f"{len(asked)} servers, about {takes_s / 60:.0f} minutes")
    table, missed = [], 0
    for (row, level), limit in zip(asked, limits, strict=True):
        load = f"{level.at:g} a second" if level.open else f"{level.at:g}"
        results.progress(f"{row.title}: {load}")
        captures, machine = measure(row, level, ARMS[options.arm])
        found = {name: (MEASURES[name](limit), MEASURES[name](captures)) for name in level.public}
        results.save("calibration", {"arm": options.arm, "row": row, "level": level, "found": found, **machine})
        late = f"{machine['late_p99_ms']:.1f}{'!' if machine['late_p99_ms'] > LATE_MS else ''}"
        cores = [f"{machine[name]:.2f}" for name in ("api", "client")]
        for name, public in level.public.items():
            allowed, ours = row.tolerance[name], found[name][1]
            within = abs(ours / public - 1) <= allowed
            missed += name in MUST and not within
            values = [f"{each:.3g}" for each in (public, *found[name], ours / public)]
            said = f"{'within' if within else 'NOT within'} {allowed:.0%}{'' if name in MUST else ' (beside)'}"
            table.append([row.title, load, name, *values, said, *cores, late])
        table.append([])
    columns = "row, streams, measure, public, limit, ours, ours / public, verdict, API cores, client cores, late ms"
    results.show(
        f"{options.arm} on light engines against public tables; late: p99 of the worst engine",
        columns.split(", "),
        table,
    )
    print(LEFT_OUT, f"!: more than {LATE_MS:g} ms, so that this machine was measured. {about.line()}", sep="\n")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
