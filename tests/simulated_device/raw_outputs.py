"""What a server's stages send, entry by entry: a plugin for the API process that writes it down.

`plugin` makes a distribution of one entry point that vLLM loads in the server's processes; `read` gives what it wrote.
What differs from run to run by nature is left out: time stamps, and how a step's batch is composed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.trust import distribution

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

        register_post_import_hook(
            lambda module: _record(module, Path(path)), "vllm_omni.engine.stage_engine_core_client"
        )


def _record(module: Any, path: Path) -> None:
    client = module.StageEngineCoreClientBase
    begin = client.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        self.decoder = _Recorder(self.decoder, path, self)

    client.__init__ = init
    apply = client._apply_ready_response

    def ready(self: Any, payload: bytes) -> None:
        import msgspec

        _write(path, {"ready": msgspec.msgpack.decode(payload), "stage": self.stage_id})
        apply(self, payload)

    client._apply_ready_response = ready


class _Recorder:
    """A decoder that writes down the raw outputs that it decodes."""

    def __init__(self, decoder: Any, path: Path, client: Any) -> None:
        self._decoder, self._path, self._client = decoder, path, client

    def decode(self, frames: Any) -> Any:
        """Upstream's, written down."""
        found = self._decoder.decode(frames)
        line = {"stage": self._client.stage_id, "replica": self._client.replica_id, "raw": described(found)}
        _write(self._path, line)
        return found


def _write(path: Path, line: Mapping[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def described(value: Any) -> Any:
    """A value as plain JSON data: of a structure the fields that are not at their default, of a tensor its hash."""
    fields = getattr(value, "__struct_fields__", None)
    if fields is not None:
        defaults = _defaults(type(value))
        shown = {name: getattr(value, name) for name in fields}
        return {
            "is": type(value).__name__,
            **{
                name: described(each)
                for name, each in shown.items()
                if name != "timestamp" and (name not in defaults or each != defaults[name])
            },
        }
    if dataclasses.is_dataclass(value):
        shown = {field.name: described(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"is": type(value).__name__, **shown}
    if isinstance(value, Mapping):
        return {str(key): described(each) for key, each in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [described(each) for each in value]
    if hasattr(value, "dtype"):
        data = value.contiguous().view(-1).numpy().tobytes() if value.numel() else b""
        return {"tensor": str(value.dtype), "shape": list(value.shape), "hash": hashlib.sha256(data).hexdigest()[:16]}
    return value


def _defaults(kind: Any) -> dict[str, Any]:
    import msgspec

    return {
        field.name: field.default for field in msgspec.structs.fields(kind) if field.default is not msgspec.NODEFAULT
    }


def read(path: Path) -> list[dict[str, Any]]:
    """Everything that was written down, in its order."""
    return [json.loads(line) for line in path.read_text().splitlines()]
