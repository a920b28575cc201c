"""If the last chunk of a request cannot be put, the sender's state of that request is never removed (vllm-omni 0.30.0).

Only a put that succeeds calls ``cleanup``, and ``_release_terminal_fence`` repeats only a cleanup that was asked for. A
request that ends by itself asks for none. A later request with the same external id continues with the old chunk
numbers.
"""

import time
from types import SimpleNamespace

from vllm_omni.distributed.omni_connectors.transfer_adapter.chunk_transfer_adapter import OmniChunkTransferAdapter

config = SimpleNamespace(
    model_config=SimpleNamespace(stage_id=0, max_model_len=100), scheduler_config=SimpleNamespace(max_num_seqs=8)
)
adapter = OmniChunkTransferAdapter(config)
adapter.connector.put = lambda **_: (False, 0, None)  # as with a full /dev/shm
for number in range(3):
    request = SimpleNamespace(
        request_id=f"r{number}", external_req_id=f"external-{number}", resumable=False, is_finished=lambda: True
    )
    adapter.save_async(None, request)
time.sleep(1)
print("failed:", list(adapter.collect_failed_send_request_ids()), "kept:", list(adapter._sender_tokens))
