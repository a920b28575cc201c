"""What stands around a fleet's stage: a runner, a connector in memory, a clock and a gate before `put`."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from vllm_omni.distributed.omni_connectors.connectors.base import OmniConnectorBase
from vllm_omni.distributed.omni_connectors.connectors.shm_connector import SharedMemoryConnector
from vllm_omni.engine.serialization import deserialize_additional_information
from vllm_omni.outputs import OmniModelRunnerOutput
from vllm_omni.utils.mm_outputs import partition_payload_list

from tests.fleets.stage_script import Fleet, Stream

CODEBOOKS = 4


def number_of(*parts: Any) -> int:
    """A number below 2^20 that follows from what is given."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=4).digest(), "little") % 2**20


def digest(payload: Any) -> str:
    """What a payload says, whatever memory its tensors lie in."""
    return hashlib.blake2b(OmniConnectorBase.serialize_obj(payload), digest_size=8).hexdigest()


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

    It keeps what upstream's persistent batch keeps of a request, and takes changes as upstream's runner does. Payloads
    are views of the step's batch, as on a GPU.

    Args:
        fleet: Its stage and width.
        layers: Numbers of the two layers that the next stage takes.
        prefix: Of every request's id, and no part of its name.
    """

    def __init__(self, fleet: Fleet, layers: tuple[int, int], prefix: str) -> None:
        self._stage, self._width, self._layers, self._prefix = fleet.stage, fleet.width, layers, prefix
        self._requests: dict[str, _Known] = {}
        self.misread: list[str] = []
        """Requests whose tokens the scheduler's changes would have got wrong."""

    def step(self, scheduled: Any) -> Any:
        """The output of a scheduled step."""
        self._take_changes(scheduled)
        counts: Mapping[str, int] = scheduled.num_scheduled_tokens
        if not counts:
            return OmniModelRunnerOutput(req_ids=[], req_id_to_index={}, sampled_token_ids=[])
        total = sum(counts.values())
        batch = [torch.zeros(total, self._width) for _ in range(2)]
        codes = torch.zeros(total, CODEBOOKS, dtype=torch.long)
        sampled, payloads = [], []
        at = 0
        for each, count in counts.items():
            request, here = self._requests[each], slice(at, at + count)
            at += count
            end = request.computed + count
            if self._stage == 0:
                payload = self._rows([rows[here] for rows in batch], request)
            else:
                payload = self._codes(codes[here], request, end - request.prompt)
            payloads.append(payload if request.pays else {})
            sampled.append([1000 + number_of(request.name, end) % 50_000] if end >= request.tokens else [])
            request.tokens = max(request.tokens, end + len(sampled[-1]))
        both: list[Any] = [payload or None for payload in payloads]
        inter_stage, client = partition_payload_list(payloads) if self._stage == 0 else (both, both)
        return OmniModelRunnerOutput(
            req_ids=list(counts),
            req_id_to_index={each: index for index, each in enumerate(counts)},
            sampled_token_ids=sampled,
            inter_stage_outputs=inter_stage,
            multimodal_outputs=client,
        )

    def _take_changes(self, scheduled: Any) -> None:
        for each in scheduled.finished_req_ids:
            self._requests.pop(each, None)
        for new in scheduled.scheduled_new_reqs:
            info = deserialize_additional_information(new.additional_information)
            count = len(new.prompt_token_ids)
            name = new.req_id.removeprefix(self._prefix)
            pays = not (isinstance(info, Mapping) and "omni_final_stage_id" in info)
            self._requests[new.req_id] = _Known(name, count, count, new.num_computed_tokens, pays)
        cached = scheduled.scheduled_cached_reqs
        for place, each in enumerate(cached.req_ids):
            request = self._requests[each]
            request.computed = cached.num_computed_tokens[place]
            if each in cached.resumed_req_ids:
                request.tokens = len(cached.all_token_ids[each])
            elif each in cached.all_token_ids and len(cached.all_token_ids[each]) != request.tokens:
                # Left out of the step before: upstream's runner takes its sampled tokens anew, from these numbers.
                self.misread.append(f"{request.name}: {len(cached.all_token_ids[each])} of {request.tokens} tokens")

    def _rows(self, layers: list[torch.Tensor], request: _Known) -> dict[str, Any]:
        """The first stage's payload: rows of two layers, of which the first value says the position."""
        positions = range(request.computed, request.computed + len(layers[0]))
        for number, rows in enumerate(layers):
            rows[:] = torch.tensor([[float(number + number_of(request.name, each))] for each in positions])
            rows[:, 0] = torch.tensor(positions)
        marks = {f"embed.tts_{name}": torch.zeros(1, 1, self._width) for name in ("bos", "eos", "pad")}
        return {f"hidden_states.layer_{n}": rows for n, rows in zip(self._layers, layers, strict=True)} | marks

    def _codes(self, frames: torch.Tensor, request: _Known, index: int) -> dict[str, Any]:
        """The second stage's payload: a frame of codes after the prompt; now and then what clients may see."""
        if index <= 0:
            return {"codes.audio": frames}
        frames[0] = torch.tensor([1 + number_of(request.name, index, book) % 2000 for book in range(CODEBOOKS)])
        seen = {"sr": torch.tensor(24000)} if number_of(request.name, index, "seen") % 3 == 0 else {}
        return {"codes.audio": frames[:1]} | seen


