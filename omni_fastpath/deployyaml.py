"""The ``fastpath:`` blocks of a deploy YAML and of the files that it builds on.

Upstream replaces a top-level block whole when a deploy YAML overlays another (``resolve_deploy_yaml`` in
``vllm_omni/config/stage_config.py``), so the chain of ``base_config`` is walked here; ``config`` merges the blocks key
by key. Upstream ignores top-level keys that it does not know: a misspelt ``fastpath`` would be silently off, hence the
warning for its look-alikes.
"""

from __future__ import annotations

import difflib
import enum
import importlib
import importlib.util
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from omni_fastpath.ledger import warn_once
from omni_fastpath.values import ConfigError, refusal, shown

KEY = "fastpath"
"""The top-level key in a deploy YAML."""

_LOOKALIKE_RATIO = 0.8


class UnreadableError(ConfigError):
    """A deploy YAML that our reader cannot read. Where upstream read it, that is our trouble and not the file's."""


class Absent(enum.Enum):
    """The type of ``ABSENT``."""

    ABSENT = "absent"


ABSENT: Final = Absent.ABSENT
"""The value of a ``fastpath`` key that is not there; ``null`` is a value and means off."""


@dataclass(frozen=True)
class Block:
    """What one file of a ``base_config`` chain says.

    Attributes:
        path: The file.
        value: Its ``fastpath`` value as it stands there, or ``ABSENT``.
        warnings: Top-level keys that look like a misspelt ``fastpath``, and blocks inside another, one line each.
        stages: Ids of the stages that the file names.
    """

    path: Path
    value: Any
    warnings: tuple[str, ...] = ()
    stages: frozenset[int] = frozenset()

    def place(self, *keys: str) -> str:
        """How a message names a key of this block."""
        return f"{'.'.join((KEY, *(key for key in keys if key)))} in {self.path}"


class _Loader(yaml.SafeLoader):
    """For where OmegaConf is not installed, and so no vLLM-Omni: PyYAML, no duplicate keys, ``1e3`` a number."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.tag != "tag:yaml.org,2002:merge" and isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    problem = f"found duplicate key {key.value}"
                    raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def blocks_of(path: str | Path, deploy: Mapping[Any, Any]) -> list[Block]:
    """The blocks of a deploy YAML that upstream has read.

    Args:
        path: The file.
        deploy: What upstream made of it and its bases. A top-level key of any of them is in it; without ours no file is
            opened a second time.

    Raises:
        ConfigError: As ``read_blocks``, where the key is there.
    """
    if KEY in deploy:
        return read_blocks(path)
    return [_block(Path(path), deploy)]


def read_blocks(path: str | Path) -> list[Block]:
    """Read the ``fastpath`` value of a deploy YAML and of the files that it builds on, the base first.

    ``base_config`` is relative to the directory of the file that names it, as in upstream's ``resolve_deploy_yaml``.

    Raises:
        UnreadableError: A file cannot be read, or the chain comes back to a file.
    """
    blocks: list[Block] = []
    seen: list[Path] = []
    current: Path | None = Path(path)
    while current is not None:
        if current.resolve() in seen:
            chain = " -> ".join(str(each) for each in [*(block.path for block in blocks), current])
            raise UnreadableError(f"base_config in {blocks[-1].path}: the chain comes back to a file: {chain}")
        seen.append(current.resolve())
        data = _load(current)
        blocks.append(_block(current, data))
        current = _base(data, current)
    return blocks[::-1]


def _block(path: Path, data: Mapping[Any, Any]) -> Block:
    warnings = (*_lookalikes(data, path), *_misplaced(data, path))
    for warning in warnings:
        warn_once(warning)
    return Block(path, data.get(KEY, ABSENT), warnings, _stage_ids(data))


def _load(path: Path) -> dict[Any, Any]:
    try:
        # OmegaConf is what upstream reads with; it is there whenever vLLM-Omni is.
        data = _by_omegaconf(path) if _has_omegaconf() else yaml.load(path.read_text(encoding="utf-8"), _Loader)  # noqa: S506
    except Exception as error:  # OmegaConf has its own tree of errors
        raise UnreadableError(f"{path}: cannot be read as a deploy YAML: {error}") from error
    if data is None:
        return {}
    if not isinstance(data, dict):
        allowed = "a mapping at the top level of a deploy YAML"
        raise UnreadableError(str(refusal(str(path), found=shown(data), allowed=allowed)))
    return data


def _has_omegaconf() -> bool:
    return importlib.util.find_spec("omegaconf") is not None


def _by_omegaconf(path: Path) -> Any:
    omega = importlib.import_module("omegaconf").OmegaConf
    return omega.to_container(omega.load(path), resolve=True)


def _base(data: Mapping[Any, Any], path: Path) -> Path | None:
    base = data.get("base_config")
    if base is None:
        return None
    if not isinstance(base, str):
        allowed = "the path of a deploy YAML"
        raise UnreadableError(str(refusal(f"base_config in {path}", found=shown(base), allowed=allowed)))
    return path.parent / base


def _lookalikes(data: Mapping[Any, Any], path: Path) -> Iterator[str]:
    for key in data:
        plain = re.sub(r"[^a-z0-9]", "", str(key).lower())
        if key != KEY and difflib.SequenceMatcher(None, plain, KEY).ratio() >= _LOOKALIKE_RATIO:
            yield f"{path}: the top-level key {key!r} is ignored by everybody; did you mean {KEY!r}?"


def _stage_ids(data: Mapping[Any, Any]) -> frozenset[int]:
    stages = data.get("stages")
    named = [stage.get("stage_id") for stage in stages if isinstance(stage, dict)] if isinstance(stages, list) else []
    return frozenset(each for each in named if isinstance(each, int))


def _misplaced(data: Mapping[Any, Any], path: Path) -> Iterator[str]:
    """The block inside a stage or a platform. Whether such a key is refused there is upstream's to say."""
    for where in _nested(data):
        yield f"{path}: {where} is not read by omni-fastpath; {KEY} belongs at the top level"


def _nested(data: Mapping[Any, Any]) -> Iterator[str]:
    yield from _in_stages(data.get("stages"), "stages")
    platforms = data.get("platforms")
    if isinstance(platforms, dict):
        for name, platform in platforms.items():
            if isinstance(platform, dict):
                if KEY in platform:
                    yield f"platforms.{name}.{KEY}"
                yield from _in_stages(platform.get("stages"), f"platforms.{name}.stages")


def _in_stages(stages: object, where: str) -> Iterator[str]:
    if not isinstance(stages, list):
        return
    for index, stage in enumerate(stages):
        if isinstance(stage, dict):
            inner = {f".{name}": stage.get(name) for name in ("engine_args", "engine_extras", "runtime")}
            for name, mapping in {"": stage, **inner}.items():
                if isinstance(mapping, dict) and KEY in mapping:
                    yield f"{where}[{index}]{name}.{KEY}"
