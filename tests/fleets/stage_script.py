"""What happens in a fleet of one stage: a pure function of its seed, so that both arms get the same."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

MAX_MODEL_LEN = 240
BLOCK = 16
"""Tokens of a block of KV cache."""
CFG_SUFFIX = "__cfg_uncond"


@dataclass(frozen=True)
class Trouble:
    """What becomes of one put.

    Attributes:
        turns: How many of the driver's turns it lasts.
        fails: "" it does not; "false": the connector reports failure; "raise": it raises.
    """

    turns: int = 0
    fails: str = ""


@dataclass(frozen=True)
class Segment:
    """A further segment of a streaming session: tokens of its prompt, and how many it samples."""

    prompt: int
    tokens: int


@dataclass(frozen=True)
class Stream:
    """One request.

    Attributes:
        name: Unique in the fleet.
        external: Its external id in the fleet; another one's where it uses an id again.
        arrives: At which turn at the earliest.
        prompt: Tokens.
        tokens: How many it samples.
        role: "plain", or "cond" and "uncond" of a pair of coupled streams.
        lora: Number of its adapter; 0: none.
        priority: Where the policy looks at it.
        text_only: It ends at this stage: no payload, no receiver.
        abort_turn: So many turns after it arrived; None: never.
        abort_tokens: After so many tokens; None: never.
        slowness: Turns that each of its puts lasts.
        hangs: Which put lasts how long.
        jitter: Share of its puts that last up to five turns.
        failing: Share of its puts that fail.
        fetches: Every so many turns its receiver looks; 0: only at the very end, or when all else waits for it.
        segments: Further segments, where it is a session.
        updates: "parked": each update comes when the session waits for it; "upfront": all at once.
        feed_gap: Turns between two chunks that it receives (second stage).
        feed_chunks: How many chunks it receives.
    """

    name: str
    external: str
    arrives: int
    prompt: int
    tokens: int
    role: str = "plain"
    lora: int = 0
    priority: int = 0
    text_only: bool = False
    abort_turn: int | None = None
    abort_tokens: int | None = None
    slowness: int = 0
    hangs: tuple[tuple[int, int], ...] = ()
    jitter: float = 0.0
    failing: float = 0.0
    fetches: int = 1
    segments: tuple[Segment, ...] = ()
    updates: str = "parked"
    feed_gap: int = 0
    feed_chunks: int = 1

    def trouble(self, put: int) -> Trouble:
        """What becomes of its put of that number, failed ones counted."""
        rng = random.Random(f"{self.name}/{put}")
        turns = self.slowness + dict(self.hangs).get(put, 0)
        if rng.random() < self.jitter:
            turns += rng.randint(1, 5)
        fails = rng.choice(("false", "raise")) if rng.random() < self.failing else ""
        return Trouble(turns, fails)


@dataclass(frozen=True)
class Fleet:
    """A seed's stage, its streams, and what goes wrong.

    Attributes:
        stage: 0 or 1: first stage or middle stage.
        scheduler: "sync", "async" or "cfg".
        processor: "real" (upstream's) or "plain" (one that sends the rows as they are).
        connector: "shared"; "memory": another class altogether; "derived": a subclass of shared memory's.
        policy: Of the scheduler.
        max_num_seqs, max_batched, kv_mib, max_loras, spec: Of the stage; 0 loras: LoRA is off.
        device: What the config calls the device.
        width: Values a row of payload.
        views: Payloads are views of the step's batch, as on a GPU.
        step_s: Seconds of the virtual clock a turn; 0: the real clock.
        switch_s: The interpreter's switch interval.
        poison: The runner writes over what it gave out before, as one without a device of its own may.
        options: Of `save_queue_cap`.
        fault: None, or what goes wrong in our own code.
        streams: The requests.
    """

    seed: int
    stage: int
    scheduler: str
    processor: str
    connector: str
    policy: str
    max_num_seqs: int
    max_batched: int
    kv_mib: int
    max_loras: int
    spec: int
    device: str
    width: int
    views: bool
    step_s: float
    switch_s: float
    poison: bool
    options: dict[str, Any]
    fault: dict[str, Any] | None
    streams: tuple[Stream, ...] = field(repr=False)

    def words(self) -> str:
        """In one line, without the streams' details."""
        parts = [
            f"stage {self.stage} {self.scheduler} {self.policy}",
            f"{self.processor} processor, {self.connector}",
            f"{len(self.streams)} streams of {self.max_num_seqs}",
            f"kv {self.kv_mib} MiB, batch {self.max_batched}, {self.device}{' views' if self.views else ''}",
            f"clock {self.step_s or 'real'}",
            f"options {self.options}",
        ]
        parts += [f"max_loras {self.max_loras}"] if self.max_loras else []
        parts += [f"spec {self.spec}"] if self.spec else []
        parts += ["poison"] if self.poison else []
        parts += [f"fault {self.fault}"] if self.fault else []
        return "; ".join(parts)


def fleet(seed: int, *, faults: str = "some") -> Fleet:
    """The fleet of a seed.

    Args:
        seed: Everything follows from it.
        faults: "some": some seeds have a fault of our own code; "none"; "all".
    """
    rng = random.Random(f"stage fleet {seed}")
    stage = 0 if rng.random() < 0.7 else 1
    scheduler = rng.choices(("sync", "async", "cfg"), (4, 5, 2 if stage == 0 else 0))[0]
    spec = rng.choice((0, 0, 0, 2)) if scheduler != "cfg" and stage == 0 else 0
    processor = "plain" if spec or scheduler == "cfg" else rng.choice(("real", "real", "plain"))
    connector = rng.choices(("shared", "memory", "derived"), (5, 2, 1))[0]
    # With adapters a second stage fails by itself (upstream takes out of `running` who waits for a chunk), and so do
    # pairs (it admits one of them).
    max_loras = rng.choice((0, 0, 1, 1, 2)) if stage == 0 else 0
    max_loras = 0 if scheduler == "cfg" else max_loras
    small = rng.random() < 0.35
    device = rng.choice(("cpu", "cuda"))
    poison = device == "cpu" and scheduler == "sync" and not spec and (processor == "plain" or connector != "shared")
    shape = Fleet(
        seed=seed,
        stage=stage,
        scheduler=scheduler,
        processor=processor,
        connector=connector,
        policy=rng.choice(("fcfs", "fcfs", "priority")) if scheduler != "cfg" and stage == 0 else "fcfs",
        max_num_seqs=rng.choice((2, 4, 8, 16)),
        max_batched=2 * MAX_MODEL_LEN if scheduler == "cfg" else rng.choice((24, 64, 200, 2048)),
        kv_mib=8 if scheduler == "cfg" else (rng.choice((1, 2, 2)) if small else 64),
        max_loras=max_loras,
        spec=spec,
        device=device,
        width=rng.choice((8, 64, 512, 2048)),
        views=rng.random() < 0.7,
        step_s=rng.choice((0.0, 0.002, 0.015, 0.015, 0.05)),
        switch_s=rng.choice((0.005, 0.005, 0.0005, 0.00002)),
        poison=poison and rng.random() < 0.5,
        options=_options(rng),
        fault=_fault(rng) if faults == "all" or (faults == "some" and rng.random() < 0.3) else None,
        streams=(),
    )
    return Fleet(**{**vars(shape), "streams": tuple(_streams(rng, shape))})


def _options(rng: random.Random) -> dict[str, Any]:
    if rng.random() < 0.2:  # as they come
        return {}
    return {
        "max_bytes": rng.choice((None, 2**16, 2**16, 2**18, 2**28)),
        "max_tasks": rng.choice((None, 1, 4, 8, 20, 60)),
        "max_hold_s": rng.choice((0.01, 0.05, 0.3, 5.0, 3600.0)),
    }


def _fault(rng: random.Random) -> dict[str, Any]:
    return {
        "mode": rng.choice(("call", "call", "line")),
        "where": rng.random(),
        "number": int(10 ** rng.uniform(0, 1.7)),
        "error": rng.choice(("RuntimeError", "KeyError", "MemoryError", "AssertionError")),
    }


def _streams(rng: random.Random, shape: Fleet) -> list[Stream]:
    count = rng.choice((3, 5, 8, 8, 12))
    longest = rng.choice((12, 30, 60))
    horizon = rng.choice((1, 20, 60))
    has_aborts, has_fails, has_slow = rng.random() < 0.6, rng.random() < 0.3, rng.random() < 0.75
    slow_ones = rng.choice((1, 2, count)) if has_slow else 0
    streams: list[Stream] = []
    for number in range(count):
        name = f"s{number}"
        room = 40 if shape.kv_mib == 1 else 100  # the longest fits the cache alone
        stream: dict[str, Any] = {
            "name": f"{shape.seed}-{name}",
            "external": name,
            "arrives": rng.randrange(horizon),
            "prompt": rng.choice((2, 16, 17, 40, room)),
            "tokens": rng.randint(1, longest),
            "lora": rng.randint(0, shape.max_loras + 1) if shape.max_loras else 0,
            "priority": rng.randint(0, 3),
            "fetches": rng.choice((1, 1, 1, 4, 25, 0)),
            "feed_gap": rng.choice((0, 0, 1, 3)),
        }
        stream["feed_chunks"] = rng.randint(1, max(1, min(stream["tokens"], 10)))
        stream["text_only"] = shape.stage == 0 and rng.random() < 0.15
        if has_aborts and rng.random() < 0.3:
            stream[rng.choice(("abort_turn", "abort_tokens"))] = rng.randint(0, longest)
        if number < slow_ones:
            kind = rng.choice(("slow", "very slow", "hung", "jitter"))
            if kind == "hung":
                stream["hangs"] = ((rng.randint(0, longest), rng.choice((20, 60, 150))),)
            elif kind == "jitter":
                stream["jitter"] = 0.3
            else:
                stream["slowness"] = 1 if kind == "slow" else 4
        if has_fails and rng.random() < 0.4:
            stream["failing"] = rng.choice((0.05, 0.3))
        # With a small cache upstream's sessions wait for each other's blocks for ever.
        sessions = shape.stage == 0 and not shape.spec and shape.scheduler != "cfg" and shape.kv_mib > 8
        if sessions and rng.random() < 0.2:
            stream["segments"] = tuple(
                Segment(rng.randint(1, 12), rng.randint(1, 12)) for _ in range(rng.randint(1, 3))
            )
            stream["updates"] = rng.choice(("parked", "upfront"))
        streams.append(Stream(**stream))
        if shape.scheduler == "cfg" and rng.random() < 0.7:
            streams[-1] = Stream(**stream, role="cond")
            streams.append(
                Stream(
                    **{
                        **stream,
                        "name": f"{shape.seed}-{name}{CFG_SUFFIX}",
                        "external": name + CFG_SUFFIX,
                        "prompt": rng.choice((2, 16, 40)),
                        "abort_tokens": None,
                        "abort_turn": None,
                    },
                    role="uncond",
                )
            )
        elif not stream.get("segments") and not stream["text_only"] and rng.random() < 0.12:
            again = {**stream, "name": f"{shape.seed}-{name}b", "arrives": rng.randrange(horizon + 30)}
            streams.append(Stream(**{**again, "abort_turn": None, "abort_tokens": None}))
    return streams
