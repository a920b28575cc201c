"""``omni-fastpath status`` as data: this installation, the live processes, and what is wrong with them.

Nothing here imports vllm or vllm-omni, except ``verify``, which compares the declarations with them.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from omni_fastpath import __version__, entrypoint, envs, install, overlay, servers, statefile, upgrade
from omni_fastpath.config import Resolved, resolve_file
from omni_fastpath.declare import Patch, State
from omni_fastpath.releases import Release, vllm_omni_release, vllm_release
from omni_fastpath.values import ConfigError

SCHEMA = 2
"""Of the report; a key is only ever added under the same number."""


def status_report(
    environ: Mapping[str, str],
    patches: Sequence[Patch],
    *,
    deploy_config: str | None = None,
    verify: bool = False,
) -> dict[str, Any]:
    """Everything that ``status`` shows, as plain data with stable keys."""
    error: str | None = None
    resolved: Resolved | None = None
    choices = envs.EnvChoices()
    try:
        choices = envs.read(environ, patches)
        resolved = resolve_file(overlay.find(deploy_config), environ, patches) if deploy_config else None
    except ConfigError as refused:
        error = str(refused)
    processes, foreign, unreadable = _processes()
    report: dict[str, Any] = {
        "schema": SCHEMA,
        "installation": _installation(environ, choices, patches),
        "processes": [_with_engagement(process, patches) for process in processes],
        "state_files_from_elsewhere": foreign,
        "servers_without_state": servers.without_state({process["pid"] for process in processes}),
        "resolved": json.loads(resolved.to_json()) if resolved else None,
        "verify": _verify(patches) if verify else None,
        "compared": _compared(patches) if verify else None,
        "configuration_error": error,
    }
    asked = set(resolved.enabled) if resolved else _asked_by(choices, patches)
    report["problems"] = [*_problems(report, asked), *unreadable]
    return report


def _asked_by(choices: envs.EnvChoices, patches: Sequence[Patch]) -> set[str]:
    """The patches whose release matters: the default set, for a YAML not seen here, and what the environment says."""
    if choices.master is False:
        return set()
    return {patch.name for patch in patches if choices.switches.get(patch.name, patch.default_on)}


def _processes() -> tuple[list[dict[str, Any]], int, list[str]]:
    try:
        return statefile.read_live(), statefile.foreign(), []
    except OSError as error:
        return [], 0, [f"the state files cannot be read: {error}"]


def _installation(environ: Mapping[str, str], choices: envs.EnvChoices, patches: Sequence[Patch]) -> dict[str, Any]:
    allowed = environ.get(entrypoint.ALLOW_LIST)
    return {
        "omni_fastpath": __version__,
        "vllm_omni": _named(vllm_omni_release()),
        "vllm": _named(vllm_release()),
        "entry_points": entrypoint.visible_groups(),
        "vllm_plugins": allowed,
        "excluded_by_vllm_plugins": entrypoint.is_left_out(allowed),
        "upstreams_excluded_by_vllm_plugins": entrypoint.upstreams_left_out(allowed),
        "environment": {name: environ[name] for name in envs.said(environ, patches)},
        "unknown_variables": list(choices.unknown),
        "state_folder": _state_folder(),
        "patches": {patch.name: _declared(patch, choices) for patch in patches},
    }


def _state_folder() -> str | None:
    try:
        return str(statefile.folder())
    except OSError:
        return None


def _named(release: Release | None) -> dict[str, str] | None:
    return None if release is None else release._asdict()


def _declared(patch: Patch, choices: envs.EnvChoices) -> dict[str, Any]:
    problem, row = install.release_problem(patch), install.row_here(patch)
    return {
        "summary": patch.summary,
        "default_on": patch.default_on,
        "requires": list(patch.requires),
        "tested": list(patch.releases),
        "release_tested": problem is None,
        "release_problem": problem,
        "release_state": install.state_here(patch).value,
        "release_words": "" if row is None else row.remarks,
        "environment": {
            "switch": False if choices.master is False else choices.switches.get(patch.name),
            "values": dict(choices.values.get(patch.name, {})),
        },
    }


def _with_engagement(process: dict[str, Any], patches: Sequence[Patch]) -> dict[str, Any]:
    """The snapshot of a process, each patch with ``took_effect``: its first counter and whether it is idle."""
    declared = {patch.name: patch for patch in patches}
    for name, record in process["patches"].items():
        first = next((counter.name for counter in declared[name].counters), None) if name in declared else None
        count = record["counters"].get(first) if first else None
        record["took_effect"] = {"counter": first, "count": count}
        record["idle"] = record["state"] == State.APPLIED.value and count == 0
    return process


def _verify(patches: Sequence[Patch]) -> dict[str, list[str]]:
    # vllm logs to standard output while it is imported; that belongs to our table or JSON.
    with contextlib.redirect_stdout(sys.stderr):
        try:
            return install.verify_all(patches)
        except Exception as error:  # whatever an import of vllm may raise
            return {patch.name: [f"vllm and vllm-omni cannot be imported: {error!r}"] for patch in patches}


def _compared(patches: Sequence[Patch]) -> dict[str, Any]:
    """On a release that is not known, for each patch: what still fits there, and what has moved."""
    found = vllm_omni_release()
    if found is None:
        return {}
    with contextlib.redirect_stdout(sys.stderr):
        unknown = [patch for patch in patches if install.row_here(patch) is None]
        return {patch.name: upgrade.compare(patch, found.version) for patch in unknown}


def _problems(report: Mapping[str, Any], asked: set[str]) -> list[str]:
    """What makes the exit code 1, one line each."""
    installation = report["installation"]
    problems = []
    if installation["excluded_by_vllm_plugins"]:
        problems.append(
            f"VLLM_PLUGINS={installation['vllm_plugins']} is an allow-list without {entrypoint.ENTRY_POINT}: "
            "vllm never loads omni-fastpath, every server runs as upstream made it"
        )
    if not installation["entry_points"]:
        problems.append("no entry point of omni-fastpath is visible in this environment: vllm never loads it")
    for name, patch in installation["patches"].items():
        if name in asked and not patch["release_tested"]:
            problems.append(f"{name}: {patch['release_problem']}")
    for name, found in (report["verify"] or {}).items():
        problems += [f"{name}: {problem}" for problem in found if problem not in " ".join(problems)]
    problems += [
        f"the server {server['pid']} was started with VLLM_PLUGINS={server['vllm_plugins']}, an allow-list without "
        f"{entrypoint.ENTRY_POINT}: it runs as upstream made it, whatever its deploy YAML says"
        for server in report["servers_without_state"]
        if server["excluded"]
    ]
    for process in report["processes"]:
        problems += [
            f"process {process['pid']} ({process['role']}): {name} is {record['state']}: {record['reason']}"
            for name, record in process["patches"].items()
            if State(record["state"]).is_trouble
        ]
    return problems
