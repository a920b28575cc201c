"""The output of the commands: tables, findings in full, and a block for a bug report."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TextIO

from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from omni_fastpath import config, install
from omni_fastpath.declare import Fit, Patch, Process, State
from omni_fastpath.metrics import API_WORKER
from omni_fastpath.statefile import REFRESH_S
from omni_fastpath.tools.findings import HERE, SEVERITIES

_PIPED_WIDTH = 100
"""The width of a table in a pipe, a file or a log."""

FOR_OPERATORS = ("What", "Why", "Scope", "Remove when")
"""The headings of a patch's docstring that ``explain`` shows without ``--full``."""

STYLES = {"error": "bold red", "warning": "yellow", "info": "dim"}
"""The style of findings by severity."""


_PACKAGES = ("omni_fastpath", "vllm_omni", "vllm")
"""The packages whose versions a state file has."""

_FOR_AN_ISSUE = ("patch", "state", "seams", "variable", "nearest")
"""The evidence that is in the block for a bug report. It has no path, no exception's message and no value."""


class _Console(Console):
    def print(self, *objects: Any, **how: Any) -> None:
        """Print like rich, but without wrapping sentences in a pipe, so that ``grep`` finds them."""
        how.setdefault("soft_wrap", not self.is_terminal and all(isinstance(each, str) for each in objects))
        super().print(*objects, **how)

    def on_broken_pipe(self) -> None:
        """Raise, for ``reader_may_leave``. Rich would exit with 1, which here means that there is a problem."""
        raise BrokenPipeError


def console(stream: TextIO) -> Console:
    """A console for a stream. It has no markup, because reasons and names may contain square brackets."""
    width = None if stream.isatty() else _PIPED_WIDTH
    return _Console(file=stream, width=width, markup=False, emoji=False, highlight=False, soft_wrap=False)


@contextlib.contextmanager
def reader_may_leave(stream: TextIO) -> Iterator[None]:
    """Ignore that the reader of a pipe closes it early (``| head``, ``| grep -q``)."""
    try:
        yield
        stream.flush()
    except BrokenPipeError:
        with open(os.devnull, "wb") as nowhere:  # noqa: PTH123 - else Python writes the rest at exit
            os.dup2(nowhere.fileno(), stream.fileno())


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        name = column in {"patch", "pid", "role", "state"}  # names are not wrapped, so that they can be copied
        table.add_column(column, overflow="fold", no_wrap=name, header_style="underline")
    return table


def _print(table: Table, to: Console) -> None:
    if table.title:  # rich would wrap it at the width of the table
        to.print(str(table.title), style="bold")
        table.title = None
    to.print(table)
    to.print()


def show_status(report: Mapping[str, Any], to: Console, *, every: bool) -> None:
    """Show a summary, the findings and the patches of each server, then what the options add.

    Args:
        report: The result of ``status_report``.
        to: The console.
        every: Whether each process is also shown separately.
    """
    for server, processes in itertools.groupby(report["processes"], key=lambda process: process["server"]):
        _show_server(server, list(processes), report, to)
    for server in report["servers_without_state"]:
        what = f"{server['model'] or 'model not named'}, port {server['port'] or 'not named'}"
        to.print(
            f"server {server['pid']} ({what}): OFF, or still starting, because it has no state file. If it answers "
            "requests, no patch is enabled, its VLLM_PLUGINS excludes the plugin, or its files are not visible here.\n"
        )
        _show_findings(f"server {server['pid']}", report, to)
    if not (report["processes"] or report["servers_without_state"]):
        others = "".join(f" User {user} has one: ask as that user." for user in report["other_users"])
        to.print(f"No running server of this user (id {os.getuid()}).{others}")
    to.print(_versions(report["installation"]))
    _show_findings(HERE, report, to)
    if report["verify"] is not None:
        _show_verify(report, to)
    if report["resolved"] is not None:
        _show_resolved(report["resolved"], to)
    for each in report["processes"] if every else ():
        to.print(f"process {each['pid']}: {each['role']}, {each['process_name']}", style="bold")
        _show_patches([each], report, to)
    more = "" if every else "More: `omni-fastpath status --all`. "
    to.print(f"{more}How to solve problems: `omni-fastpath doctor`.")


_GRAVEST = (State.FAILED, State.UNSUPPORTED, State.APPLIED, State.SUPERSEDED, State.NOT_APPLICABLE, State.OFF)
"""The order in which the state of a patch in several processes is chosen as the server's."""


