"""Problems of an installation and its running servers: findings, each from a rule with a stable id.

A rule uses only ``Facts`` and knows no particular patch: what is to be said about a patch's metric is in its
declaration (``Advice``). The id of a finding does not change, because people use it in scripts. A healthy installation
has no finding above ``info``.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from omni_fastpath import config
from omni_fastpath.declare import Patch, State
from omni_fastpath.process_role import ON_UNLISTED, master_off
from omni_fastpath.tools import entrypoint

if TYPE_CHECKING:
    from omni_fastpath.tools.servers import Server

Severity = Literal["error", "warning", "info"]
"""``error``: something that was requested does not work. ``warning``: something else is wrong. ``info``: no immediate
action is needed."""
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")

HERE = "installation"
START = "start-up"
"""The name of the start-up's seams, which belong to no patch, in the report of ``--verify``."""
FULL, ALONE = 0.85, 0.2
"""Shares of a core. Above ``FULL`` together, the two threads of an API process delay each other. While a server starts,
only one of them is busy, and the other uses less than ``ALONE``."""
FEWEST = 50
"""Values that are needed for a 99th percentile."""


@dataclass(frozen=True)
class Facts:
    """The input of the rules.

    Attributes:
        patches: The declarations.
        environ: The variables of this shell.
        report: The report of ``status`` (``omni_fastpath.tools.status``), without findings.
        asked: The patches that must be supported on the installed release.
        servers: The running servers of this user.
        refused: Why a server that is started here now would refuse to start. Empty if it would start.
    """

    patches: Sequence[Patch]
    environ: Mapping[str, str] = field(default_factory=dict)
    report: Mapping[str, Any] = field(default_factory=dict)
    asked: frozenset[str] = frozenset()
    servers: Sequence[Server] = ()
    refused: str = ""


@dataclass(frozen=True)
class Finding:
    """A problem, or a piece of information.

    Attributes:
        severity: Its severity.
        subject: ``installation`` or ``server PID``.
        what: The finding in one sentence.
        do: What to do about it.
        id: Its name. By default ``judge`` sets that of the rule.
    """

    severity: Severity
    subject: str
    what: str
    do: str
    id: str = ""


def judge(facts: Facts) -> list[Finding]:
    """All findings, each once, the most severe first, then in the order of the rules."""
    rules = [(rule.__name__.replace("_", "-"), rule) for rule in RULES]
    found = dict.fromkeys(dataclasses.replace(each, id=each.id or name) for name, rule in rules for each in rule(facts))
    return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))


# ---- This installation ----


def start_refused(facts: Facts) -> Iterator[Finding]:
    """The message with which a server would refuse this shell's variables or the given deploy YAML."""
    if facts.refused:
        yield Finding("error", HERE, facts.refused, "Correct it. Running servers are not affected.")


def upstream_missing(facts: Facts) -> Iterator[Finding]:
    """The server probably runs in another environment."""
    if facts.report["installation"]["vllm_omni"] is None:
        what = "vllm-omni is not installed in this environment"
        do = "Install omni-fastpath into the environment of your server, and run this command there."
        yield Finding("error" if facts.asked else "info", HERE, what, do)


def patch_unsupported(facts: Facts) -> Iterator[Finding]:
    """The patch was not tested on the installed release, so upstream's own code runs."""
    same = f"{ON_UNLISTED}=same_code, which applies a patch if every function is as in a tested release"
    do = f"See `omni-fastpath status --verify`. Install a tested release or a newer omni-fastpath, or set {same}."
    installation, verify = facts.report["installation"], facts.report["verify"] or {}
    for name, patch in installation["patches"].items() if installation["vllm_omni"] is not None else ():
        problem = "; ".join(verify.get(name, ()) if patch["may_be"] else ()) or patch["release_problem"]
        if problem:
            yield Finding("error" if name in facts.asked else "info", HERE, f"{name}: {problem}", do)


def seam_moved(facts: Facts) -> Iterator[Finding]:
    """The release is listed, but the installed code differs from it: a vendor's change, or a mixed installation."""
    do = "Install vllm and vllm-omni again. If a vendor or another plugin changes the function, switch the patch off."
    for name, moved in (facts.report["verify"] or {}).items():
        declared = facts.report["installation"]["patches"].get(name, {})
        if moved and not (declared.get("release_problem") or declared.get("may_be")):
            yield Finding("error", HERE, f"{name}: {'; '.join(moved)}", do)


def plugins_leave_us_out(facts: Facts) -> Iterator[Finding]:
    """An allow-list without this plugin. Servers with it run as stock, which may be intended."""
    do = f"Unset {entrypoint.ALLOW_LIST}, or add {entrypoint.ENTRY_POINT} to it, unless stock is intended."
    for subject, environ in _shell_and_servers(facts):
        allowed = environ.get(entrypoint.ALLOW_LIST)
        if entrypoint.is_left_out(allowed):
            is_asked = subject == HERE or bool(config.set_variables(environ, facts.patches))
            severity: Severity = "error" if is_asked and not master_off(environ) else "info"
            where = "vllm never loads omni-fastpath" if subject == HERE else "the server runs as stock"
            what = f"{entrypoint.ALLOW_LIST} is an allow-list without {entrypoint.ENTRY_POINT}: {where}"
            yield Finding(severity, subject, what, do)


