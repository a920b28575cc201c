"""What the commands show, as tables."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from packaging.version import Version
from rich.console import Console
from rich.table import Table

from omni_fastpath import config, install
from omni_fastpath.declare import Fit, Function, Patch, Row, State

# Piped output is read by grep and by people later: no cell may be cut or wrapped there.
_PIPED_WIDTH = 10_000

_STYLES = {"error": "bold red", "warning": "yellow", "info": "dim"}
"""Of findings, by severity."""


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leave it to the command line: rich would exit with 1, which means trouble here."""
        raise BrokenPipeError


def standard_output() -> Console:
    """A console; a reader that has left is a ``BrokenPipeError`` of whoever prints."""
    width = None if sys.stdout.isatty() else _PIPED_WIDTH
    # Reasons and reprs hold square brackets, which rich would take for markup.
    return _Console(file=sys.stdout, width=width, markup=False, emoji=False, highlight=False, soft_wrap=False)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        name = column in {"patch", "pid", "role", "state"}  # a name that is broken over two lines cannot be copied
        table.add_column(column, overflow="fold", no_wrap=name, header_style="underline")
    return table


def show_status(report: Mapping[str, Any], console: Console) -> None:
    """What ``status_report`` found, findings last."""
    _show_installation(report["installation"], console)
    if report["verify"] is not None:
        _show_verify(report["verify"], report["compared"], report["installation"], console)
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
    for finding in report["findings"]:
        told = f"{finding['severity']} {finding['id']}, {finding['subject']}: {finding['what']}"
        console.print(told, style=_STYLES[finding["severity"]])
    if report["findings"]:
        console.print("`omni-fastpath doctor` says what to do about it.")


def _show_installation(installation: Mapping[str, Any], console: Console) -> None:
    table = _table("This installation", "what", "found")
    table.add_row("omni-fastpath", installation["omni_fastpath"])
    for name in ("vllm_omni", "vllm"):
        found = installation[name]
        told = f"{found['distribution']} {found['version']}" if found else "not installed"
        table.add_row(name.replace("_", "-"), told)
    table.add_row("entry points", ", ".join(installation["entry_points"]) or "none visible")
    excluded = " (excludes omni_fastpath)" if installation["excluded_by_vllm_plugins"] else ""
    if upstreams := installation["upstreams_excluded_by_vllm_plugins"]:
        excluded += f" (excludes {', '.join(upstreams)})"
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
            _on_this_release(patch),
            _environment(patch["environment"]),
            patch["summary"],
        )
    console.print(table)
    console.print()


def _on_this_release(patch: Mapping[str, Any]) -> str:
    if not patch["release_tested"]:
        return "not tested"
    state = patch["release_state"]
    return "; ".join(filter(None, ("tested" if state == State.APPLIED.value else state, patch["release_words"])))


def _environment(said: Mapping[str, Any]) -> str:
    switch = {True: ["on"], False: ["off"], None: []}[said["switch"]]
    return ", ".join([*switch, *(f"{key}={json.dumps(value)}" for key, value in said["values"].items())]) or "-"


def _show_verify(
    found: Mapping[str, Sequence[str]], compared: Mapping[str, Any], installation: Mapping[str, Any], console: Console
) -> None:
    table = _table("Seams against the installed vllm and vllm-omni", "patch", "verdict")
    for name, problems in found.items():
        state = installation["patches"][name]["release_state"]
        for line in problems or ["as declared" if state == State.APPLIED.value else f"{state}: it has none here"]:
            table.add_row(name, line)
    console.print(table)
    console.print()
    if compared:
        _show_compared(compared, installation["vllm_omni"], console)


def _show_compared(compared: Mapping[str, Any], found: Mapping[str, str], console: Console) -> None:
    title = f"vllm-omni {found['version']} beside the nearest release that each patch knows; none of these runs here"
    table = _table(title, "patch", "beside", "seam", "verdict")
    for name, patch in compared.items():
        seams, beside = patch["seams"], patch["beside"]
        fitting = f"{sum(not seam['changes'] for seam in seams)} of {len(seams)} seams fit"
        table.add_row(name, beside, "-", fitting if seams else f"{patch['state']} there: {patch['words']}")
        for seam in seams:
            table.add_row(name, beside, seam["seam"], "; ".join(seam["changes"]) or "fits")
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


