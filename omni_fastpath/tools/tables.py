"""What the commands show, as tables."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TextIO

from packaging.version import Version
from rich.console import Console
from rich.table import Table

from omni_fastpath import config, install
from omni_fastpath.declare import Fit, Patch, Row, State

# Piped output is read by grep and by people later: no cell may be cut or wrapped there.
_PIPED_WIDTH = 10_000

STYLES = {"error": "bold red", "warning": "yellow", "info": "dim"}
"""Of findings, by severity."""


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leave it to ``reader_may_leave``: rich would exit with 1, which means trouble here."""
        raise BrokenPipeError


def console(stream: TextIO, piped_width: int = _PIPED_WIDTH) -> Console:
    """A console on standard output or standard error; without markup: reasons and names hold square brackets."""
    width = None if stream.isatty() else piped_width
    return _Console(file=stream, width=width, markup=False, emoji=False, highlight=False, soft_wrap=False)


@contextlib.contextmanager
def reader_may_leave(stream: TextIO) -> Iterator[None]:
    """Print; a reader that has seen enough (``| head``, ``| grep -q``) changes neither the exit code nor anything."""
    try:
        yield
        stream.flush()
    except BrokenPipeError:
        with open(os.devnull, "wb") as nowhere:  # noqa: PTH123 - else Python tries what is left at exit
            os.dup2(nowhere.fileno(), stream.fileno())


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        name = column in {"patch", "pid", "role", "state"}  # a name that is broken over two lines cannot be copied
        table.add_column(column, overflow="fold", no_wrap=name, header_style="underline")
    return table


def _print(table: Table, to: Console) -> None:
    to.print(table)
    to.print()


def show_status(report: Mapping[str, Any], to: Console) -> None:
    """What ``status_report`` found, findings last."""
    _show_installation(report["installation"], to)
    if report["verify"] is not None:
        _show_verify(report, to)
    if report["resolved"] is not None:
        _show_resolved(report["resolved"], to)
    _show_processes(report["processes"], to)
    for server in report["servers_without_state"]:
        what = f"{server['model'] or 'model not named'}, port {server['port'] or 'not named'}"
        to.print(
            f"The server {server['pid']} ({what}) has no state file: nothing was asked for there, its VLLM_PLUGINS "
            "leaves us out, or it runs where its files are not seen from here."
        )
    for finding in report["findings"]:
        said = f"{finding['severity']} {finding['id']}, {finding['subject']}: {finding['what']}"
        to.print(said, style=STYLES[finding["severity"]])
    if report["findings"]:
        to.print("`omni-fastpath doctor` says what to do about it.")


def _show_installation(installation: Mapping[str, Any], to: Console) -> None:
    table = _table("This installation", "what", "found")
    table.add_row("omni-fastpath", installation["omni_fastpath"])
    for name in ("vllm_omni", "vllm"):
        found = installation[name]
        told = f"{found['distribution']} {found['version']}" if found else "not installed"
        table.add_row(name.replace("_", "-"), told)
    table.add_row("entry points", ", ".join(installation["entry_points"]) or "none visible")
    plugins, upstreams = installation["vllm_plugins"], installation["upstreams_excluded_by_vllm_plugins"]
    excluded = f" (excludes {', '.join(upstreams)})" if upstreams else ""
    table.add_row("VLLM_PLUGINS", "not set: every plugin loads" if plugins is None else f"{plugins!r}{excluded}")
    for name, text in installation["environment"].items():
        table.add_row(name, "(not a variable of ours)" if text is None else repr(text))
    table.add_row("state files", installation["state_folder"])
    _print(table, to)

    table = _table("Patches", "patch", "default", "this release", "summary")
    for name, patch in installation["patches"].items():
        default = "on" if patch["default_on"] else "opt-in"
        table.add_row(name, default, _on_this_release(patch), patch["summary"])
    _print(table, to)


