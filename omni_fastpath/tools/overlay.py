"""An overlay YAML that puts a ``fastpath`` block on top of a deploy YAML, bundled with vLLM-Omni or not."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from omni_fastpath import config
from omni_fastpath.config import KEY, Block, ConfigError, refusal, resolve, shown
from omni_fastpath.declare import Patch
from omni_fastpath.deploy_yaml import read_blocks


def bundled() -> dict[str, Path]:
    """The deploy YAMLs in the installed vLLM-Omni by name, found without importing it; empty without one."""
    spec = importlib.util.find_spec("vllm_omni")
    found = [Path(place) / "deploy" for place in (spec.submodule_search_locations or [])] if spec else []
    return {path.stem: path for folder in found for path in sorted(folder.glob("*.yaml"))}


def find(name_or_path: str) -> Path:
    """The deploy YAML that a file's path or a bundled one's name means; a file that is there comes first.

    Raises:
        ConfigError: Neither is there.
    """
    path = Path(name_or_path)
    if path.is_file():
        return path.resolve()
    known = bundled()
    name = name_or_path.removesuffix(".yaml")
    if name in known:
        return known[name].resolve()
    if not known:
        raise ConfigError(f"{name_or_path}: no such file, and no vllm-omni whose deploy YAMLs have names")
    hint = f"nearest: {', '.join(config.close(name, known)) or 'none'}; `omni-fastpath overlay --list` names them all"
    raise ConfigError(f"{name_or_path}: no such file and no deploy YAML of the installed vllm-omni; {hint}")


def block_value(base: Sequence[Block], sets: Sequence[str], patches: Sequence[Patch]) -> Any:
    """The ``fastpath`` value of the overlay: ``true``, or the mapping that the ``--set`` options ask for.

    Over a base that switches something on, the mapping holds what is set and the rest is inherited; over any other it
    starts from the default set. A value is read as YAML; of two for one place the last counts.

    Raises:
        ConfigError: An option has another form than ``patch.key=value``, ``patch=true`` or ``on_unsupported=fail``.
    """
    if not sets:
        return True
    inherits = resolve(base, {}, patches).asked
    block: dict[str, Any] = {} if inherits else {patch.name: True for patch in patches if patch.default_on}
    for assignment in sets:
        target, _, text = assignment.partition("=")
        name, dot, key = target.strip().partition(".")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError:
            value = None
        if value is None and text.strip() != "null":
            place, takes = f"--set {assignment}", "patch.key=value, patch=true, patch=false"
            raise refusal(place, found=shown(assignment), allowed=takes)
        held = block.get(name)
        block[name] = {**(held if isinstance(held, dict) else {}), key: value} if dot else value
    return block


def build(base: Path, sets: Sequence[str], patches: Sequence[Patch], *, output: Path | None = None) -> str:
    """The text of the overlay, validated as the server would.

    Args:
        base: The deploy YAML below it.
        sets: The ``--set`` options.
        patches: The declarations.
        output: Where it will lie, for messages.

    Raises:
        ConfigError: The base cannot be read, the overlay would overwrite a file that it stands on, or the server would
            refuse the result.
    """
    blocks = read_blocks(base)
    if output is not None and output.resolve() in {block.path.resolve() for block in blocks}:
        raise refusal("--output", found=shown(str(output)), allowed="a file that is not below the overlay itself")
    value = block_value(blocks, sets, patches)
    where = output or Path("the overlay")
    resolve([*blocks, Block(where, value)], {}, patches)
    document = {"base_config": str(base.resolve()), KEY: value}
    body = yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=200)
    return f"# Written by `omni-fastpath overlay`; start the server with --deploy-config and this file.\n{body}"
