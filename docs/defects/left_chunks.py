"""A client that leaves after a stage's last chunk leaves chunks in /dev/shm (vllm-omni 0.30.0).

It happens if the next stage has not read them yet. They stay until the process ends.
"""

import os
import time
from types import SimpleNamespace

import torch
from vllm_omni.data_entry_keys import CodesStruct, OmniPayloadStruct
from vllm_omni.distributed.omni_connectors.transfer_adapter.chunk_transfer_adapter import OmniChunkTransferAdapter


def adapter(stage):
    connector = {"name": "SharedMemoryConnector", "extra": {"stage_id": stage}}
    model = SimpleNamespace(stage_connector_config=connector, stage_id=stage, worker_type="ar", max_model_len=100)
    scheduler = SimpleNamespace(max_num_seqs=4)
    made = OmniChunkTransferAdapter(SimpleNamespace(model_config=model, scheduler_config=scheduler))
    payload = OmniPayloadStruct(codes=CodesStruct(audio=torch.tensor([1])))
    made.custom_process_next_stage_input_func = lambda **_: payload
    return made


def leaves(name, *, is_at_end):
    thinker, talker = adapter(0), adapter(1)
    for is_finished in (False, False, is_at_end):
        request = SimpleNamespace(request_id=name, external_req_id=name, resumable=False, num_computed_tokens=1)
        request.is_finished, request.num_output_placeholders = lambda is_so=is_finished: is_so, 0
        thinker.save_async(None, request)
    time.sleep(1)
    thinker.cleanup(name, name)  # as an abort does at each stage; the talker had no slot for it yet
    talker.cleanup(name, name)
    time.sleep(1)
    print(name, "left:", [entry for entry in os.listdir("/dev/shm") if entry.startswith(f"{name}_0_")])


leaves("in-the-middle", is_at_end=False)  # none, as expected
leaves("at-the-end", is_at_end=True)  # all three
