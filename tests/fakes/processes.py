"""Fresh processes that need not import the world first: a test's body runs in a fork of one that has.

vLLM takes ten seconds to import, nearly all of it in third parties that no patch touches. ``cold`` has imported those,
but no module that a patch touches and nothing of this package. ``warm`` has imported the patched modules too. Neither
knows pytest's process: its patches, its monkeypatching and its filters.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import importlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any, Literal, NoReturn, ParamSpec

import pytest

ROOT = Path(__file__).resolve().parents[2]
COLD = ("torch", "transformers", "vllm.v1.engine.utils", "vllm.v1.executor", "pytest", "prometheus_client")
WARM = ("vllm_omni.config.stage_config", "vllm_omni.engine.orchestrator", "vllm_omni.entrypoints.async_omni")
TIMEOUT_S = 120
_PR_SET_PDEATHSIG = 1

P = ParamSpec("P")
State = Literal["cold", "warm"]


def process(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A process with the repository on Python's path, when it has ended."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, **variables}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=900)


def isolated(state: State, *argv: str) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Run the decorated test's body in a fork of the ``cold`` or ``warm`` process, and mark it ``upstream``.

    Its arguments are pickled.

    Args:
        state: What the process has imported.
        argv: Its ``sys.argv``, without the program.
    """

    def decorate(test: Callable[P, None]) -> Callable[P, None]:
        @functools.wraps(test)
        def run(*args: P.args, **kwargs: P.kwargs) -> None:
            assert not args
            _call(_address(state), test.__module__, test.__qualname__, kwargs, dict(os.environ), argv)

        return pytest.mark.upstream(run)

    return decorate


# ---- pytest's side ----


@functools.cache
def _folder() -> Path:
    folder = tempfile.TemporaryDirectory(prefix="omni-fastpath-")
    atexit.register(folder.cleanup)
    return Path(folder.name)


@functools.cache
def _address(state: State) -> str:
    address = str(_folder() / state)
    if state == "cold":
        command = [sys.executable, "-u", __file__, address, *COLD]
        environment = {name: value for name, value in os.environ.items() if "OMNI_FASTPATH" not in name}
        process = subprocess.Popen(command, env={**environment, "OMP_NUM_THREADS": "1"}, cwd=ROOT)
        atexit.register(process.wait)
        atexit.register(process.kill)
    else:
        with _connect(_address("cold")) as connection:
            connection.send((address, WARM))
    return address


def _connect(address: str) -> Any:
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        try:
            return Client(address)
        except OSError:
            assert time.monotonic() < deadline, f"no process answers at {address}"
            time.sleep(0.02)


def _call(address: str, *request: Any) -> None:
    with tempfile.NamedTemporaryFile(dir=_folder()) as output, _connect(address) as connection:
        connection.send((output.name, *request))
        try:
            passed = connection.poll(TIMEOUT_S) and connection.recv()
        except EOFError:
            passed = False
        assert passed, output.read().decode(errors="replace")
        assert connection.poll(TIMEOUT_S), "the process does not end"  # its end is the connection's


# ---- The process's side ----


def serve(address: str, modules: tuple[str, ...]) -> NoReturn:
    """Import the modules, then fork once for each connection."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for name in modules:
        importlib.import_module(name)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    gc.freeze()  # a collection in a child would copy every page
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        accepted, _ = listener.accept()
        if os.fork() == 0:
            break
        accepted.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    listener.close()
    connection = Connection(accepted.detach())
    request = connection.recv()
    if len(request) == 2:
        connection.close()
        serve(*request)
    _run(connection, *request)


def _run(
    connection: Any, output: str, module: str, name: str, kwargs: Any, environment: dict[str, str], argv: Any
) -> NoReturn:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with Path(output).open("wb") as file:
        for target in (1, 2):
            os.dup2(file.fileno(), target)
    for variable in [each for each in os.environ if "OMNI_FASTPATH" in each]:
        del os.environ[variable]
    os.environ.update(environment)
    sys.argv[1:] = argv
    try:
        getattr(importlib.import_module(module), name).__wrapped__(**kwargs)
    except BaseException:
        traceback.print_exc()
        connection.send(False)
    else:
        connection.send(True)
    # What a process does at its end, without seconds of taking thousands of modules apart.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    os._exit(0)


if __name__ == "__main__":
    sys.path[0] = str(ROOT)
    serve(sys.argv[1], tuple(sys.argv[2:]))
