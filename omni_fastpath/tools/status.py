"""``omni-fastpath status`` as data: this installation, the live processes, and what is wrong with them.

Nothing here imports vllm or vllm-omni, except ``verify``, which compares the declarations with them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import platform
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from omni_fastpath import __version__, config, install, statefile
from omni_fastpath.config import ConfigError, Resolved, resolve_file
from omni_fastpath.declare import Patch, State
from omni_fastpath.releases import vllm_omni_release, vllm_release
from omni_fastpath.tools import entrypoint, overlay, servers, upgrade
from omni_fastpath.tools.findings import HERE, START, Facts, judge

SCHEMA = 6
"""Of the report; a key is only ever added under the same number."""


def status_report(
    environ: Mapping[str, str],
    patches: Sequence[Patch],
    *,
    deploy_config: str | None = None,
    verify: bool = False,
    deep: bool = False,
) -> dict[str, Any]:
    """Everything that ``status`` shows, as plain data with stable keys. Arguments as of ``look``."""
    facts = look(environ, patches, deploy_config=deploy_config, verify=verify, deep=deep)
    return {**facts.report, "findings": [dataclasses.asdict(finding) for finding in judge(facts)]}


def is_on(report: Mapping[str, Any]) -> bool:
    """Whether servers run here, and at least one patch serves in each."""
    servers = {each["server"]: False for each in report["processes"]}
    for each in report["processes"]:
        states = (State(record["state"]) for record in each["patches"].values())
        servers[each["server"]] |= any(state.satisfies_requirement for state in states)
    return bool(servers) and all(servers.values()) and not report["servers_without_state"]


def look(
    environ: Mapping[str, str], patches: Sequence[Patch], *, deploy_config: str | None, verify: bool, deep: bool
) -> Facts:
    """Everything that is judged.

    Args:
        environ: This shell's variables.
        patches: The declarations.
        deploy_config: A deploy YAML's name or path, to be resolved with these variables.
        verify: Compare every seam with what is installed.
        deep: Ask live servers for their ``/metrics``, and watch their threads.
    """
    file, resolved, refused = None, None, ""
    try:
        file = overlay.find(deploy_config) if deploy_config else None
        resolved = config.resolve([], environ, patches) if file is None else resolve_file(file, environ, patches)
    except ConfigError as error:  # a server started here and now would say so too; those that run are shown
        refused = str(error)
    on_unlisted = resolved.on_unlisted if resolved is not None else None
    live = servers.live_servers(scrape=deep)
    used = servers.used(live) if deep else None
    moved, same_as = _verify(patches, on_unlisted) if verify else (None, None)
    report: dict[str, Any] = {
        "schema": SCHEMA,
        "installation": _installation(environ, patches, on_unlisted),
        "processes": [{**each, "server": server.pid} for server in live for each in server.snapshots],
        "servers_without_state": [server.shown() for server in live if not server.snapshots],
        "variables": {each.pid: _ours(each.environ, patches) for each in live if each.environ is not None},
        "resolved": json.loads(resolved.to_json()) if file and resolved else None,
        "verify": moved,
        "same_as": same_as,
    }
    asked = resolved.enabled if file and resolved else _asked_by(resolved, patches)
    yamls = {HERE: file, **{server.subject: server.deploy_config for server in live}}
    misspelt = [(subject, key) for subject, path in yamls.items() if path for key in overlay.misspelt(path)]
    read = [(each, each.deploy_config) for each in live if deep]
    unramped = [server.subject for server, path in read if path and overlay.lacks_ramp(path, server.model)]
    if used is not None:  # at last, since what takes time stands between
        live = servers.watched(live, used)
    return Facts(patches, environ, report, frozenset(asked), live, misspelt, unramped, refused)


def _asked_by(found: Resolved | None, patches: Sequence[Patch]) -> set[str]:
    """The patches whose release matters: the default set, for a YAML not seen here, and what the environment says."""
    said = found.origins if found is not None else {}
    missing = (each.name for each in patches if each.default_on and not said.get(each.name))
    return {*(found.enabled if found is not None else ()), *missing}


def _installation(environ: Mapping[str, str], patches: Sequence[Patch], on_unlisted: str | None) -> dict[str, Any]:
    allowed = environ.get(entrypoint.ALLOW_LIST)
    releases = {"vllm_omni": vllm_omni_release(), "vllm": vllm_release()}
    return {
        "omni_fastpath": __version__,
        **{name: None if release is None else release._asdict() for name, release in releases.items()},
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "entry_points": entrypoint.visible_groups(),
        "vllm_plugins": allowed,
        "environment": _ours(environ, patches),
        "state_folder": str(statefile.folder()),
        "patches": {patch.name: _declared(patch, on_unlisted) for patch in patches},
    }


def _ours(environ: Mapping[str, str], patches: Sequence[Patch]) -> dict[str, str | None]:
    """The variables of ours; without the value of a name that is nobody's: OMNI_FASTPATH_HF_TOKEN may be a secret."""
    known = config.variables(patches)
    return {name: environ[name] if name in known else None for name in config.said(environ, patches)}


def _declared(patch: Patch, on_unlisted: str | None) -> dict[str, Any]:
    row, found = install.row_here(patch), vllm_omni_release()
    may_be = patch.candidates(found.version, on_unlisted) if found is not None and row is None else []
    return {
        "default_on": patch.default_on,
        "headline": next((counter.headline for counter in patch.counters), ""),
        "counts": next((counter.meaning for counter in patch.counters), ""),
        "tested": list(patch.releases),
        "may_be": [release for release, _ in may_be],
        "release_problem": install.release_problem(patch, on_unlisted),
        "release_state": install.state_here(patch).value,
        "release_words": "" if row is None else row.remarks,
    }


def _verify(patches: Sequence[Patch], on_unlisted: str | None) -> tuple[dict[str, list[str]], dict[str, str]]:
    """What does not fit, of the start-up and by patch; and of what fits on an unlisted release, as on which it does.

    Where a patch does not fit there, it is compared with the nearest release that it knows.
    """
    found = vllm_omni_release()
    # vllm logs to standard output while it is imported; that belongs to our table or JSON.
    with contextlib.redirect_stdout(sys.stderr):
        problems, same_as = {START: install.start_problems(None, patches)}, {}
        for patch in patches:
            problems[patch.name] = install.verify_patch(patch, on_unlisted)
            if found is not None and install.row_here(patch) is None and problems[patch.name]:
                problems[patch.name] = [install.unlisted(patch), *upgrade.told(upgrade.compare(patch, found.version))]
            elif not problems[patch.name]:
                same_as[patch.name] = install.find_row(patch, None, on_unlisted).same_as
    return problems, same_as
