"""Reading the ``fastpath`` blocks of a deploy YAML and of the files that it builds on.

Upstream replaces a top-level block whole when a deploy YAML overlays another (``resolve_deploy_yaml`` in
``vllm_omni/config/stage_config.py``), so the chain of ``base_config`` is walked here; ``config`` merges the blocks key
by key. Upstream ignores top-level keys that it does not know, so that a misspelt ``fastpath`` is warned of.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from omni_fastpath.config import ABSENT, KEY, Block, ConfigError, Resolved, refusal, resolve, shown
from omni_fastpath.declare import Patch
from omni_fastpath.ledger import warn_once
from omni_fastpath.variables import master_off

_LOOKALIKE_RATIO = 0.75


class UnreadableError(ConfigError):
    """A deploy YAML that our reader cannot read. Where upstream read it, that is our trouble and not the file's."""


def resolve_file(path: str | Path | None, environ: Mapping[str, str], patches: Sequence[Patch]) -> Resolved:
    """``resolve`` for a deploy YAML, which is not even opened under ``OMNI_FASTPATH=0``.

    Raises:
        ConfigError: As ``read_blocks`` and ``resolve``.
    """
    blocks = [] if path is None or master_off(environ) else read_blocks(path)
    return resolve(blocks, environ, patches)


def blocks_of(path: str | Path, deploy: Mapping[Any, Any]) -> list[Block]:
    """The blocks of a deploy YAML that upstream has read.

    Args:
        path: The file.
        deploy: What upstream made of it and its bases. A top-level key of any of them is in it; without ours no file is
            opened a second time.

    Raises:
        UnreadableError: As ``read_blocks``, where the key is there.
    """
    return read_blocks(path) if KEY in deploy else [_block(Path(path), deploy)]


def read_blocks(path: str | Path) -> list[Block]:
    """Read the ``fastpath`` value of a deploy YAML and of the files that it builds on, the base first.

    ``base_config`` is relative to the directory of the file that names it, as in upstream's ``resolve_deploy_yaml``.

    Raises:
        UnreadableError: A file cannot be read, or the chain comes back to a file.
    """
    blocks: list[Block] = []
    current: Path | None = Path(path)
    while current is not None:
        if current.resolve() in {block.path.resolve() for block in blocks}:
            chain = " -> ".join(str(each) for each in [*(block.path for block in blocks), current])
            raise UnreadableError(f"base_config in {blocks[-1].path}: the chain comes back to a file: {chain}")
        data = _load(current)
        blocks.append(_block(current, data))
        base = data.get("base_config")
        if not isinstance(base, str | None):
            wrong = refusal(f"base_config in {current}", found=shown(base), allowed="the path of a deploy YAML")
            raise UnreadableError(str(wrong))
        current = None if base is None else current.parent / base
    return blocks[::-1]


def _load(path: Path) -> Mapping[Any, Any]:
    try:
        data = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except Exception as error:  # OmegaConf has its own tree of errors
        raise UnreadableError(f"{path}: cannot be read as a deploy YAML: {error}") from error
    if not isinstance(data, dict):
        wrong = refusal(str(path), found=shown(data), allowed="a mapping at the top level of a deploy YAML")
        raise UnreadableError(str(wrong))
    return data


def _block(path: Path, data: Mapping[Any, Any]) -> Block:
    for key in data:
        if key != KEY and difflib.get_close_matches(str(key).lower(), [KEY], cutoff=_LOOKALIKE_RATIO):
            warn_once(f"{path}: the top-level key {key!r} is ignored; did you mean {KEY!r}?")
    stages = data.get("stages")
    named = [stage.get("stage_id") for stage in stages if isinstance(stage, dict)] if isinstance(stages, list) else []
    return Block(path, data.get(KEY, ABSENT), frozenset(each for each in named if isinstance(each, int)))