def variable_unknown(facts: Facts) -> Iterator[Finding]:
    """A variable that is misspelt, or that another version has, unless a refusal names it.

    Under ``OMNI_FASTPATH=0`` none is read.
    """
    for subject, environ in _shell_and_servers(facts):
        for line in config.unknown_lines(environ, facts.patches) if not master_off(environ) else ():
            do = "Rename or unset it. A server with a patch on refuses it."
            if subject != HERE or line not in facts.refused:
                yield Finding("warning", subject, line.partition("; allowed:")[0], do)


def _shell_and_servers(facts: Facts) -> Iterator[tuple[str, Mapping[str, str]]]:
    yield HERE, facts.environ
    yield from ((each.subject, each.environ) for each in facts.servers if each.environ is not None)


# ---- Running servers ----


def patch_not_serving(facts: Facts) -> Iterator[Finding]:
    """A patch that was requested in a running server does not work there."""
    do = "See the reason. If it is an exception, the server's log has its traceback. Upstream's own code runs."
    for server in facts.servers:
        seen: dict[tuple[str, str, str], list[str]] = {}
        for snapshot in server.snapshots:
            for name, record in snapshot["patches"].items():
                if State(record["state"]).is_trouble:
                    process = f"{snapshot['pid']} ({snapshot['role']})"
                    seen.setdefault((name, record["state"], record["reason"]), []).append(process)
        for (name, state, reason), where in seen.items():
            what = f"{name} is {state} in process {', '.join(where)}: {reason}"
            yield Finding("error", server.subject, what, do)


def api_process_full(facts: Facts) -> Iterator[Finding]:
    """The API process limits the server, because its two threads can use about one core together."""
    do = "Switch on the patches that are off, or use `--api-server-count 2` or more (from vLLM-Omni 0.30 on)."
    for server in facts.servers:
        shares = {name: round(share, 2) for name, share in server.busy.items()}
        if sum(shares.values()) > FULL and min(shares.values()) > ALONE:
            used = ", ".join(f"{name.replace('_', ' ')} {share:.2f}" for name, share in shares.items())
            what = f"its API process is full ({used}): these two threads delay each other above {FULL} of a core"
            yield Finding("warning", server.subject, what, do)


def advice(facts: Facts) -> Iterator[Finding]:
    """What patches say about their metrics, or that there are too few values to say it. The ids are theirs."""
    advised = [(metric, metric.advice) for patch in facts.patches for metric in patch.metrics if metric.advice]
    for server, (metric, said) in itertools.product(facts.servers, advised):
        by_labels: dict[tuple[tuple[str, str], ...], list[Mapping[str, Any]]] = {}
        for record in (record for each in server.snapshots for record in each["patches"].values()):
            for sample in record.get("figures", {}).get(metric.name, ()):
                if said.labels.items() <= sample["labels"].items():
                    by_labels.setdefault(tuple(sorted(sample["labels"].items())), []).append(sample)
        for labels, samples in by_labels.items():
            value = max(each["value"] for each in samples) if metric.bounds is None else _late(metric.bounds, samples)
            if value > said.above:
                what = said.what.format(value=value, **dict(labels))
                yield Finding(said.severity, server.subject, what, said.do, said.finding)
        numbers = [sum(sum(each["counts"]) for each in samples) for samples in by_labels.values() if metric.bounds]
        if (most := max(numbers, default=FEWEST)) < FEWEST:
            what = f"{said.finding.replace('-', ' ')}: too few to judge (at most {most} of a kind, {FEWEST} are needed)"
            yield Finding("info", server.subject, what, "Ask again after more requests.", said.finding)


def _late(bounds: Sequence[float], samples: Sequence[Mapping[str, Any]]) -> float:
    """The 99th percentile of histograms together, of the last minutes if they have enough values, else of all.

    It is the upper bound of its bucket, and at most the last bound. 0 if there are too few values.
    """
    counts, before = ([*map(sum, zip(*(each[key] for each in samples), strict=True))] for key in ("counts", "before"))
    recent = [now - then for now, then in zip(counts, before, strict=True)]
    chosen = recent if sum(recent) >= FEWEST else counts
    below = itertools.accumulate(chosen)
    if sum(chosen) < FEWEST:
        return 0.0
    return next((bound for bound, up_to in zip(bounds, below, strict=False) if up_to >= 0.99 * sum(chosen)), bounds[-1])


RULES: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
    *(start_refused, upstream_missing, patch_unsupported, seam_moved, plugins_leave_us_out),
    *(variable_unknown, patch_not_serving, api_process_full, advice),
)
"""Their ids are their names with hyphens."""