def _show_server(server: int, processes: Sequence[Mapping[str, Any]], report: Mapping[str, Any], to: Console) -> None:
    workers = [each for each in processes if API_WORKER.match(each["process_name"])]
    # The parent of several API servers only starts the stages.
    serving = [each for each in processes if not workers or each["role"] != Process.SERVER or each in workers]
    declared, found = report["installation"]["patches"], _by_patch(serving)
    defaults = [state for name, (state, _) in found.items() if name in declared and declared[name]["default_on"]]
    idle = defaults.count(State.NOT_APPLICABLE)
    on = sum(state.satisfies_requirement for state in defaults)
    asked = [name for name, (state, _) in found.items() if state is not State.OFF]
    answer = f"OFF but for {', '.join(asked)}" if asked else "OFF"
    if any(state not in (State.OFF, State.NOT_APPLICABLE) for state in defaults):
        answer = f"ON, {on} of {len(defaults) - idle} default patches applied"
        answer += f", {idle} not applicable here" if idle else ""
        for name, (state, records) in found.items():
            if state is State.APPLIED and (headline := declared.get(name, {}).get("headline")):
                answer += f"; {_took_effect(records)[1]:,} {headline} (up to {REFRESH_S:g} s ago)"
    port = next((process["port"] for process in processes if process["port"]), "not named")
    to.print(f"server {server} port {port}: {answer}", style="bold")
    _show_findings(f"server {server}", report, to)
    _show_patches(serving, report, to)


_Found = dict[str, tuple[State, list[Mapping[str, Any]]]]


def _by_patch(processes: Sequence[Mapping[str, Any]]) -> _Found:
    """The most important state of each patch in these processes, and the records with that state."""
    found: _Found = {}
    for name in dict.fromkeys(name for process in processes for name in process["patches"]):
        records = [process["patches"][name] for process in processes if name in process["patches"]]
        state = min((State(record["state"]) for record in records), key=_GRAVEST.index)
        found[name] = state, [record for record in records if record["state"] == state]
    return found


def _show_patches(processes: Sequence[Mapping[str, Any]], report: Mapping[str, Any], to: Console) -> None:
    table, declared = _table("", "patch", "state", "what it did, or why"), report["installation"]["patches"]
    for name, (state, records) in _by_patch(processes).items():
        counter, count = _took_effect(records)
        words = declared.get(name, {}).get("counts") or counter
        did = f"{count:,} {words}" if counter and state is State.APPLIED else ""
        notes = [record[key] for key in ("reason", "remarks") for record in records]
        table.add_row(name, state.value, "; ".join(filter(None, dict.fromkeys([did, *notes]))))
    _print(table, to)


def _took_effect(records: Sequence[Mapping[str, Any]]) -> tuple[str, int]:
    """A patch's first counter and its sum over these processes. In another version a patch may have no counter."""
    first = next(iter(records[0]["counters"]), "")
    return first, sum(record["counters"].get(first, 0) for record in records)


def _show_findings(subject: str, report: Mapping[str, Any], to: Console) -> None:
    for finding in report["findings"]:
        if finding["subject"] == subject:
            to.print(f"{finding['severity']} {finding['id']}: {finding['what']}", style=STYLES[finding["severity"]])


def _show_verify(report: Mapping[str, Any], to: Console) -> None:
    title = "The installed vllm and vllm-omni, compared with what the patches expect (a tracer only if it is here too)"
    table = _table(title, "patch", "verdict")
    for name, problems in report["verify"].items():
        state = report["installation"]["patches"].get(name, {}).get("release_state", State.APPLIED)
        fits = "as declared" if state == State.APPLIED else f"{state}: no seams on this release"
        same_as = report["same_as"].get(name)
        for line in problems or [f"every function is as in {same_as}" if same_as else fits]:
            table.add_row(name, line)
    _print(table, to)


def _show_resolved(resolved: Mapping[str, Any], to: Console) -> None:
    source = resolved["source"]
    rules = f"on_unsupported: {resolved['on_unsupported']}, on_unlisted: {resolved['on_unlisted'] or 'not set'}"
    title = f"{source} with this shell's variables ({rules})" if source else "The YAML is not read"
    table = _table(title, "patch", "on", "because", "values")
    for name, origin in resolved["origins"].items():
        on = name in resolved["enabled"]
        because = (origin if on else resolved["off"][name]).replace(f" in {source}", "")
        table.add_row(name, "on" if on else "off", because, _listed(resolved["enabled"].get(name, {})))
    _print(table, to)


