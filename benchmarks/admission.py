"""How clients of the OpenAI SDK with its defaults fare at a full server: ``python -m benchmarks.admission``.

A closed loop of 64 clients at 16 places, which think for 0.5 to 1.5 s. vLLM brings the SDK. The first 20 s, in
which all begin at once, are left out.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.rigs import about, side_by_side
from benchmarks.server.arms import ARMS
from benchmarks.server.load import Load
from benchmarks.server.measure import serving

PLACES, CLIENTS, LEFT_OUT_S = 16, 64, 20.0
SLOT_S, LONGEST_LAG_S = 0.1, 15.0


def autocorrelation(times: Sequence[float], seconds: float) -> dict[float, float]:
    """The autocorrelation of a number of events per 0.1 s, by lag in seconds."""
    slots = [0] * int(seconds / SLOT_S)
    for at in times:
        slots[min(int(at / SLOT_S), len(slots) - 1)] += 1
    mean = statistics.fmean(slots)
    off = [each - mean for each in slots]
    whole = sum(each * each for each in off) or 1.0
    lags = range(1, int(LONGEST_LAG_S / SLOT_S))
    return {lag * SLOT_S: sum(a * b for a, b in zip(off, off[lag:], strict=False)) / whole for lag in lags}


async def run(url: str, model: str, seconds: float, retries: int | None) -> dict[str, Any]:
    """The load: its figures."""
    import openai

    began, refused, answered, failed = time.monotonic(), [], [], []
    numbers = random.Random(7)

    async def note(response: Any) -> None:
        if response.status_code == 503:
            refused.append(time.monotonic() - began)

    http = openai.DefaultAsyncHttpxClient(event_hooks={"response": [note]})
    api = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", http_client=http)
    api.max_retries = api.max_retries if retries is None else retries

    async def client(number: int) -> None:
        while (now := time.monotonic() - began) < seconds:
            tokens = numbers.randint(50, 150)
            try:
                stream = await api.chat.completions.create(
                    model=model,
                    messages=[{"role": "user", "content": f"Client {number} at {now:.3f}."}],
                    max_tokens=tokens,
                    stream=True,
                    extra_body={"ignore_eos": True, "modalities": ["text", "audio"]},
                )
                async for _ in stream:
                    pass
                answered.append(time.monotonic() - began)
            except openai.InternalServerError:
                failed.append(time.monotonic() - began)
            await asyncio.sleep(numbers.uniform(0.5, 1.5))

    _, waiting = await asyncio.wait([asyncio.create_task(client(n)) for n in range(CLIENTS)], timeout=seconds)
    for each in waiting:
        each.cancel()
    counted = {
        name: [at - LEFT_OUT_S for at in times if LEFT_OUT_S <= at < seconds]
        for name, times in (("answered", answered), ("failed", failed), ("refused", refused))
    }
    got = len(counted["answered"])
    by_lag = autocorrelation(counted["refused"], seconds - LEFT_OUT_S)
    highest = sorted(by_lag.items(), key=lambda each: -abs(each[1]))[:3]
    return {
        **{name: len(times) for name, times in counted.items()},
        "share answered": got / max(got + len(counted["failed"]), 1),
        "refusals per answer": len(counted["refused"]) / max(got, 1),
        "autocorrelation": {f"{lag:.1f} s": round(value, 2) for lag, value in highest},
        "of chance": round(2 / ((seconds - LEFT_OUT_S) / SLOT_S) ** 0.5, 2),
    }


def main() -> None:
    """Start a server and print the figures."""
    parser = side_by_side.parser("benchmarks.admission", __doc__)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--max-retries", type=int, help="of the SDK; its default if not given")
    options = parser.parse_args()
    load = Load(layout="pair")
    arm = dataclasses.replace(ARMS["default"], arguments=("--max-num-queued-reqs", str(PLACES)))
    log = Path(tempfile.mkdtemp(prefix="admission-")) / "server.log"
    with serving(arm, load, log) as server:
        print(asyncio.run(run(server.url, server.model, options.seconds, options.max_retries)), about.line())


if __name__ == "__main__":
    main()
