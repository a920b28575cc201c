"""The real orchestrator in this process, without engines: for tests of order and content, and for small figures.

Real are the ``Orchestrator`` and its loop, the stage pools, the output processors and vLLM's ``AsyncMPClient`` with
its dequeue and its exception path. Only what stands behind its queue is ours: raw outputs are put into it. It runs on
every release that `upstream` knows.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Self, TypeVar

import janus
import torch
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutputs, FinishReason
from vllm.v1.engine.core_client import AsyncMPClient
from vllm_omni.engine import OmniEngineCoreOutput, OmniEngineCoreOutputs, OmniEngineCoreRequest
from vllm_omni.engine.messages import ShutdownRequestMessage
from vllm_omni.engine.orchestrator import Orchestrator, OrchestratorRequestState
from vllm_omni.engine.stage_pool import StagePool
from vllm_omni.outputs.output_processor import MultimodalOutputProcessor

from benchmarks.rigs import upstream

SAMPLE_RATE = 24000

T = TypeVar("T")


@dataclass(frozen=True)
class Stage:
    """One stage of the pipeline under test.

    Attributes:
        final_output: Whether its outputs go to the user.
        modality: Engine output type: ``text``, ``latent`` or ``audio``.
        replicas: Number of replicas.
    """

    final_output: bool
    modality: str = "latent"
    replicas: int = 1


QWEN3_OMNI = (Stage(final_output=True, modality="text"), Stage(final_output=False), Stage(True, "audio"))
"""Thinker (text goes to the user), talker (nobody sees it), code2wav (audio goes to the user)."""


class Replica(AsyncMPClient):  # type: ignore[misc]
    """vLLM's own client without an engine behind it; ``outputs_queue`` is filled by the test."""

    stage_type = "llm"

    def __init__(self, stage_id: int, stage: Stage, replica_id: int) -> None:  # no super(): there is no engine
        self.stage_id, self.replica_id = stage_id, replica_id
        self.final_output = stage.final_output
        self.final_output_type = stage.modality if stage.final_output else None
        self.outputs_queue: asyncio.Queue[Any] = asyncio.Queue()
        self.resources = SimpleNamespace(
            output_queue_task=object(), output_socket=None, engine_dead=False, validate_alive=lambda _frames: None
        )
        self.utility_results: dict[Any, Any] = {}
        self.default_sampling_params = SamplingParams()
        self.aborted: list[str] = []
        self.submitted: list[Any] = []
        self.down = False

    async def add_request_async(self, request: Any, **_kwargs: Any) -> None:
        """Note the request; nobody will compute it."""
        self.submitted.append(request)

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        """Note the abort."""
        self.aborted.extend(request_ids)

    def shutdown(self, timeout: float | None = None) -> None:
        """Nothing to shut down."""
        del timeout
        self.down = True


