"""What a server's stages send, entry by entry: a plugin for the API process that writes it down.

`plugin` makes a distribution of one entry point that vLLM loads in the server's processes; `read` gives what it wrote.
What differs from run to run by nature is left out: time stamps, and how a step's batch is composed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.trust import distribution

VARIABLE = "TEST_RAW_OUTPUTS"


def plugin(folder: Path) -> dict[str, str]:
    """Write the distribution into the folder; the result is what the server's environment needs."""
    entry_points = "[vllm.general_plugins]\nraw_outputs = tests.simulated_device.raw_outputs:arm\n"
    path = distribution(folder, "raw_outputs", entry_points)
    return {"PYTHONPATH": path, VARIABLE: str(folder / "raw.jsonl")}


def arm() -> None:
    """Write down what the clients of this process decode, if it has any."""
    path = os.environ.get(VARIABLE)
    if path:
        from wrapt import register_post_import_hook

        name = "vllm_omni.engine.stage_engine_core_client"
        register_post_import_hook(lambda module: _record(module, Path(path)), name)


def _record(module: Any, path: Path) -> None:
    client = module.StageEngineCoreClientBase
    begin = client.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        decode = self.decoder.decode

        def decoded(frames: Any) -> Any:
            found = decode(frames)
            line = {"stage": self.stage_id, "replica": self.replica_id, "raw": described(found)}
            with path.open("a") as file:
                file.write(json.dumps(line) + "\n")
            return found

        self.decoder = SimpleNamespace(decode=decoded)

    client.__init__ = init


def described(value: Any) -> Any:
    """A value as plain JSON data, a tensor by its hash."""
    if hasattr(value, "dtype"):
        data = value.contiguous().view(-1).numpy().tobytes() if value.numel() else b""
        return {"tensor": str(value.dtype), "shape": list(value.shape), "hash": hashlib.sha256(data).hexdigest()[:16]}
    if isinstance(value, (list, tuple, set)):
        return [described(each) for each in value]
    names: Any = getattr(value, "__struct_fields__", None) or getattr(value, "__dataclass_fields__", ())
    shown = value if isinstance(value, Mapping) else {name: getattr(value, name) for name in names}
    plain = {str(name): described(each) for name, each in shown.items() if name != "timestamp"}
    return {"is": type(value).__name__, **plain} if names else plain if isinstance(value, Mapping) else value


def read(path: Path) -> list[dict[str, Any]]:
    """Everything that was written down, in its order."""
    return [json.loads(line) for line in path.read_text().splitlines()]
