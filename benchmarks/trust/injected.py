"""What goes wrong inside a server on purpose, the same in both arms: a request's id says what is done to it.

`plugin` makes a distribution whose entry points vLLM and omni-fastpath load in the server's processes. What is done is
said in the server's log, as ``[injected] NAME``.
"""

from __future__ import annotations

import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Any

from benchmarks.trust import distribution
from omni_fastpath.hooks import hookimpl

PUT_AT, PROCESSED_AT = 5, 20
"""Which of a request's chunks to the talker, and which of its outputs at the thinker."""
BLOCKED_S, HOOK_S = 4.0, 0.02

_ENTRY_POINTS = """[vllm.general_plugins]
faults = benchmarks.trust.injected:arm
[omni_fastpath.hooks]
raises = benchmarks.trust.injected:RAISES
sleeps = benchmarks.trust.injected:SLEEPS
"""
_PUT = re.compile(rf"(put-fails|put-raises|put-blocks)\S*_0_{PUT_AT}$")


def plugin(folder: Path) -> str:
    """Write the distribution into the folder; the result is the server's ``PYTHONPATH``."""
    return distribution(folder, "faults", _ENTRY_POINTS)


def arm() -> None:
    """Let puts and upstream's processing go wrong in this process, for the requests whose ids say so."""
    from wrapt import register_post_import_hook

    register_post_import_hook(_puts, "vllm_omni.distributed.omni_connectors.connectors.shm_connector")
    register_post_import_hook(_processing, "vllm.v1.engine.logprobs")


def _say(name: str) -> None:
    sys.stderr.write(f"[injected] {name}\n")
    sys.stderr.flush()


def _puts(module: Any) -> None:
    """Each connector gets a ``put`` of its own; the class's stays upstream's, which ``save_queue_cap`` pins."""
    begin = module.SharedMemoryConnector.__init__

    @wraps(begin)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        put = self.put

        def faulty(from_stage: str, to_stage: str, put_key: str, data: Any) -> Any:
            found = _PUT.search(put_key)
            fault = found[1] if found else ""
            if fault:
                _say(fault)
            if fault == "put-fails":
                return False, 0, None
            if fault == "put-raises":
                raise OSError("injected: this put raises")
            if fault == "put-blocks":
                time.sleep(BLOCKED_S)
            return put(from_stage, to_stage, put_key, data)

        self.put = faulty

    module.SharedMemoryConnector.__init__ = init


def _processing(module: Any) -> None:
    """One step of what upstream does with an output."""
    upstreams, seen = module.LogprobsProcessor.update_from_output, Counter[str]()

    def update(self: Any, output: Any) -> None:
        if "processing-raises" in output.request_id:
            seen[output.request_id] += 1
            if seen[output.request_id] == PROCESSED_AT:
                _say("processing-raises")
                raise RuntimeError("injected: this output's processing raises")
        upstreams(self, output)

    module.LogprobsProcessor.update_from_output = update


class _Hook:
    """A plugin that does something at each output of such a request."""

    def __init__(self, word: str, act: Callable[[], None]) -> None:
        self._word, self._act = word, act

    @hookimpl
    def on_routed(self, stage_id: int, replica_id: int, output: Any) -> None:
        del stage_id, replica_id
        if self._word in output.request_id:
            _say(self._word)
            self._act()


def _raise() -> None:
    raise RuntimeError("injected: this hook raises")


RAISES, SLEEPS = _Hook("hook-raises", _raise), _Hook("hook-sleeps", partial(time.sleep, HOOK_S))
"""Switched off at the first output; holds the event loop at each."""