def _listed(values_: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={json.dumps(value)}" for key, value in values_.items()) or "-"


def show_doctor(report: Mapping[str, Any], to: Console) -> None:
    """Show every finding in full, then the block for a bug report, which is ``issue`` in the report."""
    for finding in report["findings"]:
        severity = finding["severity"]
        to.print(f"{severity} {finding['id']}: {finding['subject']}", style=STYLES[severity])
        to.print(f"  {finding['what']}")
        for name, value in finding["evidence"].items():
            to.print(f"  {name}: {_written(value)}")
        to.print(f"  threshold: {finding['threshold']}\n  do: {finding['do']}\n")
    counts = Counter(finding["severity"] for finding in report["findings"])
    total = ", ".join(f"{counts[each]} {each}" for each in SEVERITIES if counts[each])
    servers = {process["server"] for process in report["processes"]}
    to.print(f"servers with state files: {len(servers)}; findings: {total or 'none'}", style="bold")
    to.print(f"\nFor a bug report:\n\n```\n{report['issue']}\n```")


def issue(report: Mapping[str, Any]) -> str:
    """Versions, the package's variables, states and findings, without names of users and hosts, and without secrets."""
    return "\n".join(_issue(report))


def _issue(report: Mapping[str, Any]) -> Iterator[str]:
    installation = report["installation"]
    yield _versions(installation)
    if not report["variables"]:
        yield _variables(installation["environment"])
    for server, of_server in report["variables"].items():
        yield f"server {server}: {_variables(of_server)}"
    for server, grouped in itertools.groupby(report["processes"], key=lambda process: process["server"]):
        processes = list(grouped)
        running = {", ".join(f"{each} {process[each]}" for each in _PACKAGES) for process in processes}
        word = "process" if len(processes) == 1 else "processes"
        yield f"server {server}: {len(processes)} {word}; {'; '.join(sorted(running))}"
        states: dict[str, Counter[str]] = {}
        for process in processes:
            for name, record in process["patches"].items():
                states.setdefault(name, Counter())[record["state"]] += 1
        for name, counts in states.items():
            yield f"  {name}: {', '.join(f'{state} x{count}' for state, count in counts.items())}"
    yield "findings:" if report["findings"] else "findings: none"
    for finding in report["findings"]:
        evidence = finding["evidence"]
        seen = ", ".join(f"{name} {_written(evidence[name])}" for name in _FOR_AN_ISSUE if name in evidence)
        yield f"  {finding['severity']} {finding['id']} ({finding['subject']}){': ' if seen else ''}{seen}"


def _variables(of_environment: Mapping[str, str | None]) -> str:
    shown = [name if value is None else f"{name}={value}" for name, value in of_environment.items()]
    return f"variables: {', '.join(shown) or 'none'}"


def _versions(installation: Mapping[str, Any]) -> str:
    found = [f"omni-fastpath {installation['omni_fastpath']}"]
    for name in ("vllm_omni", "vllm"):
        of = installation[name]
        found.append(f"{of['distribution']} {of['version']}" if of else f"no {name.replace('_', '-')}")
    return ", ".join([*found, f"Python {installation['python']}", installation["platform"]])


def _written(value: Any) -> str:
    return ("; ".join(value) or "none") if isinstance(value, list) else str(value)


def show_patches(patches: Sequence[Patch], to: Console) -> None:
    """Show one line per patch."""
    table = _table("Patches", "patch", "default", "summary")
    for patch in patches:
        table.add_row(patch.name, "on" if patch.default_on else "opt-in", patch.summary)
    to.print(table)


def show_patch(patch: Patch, to: Console, *, full: bool) -> None:
    """Show the parts of a declaration that operators need, or all of it."""
    page = patch.docs or "Python removes this text under -OO."
    summary, *parts = re.split(r"^(\S.*):$", page.strip(), flags=re.MULTILINE)
    to.print(f"{patch.name}: {summary.strip()}\n".replace("``", "`"), style="bold")
    for heading, text in zip(parts[::2], parts[1::2], strict=True):
        if full or heading in FOR_OPERATORS:
            to.print(f"{heading}:")
            to.print(Padding(" ".join(text.split()).replace("``", "`"), (0, 0, 0, 4)))
    to.print(f"\n{'in' if patch.default_on else 'opt-in, not in'} the default set (`fastpath: true`)")
    to.print(f"requires {', '.join(patch.requires) or 'nothing'}; switch: fastpath.{patch.name}, {patch.env}\n")
    options = _table(f"Values, also as variables {patch.env}__KEY", "key", "default", "allowed", "meaning")
    for *value, _ in values(patch):
        options.add_row(*value)
    counters = _table("Counters, the most important one first, and metrics", "name", "meaning")
    for counter in patch.counters:
        counters.add_row(counter.name, f"{counter.meaning} (a maximum)" if counter.is_maximum else counter.meaning)
    for metric in patch.metrics:
        counters.add_row(metric.name, metric.meaning)
    for table in (options, counters, *(_reliances(patch) if full else ())):
        if table.row_count:
            _print(table, to)
    if not full:
        to.print(f"More: `omni-fastpath explain {patch.name} --full`")


def _reliances(patch: Patch) -> tuple[Table, Table]:
    """The seams of a patch on this release, or on the newest one, and its releases."""
    row = install.row_here(patch)
    fit = row if isinstance(row, Fit) else patch.fits[-1]
    seams = _table(f"Seams on {', '.join(fit.releases)}", "use", "slot")
    for seam in fit.seams:
        seams.add_row(type(seam).__name__.lower(), seam.path)
    releases = _table("Releases", "releases", "state", "note")
    for each in patch.rows:
        releases.add_row(", ".join(each.releases), each.state.value, each.remarks)
    return seams, releases


def values(patch: Patch) -> Iterator[tuple[str, str, str, str, str]]:
    """Key, default, allowed values, meaning and variable of each value of a patch."""
    defaults = patch.options().model_dump(mode="json")
    for key, found in patch.options.model_fields.items():
        allowed, variable = config.allowed(patch.options, key), config.value_variable(patch, key)
        yield key, json.dumps(defaults[key]), allowed, found.description or "-", variable
