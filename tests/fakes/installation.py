"""An installation altered by hand: a vLLM-Omni beside the installed one, which stays as it is."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "vllm_omni"


class Altered:
    """A ``vllm_omni`` of links to the installed one's files; what is altered is a file of its own.

    The installed release's metadata is found as before, so that it counts as that release.

    Args:
        folder: Where it is made; to be first on the path.
    """

    def __init__(self, folder: Path) -> None:
        spec = importlib.util.find_spec(PACKAGE)
        assert spec is not None
        assert spec.origin is not None
        self.folder, self._installed = folder, Path(spec.origin).parent
        self._link(self._installed, folder / PACKAGE)

    def replace(self, path: str, old: str, new: str) -> None:
        """Write another text in the place of one that stands in a file once."""
        file = self._own(path)
        source = file.read_text(encoding="utf-8")
        assert source.count(old) == 1, (path, old, source.count(old))
        file.write_text(source.replace(old, new), encoding="utf-8")

    def move(self, path: str, to: str) -> None:
        """Take a file from its place; what imports it is the caller's to alter."""
        self._own(path).rename(self._own_folder(Path(to).parent) / Path(to).name)

    def _own(self, path: str) -> Path:
        """A file that is no link."""
        file = self._own_folder(Path(path).parent) / Path(path).name
        if file.is_symlink():
            source = file.read_bytes()
            file.unlink()
            file.write_bytes(source)
        return file

    def _own_folder(self, path: Path) -> Path:
        """A folder of the package that is no link, and none of those above it."""
        folder, installed = self.folder / PACKAGE, self._installed
        for part in path.parts:
            folder, installed = folder / part, installed / part
            if folder.is_symlink():
                folder.unlink()
                self._link(installed, folder)
        return folder

    @staticmethod
    def _link(installed: Path, folder: Path) -> None:
        folder.mkdir(parents=True)
        for each in installed.iterdir():
            if each.name != "__pycache__":  # compiled anew: what is altered is not what was compiled
                (folder / each.name).symlink_to(each)


@dataclass(frozen=True)
class Alteration:
    """Something that upstream runs on with, and one patch does not fit any more; of the installed release.

    Attributes:
        patch: Which one.
        told: How its reason begins, behind ``a seam moved: ``.
        replaced: File, what stands in it once, and what stands there instead.
        moved: File, and where it is instead.
    """

    patch: str
    told: str
    replaced: tuple[tuple[str, str, str], ...]
    moved: tuple[str, str] | None = None

    def make(self, installation: Altered) -> None:
        """Alter an installation so."""
        for path, old, new in self.replaced:
            installation.replace(path, old, new)
        if self.moved is not None:
            installation.move(*self.moved)


STATEMENT = Alteration(
    "final_output_wakeup",
    "vllm_omni.engine.omni_engine_base:OmniEngineBase.try_get_output_async: its body moved: fingerprint ",
    (
        (
            "engine/omni_engine_base.py",
            "self.output_queue.sync_q.get_nowait()",
            "(self.output_queue).sync_q.get_nowait()",
        ),
    ),
)
"""A statement of a body that the patch relies on: what it does is the same."""

MODULE = Alteration(
    "lean_processing",
    "vllm_omni.engine.cfg_companion_tracker:CfgCompanionTracker.has_companions: the module cannot be imported "
    "(No module named 'vllm_omni.engine.cfg_companion_tracker')",
    (("engine/orchestrator.py", "engine.cfg_companion_tracker import", "engine.companions import"),),
    ("engine/cfg_companion_tracker.py", "engine/companions.py"),
)
"""A module with a seam of the patch in it: it has another name, which its importer knows."""

IN_A_STAGE = Alteration(
    "forward_gate",
    "vllm_omni.core.sched.omni_ar_scheduler:OmniARScheduler.update_from_output: its body moved: fingerprint ",
    (
        (
            "core/sched/omni_ar_scheduler.py",
            "        num_scheduled_tokens = scheduler_output.num_scheduled_tokens\n        pooler_outputs =",
            "        num_scheduled_tokens = (scheduler_output).num_scheduled_tokens\n        pooler_outputs =",
        ),
    ),
)
"""A statement of a body of a stage's."""