def show_patches(patches: Sequence[Patch], console: Console) -> None:
    """A line for each patch."""
    table = _table("Patches", "patch", "default", "summary")
    for patch in patches:
        table.add_row(patch.name, "on" if patch.default_on else "opt-in", patch.summary)
    console.print(table)


def show_patch(patch: Patch, console: Console) -> None:
    """All of a declaration."""
    console.print(patch.name, style="bold")
    console.print(patch.docs.strip())
    console.print()
    facts = _table("Facts", "what", "value")
    facts.add_row("default", "on under `fastpath: true`" if patch.default_on else "opt-in: not under `fastpath: true`")
    facts.add_row("requires", ", ".join(patch.requires) or "nothing")
    facts.add_row("processes", ", ".join(sorted(process.value for process in patch.processes)))
    row = install.row_here(patch)
    here = install.release_problem(patch) if row is None else "; ".join(filter(None, (row.state.value, row.remarks)))
    facts.add_row("on the installed release", here)
    facts.add_row("switch", f"fastpath.{patch.name}, {patch.env}")
    console.print(facts)
    console.print()
    _show_options(patch, console)
    _show_rows(patch, console)
    counters = _table("Counters (the first says how often it took effect)", "counter", "meaning")
    for counter in patch.counters:
        counters.add_row(counter.name, f"{counter.meaning} (a maximum)" if counter.is_maximum else counter.meaning)
    console.print(counters)
    if patch.metrics:
        console.print()
        metrics = _table("On /metrics besides", "metric", "kind", "meaning")
        for metric in patch.metrics:
            metrics.add_row(metric.name, "gauge" if metric.bounds is None else "histogram", metric.meaning)
        console.print(metrics)


def _show_rows(patch: Patch, console: Console) -> None:
    here = install.row_here(patch)
    releases = _table("Releases", "release", "state there", "what to know")
    for row in patch.rows:
        for release in row.releases:
            releases.add_row(release, row.state.value, row.remarks or "-")
    console.print(releases)
    console.print()
    fit = here if isinstance(here, Fit) else patch.fits[-1]
    seams = _table(f"Seams on {', '.join(fit.releases)}", "slot", "use", "parameters", "body")
    for seam in fit.seams:
        body = "pinned" if isinstance(seam, Function) and seam.fingerprints else "-"
        parameters = ", ".join(seam.parameters) if isinstance(seam, Function) else ""
        seams.add_row(seam.path, seam.use, parameters or "-", body)
    console.print(seams)
    console.print()


def matrix(patches: Sequence[Patch]) -> str:
    """What each patch is on each release that any of them knows, as Markdown; what is to be said stands below."""
    previews = {release: row.preview for patch in patches for row in patch.rows for release in row.releases}
    releases = sorted(previews, key=Version)
    words: list[str] = []
    lines = [
        " | ".join(["| patch", *(f"{each} (preview)" if previews[each] else each for each in releases)]) + " |",
        " | ".join(["| ---", *("---" for _ in releases)]) + " |",
    ]
    for patch in patches:
        cells = [_cell(patch.row_on(release), words) for release in releases]
        lines.append(" | ".join([f"| `{patch.name}`", *cells]) + " |")
    notes = [f"{number}. {each}" for number, each in enumerate(words, 1)]
    return "\n".join([*lines, *(["", *notes] if notes else [])])


def _cell(row: Row | None, words: list[str]) -> str:
    """A state, with the number of what is to be said; that joins ``words`` when it is new."""
    if row is None:
        return State.UNSUPPORTED.value
    if row.note and row.note not in words:
        words.append(row.note)
    mark = f"<sup>{words.index(row.note) + 1}</sup>" if row.note else ""
    return f"{row.state.value}{mark}".replace("_", " ")


def _show_options(patch: Patch, console: Console) -> None:
    if not patch.options.model_fields:
        return
    options = _table("Values", "key", "default", "allowed", "meaning", "variable")
    defaults = patch.options().model_dump(mode="json")
    for key, field in patch.options.model_fields.items():
        options.add_row(
            key,
            json.dumps(defaults[key]),
            config.allowed(patch.options, key),
            field.description or "-",
            config.value_variable(patch, key),
        )
    console.print(options)
    console.print()
