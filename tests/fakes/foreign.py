"""Somebody else's package: an entry point in vLLM's group of plugins that wraps functions of vLLM-Omni's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

CALLED = "FOREIGN_CALLS"
"""Variable with the file in which its wrappers say, once in each process, that they were called."""

_SOURCE = '''
import functools
import importlib
import os

from wrapt import register_post_import_hook

SLOTS = {slots!r}
LATE = {late!r}
said = set()


def register():
    """The entry point: as such packages do it, when the modules are there; or when there is a front end."""
    if LATE:
        register_post_import_hook(wrap_front_end, "vllm_omni.entrypoints.async_omni")
        return
    for slot in SLOTS:
        register_post_import_hook(functools.partial(wrap, slot), slot.partition(":")[0])


def wrap_front_end(module):
    begin = module.AsyncOmni.__init__

    @functools.wraps(begin)
    def init(self, *args, **kwargs):
        begin(self, *args, **kwargs)
        wrap_all()

    module.AsyncOmni.__init__ = init


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
        if slot not in said and {called!r} in os.environ:
            said.add(slot)
            with open(os.environ[{called!r}], "a") as file:
                file.write(f"{{os.getpid()}} {{slot}}\\n")
        return function(*args, **kwargs)

    setattr(owner, name, theirs)
'''


def package(folder: Path, name: str, slots: Sequence[str], *, late: bool = False) -> Path:
    """Write it, to be found where the folder is on the path: before ours where it is first, after ours where last.

    Args:
        folder: Where.
        name: Of distribution, module and entry point.
        slots: ``module:qualname`` of each function that it wraps, as most do, with ``functools.wraps``.
        late: Wrap when an ``AsyncOmni`` was made, when ours are written already.

    Returns:
        The folder.
    """
    metadata = folder / f"{name}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{name} = {name}:register\n")
    (folder / f"{name}.py").write_text(_SOURCE.format(slots=tuple(slots), late=late, called=CALLED))
    return folder


def called(file: Path) -> set[tuple[int, str]]:
    """Process and slot of each wrapper that was called."""
    lines = file.read_text().split("\n") if file.exists() else []
    return {(int(pid), slot) for pid, slot in (line.split() for line in lines if line)}
