"""What happens in a fleet of one stage: a pure function of its seed, so that both arms get the same."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any, Literal

MAX_MODEL_LEN = 240
BLOCK = 16
"""Tokens of a block of KV cache."""


@dataclass(frozen=True)
class Segment:
    """A further segment of a streaming session: tokens of its prompt, and how many it samples."""

    prompt: int
    tokens: int


@dataclass(frozen=True)
class Stream:
    """One request.

    Attributes:
        name: Unique in the fleet; its external id too.
        arrives: At which of the driver's turns.
        prompt: Tokens.
        tokens: How many it samples.
        lora: Number of its adapter; 0: none.
        text_only: It ends at this stage: no payload, no receiver.
        abort_turn: So many turns after it arrived; None: never.
        slowness: Turns that each of its puts lasts.
        hangs: Which put lasts how long.
        jitter: Share of its puts that last up to five turns.
        failing: Share of its puts that fail.
        fetches: Every so many turns its receiver looks; 0: only when nothing else happens any more.
        segments: Further segments, where it is a session.
        is_upfront: All updates of the session come at once; else each when the session waits for it.
        feed_gap: Turns between two chunks that it receives (second stage).
        feed_chunks: How many chunks it receives.
    """

    name: str
    arrives: int
    prompt: int
    tokens: int
    lora: int = 0
    text_only: bool = False
    abort_turn: int | None = None
    slowness: int = 0
    hangs: tuple[int, int] = (0, 0)
    jitter: float = 0.0
    failing: float = 0.0
    fetches: int = 1
    segments: tuple[Segment, ...] = ()
    is_upfront: bool = False
    feed_gap: int = 0
    feed_chunks: int = 1

    def trouble(self, put: int) -> tuple[int, Literal["", "false", "raise"]]:
        """The turns that its put of that number lasts, failed ones counted, and how it fails, if it does."""
        rng = random.Random(f"{self.name}/{put}")
        turns = self.slowness + (self.hangs[1] if put == self.hangs[0] else 0)
        if rng.random() < self.jitter:
            turns += rng.randint(1, 5)
        return turns, rng.choice(("false", "raise")) if rng.random() < self.failing else ""


@dataclass(frozen=True)
class Fleet:
    """A seed's stage, its streams, and what goes wrong.

    Attributes:
        stage: 0 or 1: first stage or middle stage.
        asynchronous: Upstream's asynchronous scheduler.
        connector: "shared", or "memory": another class altogether.
        max_num_seqs, max_batched, kv_mib, max_loras: Of the stage; 0 loras: LoRA is off.
        device: What the config calls the device.
        width: Values a row of payload.
        step_s: Seconds of the virtual clock a turn.
        switch_s: The interpreter's switch interval.
        options: Of `save_queue_cap`.
        fault: Which line of our own code raises, as a share of all, and at which time; or None.
        streams: The requests.
    """

    seed: int
    stage: int
    asynchronous: bool
    connector: Literal["shared", "memory"]
    max_num_seqs: int
    max_batched: int
    kv_mib: int
    max_loras: int
    device: str
    width: int
    step_s: float
    switch_s: float
    options: dict[str, Any]
    fault: tuple[float, int] | None
    streams: tuple[Stream, ...] = field(default=(), repr=False)


def fleet(seed: int) -> Fleet:
    """The fleet of a seed."""
    rng = random.Random(f"stage fleet {seed}")
    stage = 0 if rng.random() < 0.7 else 1
    shape = Fleet(
        seed=seed,
        stage=stage,
        asynchronous=rng.random() < 0.5,
        connector=rng.choice(("shared", "shared", "memory")),
        max_num_seqs=rng.choice((2, 4, 8, 16)),
        max_batched=rng.choice((24, 64, 200, 2048)),
        kv_mib=rng.choice((1, 2, 2)) if rng.random() < 0.35 else 64,
        # With adapters a second stage fails by itself: upstream takes who waits for a chunk out of `running`.
        max_loras=rng.choice((0, 0, 1, 1, 2)) if stage == 0 else 0,
        device=rng.choice(("cpu", "cuda")),
        width=rng.choice((8, 64, 512, 2048)),
        step_s=rng.choice((0.002, 0.015, 0.015, 0.05)),
        switch_s=rng.choice((0.005, 0.005, 0.0005, 0.00002)),
        options=_options(rng),
        fault=(rng.random(), int(10 ** rng.uniform(0, 1.3))) if rng.random() < 0.4 else None,
    )
    return replace(shape, streams=_streams(rng, shape))


def _options(rng: random.Random) -> dict[str, Any]:
    if rng.random() < 0.2:  # as they come
        return {}
    return {
        "max_bytes": rng.choice((None, 2**16, 2**16, 2**18, 2**28)),
        "max_tasks": rng.choice((None, 1, 4, 8, 20, 60)),
        "max_hold_s": rng.choice((0.01, 0.05, 0.3, 5.0, 3600.0)),
    }


def _streams(rng: random.Random, shape: Fleet) -> tuple[Stream, ...]:
    count = rng.choice((3, 5, 8, 8, 12))
    longest = rng.choice((12, 30, 60))
    horizon = rng.choice((1, 20, 60))
    has_aborts, has_fails, has_slow = rng.random() < 0.6, rng.random() < 0.3, rng.random() < 0.75
    slow_ones = rng.choice((1, 2, count)) if has_slow else 0
    room = 40 if shape.kv_mib == 1 else 100  # the longest fits the cache alone
    # With a small cache upstream's sessions wait for each other's blocks for ever.
    sessions = shape.stage == 0 and shape.kv_mib > 8
    streams = []
    for number in range(count):
        tokens = rng.randint(1, longest)
        stream = Stream(
            name=f"s{number}",
            arrives=rng.randrange(horizon),
            prompt=rng.choice((2, 16, 17, 40, room)),
            tokens=tokens,
            lora=rng.randint(0, shape.max_loras + 1) if shape.max_loras else 0,
            text_only=shape.stage == 0 and rng.random() < 0.15,
            abort_turn=rng.randint(0, 2 * longest) if has_aborts and rng.random() < 0.3 else None,
            failing=rng.choice((0.05, 0.3)) if has_fails and rng.random() < 0.4 else 0.0,
            fetches=rng.choice((1, 1, 1, 4, 25, 0)),
            feed_gap=rng.choice((0, 0, 1, 3)),
            feed_chunks=rng.randint(1, min(tokens, 10)),
        )
        if number < slow_ones:
            trouble: list[dict[str, Any]] = [
                {"slowness": 1},
                {"slowness": 4},
                {"hangs": (rng.randint(0, longest), rng.choice((20, 60, 150)))},
                {"jitter": 0.3},
            ]
            stream = replace(stream, **rng.choice(trouble))
        if sessions and rng.random() < 0.2:
            segments = tuple(Segment(rng.randint(1, 12), rng.randint(1, 12)) for _ in range(rng.randint(1, 3)))
            stream = replace(stream, segments=segments, is_upfront=rng.random() < 0.5)
        streams.append(stream)
    return tuple(streams)