def _on_this_release(patch: Mapping[str, Any]) -> str:
    if patch["release_problem"]:
        return "not tested"
    state = patch["release_state"]
    return "; ".join(filter(None, ("tested" if state == State.APPLIED.value else state, patch["release_words"])))


def _show_verify(report: Mapping[str, Any], to: Console) -> None:
    table = _table("Seams against the installed vllm and vllm-omni", "patch", "verdict")
    for name, problems in report["verify"].items():
        state = report["installation"]["patches"][name]["release_state"]
        for line in problems or ["as declared" if state == State.APPLIED.value else f"{state}: it has none here"]:
            table.add_row(name, line)
    _print(table, to)


def _show_resolved(resolved: Mapping[str, Any], to: Console) -> None:
    source = resolved["source"] or "no YAML"
    title = f"{source} with this environment (on_unsupported: {resolved['on_unsupported']})"
    table = _table(title, "patch", "on", "because", "values")
    for name, origin in resolved["origins"].items():
        on = name in resolved["enabled"]
        because = origin if on else resolved["off"][name]
        table.add_row(name, "on" if on else "off", because, _listed(resolved["enabled"].get(name, {})))
    _print(table, to)


def _listed(values_: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={json.dumps(value)}" for key, value in values_.items()) or "-"


def _show_processes(processes: Sequence[Mapping[str, Any]], to: Console) -> None:
    if not processes:
        to.print("No live process of this user has omni-fastpath loaded.")
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
    _print(table, to)


def _took_effect(record: Mapping[str, Any]) -> str:
    counter, count = record["took_effect"].values()
    return "-" if count is None or record["state"] != State.APPLIED.value else f"{count} {counter}"


def show_seams(patches: Sequence[Mapping[str, Any]], to: Console) -> None:
    """Each seam of each patch, as it is installed."""
    for patch in patches:
        table = _table(f"{patch['patch']}, beside {patch['beside']}", "seam", "use", "place", "body", "found")
        for seam in patch["seams"]:
            found = "; ".join(seam["changes"]) or "as declared"
            table.add_row(seam["seam"], seam["use"], seam["place"] or "-", seam["fingerprint"] or "-", found)
        _print(table, to)


def show_patches(patches: Sequence[Patch], to: Console) -> None:
    """A line for each patch."""
    table = _table("Patches", "patch", "default", "summary")
    for patch in patches:
        table.add_row(patch.name, "on" if patch.default_on else "opt-in", patch.summary)
    to.print(table)


def show_patch(patch: Patch, to: Console) -> None:
    """All of a declaration."""
    to.print(patch.name, style="bold")
    to.print(patch.docs.strip())
    to.print()
    facts = _table("Facts", "what", "value")
    facts.add_row("default", "on under `fastpath: true`" if patch.default_on else "opt-in: not under `fastpath: true`")
    facts.add_row("requires", ", ".join(patch.requires) or "nothing")
    facts.add_row("switch", f"fastpath.{patch.name}, {patch.env}")
    _print(facts, to)
    defaults = patch.options().model_dump(mode="json")
    options = _table("Values", "key", "default", "allowed", "meaning", "variable")
    for key, found in patch.options.model_fields.items():
        allowed, variable = config.allowed(patch.options, key), config.value_variable(patch, key)
        options.add_row(key, json.dumps(defaults[key]), allowed, found.description or "-", variable)
    row = install.row_here(patch)
    fit = row if isinstance(row, Fit) else patch.fits[-1]
    seams = _table(f"Seams on {', '.join(fit.releases)}", "slot", "use")
    for seam in fit.seams:
        seams.add_row(seam.path, seam.use)
    counters = _table("Counters (the first says how often it took effect) and metrics", "name", "meaning")
    for counter in patch.counters:
        counters.add_row(counter.name, f"{counter.meaning} (a maximum)" if counter.is_maximum else counter.meaning)
    for metric in patch.metrics:
        counters.add_row(metric.name, metric.meaning)
    for table in (options, seams, counters):
        if table.row_count:
            _print(table, to)
    to.print(matrix([patch]))


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
