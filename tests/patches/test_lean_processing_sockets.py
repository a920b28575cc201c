"""``lean_processing``: a client receives what stock receives from its socket, complete, once and in order."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.patches.lean_processing_script import everything
from tests.patches.test_lean_processing import switched_on

pytestmark = [pytest.mark.upstream, pytest.mark.every_release]


class Wire:
    """One real client and what an engine sends to it.

    Attributes:
        client: vLLM's ``AsyncMPClient`` with its real resources, without an engine.
        socket: The client's.
    """

    def __init__(self, folder: Path, kind: type | None = None) -> None:
        import zmq.asyncio
        from vllm.v1.engine.core_client import BackgroundResources
        from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
        from vllm_omni.engine import OmniEngineCoreOutputs
        from zmq.constants import PULL, PUSH, RCVHWM, SNDHWM
        from zmq.sugar.context import Context

        from benchmarks.rigs.inprocess import QWEN3_OMNI, Replica

        address = f"ipc://{folder / str(id(self))}"
        self._context = Context()
        self.socket = zmq.asyncio.Context(self._context).socket(PULL)
        self.socket.setsockopt(RCVHWM, 0)
        self.socket.bind(address)
        self.engine = self._context.socket(PUSH)
        self.engine.setsockopt(SNDHWM, 0)
        self.engine.connect(address)
        self._encoder = MsgpackEncoder()
        self.client: Any = (kind or Replica)(0, QWEN3_OMNI[0], 0)
        self.client.read_from(self.socket, MsgpackDecoder(OmniEngineCoreOutputs))
        self.client.resources = BackgroundResources(ctx=self._context, output_socket=self.socket)

    def send(self, *outputs: Any) -> None:
        """As an engine sends; bytes go as they are."""
        for each in outputs:
            self.engine.send_multipart([each] if isinstance(each, bytes) else self._encoder.encode(each))

    def close(self) -> None:
        """The engine's end too."""
        self.engine.close(linger=0)
        self.socket.close(linger=0)
        self._context.term()


def _on_wire(folder: Path, script: Callable[[Wire], Any], kind: type | None = None) -> Any:
    async def run() -> Any:
        wire = Wire(folder, kind)
        try:
            return await asyncio.wait_for(script(wire), 60)
        finally:
            wire.client.resources()
            await asyncio.sleep(0.01)
            wire.close()

    return asyncio.run(run())


def _both(folder: Path, script: Callable[[Wire], Any], kind: type | None = None) -> tuple[Any, Any, dict[str, int]]:
    stock = _on_wire(folder, script, kind)
    with switched_on() as counters:
        return stock, _on_wire(folder, script, kind), counters


def _readers(descriptor: int) -> int:
    """Callbacks at a socket's descriptor."""
    selector: Any = vars(asyncio.get_running_loop())["_selector"]
    return int(descriptor in {key.fd for key in selector.get_map().values()})


def _raw(rng: random.Random, number: int) -> Any:
    """A raw output of any stage, numbered."""
    import torch
    from vllm.v1.engine import FinishReason
    from vllm.v1.metrics.stats import SchedulerStats

    from benchmarks.rigs.inprocess import audio, batch, codes, silent, text

    large = torch.full((3, 200), rng.random())
    kinds: list[Callable[[str], Any]] = [
        lambda name: text(name, rng.randrange(100)),
        codes,
        lambda name: codes(name, FinishReason.STOP, stop_reason="because", kv_transfer_params={"kv_wait_s": 0.5}),
        lambda name: audio(name, *[rng.random() for _ in range(rng.choice((1, 10, 500)))]),
        silent,
        lambda name: text(name, 1, pooling_output=large),
    ]
    entries = [rng.choice(kinds)(f"r{n}") for n in range(rng.randrange(4))]
    found = batch(*entries, stats=SchedulerStats() if rng.random() < 0.3 or not entries else None)
    found.timestamp, found.engine_index = float(number + 1), number  # 0.0 becomes the time of decoding
    return found


# ---- What comes of a socket ----


@pytest.mark.parametrize("seed", range(2))
def test_what_is_received_is_stocks(tmp_path: Path, seed: int) -> None:
    """Every raw output is received complete, once and in the order of sending, in bursts and singly."""

    async def script(wire: Wire) -> list[Any]:
        rng = random.Random(seed)
        found, sent = [], 0
        for _ in range(30):
            burst = rng.choice((1, 1, 2, 5, 150))
            wire.send(*(_raw(rng, sent + n) for n in range(burst)))
            sent += burst
            if rng.random() < 0.5:
                await asyncio.sleep(0.002)
            found += [everything(await wire.client.get_output_async()) for _ in range(burst)]
        assert [each["engine_index"] for each in found] == [*range(sent)]
        return found

    stock, ours, counters = _both(tmp_path, script)
    assert ours == stock
    assert repr(ours) == repr(stock)
    assert counters["messages"] == len(stock)


