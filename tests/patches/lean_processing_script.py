"""Random raw outputs for the orchestrator without its loop, on a clock of their own, and all that came of them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

from benchmarks.rigs import inprocess
from tests.patches.content import plain

KINDS = ("DELTA", "CUMULATIVE", "FINAL_ONLY")

_CLOCKS = (
    "benchmarks.rigs.inprocess.time",
    "vllm.v1.metrics.stats.time",
    "vllm_omni.engine.orchestrator._time",
    "vllm_omni.engine.stage_pool._time",
)
"""Where modules look at the clock for what is compared."""

_RECORDS = ("output_timestamps", "non_empty_first_output_timestamps", "audio_frames", "audio_sample_rate")
"""What a pool keeps of each request."""


@dataclass(frozen=True)
class Setting:
    """What a script is played with.

    Attributes:
        seed: Everything else follows from it.
        kind: How requests want their outputs; ``mixed``: one each.
        async_chunk: As the deploy YAML's key.
        detokenizer: ``none``, ``fast`` or ``slow``; with one there are texts, stop strings and log probabilities.
        statistics: Whether upstream makes iteration statistics.
    """

    seed: int
    kind: str = "DELTA"
    async_chunk: bool = True
    detokenizer: str = "none"
    statistics: bool = True


class Clock:
    """Goes on at each look, so that who looks more or less often than upstream does is found."""

    def __init__(self) -> None:
        self.now = 1000.0

    def time(self) -> float:
        """Seconds."""
        self.now += 0.0137
        return self.now

    monotonic = perf_counter = time


def tokenizer() -> Any:
    """A fast tokenizer of 100 words, and no file."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = {f"w{n}": n for n in range(100)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words)))


