"""The stage whose payload is sent twice, release by release: its real scheduler, and what its model puts out.

0.22's thinker is built from that release's own engine arguments, over the packages of the environment; its model is a
stand-in that answers each token with two rows of [1, 2048] bf16. 0.30's talker is the rig of ``benchmarks.save_queue``:
the config that the simulated deploy's stage gets, and the simulated device's codes, [1, 16] a token.
"""

from __future__ import annotations

import os
import pickle
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from benchmarks.rigs.engine_requests import engine_request

OLD, NEW = "0.22.0", "0.30.0"
PROMPT_TOKENS = 16
_PROCESSORS = "vllm_omni.model_executor.stage_input_processors.qwen3_omni"


class Stage(Protocol):
    """A stage under measurement."""

    scheduler: Any

    def add(self, name: str, tokens: int) -> Any:
        """Add a request that gets exactly so many tokens; return what the output processor registers for it."""
        ...

    def begin(self) -> None:
        """Wait until all that was added can start in one step."""
        ...

    def compute(self) -> tuple[Any, Any]:
        """A step of scheduler and model: the scheduler's output, and the model runner's."""
        ...

    def close(self) -> None:
        """End its threads."""
        ...


def request_of(name: str, tokens: int) -> Any:
    """A request of so many tokens; detokenised text is left out, it is not what is measured."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    params = SamplingParams(
        temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
    )
    return engine_request(name, range(100, 100 + PROMPT_TOKENS), params)


class Thinker:
    """0.22's first stage, whose latents are sent to the orchestrator as ``pooling_output``."""

    ROW = 2048

    def __init__(self, folder: Path) -> None:
        import torch
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager
        from vllm_omni.core.sched.omni_ar_scheduler import OmniARScheduler

        config = pickle.loads((folder / "thinker.pickle").read_bytes())  # noqa: S301 - our own file
        blocks = 20_000
        config.cache_config.num_gpu_blocks = blocks
        spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.bfloat16)
        self.scheduler = OmniARScheduler(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
            structured_output_manager=StructuredOutputManager(config),
            include_finished_set=True,
            log_stats=False,
            block_size=16,
        )
        self._adapter = self.scheduler.chunk_transfer_adapter
        self._adapter.connector.put = _put_nowhere
        self._steps = 0

    @staticmethod
    def configure(folder: Path) -> None:
        """Pickle the stage's config into *folder*: it takes some 20 s, and every arm needs the same."""
        from vllm_omni.engine.arg_utils import OmniEngineArgs

        from omni_simulated_device.models import write_qwen3_omni

        write_qwen3_omni(folder / "model")
        arguments = OmniEngineArgs(
            model=str(folder / "model"),
            stage_id=0,
            model_stage="thinker",
            model_arch="Qwen3OmniMoeForConditionalGeneration",
            hf_config_name="thinker_config",
            engine_output_type="latent",
            worker_type="ar",
            worker_cls="vllm.v1.worker.worker_base.WorkerBase",
            async_chunk=True,
            custom_process_next_stage_input_func=f"{_PROCESSORS}.thinker2talker_async_chunk",
            stage_connector_spec={"name": "SharedMemoryConnector", "extra": {}},
            scheduler_cls="vllm_omni.core.sched.omni_ar_scheduler.OmniARScheduler",
            async_scheduling=False,
            max_model_len=4096,
            max_num_seqs=128,
            max_num_batched_tokens=4096,
            enforce_eager=True,
            enable_prefix_caching=False,
            load_format="dummy",
            trust_remote_code=True,
        )
        (folder / "thinker.pickle").write_bytes(pickle.dumps(arguments.create_engine_config()))

    def add(self, name: str, tokens: int) -> Any:
        """Add a request, made a scheduler's as the stage process does."""
        from vllm.v1.request import Request

        request = request_of(name, tokens)
        scheduled = Request.from_engine_core_request(request, None)
        scheduled.external_req_id = name
        self.scheduler.add_request(scheduled)
        return request

    def begin(self) -> None:
        """The first stage waits for nobody."""

    def compute(self) -> tuple[Any, Any]:
        """One token a request, and two rows for each token computed, every step's in memory of its own."""
        import torch
        from vllm_omni.outputs import OmniModelRunnerOutput

        step = self.scheduler.schedule()
        scheduled = step.num_scheduled_tokens
        self._steps += 1
        payloads = [
            {
                f"hidden_states.layer_{layer}": torch.full((count, self.ROW), float(self._steps), dtype=torch.bfloat16)
                for layer in (0, 24)
            }
            for count in scheduled.values()
        ]
        output = OmniModelRunnerOutput(
            req_ids=list(scheduled),
            req_id_to_index={name: index for index, name in enumerate(scheduled)},
            sampled_token_ids=[[1000 + self._steps] for _ in scheduled],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=payloads,
        )
        return step, output

    def close(self) -> None:
        """End the adapter's threads."""
        self._adapter.stop_event.set()


class Talker:
    """0.30's middle stage, whose codes are sent to the orchestrator as ``multimodal_output``."""

    def __init__(self, folder: Path) -> None:
        from benchmarks.save_queue.rig import Rig, stage_configs

        self._rig = Rig(stage_configs(folder)[1], async_scheduling=False)
        self._rig.connector.put = _put_nowhere
        self.scheduler = self._rig.scheduler

    @staticmethod
    def configure(folder: Path) -> None:
        """Let the rig make its configs."""
        from benchmarks.save_queue.rig import stage_configs

        stage_configs(folder)

    def add(self, name: str, tokens: int) -> Any:
        """Add a request with its thinker's rows in shared memory."""
        self._rig.add(name, tokens=tokens)
        return request_of(name, tokens)

    def begin(self) -> None:
        """The first look at the requests starts the fetching of their thinkers' rows, in a thread."""
        step = self._rig.schedule()
        assert not step.num_scheduled_tokens
        time.sleep(3.0)

    def compute(self) -> tuple[Any, Any]:
        """One frame a request."""
        step = self._rig.execute(self._rig.schedule())
        self._rig.in_flight.pop()
        return step.scheduled, step.output()

    def close(self) -> None:
        """End the rig."""
        self._rig.close()


STAGES: dict[str, type[Thinker | Talker]] = {OLD: Thinker, NEW: Talker}


def _put_nowhere(*_: Any, **__: Any) -> tuple[bool, int, None]:
    """The next stage is not there: chunks are made, and not kept."""
    return True, 0, None


def carriers(release: str) -> Sequence[str]:
    """The fields of an output that may hold a payload."""
    return ("pooling_output",) if release == OLD else ("multimodal_output", "pooling_output")


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    STAGES[sys.argv[1]].configure(Path(sys.argv[2]))
