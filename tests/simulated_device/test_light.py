"""Light engines: what they say on the wire, against upstream's own classes; no server."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

pytest.importorskip("vllm_omni")

import msgspec

from benchmarks.rigs.engine_requests import engine_request
from omni_simulated_device import config, content
from omni_simulated_device.light import behaviour, manager
from omni_simulated_device.light.engine import Spec

zmq: Any = pytest.importorskip("zmq")
pytestmark = [pytest.mark.upstream, pytest.mark.every_release]

STEP_MS = 2.0
IDENTITY = (0).to_bytes(2, "little")
MODEL_STAGES = ("thinker", "talker", "code2wav")
WAIT_MS = 10_000
LENGTHS = {"min_tokens": 6, "max_tokens": 9, "min_frames": 5, "max_frames": 40}


def spec(stage: int, folder: Any, **changes: Any) -> Spec:
    """An engine of a Qwen3-Omni stage, as the server would describe it."""
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm_omni.engine import OmniEngineCoreOutput, OmniEngineCoreOutputs, OmniEngineCoreRequest

    settings = config.StageSettings(base_ms=STEP_MS, **LENGTHS)
    stage_spec = behaviour.StageSpec(
        model_stage=MODEL_STAGES[stage],
        context=4096,
        eos=151645 if stage == 0 else 2150,
        codebooks=16,
        initial_chunk=4,
        chunk=25,
        left_context=25,
        client_gets_payload=stage == 1,
        seed=0,
        settings={**dataclasses.asdict(settings), **changes},
    )
    return Spec(
        name=f"stage{stage}",
        stage=stage,
        handshake=f"ipc://{folder}/handshake-{stage}",
        identity=IDENTITY,
        ready=b"\x80",
        request=manager._layout(OmniEngineCoreRequest),
        output=manager._layout(OmniEngineCoreOutput),
        outputs=manager._layout(OmniEngineCoreOutputs),
        stats=msgspec.to_builtins(SchedulerStats()),
        stats_every_s=1.0,
        ends_only=False,
        slots=64,
        behaviour=stage_spec,
    )


def payload_of(output: Any) -> Any:
    """What an output has for the client."""
    return output.multimodal_output


class Client:
    """A stage's client as vLLM has it: handshake, requests in, raw outputs out."""

    def __init__(self, spec: Spec, folder: Any) -> None:
        from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
        from vllm_omni.engine import OmniEngineCoreOutputs

        self.context = zmq.Context()
        inputs, outputs = f"ipc://{folder}/in-{spec.stage}", f"ipc://{folder}/out-{spec.stage}"
        self._input, self._output = self.context.socket(zmq.ROUTER), self.context.socket(zmq.PULL)
        self._input.bind(inputs)
        self._output.bind(outputs)
        handshake = self.context.socket(zmq.ROUTER)
        handshake.bind(spec.handshake)
        self.handle = manager._Handle(spec)
        assert self._said(handshake) == {"status": "HELLO", "local": True, "headless": False}
        init = msgspec.msgpack.encode({"addresses": {"inputs": [inputs], "outputs": [outputs]}, "parallel_config": {}})
        handshake.send_multipart((IDENTITY, init))
        assert self._said(handshake)["status"] == "READY"
        assert self._input.poll(WAIT_MS)
        assert self._input.recv_multipart() == [IDENTITY, spec.ready]
        handshake.close()
        self._encoder, self._decoder = MsgpackEncoder(), MsgpackDecoder(OmniEngineCoreOutputs)

    @staticmethod
    def _said(handshake: Any) -> Any:
        assert handshake.poll(WAIT_MS)
        identity, message = handshake.recv_multipart()
        assert identity == IDENTITY
        return msgspec.msgpack.decode(message)

    def send(self, kind: bytes, message: Any) -> None:
        """What the server sends to the engine."""
        self._input.send_multipart((IDENTITY, kind, *self._encoder.encode(message)))

    def raw(self, wait_ms: int = WAIT_MS) -> Any:
        """The next raw output, or None."""
        if not self._output.poll(wait_ms):
            return None
        return self._decoder.decode(self._output.recv_multipart(copy=False))

    def outputs_of(self, name: str) -> list[Any]:
        """A request's outputs to its end."""
        found: list[Any] = []
        while not found or found[-1].finish_reason is None:
            raw = self.raw()
            assert raw is not None, f"{len(found)} outputs of {name} and no more"
            found += [each for each in raw.outputs if each.request_id == name]
        return found

    def close(self) -> None:
        """End the engine and this side's sockets."""
        self.handle.terminate()
        self.handle.join(5)
        for each in (self._input, self._output):
            each.close(linger=0)
        self.context.term()