class Pipeline:
    """A real orchestrator over ``Replica`` clients.

    Args:
        stages: The stages, first to last.
        async_chunk: As the deploy YAML's key.
        event_driven: Upstream's event-driven loop instead of the poll loop.
    """

    def __init__(
        self, stages: Sequence[Stage] = QWEN3_OMNI, *, async_chunk: bool = True, event_driven: bool = False
    ) -> None:
        self.stages = tuple(stages)
        self.crash: Exception | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.requests: janus.Queue[Any] = janus.Queue()
        self.outputs: janus.Queue[Any] = janus.Queue()
        self.rpc: janus.Queue[Any] = janus.Queue()
        self.replicas = [[Replica(s, stage, r) for r in range(stage.replicas)] for s, stage in enumerate(stages)]
        self.pools = [
            StagePool(
                stage_id,
                list(replicas),
                output_processor=MultimodalOutputProcessor(
                    None, log_stats=True, engine_core_output_type=self.stages[stage_id].modality
                ),
            )
            for stage_id, replicas in enumerate(self.replicas)
        ]
        self.writer = upstream.output_writer(self.outputs)
        self.orchestrator = Orchestrator(
            self.requests.async_q, self.writer, self.rpc.async_q, self.pools, async_chunk=async_chunk
        )
        self.orchestrator._event_driven_orch = event_driven

    # ---- Requests ----

    def add_request(
        self,
        request_id: str,
        kind: RequestOutputKind = RequestOutputKind.DELTA,
        *,
        replicas: Sequence[int] | None = None,
        resumable: bool = False,
    ) -> OrchestratorRequestState:
        """Register a request that has been submitted to every stage, as under async-chunk.

        Args:
            request_id: Its id.
            kind: How it wants its outputs, at every stage.
            replicas: The replica of each stage that it is bound to; the first by default.
            resumable: A streaming-input session, whose stages end segment by segment.
        """
        last = len(self.stages) - 1
        params = [SamplingParams(output_kind=kind, detokenize=False, max_tokens=100_000) for _ in self.stages]
        state = OrchestratorRequestState(
            request_id=request_id,
            sampling_params_list=params,
            final_stage_id=last,
            final_output_stage_ids={i for i, stage in enumerate(self.stages) if stage.final_output},
            request_timestamp=time.time(),
        )
        state.streaming.enabled = resumable
        self.orchestrator.request_states[request_id] = state
        for stage_id, pool in enumerate(self.pools):
            state.stage_submit_ts[stage_id] = time.time()
            request = engine_request(request_id, [1, 2, 3], params[stage_id], resumable=resumable)
            pool.output_processor.add_request(request, None)
            pool._request_bindings[request_id] = replicas[stage_id] if replicas else 0
        return state

    def put(self, stage_id: int, *batches: Any, replica_id: int = 0) -> None:
        """Queue raw outputs (or exceptions) on a replica in one go, as its socket reader would."""
        queue = self.replicas[stage_id][replica_id].outputs_queue

        def put_all() -> None:
            for each in batches:
                queue.put_nowait(each)

        self.do(put_all)

    # ---- Running ----

    @property
    def thread(self) -> threading.Thread:
        """The orchestrator's thread."""
        return self._thread

    def do(self, function: Callable[[], T]) -> T:
        """Call ``function`` on the orchestrator's event loop and return its result; before the start, here and now."""
        if self._loop is None:
            return function()

        async def call() -> T:
            return function()

        return asyncio.run_coroutine_threadsafe(call(), self._loop).result(timeout=30)

    def __enter__(self) -> Self:
        started = threading.Event()

        async def run() -> None:
            self._loop = asyncio.get_running_loop()
            started.set()
            await self.orchestrator.run()

        def thread() -> None:
            try:
                asyncio.run(run())
            except Exception as error:  # as upstream's thread, which logs it; a test looks at it
                self.crash = error

        self._thread = threading.Thread(target=thread, name="orchestrator")
        self._thread.start()
        assert started.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        self.requests.sync_q.put_nowait(ShutdownRequestMessage())
        self._thread.join(timeout=30)
        assert not self._thread.is_alive(), "the orchestrator did not shut down"
        self._loop = None

    def settle(self) -> None:
        """Wait until every queue is empty and what was taken is routed: nothing is about to run on the event loop."""
        assert self._loop is not None
        ready = vars(self._loop)["_ready"]  # asyncio's own: upstream's event-driven queue is a local of its loop
        quiet = 0
        while quiet < 3 and self._thread.is_alive():
            waiting = self.do(
                lambda: len(ready) + sum(r.outputs_queue.qsize() for replicas in self.replicas for r in replicas)
            )
            quiet = 0 if waiting else quiet + 1
            time.sleep(0.002)

    def messages(self) -> list[Any]:
        """What the orchestrator has sent to the front end since the last call."""
        found = []
        while not self.outputs.sync_q.empty():
            found.append(self.outputs.sync_q.get_nowait())
        return found


# ---- Front end ----


def without_orchestrator(is_alive: Callable[[], bool] = lambda: True) -> Any:
    """What ``front_end`` needs of a pipeline: an empty output queue, and a thread that says that it lives."""
    outputs = janus.Queue[Any]()
    thread = type("Thread", (), {"is_alive": staticmethod(is_alive)})()
    return SimpleNamespace(outputs=outputs, writer=upstream.output_writer(outputs), thread=thread)


