"""An overlay YAML that adds a ``fastpath`` block to a deploy YAML, which may be one of vLLM-Omni's."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from omni_fastpath import config
from omni_fastpath.config import KEY, Block, ConfigError, refusal, resolve, short_repr
from omni_fastpath.declare import Patch
from omni_fastpath.process_role import MASTER


def bundled() -> dict[str, Path]:
    """The deploy YAMLs of the installed vLLM-Omni by name. It is not imported. Empty if it is not installed."""
    spec = importlib.util.find_spec("vllm_omni")
    found = [Path(place) / "deploy" for place in (spec.submodule_search_locations or [])] if spec else []
    return {path.stem: path for folder in found for path in sorted(folder.glob("*.yaml"))}


def find(name_or_path: str) -> Path:
    """The deploy YAML for a path or the name of a bundled one. An existing file takes precedence.

    Links in the path stay, because what they name may be replaced, as in a Kubernetes ConfigMap.

    Raises:
        ConfigError: There is no such file; the message has the bundled names with the nearest spelling.
    """
    path = Path(name_or_path)
    if path.is_file():
        return path.absolute()
    known, name = bundled(), name_or_path.removesuffix(".yaml")
    if name in known:
        return known[name].absolute()
    hint = f"nearest: {', '.join(config.close(name, known)) or 'none'}; `omni-fastpath overlay --list` names them all"
    raise ConfigError(f"{name_or_path}: no such file and no deploy YAML of an installed vllm-omni; {hint}")


def block_value(base: Block, sets: Sequence[str], patches: Sequence[Patch]) -> Any:
    """The ``fastpath`` value of the overlay: ``true``, or a mapping from the ``--set`` options.

    It starts from what the base switches on, because its block is replaced as a whole, or from the default set.
    A value is YAML. Of two values for one key the last counts.

    Raises:
        ConfigError: An option has another form than ``patch.key=value``, ``patch=true`` or ``on_unsupported=fail``.
    """
    own = base.value if resolve(base, {}, patches).enabled else True
    if not sets:
        return own
    usual = {each.name: True for each in patches if each.default_on}
    block: dict[str, Any] = {**(own if isinstance(own, dict) else usual)}
    for assignment in sets:
        target, _, text = assignment.partition("=")
        name, dot, key = target.strip().partition(".")
        try:
            value = yaml.safe_load(text)
        except Exception:  # yaml raises various exceptions for wrong dates and numbers
            value = None
        if value is None and text.strip() != "null":
            takes = "patch.key=value, patch=true, patch=false"
            raise refusal(f"--set {assignment}", found=short_repr(assignment), allowed=takes)
        held = block.get(name)
        block[name] = {**(held if isinstance(held, dict) else {}), key: value} if dot else value
    return block


def build(base: Path, sets: Sequence[str], patches: Sequence[Patch], *, output: Path | None = None) -> str:
    """The text of the overlay, validated like in a server.

    Args:
        base: Its base.
        sets: The ``--set`` options.
        patches: The declarations.
        output: The file to be written. If it is beside its base, it names the base by a relative path.

    Raises:
        ConfigError: The base cannot be read, the overlay would overwrite it, or a server would refuse the result.
        UnicodeError: The name of the base is not UTF-8.
    """
    block = config.read(base)
    if output is not None and output.resolve() == base.resolve():
        raise refusal("--output", found=short_repr(str(output)), allowed="another file than the base")
    value = block_value(block, sets, patches)
    where = output or Path("the overlay")
    resolve(dataclasses.replace(block, path=where, value=value), {}, patches)
    is_beside = output is not None and output.absolute().parent == base.absolute().parent
    named = Path(os.fsencode(base.name if is_beside else base.absolute()).decode())  # independent of the locale
    document = {"base_config": str(named), KEY: value}
    body = yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=200)
    head = f"# `omni-fastpath overlay`, over {named.name}; start the server with --deploy-config and this file.\n"
    if base in bundled().values():
        head += f"# If vllm-omni moves, write this file again, or use {MASTER}=1 and --deploy-config {named.name}.\n"
    return head + body