# ---- Connectors ----


class MemoryConnector(OmniConnectorBase):  # type: ignore[misc]  # upstream is not typed here
    """Another class than shared memory's, as every remote connector is: chunks in a dict, which both sides share."""

    def __init__(self, config: dict[str, Any], chunks: dict[str, bytes] | None) -> None:
        self.stage_id, self.config = config["stage_id"], config
        self.chunks: dict[str, bytes] = {} if chunks is None else chunks

    def put(self, from_stage: str, to_stage: str, put_key: str, data: Any) -> Any:
        """Keep a chunk."""
        self.chunks[put_key] = self.serialize_obj(data)
        return True, len(self.chunks[put_key]), None

    def get(self, from_stage: str, to_stage: str, get_key: str, metadata: Any = None) -> Any:
        """Take a chunk."""
        data = self.chunks.pop(get_key, None)
        return None if data is None else (self.deserialize_obj(data), len(data))

    def cleanup(self, request_id: str) -> None:
        """Forget a chunk."""
        self.chunks.pop(request_id, None)

    def health(self) -> dict[str, Any]:
        """It is well."""
        return {}

    def close(self) -> None:
        """Nothing to do."""


def connector_of(kind: str, stage: int, chunks: dict[str, bytes] | None = None) -> Any:
    """A side of a connection."""
    config = {"stage_id": stage, "extra": {"codec_chunk_frames": 5, "codec_left_context_frames": 3}}
    return SharedMemoryConnector(config) if kind == "shared" else MemoryConnector(config, chunks)


# ---- The clock ----


class Clock:
    """Seconds of the driver's turns, in place of the module `time` in the patch's modules."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        """As `time.monotonic`."""
        return self.now


# ---- The gate ----


class Put(NamedTuple):
    """A put: its key, what it carried, and whether it ended the request."""

    key: str
    content: str
    finished: bool


class Gate:
    """In front of a connector's ``put``: lets it last, fail or hang as the script says, and writes down what was put.

    Attributes:
        turn: The driver's.
        puts: By stream, in order.
        opened: Nothing lasts any longer.
        refused: Keys of puts that the connector itself failed.
    """

    def __init__(self, connector: Any, prefix: str, streams: Mapping[str, Stream]) -> None:
        self._prefix, self._streams, self._put = prefix, streams, connector.put
        self.turn = 0
        self.puts: dict[str, list[Put]] = defaultdict(list)
        self.opened = False
        self.refused: list[str] = []
        self._lock = threading.Lock()
        connector.put = self.put

    def put(self, from_stage: str, to_stage: str, put_key: str, data: Any) -> Any:
        """Upstream's ``put``, with what happens to it."""
        name = put_key.rsplit("_", 2)[0].removeprefix(self._prefix)
        with self._lock:
            turns, fails = self._streams[name].trouble(len(self.puts[name]))
            self.puts[name].append(Put(put_key.removeprefix(self._prefix), digest(data), bool(data.meta.finished)))
            until = self.turn + turns
        while self.turn < until and not self.opened:
            time.sleep(0.0002)
        if fails == "raise":
            raise RuntimeError("the fleet's connector raises")
        if fails:
            return False, 0, None
        result = self._put(from_stage=from_stage, to_stage=to_stage, put_key=put_key, data=data)
        if not result[0]:
            self.refused.append(put_key)
        return result
