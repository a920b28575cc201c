"""``omni-fastpath status`` as data: this installation, the running processes, and findings about them.

Only ``verify`` and a deploy YAML import vllm and vllm-omni, to compare the declarations with them and to read it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omni_fastpath import __version__, config, install, startup, state
from omni_fastpath.config import ConfigError, Resolved, resolve_file
from omni_fastpath.declare import Patch, State
from omni_fastpath.releases import vllm_omni_release, vllm_release
from omni_fastpath.tools import entrypoint, overlay, servers
from omni_fastpath.tools.findings import START, Facts, judge

SCHEMA = 7
"""The version of the report. Adding a key does not change it."""


def status_report(patches: Sequence[Patch], file: str | None, *, verify: bool, deep: bool) -> dict[str, Any]:
    """Everything that ``status`` shows, as plain data with stable keys. The arguments are those of ``collect``."""
    facts = collect(os.environ, patches, file, verify=verify, deep=deep)
    return {**facts.report, "findings": [dataclasses.asdict(finding) for finding in judge(facts)]}


def is_on(report: Mapping[str, Any]) -> bool:
    """Whether a server is running, and at least one patch serves in each server."""
    on = dict.fromkeys((each["server"] for each in report["processes"]), False)
    for each in report["processes"]:
        states = (State(record["state"]) for record in each["patches"].values())
        on[each["server"]] |= any(found.satisfies_requirement for found in states)
    return bool(on) and all(on.values()) and not report["servers_without_state"]


def collect(
    environ: Mapping[str, str], patches: Sequence[Patch], deploy_config: str | None, *, verify: bool, deep: bool
) -> Facts:
    """The input of the rules.

    Args:
        environ: The variables of this shell.
        patches: The declarations.
        deploy_config: The name or path of a deploy YAML that is resolved with these variables.
        verify: Compare every seam with the installed code.
        deep: Watch the threads of running servers.
    """
    file, resolved, refused = None, None, ""
    try:
        file = overlay.find(deploy_config) if deploy_config else None
        resolved = resolve_file(file, environ, patches)
    except (ConfigError, OSError) as error:  # a new server would refuse too, but running ones are shown
        refused = str(error)
    on_unlisted = resolved.on_unlisted if resolved is not None else None
    moved, same_as = _verify(patches, on_unlisted) if verify else (None, None)
    if resolved is not None and not refused:
        refused = _refusal(resolved, moved or {}, patches)
    live = servers.watched() if deep else servers.live_servers()
    report: dict[str, Any] = {
        "schema": SCHEMA,
        "installation": _installation(environ, patches, on_unlisted),
        "processes": [{**each, "server": server.pid} for server in live for each in server.snapshots],
        "servers_without_state": [{"pid": each.pid, "port": each.port} for each in live if not each.snapshots],
        "other_users": [] if live else sorted({*servers.started().values()}),
        "resolved": json.loads(resolved.to_json()) if file and resolved else None,
        "verify": moved,
        "same_as": same_as,
    }
    # Without a YAML also the default set, because a server's may switch it on.
    origins, asked = resolved.origins if resolved else {}, {*(resolved.enabled if resolved else ())}
    if not (file and resolved):
        asked |= {each.name for each in patches if each.default_on and not origins.get(each.name)}
    return Facts(patches, environ, report, frozenset(asked), live, refused)


def _refusal(found: Resolved, moved: Mapping[str, list[str]], patches: Sequence[Patch]) -> str:
    """Why a start is refused under ``on_unsupported: fail``, as far as it is known. Empty if it is not."""
    trouble = []
    for patch in patches if found.on_unsupported == "fail" and vllm_omni_release() is not None else ():
        known = [*moved.get(START, ()), *moved.get(patch.name, ())]
        why = "; ".join(known) or install.release_problem(patch, found.on_unlisted)
        if why and patch.name in found.enabled:
            trouble.append(f"{patch.name} is {State.UNSUPPORTED.value}: {why}")
    return f"fastpath.on_unsupported is 'fail' and {'; '.join(trouble)}" if trouble else ""


def _installation(environ: Mapping[str, str], patches: Sequence[Patch], on_unlisted: str | None) -> dict[str, Any]:
    releases = {"vllm_omni": vllm_omni_release(), "vllm": vllm_release()}
    return {
        "omni_fastpath": __version__,
        **{name: None if release is None else release._asdict() for name, release in releases.items()},
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "vllm_plugins": environ.get(entrypoint.ALLOW_LIST),
        "environment": _ours(environ, patches),
        "state_folder": str(state.folders(environ, Path.cwd())[0]),
        "patches": {patch.name: _declared(patch, on_unlisted) for patch in patches},
    }


def _ours(environ: Mapping[str, str], patches: Sequence[Patch]) -> dict[str, str | None]:
    """The package's variables. Values of unknown names are hidden, because OMNI_FASTPATH_HF_TOKEN may be a secret."""
    known = config.variables(patches)
    return {name: environ[name] if name in known else None for name in config.set_variables(environ, patches)}


def _declared(patch: Patch, on_unlisted: str | None) -> dict[str, Any]:
    row, found = install.row_here(patch), vllm_omni_release()
    return {
        "default_on": patch.default_on,
        "counts": patch.counters[0].meaning if patch.counters else "",
        "tested": list(patch.releases),
        "may_be": [each for each, _ in patch.candidates(found.version, on_unlisted)] if found and row is None else [],
        "release_problem": install.release_problem(patch, on_unlisted),
        "release_state": install.state_here(patch).value,
    }


def _verify(patches: Sequence[Patch], on_unlisted: str | None) -> tuple[dict[str, list[str]], dict[str, str]]:
    """The differences of the start-up and of each patch, and the listed release whose code each matching patch has.

    On an unlisted release the code decides, whether it may be served or not, unless none may be.
    """
    # vllm logs to standard output while it is imported, but standard output is for the table or the JSON.
    with contextlib.redirect_stdout(sys.stderr):
        problems, same_as = {START: startup.start_problems()}, {}
        for patch in patches:
            problems[patch.name] = install.verify_patch(patch, on_unlisted or "same_code")
            if not problems[patch.name]:
                same_as[patch.name] = install.find_row(patch, None, on_unlisted or "same_code").same_as
    return problems, same_as
