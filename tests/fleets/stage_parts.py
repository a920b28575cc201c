"""What stands around a fleet's stage: a runner, connectors, an input processor, a clock and a gate before `put`."""

from __future__ import annotations

import hashlib
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from vllm_omni.data_entry_keys import CodesStruct, OmniPayloadStruct
from vllm_omni.distributed.omni_connectors.connectors.base import OmniConnectorBase
from vllm_omni.distributed.omni_connectors.connectors.shm_connector import SharedMemoryConnector
from vllm_omni.engine.serialization import deserialize_additional_information
from vllm_omni.outputs import OmniModelRunnerOutput
from vllm_omni.utils.mm_outputs import partition_payload_list

from tests.fleets.stage_script import CFG_SUFFIX, Stream, Trouble

PACKAGE = "omni_fastpath.patches.save_queue_cap"
CODEBOOKS = 4


# ---- What a payload says ----


def number_of(*parts: Any) -> int:
    """A number below 2^20 that follows from what is given."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=4).digest(), "little") % 2**20


def digest(value: Any) -> str:
    """What a payload is: kinds, shapes and contents, whatever memory they lie in."""
    found = hashlib.blake2b(digest_size=8)
    for line in _leaves("", value):
        found.update(line)
    return found.hexdigest()


def _leaves(path: str, value: Any) -> Iterator[bytes]:
    if isinstance(value, Mapping):
        for key in value:
            yield from _leaves(f"{path}.{key}", value[key])
    elif isinstance(value, (list, tuple)):
        for place, each in enumerate(value):
            yield from _leaves(f"{path}[{place}]", each)
    elif isinstance(value, torch.Tensor):
        plain = (value.to_dense() if value.is_sparse else value).detach().resolve_conj().resolve_neg().contiguous()
        yield f"{path} {plain.dtype} {tuple(plain.shape)} {value.is_sparse}".encode()
        yield plain.flatten().view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    else:
        yield f"{path} {value!r}".encode()


def plain_processor(
    transfer_manager: Any, multimodal_output: Any, request: Any, is_finished: bool = False
) -> OmniPayloadStruct | None:
    """An input processor that sends each step's positions; nothing of the second stream of a pair."""
    if request.external_req_id.endswith(CFG_SUFFIX) or not isinstance(multimodal_output, Mapping):
        return None
    layers = multimodal_output.get("hidden_states", {}).get("layers")
    if layers:
        rows = layers[0]
        # Everything is summed up, so that a row that changed on its way changes the chunk.
        values = torch.stack((rows[:, 0].double(), rows.double().sum(dim=1)), dim=1)
    else:
        values = multimodal_output["codes"]["audio"].double()
        if not values.any():  # of the prompt, in whatever pieces it came
            return None
    return OmniPayloadStruct(codes=CodesStruct(audio=values.flatten().clone()))


# ---- The runner ----


@dataclass
class _Known:
    name: str
    prompt: int
    tokens: int
    computed: int
    pays: bool


