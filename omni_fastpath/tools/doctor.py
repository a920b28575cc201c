"""``omni-fastpath doctor``: every finding in full, and a block to paste into an issue."""

from __future__ import annotations

import getpass
import platform
import re
import socket
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import Console

from omni_fastpath import config
from omni_fastpath.tools.findings import Facts, Finding, Severity, judge
from omni_fastpath.tools.findings.facts import Server
from omni_fastpath.tools.findings.model import SCHEMA, Doctor, Evidence, ServerReport, Versions, as_text

_STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "yellow", Severity.INFO: "dim"}

_OURS = ("patch", "state", "package", "versions", "seams", "idle", "variables", "variable", "nearest", "differences")
"""Evidence that goes into an issue, beside figures: names and words of ours. No other variable's value does."""

_ADDRESS = re.compile(r"(?<![\d.])(?!127\.|0\.0\.0\.0)(?:\d{1,3}\.){3}\d{1,3}(?![\d.])")
_HOMES = re.compile(r"/(?:home|Users)/[^/\s:;,'\"]+|/root(?=/|\b)")


def examine(facts: Facts) -> Doctor:
    """The report."""
    found, installation = judge(facts), facts.report["installation"]
    versions = Versions(
        omni_fastpath=installation["omni_fastpath"],
        vllm_omni=_release(installation["vllm_omni"]),
        vllm=_release(installation["vllm"]),
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.release()} {platform.machine()}",
    )
    reports = [_server(server) for server in facts.servers]
    environment = {as_text(name): as_text(value) for name, value in installation["environment"].items()}
    known = config.variables(facts.patches)  # what another name holds may be a secret: OMNI_FASTPATH_HF_TOKEN
    variables = [f"{name}={value}" if name in known else name for name, value in environment.items()]
    return Doctor(
        schema=SCHEMA,
        versions=versions,
        environment=environment,
        servers=reports,
        findings=found,
        issue=redacted("\n".join(_issue(versions, variables, reports, found))),
    )


def is_trouble(report: Doctor) -> bool:
    """Whether anything weighs more than ``info``."""
    return any(finding.severity is not Severity.INFO for finding in report.findings)


def show(report: Doctor, console: Console) -> None:
    """Every finding in full, then the block for an issue."""
    for finding in report.findings:
        console.print(f"{finding.severity.value} {finding.id}: {finding.subject}", style=_STYLES[finding.severity])
        console.print(f"  {finding.what}")
        for name, value in finding.evidence.items():
            console.print(f"  {name}: {_written(value)}")
        console.print(f"  found from: {finding.threshold}")
        console.print(f"  do: {finding.do}")
        console.print()
    counts = Counter(finding.severity for finding in report.findings)
    told = ", ".join(f"{counts[each]} {each.value}" for each in Severity if counts[each])
    servers = f"{len(report.servers)} live server{'' if len(report.servers) == 1 else 's'}"
    console.print(f"{servers}; {told or 'nothing found'}", style="bold")
    console.print("\nFor an issue (look through it before you post it):\n\n```")
    console.print(report.issue)
    console.print("```")


def _release(found: Mapping[str, str] | None) -> str | None:
    return None if found is None else f"{found['distribution']} {found['version']}"


def _server(server: Server) -> ServerReport:
    states: dict[str, Counter[str]] = {}
    for snapshot in server.snapshots:
        for name, record in snapshot["patches"].items():
            states.setdefault(name, Counter())[record["state"]] += 1
    packages = ("omni_fastpath", "vllm_omni", "vllm")
    told = {tuple(str(each[package]) for package in packages) for each in server.snapshots}
    return ServerReport(
        pid=server.pid,
        role=server.role,
        processes=1 + len(server.members),
        reporting=len(server.snapshots),
        versions=[", ".join(f"{n} {v}" for n, v in zip(packages, each, strict=True)) for each in sorted(told)],
        patches={name: ", ".join(f"{state} x{n}" for state, n in each.items()) for name, each in states.items()},
    )


def _written(value: Evidence) -> str:
    return ("; ".join(value) or "none") if isinstance(value, list) else str(value)


def _issue(
    versions: Versions, variables: Sequence[str], servers: Sequence[ServerReport], found: Sequence[Finding]
) -> Iterator[str]:
    yield "; ".join(
        [f"omni-fastpath {versions.omni_fastpath}", versions.vllm_omni or "no vllm-omni", versions.vllm or "no vllm"]
    )
    yield f"Python {versions.python}; {versions.platform}"
    yield f"variables: {', '.join(variables) or 'none'}"
    for server in servers:
        yield f"{server.role} {server.pid}: {server.reporting} of {server.processes} processes report"
        yield from (f"  {each}" for each in server.versions)
        yield from (f"  {name}: {states}" for name, states in server.patches.items())
    yield "findings:" if found else "findings: none"
    for finding in found:
        yield f"  {finding.severity.value} {finding.id} ({finding.subject}): {finding.what}"
        for name, value in finding.evidence.items():
            if name in _OURS or isinstance(value, (bool, int, float)):
                yield f"    {name}: {_written(value)}"


def redacted(text: str) -> str:
    """Text without the names of this host and user, home folders and addresses."""
    home = _home()
    text = _HOMES.sub("~", text.replace(home, "~") if home not in {"", "/"} else text)
    text = _ADDRESS.sub("ADDRESS", text)
    for name, instead in ((socket.getfqdn(), "HOST"), (socket.gethostname(), "HOST"), (_user(), "USER")):
        if len(name) > 2 and name not in {"root", "localhost"}:  # a word of everybody's
            text = re.sub(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", instead, text)
    return text


def _home() -> str:
    try:
        return str(Path.home())
    except RuntimeError:  # neither HOME nor an entry among the users: a pod's user
        return ""


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a pod's user often has no name
        return ""
