"""An open request is not told of a shutdown, so SIGTERM does not end a server with open streams (vllm-omni 0.30.0)."""

import asyncio

from vllm_omni.entrypoints.async_omni import AsyncOmni
from vllm_omni.entrypoints.client_request_state import ClientRequestState


class Engine:  # one without outputs
    async def try_get_output_async(self):
        return None

    def shutdown(self):
        pass


async def main():
    omni = object.__new__(AsyncOmni)
    omni.engine, omni.final_output_task = Engine(), None
    request = ClientRequestState("request-0")
    omni.request_states = {"request-0": request}
    omni._final_output_handler()
    await asyncio.sleep(0.1)
    omni.shutdown()  # vLLM's launcher calls it on SIGTERM, before it waits for the HTTP connections to close
    try:
        print("received:", await asyncio.wait_for(request.queue.get(), 10))
    except TimeoutError:
        print("BUG: the request received nothing. Its HTTP stream stays open, and uvicorn waits for it without a limit")


asyncio.run(main())
