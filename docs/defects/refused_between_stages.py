"""A Ming-Image request with a negative prompt ends the server (vllm-omni 0.30.0).

``thinker2image`` makes the image stage's input from the thinker's output, and refuses a negative prompt with a
ValueError. ``_dispatch_or_fail_request`` fails a request alone on four exceptions only. Any other one, of a function
between two stages too, leaves the orchestrator's loop and ends it.

Expected: the request fails, and nothing is raised. Seen: the ValueError. Needs no GPU.
"""

import asyncio
from types import SimpleNamespace

from vllm_omni.engine.cfg_companion_tracker import CfgCompanionTracker
from vllm_omni.engine.orchestrator import Orchestrator, OrchestratorRequestState
from vllm_omni.model_executor.stage_input_processors.ming_image import thinker2image

client = SimpleNamespace(custom_process_input_func=thinker2image)
pool = SimpleNamespace(live_replica_ids=lambda: [0], stage_type="diffusion", stage_client=client)
orchestrator = object.__new__(Orchestrator)
orchestrator.stage_pools, orchestrator._cfg_tracker = [None, pool], CfgCompanionTracker()
prompt = {"prompt": "a cat", "negative_prompt": "blurry"}
state = OrchestratorRequestState(request_id="r", prompt=prompt, sampling_params_list=[None, None])
asyncio.run(orchestrator._forward_to_next_stage("r", 0, SimpleNamespace(), state))