class Runner:
    """Answers with tokens and payloads that follow from a request's name and the position alone.

    It keeps what upstream's persistent batch keeps of a request, and takes changes as upstream's runner does.

    Args:
        stage: 0 or 1.
        width: Values a row of the first stage.
        layers: Numbers of the two layers that the next stage takes.
        views: Payloads are views of the step's batch.
        spec: Draft tokens of each request and step.
        prefix: Of every request's id, and no part of its name.
    """

    def __init__(self, stage: int, width: int, layers: tuple[int, int], *, views: bool, spec: int, prefix: str) -> None:
        self._stage, self._width, self._layers, self._views = stage, width, layers, views
        self._spec, self._prefix = spec, prefix
        self._requests: dict[str, _Known] = {}
        self._marks = {f"embed.tts_{name}": torch.zeros(1, 1, width) for name in ("bos", "eos", "pad")}
        self.misread: list[str] = []
        """Requests whose tokens the scheduler's changes would have got wrong."""
        self.drafts: tuple[list[str], list[list[int]]] = ([], [])

    def step(self, scheduled: Any) -> Any:
        """The output of a scheduled step."""
        for each in scheduled.finished_req_ids:
            self._requests.pop(each, None)
        for new in scheduled.scheduled_new_reqs:
            info = deserialize_additional_information(new.additional_information)
            final = info.get("omni_final_stage_id") if isinstance(info, Mapping) else None
            count = len(new.prompt_token_ids)
            self._requests[new.req_id] = _Known(
                new.req_id.removeprefix(self._prefix),
                count,
                count,
                new.num_computed_tokens,
                final is None or int(final) > self._stage,
            )
        self._take_changes(scheduled.scheduled_cached_reqs)
        counts: Mapping[str, int] = scheduled.num_scheduled_tokens
        if not counts:
            return OmniModelRunnerOutput(req_ids=[], req_id_to_index={}, sampled_token_ids=[])
        sampled, batch = [], _Batch(self._width, sum(counts.values()), views=self._views)
        payloads: list[dict[str, Any]] = []
        drafts = scheduled.scheduled_spec_decode_tokens
        for each, count in counts.items():
            request = self._requests[each]
            tokens, accepted = self._sample(request, count, len(drafts.get(each, ())))
            rows = count - len(drafts.get(each, ())) + accepted
            payloads.append(self._payload(request, rows, batch) if request.pays else {})
            sampled.append(tokens)
        both: list[Any] = [payload or None for payload in payloads]
        inter_stage, client = partition_payload_list(payloads) if self._stage == 0 else (both, both)
        self.drafts = (list(counts), [[7] * self._spec for _ in counts])
        return OmniModelRunnerOutput(
            req_ids=list(counts),
            req_id_to_index={each: index for index, each in enumerate(counts)},
            sampled_token_ids=sampled,
            inter_stage_outputs=inter_stage,
            multimodal_outputs=client,
        )

    def _take_changes(self, cached: Any) -> None:
        for place, each in enumerate(cached.req_ids):
            request = self._requests[each]
            request.computed = cached.num_computed_tokens[place]
            if each in cached.resumed_req_ids:
                request.tokens = len(cached.all_token_ids[each])
            elif self._spec:  # the scheduler counts drafts that were refused meanwhile; the device knows better
                request.computed = min(request.computed, request.tokens - 1)
            elif each in cached.all_token_ids:
                # Left out of the step before: upstream's runner takes its sampled tokens anew, from these numbers.
                known = len(cached.all_token_ids[each])
                if self._spec == 0 and known != request.tokens:
                    self.misread.append(f"{request.name}: {known} of {request.tokens} tokens")

    def _sample(self, request: _Known, count: int, drafts: int) -> tuple[list[int], int]:
        """The tokens of a step, and how many drafts were accepted."""
        accepted = 0
        if drafts:
            position = request.computed + count - drafts
            accepted = min(drafts, number_of(request.name, "accepted", position) % (drafts + 1))
        if request.computed + count - drafts < request.tokens:
            return [], accepted
        first = request.computed + count - drafts
        tokens = [1000 + number_of(request.name, first + n) % 50_000 for n in range(accepted + 1)]
        request.tokens = first + len(tokens)
        return tokens, accepted

    def _payload(self, request: _Known, count: int, batch: _Batch) -> dict[str, Any]:
        name, start = request.name, request.computed
        if self._stage == 1:
            index = start + count - request.prompt
            codes = batch.codes(
                [[0] * CODEBOOKS] * count
                if index <= 0
                else [[1 + number_of(name, index, book) % 2000 for book in range(CODEBOOKS)]]
            )
            payload: dict[str, Any] = {"codes.audio": codes}
            if index > 0 and number_of(name, index, "seen") % 3 == 0:
                payload["sr"] = torch.tensor(24000)
            return payload
        values = torch.tensor([number_of(name, position) for position in range(start, start + count)])
        layers = [batch.rows(values, layer, start) for layer in range(2)]
        payload = {f"hidden_states.layer_{number}": rows for number, rows in zip(self._layers, layers, strict=True)}
        payload |= self._marks
        return payload | _odd(name, start)