class Play:
    """One script on one arm, from the beginning."""

    def __init__(self, setting: Setting, monkeypatch: Any) -> None:
        import vllm.v1.engine.detokenizer as detokenizers

        self.setting, self.clock = setting, Clock()
        for name in _CLOCKS:
            monkeypatch.setattr(name, self.clock)
        fast = setting.detokenizer != "slow"
        if hasattr(detokenizers, "USE_FAST_DETOKENIZER"):
            monkeypatch.setattr(detokenizers, "USE_FAST_DETOKENIZER", fast)
        else:  # 0.32
            monkeypatch.setattr(detokenizers, "uses_fast_detokenizer", lambda _tokenizer: fast)
        self.rng = random.Random(setting.seed)
        self.pipeline = inprocess.Pipeline(async_chunk=setting.async_chunk)
        self.orchestrator = self.pipeline.orchestrator
        model = SimpleNamespace(max_model_len=1_000_000, model_stage="", async_chunk=setting.async_chunk)
        for pool in self.pipeline.pools:
            pool._stage_vllm_config = SimpleNamespace(model_config=model)
        self.statistics = list[Any]()
        if setting.statistics:  # in the place of the Prometheus logger: what it is given, as it is then
            self.orchestrator._stat_logger = SimpleNamespace(
                record=lambda _scheduler, iteration, **_: self.statistics.append(plain(vars(iteration)))
            )
        if setting.detokenizer != "none":
            shared = tokenizer()
            for pool in self.pipeline.pools:
                pool.output_processor.tokenizer = shared
        self.held: list[Any] = []

    def add(self, name: str) -> None:
        """A request, submitted to every stage."""
        from vllm import sampling_params

        kind = self.rng.choice(KINDS) if self.setting.kind == "mixed" else self.setting.kind
        made = sampling_params.SamplingParams

        def params(**values: Any) -> Any:
            if self.setting.detokenizer != "none":
                values |= {"detokenize": True, "stop": ["w7w8", "w9 w1"], "logprobs": 1}
                values["include_stop_str_in_output"] = self.rng.random() < 0.5
            return made(**values)

        with mock.patch.object(inprocess, "SamplingParams", params):
            self.pipeline.add_request(name, sampling_params.RequestOutputKind[kind])

    async def step(self, stage_id: int, *entries: Any) -> list[Any]:
        """One raw output through processing and routing, as both of upstream's loops do it."""
        raw, terminal = inprocess.batch(*entries), set[str]()
        processed = await self.orchestrator._process_llm_stage_outputs(stage_id, 0, raw, terminal)
        await self.orchestrator._handle_processed_outputs(stage_id, 0, processed)
        await self.orchestrator._finish_raw_terminal_requests(stage_id, 0, terminal)
        self.held += [output for output in processed if output.finished]
        return list(processed)

    async def abort(self, name: str) -> None:
        """The user hangs up."""
        self.held += await self.orchestrator._abort_request_ids([name]) or ()
        self.orchestrator.request_states.pop(name, None)

    def run(self) -> dict[str, Any]:
        """The whole script; everything that came of it, read when all is over."""
        asyncio.run(self._script())
        return self.outcome()

    async def _script(self) -> None:
        rng = self.rng
        live: dict[str, list[int]] = {}
        for n in range(6):
            name = f"request-{n}"
            self.add(name)
            live[name] = [rng.randrange(3, 40) for _ in range(3)]
        styles = {name: rng.choice(STYLES) for name in live}
        while live:
            stage_id = rng.randrange(3)
            at_stage = sorted(name for name, left in live.items() if left[stage_id])
            if at_stage:
                chosen = rng.sample(at_stage, rng.randrange(1, len(at_stage) + 1))
                entries = []
                if rng.random() < 0.1 and live[chosen[0]][stage_id] > 1:
                    chosen.insert(rng.randrange(len(chosen) + 1), chosen[0])  # twice in one raw output
                for name in chosen:
                    live[name][stage_id] -= 1
                    entries.append(self._entry(name, stage_id, styles[name], last=not live[name][stage_id]))
                await self.step(stage_id, *entries)
            if rng.random() < 0.01:
                gone = rng.choice(sorted(live))
                await self.abort(gone)
                live.pop(gone)
            live = {name: left for name, left in live.items() if any(left) and name in self.orchestrator.request_states}

    def _entry(self, name: str, stage_id: int, style: str, *, last: bool) -> Any:
        from vllm.v1.engine import EngineCoreEvent, EngineCoreEventType, FinishReason
        from vllm.v1.metrics import stats
        from vllm_omni.engine import OmniEngineCoreOutput

        rng = self.rng
        finish = rng.choice([FinishReason.STOP, FinishReason.LENGTH]) if last else None
        fields: dict[str, Any] = {}
        tokens = [rng.randrange(10) for _ in range(rng.choice([0, 1, 1, 1, 3]))]
        if self.setting.detokenizer != "none" and tokens:
            fields["new_logprobs"] = _log_probabilities(tokens)
        payload = _payload(rng, style if stage_id == 1 else "audio" if stage_id == 2 else "none")
        if payload is not None:
            fields["multimodal_output"] = payload
        now_and_then: dict[str, Callable[[], Any]] = {
            "kv_transfer_params": lambda: {"block": rng.randrange(100)},
            "num_generation_tokens": lambda: rng.randrange(100),
            "is_coalesced": lambda: True,
            "events": lambda: [EngineCoreEvent(EngineCoreEventType.PREEMPTED, rng.random())],
            "prefill_stats": lambda: stats.PrefillStats(3, 2, 1),
        }
        known = OmniEngineCoreOutput.__struct_fields__
        fields |= {key: make() for key, make in now_and_then.items() if key in known and rng.random() < 0.05}
        return OmniEngineCoreOutput(name, tokens, finish_reason=finish, **fields)

    def outcome(self) -> dict[str, Any]:
        """Messages in order with their times, what an abort and a terminal gave, statistics, and what is left."""
        left = list[Any]()
        for pool in self.pipeline.pools:
            processor = pool.output_processor
            left += [getattr(pool, f"_{name}_by_request") for name in _RECORDS]
            left += [{n: processor.pop_native_text_metrics(n) for n in [*processor._native_text_metrics_by_request]}]
            left += [{n: _state(each) for n, each in processor.request_states.items()}, pool.clients[0].aborted]
        return {
            "messages": [everything(each) for each in self.pipeline.messages()],
            "held": [everything(each) for each in self.held],
            "statistics": self.statistics,
            "left": left,
            "now": self.clock.now,
        }


