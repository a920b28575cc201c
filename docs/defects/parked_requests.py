"""Two threads change the deques of parked requests, one of them without the lock (vllm-omni 0.30.0).

``cleanup`` of the save thread removes every parked request and puts it back, under ``_receiver_state_lock``.
``restore_queues`` of the scheduler's thread iterates over the same deque and replaces it, without the lock.
"""

import sys
import threading
from types import SimpleNamespace

from vllm_omni.distributed.omni_connectors.transfer_adapter.chunk_transfer_adapter import OmniChunkTransferAdapter

sys.setswitchinterval(1e-5)  # shows it sooner
config = SimpleNamespace(
    model_config=SimpleNamespace(stage_id=1, max_model_len=100), scheduler_config=SimpleNamespace(max_num_seqs=8)
)
adapter = OmniChunkTransferAdapter(config)
requests = {f"r{n}": SimpleNamespace(request_id=f"r{n}") for n in range(8)}
raised, lost, over = 0, 0, False


def save_thread():  # other requests end
    while not over:
        adapter.cleanup_receiver("another")


threading.Thread(target=save_thread, daemon=True).start()
for _ in range(100_000):  # steps of the scheduler, in each of which all requests wait for a chunk
    running = []
    try:
        adapter.waiting_for_chunk_running_requests.extend(requests.values())
        adapter.restore_queues(None, running, requests)
        lost += len(running) < len(requests)
    except (RuntimeError, IndexError):
        raised += 1
        adapter.waiting_for_chunk_running_requests.clear()
over = True
print(f"{raised} steps raised, which ends the engine; {lost} lost a request, which waits forever")