def test_no_arrival_is_missed(tmp_path: Path) -> None:
    """The reader wakes for each message whatever the gaps, although the descriptor signals a change only once."""

    async def script(wire: Wire) -> list[int]:
        def feed() -> None:
            rng = random.Random(1)
            for number in range(4000):
                wire.send(_raw(rng, number))
                if rng.random() < 0.3:
                    time.sleep(rng.random() * 0.0003)

        thread = threading.Thread(target=feed)
        thread.start()
        found = [(await wire.client.get_output_async()).engine_index for _ in range(4000)]
        thread.join()
        return found

    with switched_on():
        assert _on_wire(tmp_path, script) == [*range(4000)]


def test_others_get_their_turn(tmp_path: Path) -> None:
    """However much is queued in a socket, other tasks of the event loop run after 64 messages."""
    count = 1000

    async def script(wire: Wire) -> int:
        wire.send(*(_raw(random.Random(0), number) for number in range(count)))
        await asyncio.sleep(0.2)
        wire.client._ensure_output_queue_task()
        turns = 0
        while wire.client.outputs_queue.qsize() < count:
            turns += 1
            await asyncio.sleep(0)
        return turns

    with switched_on():
        assert _on_wire(tmp_path, script) >= count / 65


@pytest.mark.parametrize("last", ["dead", "garbage"])
def test_an_error_comes_after_what_was_before_it(tmp_path: Path, last: str) -> None:
    """A dead engine and a message that cannot be decoded are raised as on stock, after the earlier messages."""
    from vllm.v1.engine.core import EngineCoreProc

    async def script(wire: Wire) -> Any:
        wire.send(_raw(random.Random(3), 0), _raw(random.Random(4), 1))
        wire.send(EngineCoreProc.ENGINE_CORE_DEAD if last == "dead" else b"\xc1 no message")
        await asyncio.sleep(0.05)
        found = [everything(await wire.client.get_output_async()) for _ in range(2)]
        with pytest.raises(Exception) as caught:  # noqa: PT011 - which one is what is compared
            await wire.client.get_output_async()
        await asyncio.sleep(0)  # the task's end is told one turn after its last message
        return found, repr(caught.value), wire.client.resources.engine_dead, _readers(wire.socket.FD)

    stock, ours, _ = _both(tmp_path, script)
    assert ours[:3] == stock[:3]
    assert ours[3] == 0  # a task that has ended leaves no callback that would find the socket readable for ever


@pytest.mark.parametrize("waits", [False, True])
def test_shutdown_is_upstreams(tmp_path: Path, waits: bool) -> None:
    """Closing raises ``EngineDeadError`` in a waiting call and leaves nothing on the event loop."""
    from vllm.v1.engine.exceptions import EngineDeadError

    async def script(wire: Wire) -> Any:
        wire.send(_raw(random.Random(3), 0))
        await wire.client.get_output_async()
        task, descriptor = wire.client.resources.output_queue_task, wire.socket.FD
        waiting = asyncio.ensure_future(wire.client.get_output_async()) if waits else None
        await asyncio.sleep(0.01)
        wire.client.resources()
        left = _readers(descriptor)
        with pytest.raises(EngineDeadError):
            await (waiting or wire.client.get_output_async())
        return wire.socket.closed, task.done(), task.cancelled(), left

    stock, ours, _ = _both(tmp_path, script)
    assert ours == stock == (True, True, False, 0)


def test_a_client_can_be_collected(tmp_path: Path) -> None:
    """The patch keeps no client alive while its reader waits: upstream closes the socket of a collected one."""

    async def script() -> Any:
        wire = Wire(tmp_path)
        wire.send(_raw(random.Random(3), 0))
        await wire.client.get_output_async()
        await asyncio.sleep(0.01)
        resources, gone = wire.client.resources, weakref.ref(wire.client)
        del wire.client
        gc.collect()
        found = gone()
        resources()
        await asyncio.sleep(0.01)
        wire.close()
        return found

    with switched_on() as counters:
        assert asyncio.run(asyncio.wait_for(script(), 60)) is None
        assert counters["messages"] == 1


# ---- Clients that keep pyzmq's reading ----


def test_data_parallelism_is_left_alone(tmp_path: Path) -> None:
    """A client with data parallelism keeps pyzmq's reading, the rest of the patch applies, and the reason says so."""
    from benchmarks.rigs.inprocess import Replica
    from omni_fastpath.declare import State
    from omni_fastpath.ledger import LEDGER

    class WithHandler(Replica):
        @staticmethod
        async def process_engine_outputs(_client: Any, _outputs: Any) -> None:
            """As the load balancer's."""

    async def script(wire: Wire) -> Any:
        wire.send(_raw(random.Random(3), 7))
        number = (await wire.client.get_output_async()).engine_index
        return number, "recv_multipart" in vars(wire.socket)

    with switched_on() as counters:
        assert _on_wire(tmp_path, script, WithHandler) == (7, False)
        entry = LEDGER.named("lean_processing")
        assert entry.state is State.APPLIED
        assert "data parallelism" in entry.reason
        assert counters["messages"] == 0
        assert _on_wire(tmp_path, script) == (7, True)
