"""``python -m benchmarks.ab``."""

from __future__ import annotations

import argparse
import copy
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import benchmarks.ab
import omni_simulated_device
from benchmarks.rigs import overlays, whole_server
from benchmarks.rigs.server import DEFAULT_ENVIRONMENT, vllm_command
from omni_fastpath.tools import cli

STEPS: Mapping[str, dict[str, float]] = {
    "*": {"alone_ms": 0, "saturating_ms": 0, "per_req_us": 0, "per_token_us": 0},  # what is slowed is slowed by that
    "thinker": {"base_ms": 6},
    "talker": {"base_ms": 5},
    "code2wav": {"base_ms": 3, "silent": 3},
}
WORSE: Mapping[str, Sequence[str]] = {
    "talker": (
        "whole answer (E2EL), median",
        "whole answer (E2EL), p99",
        "time for a second of audio (RTF), median",
        "requests served",
        "text made",
        "audio made",
    ),
    "code2wav": ("first audio (TTFP), median",),
}
"""What a slower stage must make worse. Not first audio by the talker: in a closed loop requests come less densely then,
which gives back as much."""
OUT_OF_REACH = ("first text (TTFT), median", "first text (TTFT), p99")
METRICS = "ttft,tpot,itl,e2el,audio_ttfp,audio_rtf"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one series and judge it; 0 where it found what there is to find."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ab",
        description=benchmarks.ab.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=("same", *WORSE), help="a setting against itself, or the stage to slow in B")
    parser.add_argument("--by-ms", type=float, default=6.0, help="so much longer a step of that stage takes")
    parser.add_argument("--starts", type=int, default=6, help="of each arm")
    options = parser.parse_args(argv)
    out = Path(tempfile.mkdtemp(prefix=f"ab-{options.what}-", dir=_results()))
    arms = ["--a", "OMNI_FASTPATH=1", "--b", "OMNI_FASTPATH=1"]
    if options.what != "same":
        slowed = copy.deepcopy(dict(STEPS))
        slowed[options.what]["base_ms"] += options.by_ms
        arms += ["--b", f"{omni_simulated_device.CONFIG_VARIABLE}={json.dumps({'stages': slowed})}"]
    code = _series(["--starts", str(options.starts), *arms, "--out", str(out)])
    if code not in (0, 1):
        return code
    return _judge(json.loads((out / "ab.json").read_text()), WORSE.get(options.what, ()))


def _results() -> Path:
    folder = overlays.ROOT / "results"
    folder.mkdir(exist_ok=True)
    return folder


def _series(arguments: Sequence[str]) -> int:
    model, vllm = str(whole_server.model_folder("qwen3_omni")), vllm_command()
    serve = [*vllm, "serve", model, "--omni", "--deploy-config", str(whole_server.deploy("qwen3_omni.yaml"))]
    bench = [*vllm, "bench", "serve", "--omni", "--model", model, "--host", "127.0.0.1", "--port", "{port}"]
    bench += ["--backend", "openai-chat-omni", "--endpoint", "/v1/chat/completions", "--dataset-name", "random"]
    bench += ["--random-input-len", "32", "--random-output-len", "60", "--num-prompts", "48", "--ignore-eos"]
    bench += ["--max-concurrency", "16", "--extra-body", '{"modalities": ["text", "audio"]}', "--disable-tqdm"]
    bench += ["--percentile-metrics", METRICS, "--save-result", "--result-filename", "{result}"]
    os.environ.update(DEFAULT_ENVIRONMENT)
    os.environ[omni_simulated_device.ENABLE_VARIABLE] = "light"
    os.environ[omni_simulated_device.CONFIG_VARIABLE] = json.dumps({"stages": STEPS})
    with tempfile.TemporaryDirectory(prefix="ab-") as elsewhere:  # the repository's folders must not shadow modules
        runtime = Path(elsewhere, "runtime")
        runtime.mkdir(mode=0o700)
        os.environ["XDG_RUNTIME_DIR"] = str(runtime)
        os.chdir(elsewhere)
        try:
            return cli.main(["ab", *arguments, "--", *serve, "--port", "{port}", "--", *bench])
        finally:
            os.chdir(overlays.ROOT)


def _judge(report: Mapping[str, Any], named: Sequence[str]) -> int:
    """Print what differs from what was to be found; 1 if anything does."""
    found = {row["name"]: row["verdict"]["word"] for row in report["rows"] if row["verdict"]}
    wrong = {name: found.get(name) for name in named if found.get(name) != "worse"}
    if named:
        wrong |= {name: found[name] for name in OUT_OF_REACH if found[name] == "worse"}
    else:
        wrong |= {name: word for name, word in found.items() if word != "no difference shown"}
    alike = not report["answers"]["differences"]
    print(f"named beforehand as worse: {'; '.join(named) or 'nothing'}; found otherwise: {wrong or 'nothing'}")
    print(f"answers: {'alike' if alike else 'they differ'}")
    return int(bool(wrong) or not alike)


if __name__ == "__main__":
    sys.exit(main())
