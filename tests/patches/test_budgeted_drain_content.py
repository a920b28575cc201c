"""What reaches upstream's processing with the drain, on the real orchestrator, and a script for its outputs."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm_omni")

from vllm.v1.engine import FinishReason

from benchmarks.rigs.inprocess import Pipeline, audio, batch, codes, silent, text
from omni_fastpath.ledger import LEDGER
from tests.patches.content import plain
from tests.patches.drive import before_processing, run, switched_on

pytestmark = pytest.mark.upstream

Script = Callable[[Any], None]


def three_stage_script(seed: int, kind: Any, *, bursts: bool) -> Script:
    """Requests of mixed lengths on two replicas a stage; thinker text, talker codes, code2wav N N N A."""

    def script(pipeline: Any) -> None:
        rng = random.Random(seed)
        plans: dict[tuple[int, int], list[Any]] = {(s, r): [] for s in range(3) for r in range(2)}
        for n in range(6):
            request = f"request-{n}"
            where = [rng.randrange(2) for _ in range(3)]
            pipeline.add_request(request, kind, replicas=where)
            steps = rng.randrange(5, 40)
            lanes = [plans[stage, where[stage]] for stage in range(3)]
            for step in range(steps):
                last = step == steps - 1
                finish = FinishReason.LENGTH if last and n % 2 else FinishReason.STOP if last else None
                lanes[0].append(text(request, 100 + step, 7 * n, finish=finish))
                lanes[1].append(codes(request, finish=finish))
                heard = last or rng.random() < 0.25
                lanes[2].append(audio(request, n, step, 0.5, finish=finish) if heard else silent(request))
        for (stage, replica), entries in plans.items():
            # Interleave the requests of a replica without reordering any of them, in batches of one to three.
            by_request: dict[str, list[Any]] = {}
            for entry in entries:
                by_request.setdefault(entry.request_id, []).append(entry)
            while by_request:
                chosen = rng.sample(sorted(by_request), min(len(by_request), rng.randrange(1, 4)))
                step_entries = [by_request[request].pop(0) for request in chosen]
                by_request = {request: rest for request, rest in by_request.items() if rest}
                pipeline.put(stage, batch(*step_entries), replica_id=replica)
                if bursts and rng.random() < 0.1:
                    pipeline.settle()

    return script


def test_payload_carrier_is_rehydrated(event_driven: bool) -> None:
    """A dict payload that travels as bytes (model runner v2) is restored before processing, in both modes.

    Upstream's event-driven loop of 0.30 leaves it packed.
    """
    import torch
    from vllm_omni.engine.serialization import serialize_additional_information

    seen: list[Any] = []
    for arm in (contextlib.nullcontext(), switched_on()):
        with arm:
            pipeline = Pipeline(event_driven=event_driven)
            entry = codes("somebody")
            entry.multimodal_output = None
            entry.pooling_output_payload = serialize_additional_information({"codes": {"audio": torch.ones(2, 3)}})
            before_processing(pipeline, lambda _stage, raw: seen.append(plain(raw.outputs[0].pooling_output)))
            pipeline.put(1, batch(entry))
            run(pipeline)
    restored = plain({"codes.audio": torch.ones(2, 3)})
    assert seen == [None if event_driven else restored, restored]
    assert LEDGER.named("budgeted_drain").counters["items"] == 1
