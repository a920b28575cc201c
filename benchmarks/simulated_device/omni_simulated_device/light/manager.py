"""Light engines in the place of upstream's stage processes, in the process that launches stages.

Upstream makes a `StageEngineCoreProcManager` for each replica, by its name in its module, and asks it little: whether
its processes live, and to end them. `LightEngineManager` answers for an engine in the `host` process. That one is
started with the first engine and ended with the last, or when this process is gone.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import logging
import socket
import subprocess
import sys
import threading
import time
import weakref
from typing import Any

import msgspec
from vllm.v1.engine.utils import CoreEngineProcManager

from omni_simulated_device import config
from omni_simulated_device.light import fastpath
from omni_simulated_device.light.behaviour import BEHAVIOURS, StageSpec
from omni_simulated_device.light.sender import Spec
from omni_simulated_device.light.wire import Layout

logger = logging.getLogger("vllm.omni_simulated_device")

SEAM = "vllm_omni.engine.stage_engine_core_proc_manager"
_HOST_STOP_S = 10.0
_KV_BYTES_PER_TOKEN = 2 * 8 * 128 * 2  # of the one layer that the simulated worker pretends to have


def install() -> None:
    """Let stages that this process launches from now on be light engines; may be called many times."""
    vars(importlib.import_module(SEAM))["StageEngineCoreProcManager"] = LightEngineManager


class _Host:
    """The process of the engines that this process launches, from the first one to the last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._engines = 0
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "omni_simulated_device.light.host", str(theirs.fileno())]
        with theirs:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])

    def add(self, spec: Spec) -> socket.socket | None:
        """Start an engine; the result is this side of its pair, or None if the process is gone or about to."""
        with self._lock:
            if self.process.poll() is not None or self.control.fileno() < 0:
                return None
            ours, theirs = socket.socketpair()
            with theirs:
                socket.send_fds(self.control, [msgspec.msgpack.encode(spec)], [theirs.fileno()])
            self._engines += 1
            return ours

    def release(self) -> None:
        """An engine has ended; with the last one the process does."""
        with self._lock:
            self._engines -= 1
            if self._engines:
                return
            self.control.close()
            try:
                self.process.wait(_HOST_STOP_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


_hosts: list[_Host] = []
_hosts_lock = threading.Lock()


def _begin(spec: Spec) -> tuple[_Host, socket.socket]:
    """Start an engine, in the process that there is or in a new one."""
    with _hosts_lock:
        for host in _hosts:
            if (pair := host.add(spec)) is not None:
                return host, pair
        _hosts[:] = [host := _Host()]
        pair = host.add(spec)
        if pair is None:
            raise RuntimeError("the process of the light engines ended at once")
        return host, pair


class _Handle:
    """An engine as `multiprocessing` would show its process, as far as vLLM asks."""

    pid = None  # vLLM kills by it what does not end, and the process is the siblings' too

    def __init__(self, spec: Spec) -> None:
        self.name = spec.name
        self.host, self._pair = _begin(spec)
        self.sentinel = self._pair.fileno()
        """Readable when the engine has ended; open as long as this, because others may still wait for it."""
        weakref.finalize(self, self._pair.close)
        self._lock = threading.Lock()
        self._exitcode: int | None = None
        self._told = False

    @property
    def exitcode(self) -> int | None:
        """None while it lives; 0 if it was told to end, else 1."""
        self.join(0)
        return self._exitcode

    def is_alive(self) -> bool:
        """Whether the engine has not ended."""
        return self.exitcode is None

    def terminate(self) -> None:
        """Tell the engine to end."""
        self._told = True
        with contextlib.suppress(OSError):
            self._pair.shutdown(socket.SHUT_WR)

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end."""
        with self._lock:
            if self._exitcode is not None:
                return
            self._pair.settimeout(timeout)
            try:
                error = self._pair.recv(4096)
            except (TimeoutError, BlockingIOError):
                return
            except OSError:
                error = b"the process of the light engines is gone"
            if error:
                logger.error("light engine %s: %s", self.name, error.decode(errors="replace"))
            self._exitcode = 1 if error or not self._told else 0
        self.host.release()


def _end(handles: list[_Handle]) -> None:
    for handle in handles:
        handle.terminate()
    for handle in handles:
        handle.join(_HOST_STOP_S)


class LightEngineManager(CoreEngineProcManager):  # type: ignore[misc]
    """In the place of upstream's manager: its methods work on `_Handle` as on processes."""

    def __init__(
        self,
        local_engine_count: int,
        start_index: int,
        local_start_index: int,  # noqa: ARG002 - upstream's signature
        vllm_config: Any,
        local_client: bool,
        handshake_address: str,
        executor_class: type,  # noqa: ARG002
        log_stats: bool,
        *,
        omni_stage_id: int,
        omni_coordinator_address: str | None = None,
        omni_replica_base_id: int = 0,
        client_handshake_address: str | None = None,
        tensor_queue: Any = None,  # noqa: ARG002 - light engines do not look at tensors
        omni_parallel_stage_init: bool = False,  # noqa: ARG002 - they have no memory to profile; from 0.30
        omni_handshake_timeout_s: float | None = None,  # noqa: ARG002 - from 0.32
    ) -> None:
        if local_engine_count != 1 or vllm_config.parallel_config.data_parallel_size != 1:
            raise NotImplementedError("light engines have no data parallelism inside a replica")
        if omni_coordinator_address or client_handshake_address or not local_client:
            raise NotImplementedError("light engines are local: no coordinator, no headless stages")
        self._request_shutdown_timeout = vllm_config.shutdown_timeout
        self.manager_stopped = threading.Event()
        self.failed_proc_name: str | None = None
        began = time.monotonic()
        spec = describe(
            vllm_config,
            stage=omni_stage_id,
            replica=omni_replica_base_id,
            index=start_index,
            handshake=handshake_address,
            log_stats=log_stats,
        )
        self.processes = [_Handle(spec)]
        self._finalizer = weakref.finalize(self, _end, self.processes)
        gate = spec.fastpath.states[fastpath.GATE] if spec.fastpath else ("off", "")
        took_s = time.monotonic() - began
        logger.info("[simulated device] light engine %s after %.3f s, forward_gate %s: %s", spec.name, took_s, *gate)


def describe(vllm_config: Any, *, stage: int, replica: int, index: int, handshake: str, log_stats: bool) -> Spec:
    """One engine, by upstream's own classes and configuration.

    Raises:
        NotImplementedError: The stage is none that a light engine can be.
    """
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm_omni.core.sched.omni_scheduler_mixin import _STATS_INTERVAL_S
    from vllm_omni.distributed.omni_connectors.utils.config import stage_sends_async_output
    from vllm_omni.engine import OmniEngineCoreOutput, OmniEngineCoreOutputs, OmniEngineCoreRequest

    from omni_simulated_device import upstream

    model = vllm_config.model_config
    if model.model_stage not in BEHAVIOURS:
        raise NotImplementedError(f"model stage {model.model_stage!r}: light engines are {', '.join(BEHAVIOURS)}")
    if not model.async_chunk:
        raise NotImplementedError("light engines need async_chunk: true")
    ours = fastpath.in_stage(vllm_config)
    return Spec(
        name=f"LightEngine_stage{stage}_replica{replica}",
        stage=stage,
        handshake=handshake,
        identity=index.to_bytes(2, "little"),
        ready=msgspec.msgpack.encode(_ready(vllm_config, index)),
        request=_layout(OmniEngineCoreRequest),
        output=_layout(OmniEngineCoreOutput),
        outputs=_layout(OmniEngineCoreOutputs),
        stats=msgspec.to_builtins(SchedulerStats()) if log_stats else None,
        stats_every_s=_STATS_INTERVAL_S,
        ends_only=not upstream.emits_output(model, stopped=False, has_control=False),
        slots=vllm_config.scheduler_config.max_num_seqs,
        budget=vllm_config.scheduler_config.max_num_batched_tokens,
        behaviour=_behaviour(
            model, makes_payload=not stage_sends_async_output(model), gated=ours is not None and ours.gated
        ),
        fastpath=ours,
    )


def _behaviour(model: Any, *, makes_payload: bool, gated: bool) -> StageSpec:
    hf_config = model.hf_config
    talker = getattr(hf_config, "talker_config", hf_config)
    device = config.load()
    connector = model.stage_connector_config
    extra = (connector.get("extra") if isinstance(connector, dict) else None) or {}
    omni = hasattr(hf_config, "thinker_config")
    return StageSpec(
        model_stage=model.model_stage,
        context=int(model.max_model_len),
        eos=int(hf_config.im_end_token_id if model.model_stage == "thinker" else talker.codec_eos_token_id),
        codebooks=int(talker.num_code_groups),
        initial_chunk=int(extra.get("initial_codec_chunk_frames") or 0),
        chunk=int(extra.get("codec_chunk_frames", 25)),
        # Qwen3-TTS's decoder keeps its state, so that no frame is sent twice.
        left_context=int(extra.get("codec_left_context_frames", 25)) if omni else 0,
        makes_payload=makes_payload,
        gated=gated,
        seed=device.seed,
        settings=device.stage(model.model_stage),
    )


def _layout(kind: type) -> Layout:
    """Where the fields of one of upstream's structures stand, and their defaults."""
    fields: tuple[Any, ...] = msgspec.structs.fields(kind)
    defaults = []
    for field in fields:
        if field.default_factory is not msgspec.NODEFAULT:
            defaults.append(field.default_factory())
        else:
            defaults.append(None if field.default is msgspec.NODEFAULT else field.default)
    return Layout([field.name for field in fields], defaults)


def _ready(vllm_config: Any, index: int) -> Any:
    """What an engine says of itself when it has started."""
    from vllm import __version__
    from vllm.v1.engine import EngineCoreReadyResponse

    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    tokens = config.KV_CACHE_MIB * 2**20 // _KV_BYTES_PER_TOKEN
    scheduler, lora = vllm_config.scheduler_config, vllm_config.lora_config
    said = {
        "max_model_len": model.max_model_len,
        "num_gpu_blocks": tokens // cache.block_size,
        "block_size": cache.block_size,
        "dp_stats_address": None,
        "dtype": str(model.dtype).removeprefix("torch."),
        "vllm_version": __version__,
        "world_size": parallel.world_size,
        "data_parallel_size": parallel.data_parallel_size,
        "tensor_parallel_size": parallel.tensor_parallel_size,
        "pipeline_parallel_size": parallel.pipeline_parallel_size,
        "decode_context_parallel_size": parallel.decode_context_parallel_size,
        "data_parallel_rank": index,
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "instance_id": vllm_config.instance_id,
        "supports_lora": lora is not None,
        "max_loras": 0 if lora is None else lora.max_loras,
        "kv_cache_size_tokens": tokens,
        "kv_cache_max_concurrency": tokens / model.max_model_len,
    }
    known = inspect.signature(EngineCoreReadyResponse).parameters  # releases differ
    return EngineCoreReadyResponse(**{name: value for name, value in said.items() if name in known})
