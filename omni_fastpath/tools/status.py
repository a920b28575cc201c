"""``omni-fastpath status`` as data: this installation, the live processes, and what is wrong with them.

Nothing here imports vllm or vllm-omni, except ``verify``, which compares the declarations with them.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from omni_fastpath import __version__, config, entrypoint, install, processid, statefile
from omni_fastpath.config import ConfigError, Resolved
from omni_fastpath.declare import Patch, State
from omni_fastpath.deploy_yaml import resolve_file
from omni_fastpath.ledger import logger
from omni_fastpath.releases import Release, vllm_omni_release, vllm_release
from omni_fastpath.tools import findings, overlay, servers, upgrade
from omni_fastpath.tools.findings import Facts, leftovers
from omni_fastpath.tools.findings.facts import live_servers, unwritable
from omni_fastpath.variables import boolean, master_off

SCHEMA = 3
"""Of the report; a key is only ever added under the same number."""


def status_report(
    environ: Mapping[str, str],
    patches: Sequence[Patch],
    *,
    deploy_config: str | None = None,
    verify: bool = False,
) -> dict[str, Any]:
    """Everything that ``status`` shows, as plain data with stable keys."""
    facts = look(environ, patches, deploy_config=deploy_config, verify=verify)
    return {**facts.report, "findings": [finding.model_dump(mode="json") for finding in findings.judge(facts)]}


def look(
    environ: Mapping[str, str],
    patches: Sequence[Patch],
    *,
    deploy_config: str | None = None,
    verify: bool = False,
    deep: bool = False,
) -> Facts:
    """Everything that is judged.

    Args:
        environ: This shell's variables.
        patches: The declarations.
        deploy_config: A deploy YAML's name or path, to be resolved with these variables.
        verify: Compare every seam with what is installed.
        deep: Ask live servers for their ``/metrics``, and load the hook plugins in this process.
    """
    error: str | None = None
    resolved: Resolved | None = None
    by_environment: Resolved | None = None
    try:
        by_environment = config.resolve([], environ, patches, partial=True)
        resolved = resolve_file(overlay.find(deploy_config), environ, patches) if deploy_config else None
    except ConfigError as refused:
        error = str(refused)
    here, elsewhere, others, unusable = _state_files()
    live, stray = live_servers(here, scrape=deep)
    processes = {each["pid"]: each for each in (*here, *(each for server in live for each in server.snapshots), *stray)}
    report: dict[str, Any] = {
        "schema": SCHEMA,
        "installation": _installation(environ, by_environment, patches),
        "processes": [_with_engagement(dict(processes[pid]), patches) for pid in sorted(processes)],
        "state_files_from_elsewhere": elsewhere,
        "servers_without_state": servers.without_state(processes.keys()),
        "resolved": json.loads(resolved.to_json()) if resolved else None,
        "verify": _verify(patches) if verify else None,
        "compared": _compared(patches) if verify else None,
        "foreign_wrappers": None,
        "configuration_error": error,
    }
    return Facts(
        patches=patches,
        environ=environ,
        report=report,
        asked=frozenset(resolved.enabled if resolved else _asked_by(by_environment, patches)),
        servers=live,
        stray=stray,
        folder_problem=unusable,
        other_namespaces=others,
        leftovers=leftovers.find(),
        shared_memory_bytes=leftovers.size_of(),
        contained=processid.is_contained(),
        hooks=_hooks() if deep else None,
    )


def _asked_by(found: Resolved | None, patches: Sequence[Patch]) -> set[str]:
    """The patches whose release matters: the default set, for a YAML not seen here, and what the environment says."""
    origins = {} if found is None else found.origins
    enabled = {} if found is None else found.enabled
    return {each.name for each in patches if each.name in enabled or (each.default_on and not origins.get(each.name))}


def _state_files() -> tuple[list[dict[str, Any]], int, int, str]:
    """Those of live processes, how many are from elsewhere and how many of other namespaces; or why there are none."""
    try:
        found = statefile.folder()
        return statefile.read_live(), statefile.foreign(), statefile.of_other_namespaces(), unwritable(found)
    except OSError as error:
        return [], 0, 0, str(error)


def _hooks() -> Mapping[str, Any]:
    """The hook plugins as a server in this environment would find them; what they print is not ours."""
    from omni_fastpath.hooks import HookManager  # noqa: PLC0415 - only where plugins are looked for

    manager, quiet = HookManager(), logger.disabled
    logger.disabled = True  # it is told as a finding
    try:
        with contextlib.redirect_stdout(sys.stderr):
            manager.load()
    finally:
        logger.disabled = quiet
    return manager.told()


def _installation(environ: Mapping[str, str], found: Resolved | None, patches: Sequence[Patch]) -> dict[str, Any]:
    allowed = environ.get(entrypoint.ALLOW_LIST)
    return {
        "omni_fastpath": __version__,
        "vllm_omni": _named(vllm_omni_release()),
        "vllm": _named(vllm_release()),
        "entry_points": entrypoint.visible_groups(),
        "vllm_plugins": allowed,
        "excluded_by_vllm_plugins": entrypoint.is_left_out(allowed),
        "upstreams_excluded_by_vllm_plugins": entrypoint.upstreams_left_out(allowed),
        "environment": {name: environ[name] for name in config.said(environ, patches)},
        "unknown_variables": list(found.unknown) if found else [],
        "state_folder": _state_folder(),
        "patches": {patch.name: _declared(patch, environ) for patch in patches},
    }


def _state_folder() -> str | None:
    try:
        return str(statefile.folder())
    except OSError:
        return None


def _named(release: Release | None) -> dict[str, str] | None:
    return None if release is None else release._asdict()


def _declared(patch: Patch, environ: Mapping[str, str]) -> dict[str, Any]:
    off = master_off(environ)
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
            "switch": False if off else boolean(environ.get(patch.env, "")),
            "values": {
                key: config.parse(patch.options, key, environ[name])
                for key in patch.options.model_fields
                if (name := config.value_variable(patch, key)) in environ and not off
            },
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