def _odd(name: str, start: int) -> dict[str, Any]:
    """Now and then what other models' payloads have."""
    number = float(start)
    kinds: list[Callable[[], dict[str, Any]]] = [
        lambda: {"embed.odd": torch.full((6,), number).to(torch.bfloat16)[1:3]},
        lambda: {"embed.odd": torch.complex(torch.full((4,), number), torch.ones(4))[:2].conj()},
        lambda: {"embed.odd": [torch.full((3,), number)[1:], "words", None, 3]},
        lambda: {"embed.odd": torch.zeros(0, 4)},
        lambda: {"embed.odd": torch.sparse_coo_tensor(torch.tensor([[0, 1]]), torch.tensor([number, 2.0]), (4,))},
        lambda: {"embed.odd": torch.arange(12.0).reshape(3, 4).t()[:, 1] + number, "embed.even": {"a": torch.ones(1)}},
    ]
    kind = number_of(name, start, "odd") % 40
    return kinds[kind]() if kind < len(kinds) else {}


class _Batch:
    """A step's tensors, of which requests get their part."""

    def __init__(self, width: int, total: int, *, views: bool) -> None:
        self._views = views
        self._layers = [torch.zeros(total, width) for _ in range(2)]
        self._codes = torch.zeros(total, CODEBOOKS, dtype=torch.long)
        self._at = [0, 0, 0]

    def _part(self, of: torch.Tensor, lane: int, count: int) -> torch.Tensor:
        start = self._at[lane]
        self._at[lane] += count
        part = of[start : start + count]
        return part.contiguous() if self._views else part.clone()

    def rows(self, values: torch.Tensor, layer: int, start: int) -> torch.Tensor:
        """Rows of these positions, of which the first value says the position."""
        at = self._at[layer]
        target = self._layers[layer][at : at + len(values)]
        target[:] = (values + layer).unsqueeze(1)
        target[:, 0] = torch.arange(start, start + len(values))
        return self._part(self._layers[layer], layer, len(values))

    def codes(self, frames: Sequence[Sequence[int]]) -> torch.Tensor:
        """Frames of codes."""
        at = self._at[2]
        self._codes[at : at + len(frames)] = torch.tensor(frames)
        return self._part(self._codes, 2, len(frames))


# ---- Connectors ----


class _InMemory:
    """Chunks in a dict, serialised as they are put. Shared by the sides of a connection."""

    def __init__(self) -> None:
        self.chunks: dict[str, bytes] = {}

    def put(self, key: str, data: bytes) -> tuple[bool, int, None]:
        self.chunks[key] = data
        return True, len(data), None


class _KeepsInMemory:
    """A side of a connection whose chunks lie in a store of this process."""

    store: _InMemory
    serialize_obj: Any
    deserialize_obj: Any

    def put(self, from_stage: str, to_stage: str, put_key: str, data: Any) -> Any:
        """Keep a chunk."""
        return self.store.put(put_key, self.serialize_obj(data))

    def get(self, from_stage: str, to_stage: str, get_key: str, metadata: Any = None) -> Any:
        """Take a chunk."""
        data = self.store.chunks.pop(get_key, None)
        return None if data is None else (self.deserialize_obj(data), len(data))

    def cleanup(self, request_id: str) -> None:
        """Forget a chunk."""
        self.store.chunks.pop(request_id, None)

    def close(self) -> None:
        """Nothing to do."""


class MemoryConnector(_KeepsInMemory, OmniConnectorBase):  # type: ignore[misc]  # upstream is not typed here
    """Another class than shared memory's, as every remote connector is."""

    def __init__(self, stage: int, store: _InMemory | None = None) -> None:
        self.stage_id, self.config = stage, {"extra": {"codec_chunk_frames": 5, "codec_left_context_frames": 3}}
        self.store = store or _InMemory()

    def health(self) -> dict[str, Any]:
        """It is well."""
        return {}


class DerivedConnector(_KeepsInMemory, SharedMemoryConnector):  # type: ignore[misc]
    """A subclass of shared memory's that keeps its chunks elsewhere: clean-up tasks come as with the real one."""

    def __init__(self, stage: int, store: _InMemory | None = None) -> None:
        super().__init__({"stage_id": stage, "extra": {"codec_chunk_frames": 5, "codec_left_context_frames": 3}})
        self.store = store or _InMemory()


