"""A full /dev/shm raises SIGBUS in the stage process instead of failing the put (vllm-omni 0.30.0).

unshare -m sh -c 'mount -t tmpfs -o size=1m tmpfs /dev/shm && python full_shared_memory.py; echo exit status $?'
"""

from vllm_omni.distributed.omni_connectors.connectors.shm_connector import SharedMemoryConnector

connector = SharedMemoryConnector({"stage_id": 0})
print("put:", connector.put("0", "1", "key", {"x": bytes(4 << 20)}))  # expected: (False, 0, None)