def front_end(pipeline: Pipeline, queues: Mapping[str, Any], *, event_driven: bool) -> Any:
    """Upstream's front end with its own drain, without a server around it.

    Args:
        pipeline: Whose output queue it drains.
        queues: For each request, what takes its messages with ``await put(message)``.
        event_driven: Its event-driven drain, which blocks in a thread, instead of the polling one. A server has the
            same mode here and in the orchestrator.
    """
    from vllm_omni.entrypoints.async_omni import AsyncOmni
    from vllm_omni.entrypoints.client_request_state import ClientRequestState

    class Engine(upstream.OmniEngineBase):  # type: ignore[misc]
        def __init__(self) -> None:  # no super(): there are no stages
            upstream.give_output(self, pipeline.outputs, pipeline.writer, event_driven=event_driven)
            self.orchestrator_thread = pipeline.thread

        def is_alive(self) -> bool:
            return pipeline.thread.is_alive()

        def __del__(self) -> None:
            """Nothing to shut down."""

    found = object.__new__(AsyncOmni)
    found.engine, found.final_output_task = Engine(), None
    upstream.drain_in_mode(found, event_driven=event_driven)
    found.request_states = {each: ClientRequestState(each, queue=queue) for each, queue in queues.items()}
    return found


# ---- Requests and raw outputs ----


def engine_request(
    name: str, prompt_token_ids: Sequence[int], sampling_params: Any, *, request_id: str | None = None, **fields: Any
) -> Any:
    """Upstream's request of a stage's engine, text in, with nothing but what is said here.

    Args:
        name: The external request id.
        prompt_token_ids: The prompt.
        sampling_params: Upstream's.
        request_id: The internal one; the same unless given.
        fields: More of upstream's fields.
    """
    return OmniEngineCoreRequest(
        request_id=request_id or name,
        external_req_id=name,
        prompt_token_ids=list(prompt_token_ids),
        mm_features=None,
        sampling_params=sampling_params,
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
        **fields,
    )


def batch(*entries: OmniEngineCoreOutput, stats: Any = None, finished: Iterable[str] = ()) -> EngineCoreOutputs:
    """One raw output of a stage: an entry for each request that the step touched."""
    return OmniEngineCoreOutputs(
        outputs=list(entries),
        scheduler_stats=stats,
        finished_requests=set(finished) or None,
        timestamp=time.monotonic(),
    )


def text(request_id: str, *token_ids: int, finish: FinishReason | None = None, **fields: Any) -> OmniEngineCoreOutput:
    """A thinker's entry: tokens for the user."""
    return OmniEngineCoreOutput(request_id, list(token_ids), finish_reason=finish, **fields)


def codes(request_id: str, finish: FinishReason | None = None, **fields: Any) -> OmniEngineCoreOutput:
    """A talker's entry: codec frames, which nobody sees and which are never drained."""
    payload = {"codes.audio": torch.zeros(1, 16, dtype=torch.long)}
    return _with(payload, request_id, [7], finish_reason=finish, **fields)


def audio(request_id: str, *samples: float, finish: FinishReason | None = None, **fields: Any) -> OmniEngineCoreOutput:
    """A code2wav entry with audio in it."""
    payload = {"model_outputs": torch.tensor(samples), "sr": torch.tensor(SAMPLE_RATE)}
    return _with(payload, request_id, [], finish_reason=finish, **fields)


def silent(request_id: str, **fields: Any) -> OmniEngineCoreOutput:
    """A code2wav entry that nobody hears: the sample rate, and no samples."""
    payload = {"model_outputs": torch.zeros(0), "sr": torch.tensor(SAMPLE_RATE)}
    return _with(payload, request_id, [], **fields)


def _with(payload: Mapping[str, Any], *given: Any, **fields: Any) -> OmniEngineCoreOutput:
    return OmniEngineCoreOutput(*given, multimodal_output=payload, **fields)