@pytest.fixture
def clients(tmp_path: Any) -> Iterator[Sequence[Client]]:
    """One engine of each stage."""
    made = [Client(spec(stage, tmp_path), tmp_path) for stage in range(3)]
    yield made
    for each in made:
        each.close()


def ask(clients: Sequence[Client], name: str, *, most: int = 100, final: int = 2) -> None:
    """Submit a request as the orchestrator does: to stage 0, and with zeros to the others at once."""
    from vllm.sampling_params import SamplingParams
    from vllm_omni.engine.serialization import serialize_additional_information

    information = serialize_additional_information({"omni_final_stage_id": final})
    text = SamplingParams(temperature=0.0, max_tokens=most)
    text._eos_token_id = 151645
    audio = SamplingParams(temperature=0.9, seed=42, max_tokens=4096, stop_token_ids=[2150])
    for stage, (client, params) in enumerate(zip(clients, (text, audio, audio), strict=False)):
        if stage <= final:
            request = engine_request(name, [5, 6, 7] if stage == 0 else [0, 0], params)
            if stage == 0:
                request.additional_information = information
            client.send(b"\x00", request)


def test_they_take_what_upstreams_take() -> None:
    """What stands in for the seam that upstream launches a stage's process with has that one's parameters."""
    theirs = importlib.import_module(manager.SEAM).StageEngineCoreProcManager
    wanted = list(inspect.signature(theirs).parameters)
    assert list(inspect.signature(manager.LightEngineManager).parameters)[: len(wanted)] == wanted


