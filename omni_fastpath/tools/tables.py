"""The output of the commands as lines: tables, and findings in full.

A sentence is one line, whatever its length. The lines of a table and of a paragraph have at most ``width`` characters.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from omni_fastpath import config, install
from omni_fastpath.declare import Fit, Patch, Process, State
from omni_fastpath.state import API_WORKER
from omni_fastpath.tools.findings import HERE

FOR_OPERATORS = ("What", "Why", "Scope", "Remove when")
"""The headings of a patch's docstring that ``explain`` shows without ``--full``."""

_GRAVEST = (State.FAILED, State.UNSUPPORTED, State.APPLIED, State.SUPERSEDED, State.NOT_APPLICABLE, State.OFF)
"""The order in which the state of a patch in several processes is chosen as the server's."""

_Processes = Sequence[Mapping[str, Any]]


def _table(width: int, title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """A table, in which the widest columns are wrapped. Nothing if there are no rows."""
    head, *body = columns, *rows
    widths = [max(map(len, column)) for column in zip(head, *body, strict=True)]
    while sum(widths) + 2 * (len(widths) - 1) > max(width, 60):
        widths[widths.index(max(widths))] -= 1
    if body and title:
        yield title
    for row in (head, ["-" * each for each in widths], *body) if body else ():
        cells = [textwrap.wrap(cell, size, break_on_hyphens=False) for cell, size in zip(row, widths, strict=True)]
        for line in itertools.zip_longest(*cells, fillvalue=""):
            yield "  ".join(cell.ljust(size) for cell, size in zip(line, widths, strict=True)).rstrip()
    if body:
        yield ""


# ---- status ----


def status(report: Mapping[str, Any], width: int, *, every: bool) -> Iterator[str]:
    """A summary, the findings and the patches of each server, then what the options add.

    Args:
        report: The result of ``status_report``.
        width: The width of tables.
        every: Whether each process is also shown separately.
    """
    declared = report["installation"]["patches"]
    for server, group in itertools.groupby(report["processes"], key=lambda process: process["server"]):
        processes = list(group)
        workers = [each for each in processes if API_WORKER.match(each["process_name"])]
        # The parent of several API servers only starts the stages.
        serving = [each for each in processes if not workers or each["role"] != Process.SERVER or each in workers]
        port = next((process["port"] for process in processes if process["port"]), "not named")
        yield f"server {server} port {port}: {_answer(serving, declared)}"
        yield from _findings(f"server {server}", report)
        yield from _patches(serving, declared, width)
    for each in report["servers_without_state"]:
        yield (
            f"server {each['pid']} port {each['port'] or 'not named'}: OFF, or still starting, because it has no state "
            "file of this version. If it answers requests, no patch is enabled, its VLLM_PLUGINS excludes the plugin, "
            "or its files are not visible here.\n"
        )
        yield from _findings(f"server {each['pid']}", report)
    if not (report["processes"] or report["servers_without_state"]):
        others = "".join(f" User {user} has one: ask as that user." for user in report["other_users"])
        yield f"No running server of this user (id {os.getuid()}).{others}"
    yield _versions(report["installation"])
    yield from _findings(HERE, report)
    if report["verify"] is not None:
        yield from _verified(report, width)
    if report["resolved"] is not None:
        yield from _resolved(report, width)
    for each in report["processes"] if every else ():
        yield f"process {each['pid']}: {each['role']}, {each['process_name']}"
        yield from _patches([each], declared, width)
    more = "" if every else "More: `omni-fastpath status --all`. "
    yield f"{more}How to solve problems: `omni-fastpath doctor`."


def _answer(serving: _Processes, declared: Mapping[str, Any]) -> str:
    found = _by_patch(serving)
    defaults = [state for name, (state, _) in found.items() if name in declared and declared[name]["default_on"]]
    idle = defaults.count(State.NOT_APPLICABLE)
    if all(state in (State.OFF, State.NOT_APPLICABLE) for state in defaults):
        others = [name for name, (state, _) in found.items() if state.satisfies_requirement]
        return f"OFF but for {', '.join(others)}" if others else "OFF"
    on = sum(state.satisfies_requirement for state in defaults)
    answer = f"ON, {on} of {len(defaults) - idle} default patches applied"
    return answer + (f", {idle} not applicable here" if idle else "")


def _by_patch(processes: _Processes) -> dict[str, tuple[State, _Processes]]:
    """The most important state of each patch in these processes, and the records with that state."""
    found: dict[str, tuple[State, _Processes]] = {}
    for name in dict.fromkeys(name for process in processes for name in process["patches"]):
        records = [process["patches"][name] for process in processes if name in process["patches"]]
        state = min((State(record["state"]) for record in records), key=_GRAVEST.index)
        found[name] = state, [record for record in records if record["state"] == state]
    return found


def _patches(processes: _Processes, declared: Mapping[str, Any], width: int) -> Iterator[str]:
    rows = []
    for name, (state, records) in _by_patch(processes).items():
        counter = next(iter(records[0]["counters"]), "")  # in another version a patch may have none
        count = sum(record["counters"].get(counter, 0) for record in records)
        words = declared.get(name, {}).get("counts") or counter
        did = f"{count:,} {words}" if counter and state is State.APPLIED else ""
        notes = dict.fromkeys([did, *(record["reason"] for record in records)])
        rows.append((name, state.value, "; ".join(filter(None, notes))))
    return _table(width, "", ("patch", "state", "what it did, or why"), rows)


def _findings(subject: str, report: Mapping[str, Any]) -> Iterator[str]:
    for each in report["findings"]:
        if each["subject"] == subject:
            yield f"{each['severity']} {each['id']}: {each['what']}"


def _verified(report: Mapping[str, Any], width: int) -> Iterator[str]:
    rows = []
    for name, problems in report["verify"].items():
        state = report["installation"]["patches"].get(name, {}).get("release_state", State.APPLIED)
        fits = "as declared" if state == State.APPLIED else f"{state}: no seams on this release"
        same_as = report["same_as"].get(name)
        rows += [(name, line) for line in problems or [f"every function is as in {same_as}" if same_as else fits]]
    title = "The installed vllm and vllm-omni, compared with what the patches expect (a tracer only if it is here too)"
    return _table(width, title, ("patch", "verdict"), rows)


def _resolved(report: Mapping[str, Any], width: int) -> Iterator[str]:
    resolved, told = report["resolved"], tuple(each["what"] for each in report["findings"])
    source, enabled, rows = resolved["source"], resolved["enabled"], []
    for name, origin in resolved["origins"].items():
        because = (origin if name in enabled else resolved["off"][name]).replace(f" in {source}", "")
        given = ", ".join(f"{key}={json.dumps(value)}" for key, value in enabled.get(name, {}).items())
        rows.append((name, "on" if name in enabled else "off", because, given or "-"))
    rules = f"on_unsupported: {resolved['on_unsupported']}, on_unlisted: {resolved['on_unlisted'] or 'not set'}"
    title = f"{source} with this shell's variables ({rules})" if source else "The YAML is not read"
    yield from _table(width, title, ("patch", "on", "because", "values"), rows)
    yield from (f"warning: {line}" for line in resolved["unknown"] if not line.startswith(told))


def _versions(installation: Mapping[str, Any]) -> str:
    found = [f"omni-fastpath {installation['omni_fastpath']}"]
    for name in ("vllm_omni", "vllm"):
        of = installation[name]
        found.append(f"{of['distribution']} {of['version']}" if of else f"no {name.replace('_', '-')}")
    return ", ".join([*found, f"Python {installation['python']}", installation["platform"]])


# ---- doctor ----


def doctor(report: Mapping[str, Any]) -> Iterator[str]:
    """Every finding in full, then their number."""
    for each in report["findings"]:
        yield f"{each['severity']} {each['id']}: {each['subject']}"
        yield f"  {each['what']}\n  do: {each['do']}\n"
    servers = {process["server"] for process in report["processes"]}
    yield f"servers with state files: {len(servers)}; findings: {len(report['findings'])}"


# ---- explain ----


def patches(declared: Sequence[Patch], width: int) -> Iterator[str]:
    """One line per patch."""
    rows = [(patch.name, "on" if patch.default_on else "opt-in", patch.summary) for patch in declared]
    return _table(width, "Patches", ("patch", "default", "summary"), rows)


def patch(of: Patch, width: int, *, full: bool) -> Iterator[str]:
    """The parts of a declaration that operators need, or all of it."""
    page = of.docs or "Python removes this text under -OO."
    summary, *parts = re.split(r"^(\S.*):$", page.strip().replace("``", "`"), flags=re.MULTILINE)
    yield f"{of.name}: {summary.strip()}\n"
    for heading, text in zip(parts[::2], parts[1::2], strict=True):
        if full or heading in FOR_OPERATORS:
            indent = " " * 4
            yield f"{heading}:"
            yield textwrap.fill(" ".join(text.split()), width, initial_indent=indent, subsequent_indent=indent)
    yield f"\n{'in' if of.default_on else 'opt-in, not in'} the default set (`fastpath: true`)"
    yield f"requires {', '.join(of.requires) or 'nothing'}; switch: fastpath.{of.name}, {of.env}\n"
    title = f"Values, also as variables {of.env}__KEY"
    yield from _table(width, title, ("key", "default", "allowed", "meaning"), [value[:4] for value in values(of)])
    numbers = [(each.name, f"{each.meaning}{' (a maximum)' if each.is_maximum else ''}") for each in of.counters]
    numbers += [(each.name, each.meaning) for each in of.metrics]
    yield from _table(width, "Counters, the most important one first, and metrics", ("name", "meaning"), numbers)
    if not full:
        yield f"More: `omni-fastpath explain {of.name} --full`"
        return
    row = install.row_here(of)
    fit = row if isinstance(row, Fit) else of.fits[-1]
    seams = [(type(seam).__name__.lower(), seam.path) for seam in fit.seams]
    yield from _table(width, f"Seams on {', '.join(fit.releases)}", ("use", "slot"), seams)
    releases = [(", ".join(each.releases), each.state.value, each.note) for each in of.rows]
    yield from _table(width, "Releases", ("releases", "state", "note"), releases)


def values(of: Patch) -> Iterator[tuple[str, str, str, str, str]]:
    """Key, default, allowed values, meaning and variable of each value of a patch."""
    defaults = of.options().model_dump(mode="json")
    for key, found in of.options.model_fields.items():
        allowed, variable = config.allowed(of.options, key), config.value_variable(of, key)
        yield key, json.dumps(defaults[key]), allowed, found.description or "-", variable
