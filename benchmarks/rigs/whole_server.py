"""What the benchmarks of a whole server share: environment, starts in turn, checks and verdicts of rows."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from benchmarks.ab import verdict
from benchmarks.ab.capture import Capture
from benchmarks.ab.serving import MeasureError
from benchmarks.ab.verdict import Measure
from benchmarks.rigs import about, results, server_arms
from benchmarks.rigs.arm import Arm, turns
from benchmarks.rigs.server import Server
from omni_fastpath.releases import installed_release

CACHE = Path(__file__).resolve().parents[2] / ".cache" / "models"

FEWEST = 8
"""Requests at the lowest levels."""

Figures = Mapping[str, Mapping[str, float]]
"""Of one start: by level and name; NaN where there is nothing to say."""

Rows = Mapping[tuple[str, str], Measure]
"""What gets a verdict, by level and figure; the first one is primary."""

AnArm = TypeVar("AnArm", bound=Arm)


def deploy(name: str | Path) -> Path:
    """One of the simulated device's deploy YAMLs; an absolute path stays what it is."""
    import omni_simulated_device

    return Path(omni_simulated_device.__file__).parent / "deploy" / name


def model_folder(kind: str) -> Path:
    """The folder of one of `omni_simulated_device.models`, written if nobody has yet: seconds, and much to import.

    It lies in ``.cache`` of the checkout, under a name that follows from what writes it.
    """
    import omni_simulated_device

    package = Path(omni_simulated_device.__file__).parent
    writers = [path.read_bytes() for path in (package / "models.py", *sorted(package.glob("configs/*.json")))]
    versions = [f"{name} {installed_release(name)}" for name in ("transformers", "tokenizers")]
    digest = hashlib.sha256(b"\n".join([*writers, *map(str.encode, versions)])).hexdigest()[:12]
    folder = CACHE / f"{kind}-{digest}"
    if not folder.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as made:
            command = [sys.executable, "-m", "omni_simulated_device.models", kind, f"{made}/model"]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            with contextlib.suppress(OSError):  # another benchmark was faster
                Path(made, "model").rename(folder)
    return folder


def server(
    arm: Arm,
    model: str,
    deploy_config: str | Path,
    device: Mapping[str, Any] | None = None,
    *,
    light: bool = False,
    variables: Mapping[str, str] = MappingProxyType({}),
    **given: Any,
) -> Server:
    """A server that is the arm.

    Args:
        arm: What it should be.
        model: One of `omni_simulated_device.models`.
        deploy_config: One of the simulated device's deploy YAMLs by name, or the path of another one.
        device: As of `environment`.
        light: As of `environment`.
        variables: More of its environment.
        given: What else `Server` takes.
    """
    made = {**environment(arm, device, light=light), **variables}
    return Server(model_folder(model), deploy(deploy_config), environment=made, arguments=arm.arguments, **given)


def environment(arm: Arm, device: Mapping[str, Any] | None = None, *, light: bool = False) -> dict[str, str | None]:
    """What makes a server the arm, on such a device.

    Args:
        arm: What the server should be.
        device: What ``OMNI_SIMULATED_DEVICE_CONFIG`` holds; unless given, an H100 (`omni_simulated_device.config`).
        light: Light engines instead of stage processes.
    """
    import omni_simulated_device

    found = server_arms.environment(arm)
    found[omni_simulated_device.CONFIG_VARIABLE] = json.dumps(device or {})
    if light:
        found[omni_simulated_device.ENABLE_VARIABLE] = "light"
    return found


def checked(captures: Sequence[Capture], *, audio: bool = False) -> Sequence[Capture]:
    """The captures, if every request was answered to its end, with audio where that is asked for.

    Raises:
        MeasureError: One was not.
    """
    bad = [number for number, each in enumerate(captures) if not each.succeeded or (audio and not each.audio)]
    if bad:
        error = captures[bad[0]].error or "no audio"
        raise MeasureError(f"{len(bad)} of {len(captures)} requests failed, the first, number {bad[0]}, with {error}")
    return captures


def run_starts(
    name: str,
    arms: Sequence[AnArm],
    starts: int,
    measure: Callable[[AnArm, Path], Mapping[str, Any]],
    *,
    of: Mapping[str, Any] | None = None,
    minutes: float = math.inf,
) -> dict[str, list[Mapping[str, Any]]]:
    """So many starts of each arm, in turn; each is a line in ``results/NAME.jsonl``.

    Args:
        name: Of the benchmark.
        arms: Arms with names of their own; one that is there twice has twice as many starts.
        starts: Of each arm.
        measure: One start: from the arm and a path for the log to the fields of its line.
        of: Of what the starts are. Those that the file has of the same count, and a run that was cut off goes on.
        minutes: No start begins that would probably end later.

    Returns:
        The fields of each start, by the arm's name.
    """
    about.commit()  # of the code that runs, whatever is committed meanwhile
    found: dict[str, list[Mapping[str, Any]]] = {arm.name: [] for arm in arms}
    said = json.loads(json.dumps(of, default=dataclasses.asdict))
    for line in results.read(name) if of is not None else ():
        if line.get("of") == said and line["arm"] in found:
            found[line["arm"]].append(line)
    done, begun, longest_s = Counter({arm: len(lines) for arm, lines in found.items()}), time.monotonic(), 0.0
    with tempfile.TemporaryDirectory() as folder:
        for place, (_, arm) in enumerate(turns(arms, starts)):
            done[arm.name] -= 1
            if done[arm.name] >= 0:
                continue
            began = time.monotonic()
            if began - begun + longest_s > 60 * minutes:
                results.progress(f"{place} of {len(arms) * starts} starts are done; the same command goes on")
                break
            results.progress(f"start {place + 1} of {len(arms) * starts}: {arm.name}")
            start = measure(arm, Path(folder) / f"{place}.log")
            results.save(name, {"arm": arm.name, "place": place, "of": of, **start})
            found[arm.name].append(start)
            longest_s = max(longest_s, time.monotonic() - began)
    return found


def judge(a: Sequence[Figures], b: Sequence[Figures], rows: Rows) -> dict[str, verdict.Verdict]:
    """The verdict of each row, *b* against *a*, by the measure's name.

    A row of which a start has no figure gets none; where that is the primary one, none does.
    """
    values = [
        {row.name: [each[level].get(name, math.nan) for each in arm] for (level, name), row in rows.items()}
        for arm in (a, b)
    ]
    return verdict.verdicts(list(rows.values()), *values)


def widest(starts: Sequence[Sequence[float]]) -> float:
    """The widest ratio of two starts of one arm, of all arms; 1 where a start has zero or nothing."""
    return max((max(each) / min(each) if min(each) > 0 else 1.0 for each in starts if each), default=1.0)