STYLES = ("none", "none", "codes", "latents", "audio", "rate", "nested", "now and then", "torn", "drained", "shifting")
"""What a talker's entries carry."""


def _payload(rng: random.Random, style: str) -> dict[str, Any] | None:
    import torch

    if style == "none" or (style == "now and then" and rng.random() < 0.7):
        return None
    codes: dict[str, Any] = {"codes.audio": torch.full((1, 4), rng.randrange(9))}
    match style:
        case "audio":
            samples = rng.choice([0, 0, 3, 5])
            codes = {"model_outputs": torch.arange(samples, dtype=torch.float32), "sr": torch.tensor(16000)}
        case "rate":
            codes |= {"sr": torch.tensor(rng.choice([0, 0, 24000]))}
        case "nested":
            codes |= {"meta": {"depth": rng.randrange(9)}, "meta.turn_end": rng.random() < 0.5}
        case "latents":
            codes = {"latent": torch.ones(1, 2), "meta.left_context": torch.tensor([rng.randrange(9)])}
        case "drained":
            codes |= {"image": torch.ones(1, 2)} if rng.random() < 0.8 else {}
        case "shifting":
            codes |= {"hidden_states.layer_1": rng.choice([torch.ones(1, 2), torch.ones(1, 2), 7])}
        case "torn":  # shapes that cannot be put together, and keys that upstream cannot unflatten
            codes = {"codes.audio": torch.zeros(rng.randrange(1, 3), rng.randrange(1, 3)), "depth": 5, "depth.x": 1}
    return codes


def _log_probabilities(tokens: list[int]) -> Any:
    import numpy as np
    from vllm.v1.outputs import LogprobsLists

    rows = len(tokens)
    return LogprobsLists(
        np.array([[each, 1] for each in tokens]), np.full((rows, 2), -0.5), np.ones(rows, dtype=np.int64), None
    )


def _state(state: Any) -> dict[str, Any]:
    detokenizer, payload = state.detokenizer, state.mm_accumulated
    return {
        "ids": list(detokenizer.output_token_ids),
        "text": getattr(detokenizer, "output_text", None),
        "offset": getattr(detokenizer, "_last_output_text_offset", None),
        "payload": [plain(payload.tensors), plain(payload.metadata)] if hasattr(payload, "tensors") else plain(payload),
        "stats": vars(state.native_text_stats),
        "prompt_logprobs": plain(state.logprobs_processor.prompt_logprobs),
        "prefilling": state.is_prefilling,
    }


def everything(found: Any) -> Any:
    """Plain data of a message or an output, with all times, and with the token ids so far."""
    if hasattr(found, "detach") or isinstance(found, int):  # a tensor and an enum have a `__dict__`, too
        return plain(found)
    if hasattr(found, "__dict__") or hasattr(found, "__struct_fields__"):
        names = getattr(found, "__struct_fields__", None) or [
            name for name in vars(found) if not name.startswith("_omni_fastpath")
        ]
        known = {name: everything(getattr(found, name)) for name in names}
        if "token_ids" in known:
            known.pop("cumulative_token_ids", None)  # an attribute's place is nobody's business
            known["cumulative_token_ids"] = list(getattr(found, "cumulative_token_ids", ()))
        return known
    if isinstance(found, dict):
        return {str(k): everything(v) for k, v in found.items()}
    if isinstance(found, (list, tuple)):
        return [everything(each) for each in found]
    return plain(found)
