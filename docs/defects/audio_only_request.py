"""A request for audio alone loses its last audio, or ends twice (vllm-omni 0.30.0).

Under async_chunk such a request, whose ``final_output_stage_ids`` is ``{2}`` (code2wav), also runs the thinker (stage
0), which is a final-output stage too. If the orchestrator processes code2wav's end before the thinker's:

1. ``_route_output`` keeps code2wav's last message in ``req_state.pending_final_output``, because other stages run.
2. The thinker ends. ``final_output_stage_ids.issubset(finished_final_output_stage_ids)`` is true, although the thinker
   was not asked for.
   (a) If another stage still runs, the thinker's message overwrites ``pending_final_output``: the last audio is lost.
   (b) Otherwise the thinker's message is sent with ``finished=True`` and the pending one after it. The front end stops
       at the first and drops the last audio.

Expected: every message of code2wav arrives, and only the last one is ``finished``. Needs no GPU.
"""

import asyncio
from types import SimpleNamespace

import torch
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import FinishReason
from vllm_omni.engine import OmniEngineCoreOutput, OmniEngineCoreOutputs, OmniEngineCoreRequest
from vllm_omni.engine.messages import ShutdownRequestMessage
from vllm_omni.engine.orchestrator import Orchestrator, OrchestratorRequestState
from vllm_omni.engine.stage_pool import StagePool
from vllm_omni.outputs.output_processor import MultimodalOutputProcessor

STAGES = [(True, "text"), (False, "latent"), (True, "audio")]  # thinker, talker, code2wav


class Client:
    stage_type = "llm"

    def __init__(self, final_output, modality):
        self.final_output, self.final_output_type = final_output, modality
        self.queue = asyncio.Queue()

    async def get_output_async(self):
        return await self.queue.get()

    def shutdown(self):
        pass


def raw(stage, finish):
    payload = {
        1: {"codes.audio": torch.zeros(1, 16)},
        2: {"model_outputs": torch.tensor([1.0]), "sr": torch.tensor(24000)},
    }
    entry = OmniEngineCoreOutput(
        "r", [7] if stage < 2 else [], finish_reason=finish, multimodal_output=payload.get(stage)
    )
    return OmniEngineCoreOutputs(outputs=[entry])


async def run(order):
    outputs, requests = asyncio.Queue(), asyncio.Queue()
    clients = [Client(*stage) for stage in STAGES]
    pools = [
        StagePool(
            n,
            [client],
            output_processor=MultimodalOutputProcessor(None, log_stats=True, engine_core_output_type=STAGES[n][1]),
            stage_vllm_config=SimpleNamespace(model_config=SimpleNamespace(max_model_len=10**6)),
        )
        for n, client in enumerate(clients)
    ]
    orchestrator = Orchestrator(requests, outputs, asyncio.Queue(), pools, async_chunk=True)
    params = [SamplingParams(output_kind=RequestOutputKind.DELTA, detokenize=False, max_tokens=99) for _ in STAGES]
    state = OrchestratorRequestState("r", sampling_params_list=params, final_stage_id=2, final_output_stage_ids={2})
    orchestrator.request_states["r"] = state
    for n, pool in enumerate(pools):  # as _prewarm_async_chunk_stages leaves it
        state.stage_submit_ts[n] = 1.0
        pool._request_bindings["r"] = 0
        request = OmniEngineCoreRequest(
            request_id="r",
            external_req_id="r",
            prompt_token_ids=[1],
            mm_features=None,
            sampling_params=params[n],
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        pool.output_processor.add_request(request, None)

    async def feed():
        for stage in order:
            clients[stage].queue.put_nowait(raw(stage, FinishReason.STOP))
            await asyncio.sleep(0.05)
        requests.put_nowait(ShutdownRequestMessage())

    feeder = asyncio.create_task(feed())
    await orchestrator.run()
    assert feeder.done()
    while not outputs.empty():
        found = outputs.get_nowait()
        print("  ", type(found).__name__, "of stage", found.stage_id, "finished:", getattr(found, "finished", "-"))


for words, order in (
    ("in order, as expected", (0, 1, 2)),
    ("(a) code2wav, thinker, talker: the audio is lost", (2, 0, 1)),
    ("(b) talker, code2wav, thinker: two messages end the request, the audio second", (1, 2, 0)),
):
    print(words)
    asyncio.run(run(order))