def connector_of(kind: str, stage: int, store: _InMemory | None = None) -> Any:
    """A side of a connection."""
    if kind == "shared":
        extra = {"codec_chunk_frames": 5, "codec_left_context_frames": 3}
        return SharedMemoryConnector({"stage_id": stage, "extra": extra})
    return {"memory": MemoryConnector, "derived": DerivedConnector}[kind](stage, store)


# ---- The clock ----


class Clock:
    """Seconds of the driver's turns, in place of the module `time` in the patch's modules."""

    def __init__(self, step_s: float) -> None:
        self._step_s, self.now = step_s, 1000.0

    def tick(self) -> None:
        """A turn has passed."""
        self.now += self._step_s

    def monotonic(self) -> float:
        """As `time.monotonic`."""
        return self.now

    perf_counter = monotonic

    def monotonic_ns(self) -> int:
        """As `time.monotonic_ns`."""
        return int(self.now * 1e9)

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


def our_modules() -> list[ModuleType]:
    """The modules of the patch that are imported."""
    return [module for name, module in list(sys.modules.items()) if name.startswith(PACKAGE) and module is not None]


@contextmanager
def clocked(clock: Clock | None) -> Iterator[None]:
    """The patch's modules see this clock; None: the real one."""
    replaced = []
    if clock is not None:
        others = {time: clock, time.monotonic: clock.monotonic, time.perf_counter: clock.monotonic}
        for module in our_modules():
            for name, value in list(vars(module).items()):
                for real, ours in others.items():
                    if value is real:
                        setattr(module, name, ours)
                        replaced.append((module, name, value))
    try:
        yield
    finally:
        for module, name, value in replaced:
            setattr(module, name, value)


# ---- The gate ----


@dataclass
class Put:
    """A put: its key, what it carried, whether it ended the request, and what the connector said."""

    key: str
    content: str
    values: list[float]
    finished: bool
    segment: bool
    ok: bool = False


@dataclass
class Gate:
    """In front of a connector's ``put``: lets it last, fail or hang as the script says, and writes down what was put.

    Attributes:
        streams: Who has an external id now.
        turn: The driver's.
        puts: By stream, in order.
    """

    connector: Any
    prefix: str
    streams: dict[str, Stream]
    turn: int = 0
    puts: dict[str, list[Put]] = field(default_factory=lambda: defaultdict(list))
    inside: dict[str, int] = field(default_factory=dict)
    opened: bool = False

    def __post_init__(self) -> None:
        """Stand in front of it."""
        self._put = self.connector.put
        self._lock = threading.Lock()
        self.connector.put = self.put

    def is_stuck(self) -> bool:
        """Whether a put lasts beyond this turn."""
        return any(until > self.turn for until in list(self.inside.values()))

    def put(self, from_stage: str, to_stage: str, put_key: str, data: Any) -> Any:
        """Upstream's ``put``, with what happens to it."""
        external = put_key.rsplit("_", 2)[0].removeprefix(self.prefix)
        stream = self.streams[external]
        meta = data.meta
        audio = None if data.codes is None else data.codes.audio
        entry = Put(
            put_key.removeprefix(self.prefix + external),
            hashlib.blake2b(self.connector.serialize_obj(data), digest_size=8).hexdigest(),
            [] if audio is None else audio.tolist(),
            bool(meta.finished),
            bool(meta.is_segment_finished),
        )
        with self._lock:
            puts = self.puts[stream.name]
            trouble: Trouble = stream.trouble(len(puts))
            puts.append(entry)
            self.inside[external] = until = self.turn + trouble.turns
        try:
            while self.turn < until and not self.opened:
                time.sleep(0.0002)
            if trouble.fails == "raise":
                raise RuntimeError("the fleet's connector raises")
            if trouble.fails:
                return False, 0, None
            result = self._put(from_stage=from_stage, to_stage=to_stage, put_key=put_key, data=data)
            entry.ok = bool(result[0])
            return result
        finally:
            with self._lock:
                self.inside.pop(external, None)
