"""An overlay YAML that puts a ``fastpath`` block on top of a deploy YAML, bundled with vLLM-Omni or not."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from omni_fastpath import config
from omni_fastpath.config import KEY, Block, ConfigError, refusal, resolve, shown, unknown
from omni_fastpath.declare import Patch
from omni_fastpath.deploy_yaml import read_blocks
from omni_fastpath.variables import BOOLEAN_WORDS, boolean


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
    if path.is_dir():
        raise refusal("deploy YAML", found=f"{name_or_path}, a folder", allowed="a file, or a bundled one's name")
    known = bundled()
    name = name_or_path.removesuffix(".yaml")
    if name in known:
        return known[name].resolve()
    if not known:
        raise ConfigError(f"{name_or_path}: no such file, and no vllm-omni whose deploy YAMLs have names")
    close = config.close(name, known)
    hint = f"nearest: {', '.join(close)}" if close else "`omni-fastpath overlay --list` names them all"
    raise ConfigError(f"{name_or_path}: no such file and no deploy YAML of the installed vllm-omni; {hint}")


def parse_set(assignment: str, patches: Sequence[Patch]) -> tuple[str, str | None, Any]:
    """Read ``patch.key=value``, ``patch=true`` or ``on_unsupported=fail``.

    Returns:
        The patch or ``on_unsupported``, the key or None, the value.

    Raises:
        ConfigError: The text has another form, or names a patch or key that is not there.
    """
    place = f"--set {assignment}"
    target, equals, text = assignment.partition("=")
    if not equals:
        raise refusal(place, found=shown(assignment), allowed="patch.key=value, patch=true, patch=false")
    name, dot, key = target.strip().partition(".")
    if name == "on_unsupported" and not dot:
        return name, None, text.strip()
    declared = {patch.name: patch for patch in patches}
    if name not in declared:
        raise unknown(place, name, [*declared, "on_unsupported"], found=f"an unknown patch {shown(name)}")
    if dot:
        options = declared[name].options
        if key not in options.model_fields:
            raise unknown(place, key, options.model_fields)
        return name, key, config.parse(options, key, text)
    on = boolean(text)
    if on is None:
        raise refusal(place, found=shown(text), allowed=BOOLEAN_WORDS)
    return name, None, on


def block_value(base: Sequence[Block], sets: Sequence[str], patches: Sequence[Patch]) -> Any:
    """The ``fastpath`` value of the overlay: ``true``, or the mapping that the ``--set`` options ask for.

    Over a base that switches something on, the mapping holds what is set and the rest is inherited; over any other it
    starts from the default set.

    Raises:
        ConfigError: As ``parse_set``.
    """
    if not sets:
        return True
    inherits = resolve(base, {}, patches).asked
    block: dict[str, Any] = {} if inherits else {patch.name: True for patch in patches if patch.default_on}
    off: set[str] = set()
    valued: set[str] = set()
    for assignment in sets:
        name, key, value = parse_set(assignment, patches)
        if key is None:
            off |= {name} if value is False else set()
            block[name] = value
        else:
            valued.add(name)
            held = block.get(name)
            block[name] = {**(held if isinstance(held, dict) else {}), key: value}
    for name in sorted(off & valued):
        raise refusal(f"--set {name}", found="both 'false' and values", allowed="one of them")
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
    if output is not None and any(_same_file(block.path, output) for block in blocks):
        raise refusal("--output", found=shown(str(output)), allowed="a file that is not below the overlay itself")
    value = block_value(blocks, sets, patches)
    where = output or Path("the overlay")
    resolve([*blocks, Block(where, value)], {}, patches)
    document = {"base_config": str(base.resolve()), KEY: value}
    body = yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=200)
    return f"# Written by `omni-fastpath overlay`; start the server with --deploy-config and this file.\n{body}"


def _same_file(path: str | Path, other: Path) -> bool:
    return Path(path).resolve() == other.resolve()


def write(text: str, output: Path, *, force: bool = False) -> None:
    """Write the overlay.

    Raises:
        FileExistsError: The file is there and ``force`` is not given.
        OSError: It cannot be written.
    """
    with output.open("w" if force else "x", encoding="utf-8") as file:
        file.write(text)
