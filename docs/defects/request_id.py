"""A client's request id is part of a file name and not checked, so that some requests never end (vllm-omni 0.30.0).

With ``X-Request-Id: a/b``, or one of 300 characters, the put fails and the request is never answered.
"""

from vllm_omni.distributed.omni_connectors.connectors.shm_connector import SharedMemoryConnector

connector = SharedMemoryConnector({"stage_id": 0})
for request in ("chatcmpl-a", "chatcmpl-a/b", "chatcmpl-" + "a" * 300):
    print(connector.put("0", "1", f"{request}_0_0", {"x": 1}))  # (True, ...), (False, 0, None), (False, 0, None)
