"""Upstream's own benchmark client, run against a server of ours."""

import dataclasses
import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from benchmarks.rigs.server import DEFAULT_ENVIRONMENT, Server, vllm_command
from omni_fastpath.tools.ab.arm import clean

BENCH_TIMEOUT_S = 900.0
_METRICS = "ttft,tpot,itl,e2el,audio_ttfp,audio_rtf"

Api = Literal["chat", "speech"]


class BenchError(RuntimeError):
    """The benchmark client failed; the message ends with the tail of its output."""


@dataclasses.dataclass(frozen=True)
class BenchResult:
    """One run of ``vllm bench serve --omni``."""

    path: Path
    """The JSON file that it wrote."""
    data: Mapping[str, Any]
    """Its content; times whose names end in ``_ms`` are milliseconds."""
    output: str
    """What it printed."""


def run(
    server: Server,
    folder: str | Path,
    *,
    api: Api = "chat",
    prompts: int = 32,
    max_concurrency: int = 8,
    input_tokens: int = 64,
    output_tokens: int = 60,
    seed: int = 0,
    name: str = "bench",
    body: Mapping[str, Any] | None = None,
    arguments: Sequence[str] = (),
    timeout_s: float = BENCH_TIMEOUT_S,
) -> BenchResult:
    """Run the client against *server* and return its result, written to *folder*/*name*.json.

    ``chat`` asks for text and audio from the chat endpoint, ``speech`` for audio from the speech endpoint. Random
    prompts of *input_tokens* tokens come from *seed*, so that two runs send the same ones.
    """
    path = Path(folder).resolve() / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    backend, endpoint = {
        "chat": ("openai-chat-omni", "/v1/chat/completions"),
        "speech": ("openai-audio-speech", "/v1/audio/speech"),
    }[api]
    defaults: dict[str, Any] = {"modalities": ["text", "audio"]} if api == "chat" else {"voice": "vivian"}
    command = [*vllm_command(), "bench", "serve", "--omni", "--model", server.model, "--host", "127.0.0.1"]
    command += ["--port", str(server.port), "--backend", backend, "--endpoint", endpoint, "--seed", str(seed)]
    command += ["--dataset-name", "random", "--random-input-len", str(input_tokens)]
    command += ["--random-output-len", str(output_tokens), "--num-prompts", str(prompts)]
    command += ["--max-concurrency", str(max_concurrency), "--extra-body", json.dumps({**defaults, **(body or {})})]
    command += ["--percentile-metrics", _METRICS, "--metric-percentiles", "50,90,99", "--disable-tqdm"]
    command += ["--save-result", "--save-detailed", "--result-dir", str(path.parent), "--result-filename", path.name]
    environment = clean({**server.environment(), **DEFAULT_ENVIRONMENT})
    done = subprocess.run(
        [*command, *arguments],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=timeout_s,
        env=environment,
        cwd=path.parent,
        check=False,
    )
    output = done.stdout + done.stderr
    if done.returncode != 0 or not path.exists():
        tail = "\n".join(output.splitlines()[-40:])
        raise BenchError(f"vllm bench serve ended with status {done.returncode}; the end of its output:\n{tail}")
    return BenchResult(path, json.loads(path.read_text(encoding="utf-8")), output)
