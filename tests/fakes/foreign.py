"""Somebody else's package: an entry point in vLLM's group of plugins that wraps functions of vLLM-Omni's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

_SOURCE = '''
import functools
import importlib

from wrapt import register_post_import_hook

SLOTS = {slots!r}
LATE = {late!r}


def register():
    """The entry point: as such packages do it, when the modules are there."""
    for slot in () if LATE else SLOTS:
        register_post_import_hook(functools.partial(wrap, slot), slot.partition(":")[0])


def wrap_all():
    for slot in SLOTS:
        wrap(slot, importlib.import_module(slot.partition(":")[0]))


def wrap(slot, owner):
    *parents, name = slot.partition(":")[2].split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    function = getattr(owner, name)

    @functools.wraps(function)
    def theirs(*args, **kwargs):
        return function(*args, **kwargs)

    setattr(owner, name, theirs)
'''


def package(folder: Path, name: str, slots: Sequence[str], *, late: bool = False) -> Path:
    """Write it, to be found where the folder is on the path: before ours where it is first, after ours where last.

    Args:
        folder: Where.
        name: Of distribution, module and entry point.
        slots: ``module:qualname`` of each function that it wraps, as most do, with ``functools.wraps``.
        late: Wrap when its ``wrap_all`` is called, when ours are written already.

    Returns:
        The folder.
    """
    metadata = folder / f"{name}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{name} = {name}:register\n")
    (folder / f"{name}.py").write_text(_SOURCE.format(slots=tuple(slots), late=late))
    return folder
