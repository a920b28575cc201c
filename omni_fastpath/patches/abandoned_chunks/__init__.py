"""Chunks that nobody will read are removed from shared memory.

What:
    With async-chunk a stage puts its payloads for the next stage into ``/dev/shm``, and the next stage removes each one
    when it reads it. With the patch, what is left there under the names of a request, chunks and their lock files, is
    removed 5 s after the orchestrator has ended the request, whether it was answered, failed or was aborted. For five
    minutes it is looked for again every 2.5 s, because a stage may still be sending.
Why:
    The chunks of a client who left before they were read stay until the server ends, and the lock files even longer.
    The same is true of a chunk for text alone, and of what the thinker sends after the talker's last step. The first
    chunk has the hidden states of the whole prompt. When ``/dev/shm`` is full, the next put kills its stage (SIGBUS).
Why not a hook:
    Upstream has none at the end of a request.
Scope:
    The orchestrator's process, in both modes. Only names of requests that this server has ended are removed, never
    those of a request that it has, not even under the same id, nor a file that is younger than 5 s. Not covered: stages
    on other hosts or with a ``/dev/shm`` of their own, requests whose server is killed or ends within 5 s, chunks that
    are sent later than five minutes, and more than 10,000 ended requests in that time.
Fragility:
    Wraps the orchestrator's ``_cleanup_request_ids``, through which every request ends, and sees what it takes out of
    ``request_states``, whose keys are the external ids. Relies on the names of chunks and lock files, so
    ``SharedMemoryConnector.put`` is pinned, and so is the function that numbers the chunks. Files are unlinked by name,
    and Python's resource tracker is told, as it is when a stage reads a chunk.
Upstream thread:
    vllm-omni issues #1943 and #4414, PR #4349 (open). From 0.32 on the orchestrator's clean-up makes the stages do it.
Remove when:
    Upstream removes what ended requests leave in shared memory, in every supported release.
"""

from __future__ import annotations

from omni_fastpath.declare import AnySeam, Counter, Fit, Patch, Process, Relies, Row, State, Wrap

ORCHESTRATOR = "vllm_omni.engine.orchestrator"
ADAPTER = "vllm_omni.distributed.omni_connectors.transfer_adapter.chunk_transfer_adapter"


def _seams(owner: str) -> tuple[AnySeam, ...]:
    """The end of a request, in the class that has it, and the names in shared memory."""
    return (
        Wrap(ORCHESTRATOR, f"{owner}._cleanup_request_ids", wrapper="wrapped_cleanup_request_ids"),
        Relies("vllm_omni.distributed.omni_connectors.connectors.shm_connector", "SharedMemoryConnector.put"),
        Relies(ADAPTER, "OmniChunkTransferAdapter._send_single_request_for_generation"),
        Relies(ORCHESTRATOR, owner),
    )


PATCH = Patch(
    name="abandoned_chunks",
    summary="chunks that nobody will read are removed from shared memory",
    processes=frozenset({Process.SERVER}),
    docs=__doc__,
    counters=(
        Counter("chunks", "chunks of ended requests that were removed"),
        Counter("lock_files", "lock files of ended requests that were removed"),
    ),
    rows=(
        Fit(releases=("0.28.0",), seams=_seams("Orchestrator")),
        Fit(releases=("0.30.0",), seams=_seams("OrchestratorBase")),
        Row(
            releases=("0.32.0rc1",),
            state=State.SUPERSEDED,
            seams=(
                Relies(ORCHESTRATOR, "OrchestratorBase._cleanup_request_ids"),
                Relies(ADAPTER, "OmniChunkTransferAdapter.release_shm_resources"),
            ),
            note="the orchestrator tells the stages to remove the chunks of ended requests",
        ),
    ),
)