def test_a_request_goes_through_the_stages(clients: Sequence[Client]) -> None:
    """Text to its end token, codes for each text token, audio of exactly those codes, in upstream's classes."""
    import torch
    from vllm.v1.engine import FinishReason

    ask(clients, "one")
    text, codes, audio = (client.outputs_of("one") for client in clients)
    key = content.content_key(0, "text", [5, 6, 7], None)
    tokens = [token for each in text for token in each.new_token_ids]
    assert tokens[:-1] == [content.text_token(key, index) for index in range(len(tokens) - 1)]
    assert tokens[-1] == 151645
    assert 6 <= len(tokens) <= 9
    assert [each.finish_reason for each in (text[-1], codes[-1], audio[-1])] == [FinishReason.STOP] * 3
    assert (text[-1].stop_reason, codes[-1].stop_reason) == (None, 2150)
    frames = [payload_of(each)["codes.audio"] for each in codes]
    assert frames[0].shape == (2, 16)
    assert not frames[0].any()
    said = [frame[0].tolist() for frame in frames[1:]]
    assert said == [content.codec_frame(key, index, 16) for index in range(len(said))]
    waves = [payload_of(each)["model_outputs"] for each in audio]
    lengths = [wave.shape[1] // 1920 for wave in waves]
    assert lengths[0] == 4
    assert sum(lengths) == len(said)
    whole = torch.cat([torch.from_numpy(content.frame_samples(frame, 1920)) for frame in said])
    assert torch.equal(torch.cat(waves, dim=1)[0], whole)
    assert int(payload_of(audio[0])["sr"]) == 24000


def test_an_aborted_request_falls_silent_and_the_others_go_on(tmp_path: Any) -> None:
    """After an abort one entry says so, as an AR scheduler's does, and nothing more comes of that request."""
    client = Client(spec(0, tmp_path, base_ms=100.0), tmp_path)  # slow: the abort comes before the request's own end
    outputs: list[Any] = []
    ended: set[str] = set()
    try:
        for name in ("gone", "stays"):
            ask([client], name)
        client.send(b"\x01", ["gone"])
        while "stays" not in ended:
            raw = client.raw()
            assert raw is not None, ended
            outputs += raw.outputs
            ended |= set(raw.finished_requests or ())
        assert client.raw(300) is None
    finally:
        client.close()
    gone = [each for each in outputs if each.request_id == "gone"]
    stays = [each for each in outputs if each.request_id == "stays"]
    assert [str(each.finish_reason) for each in gone if each.finish_reason is not None] == ["abort"]
    assert gone[-1].finish_reason is not None
    assert str(stays[-1].finish_reason) == "stop"
    assert ended == {"gone", "stays"}


def test_a_length_ends_a_request(clients: Sequence[Client]) -> None:
    """``max_tokens`` ends it with that reason; a request for text alone does not reach the other stages."""
    ask(clients, "short", most=2, final=0)
    assert [str(each.finish_reason) for each in clients[0].outputs_of("short")] == ["None", "length"]
    assert clients[1].raw(30) is None


def test_utilities_answer_or_fail(clients: Sequence[Client]) -> None:
    """What an engine without a model can answer is answered, anything else fails by name."""
    for method, (failure, result) in {
        "get_supported_tasks": (None, ["generate"]),
        "add_lora": ("Call to add_lora method failed", None),
    }.items():
        clients[0].send(b"\x03", (0, 77, method, ()))
        answer = clients[0].raw().utility_output
        assert answer.call_id == 77
        assert (answer.failure_message or "").startswith(failure or "")
        assert bool(answer.failure_message) == bool(failure)
        if failure is None:
            assert answer.result.result == result


def test_one_engines_end_is_not_its_siblings(clients: Sequence[Client]) -> None:
    """An engine that is told to end does, with status 0; another one serves on."""
    clients[2].handle.terminate()
    clients[2].handle.join(5)
    assert (clients[2].handle.is_alive(), clients[2].handle.exitcode) == (False, 0)
    assert clients[0].handle.is_alive()
    clients[0].send(b"\x03", (0, 1, "is_sleeping", ()))
    assert clients[0].raw().utility_output.result.result is False


def test_silent_outputs_come_before_each_with_audio(tmp_path: Any) -> None:
    """With ``silent`` 3 code2wav sends N N N A."""
    made = [Client(spec(stage, tmp_path, silent=3), tmp_path) for stage in range(3)]
    try:
        ask(made, "one")
        heard = [bool(payload_of(each)["model_outputs"].numel()) for each in made[2].outputs_of("one")]
    finally:
        for each in made:
            each.close()
    assert heard == [False, False, False, True] * (len(heard) // 4)


def test_a_stage_that_nobody_sees_sends_only_ends(tmp_path: Any) -> None:
    """As a talker does on model runner v2: one entry a request, and code2wav gets all of its frames."""
    if "num_generation_tokens" not in spec(1, tmp_path).output.names:
        pytest.skip("this release has no model runner v2 for stages")
    made = [
        Client(msgspec.structs.replace(spec(stage, tmp_path), ends_only=stage == 1), tmp_path) for stage in range(3)
    ]
    try:
        ask(made, "one")
        [end] = made[1].outputs_of("one")
        audio = made[2].outputs_of("one")
    finally:
        for each in made:
            each.close()
    assert end.finish_reason is not None
    frames = sum(payload_of(each)["model_outputs"].shape[1] // 1920 for each in audio)
    assert frames == end.num_generation_tokens - 1


def test_the_process_ends_with_its_last_engine(tmp_path: Any) -> None:
    """Engines share one process, which is gone when the last of them is."""
    made = [Client(spec(stage, tmp_path), tmp_path) for stage in range(2)]
    process = made[0].handle.host.process
    assert made[1].handle.host.process is process
    made[0].close()
    assert process.poll() is None
    made[1].close()
    assert process.poll() == 0


def test_the_process_ends_with_its_server(tmp_path: Any) -> None:
    """When the server's end of the control socket is gone, the process ends whatever its engines do."""
    client = Client(spec(0, tmp_path), tmp_path)
    host = client.handle.host
    host.control.shutdown(socket.SHUT_RDWR)
    assert host.process.wait(5) == 0
    assert not client.handle.is_alive()
    client.close()
