"""``omni-fastpath doctor``: every finding in full, and a block to paste into an issue."""

from __future__ import annotations

import dataclasses
import platform
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console

from omni_fastpath.tools.findings import SEVERITIES, Facts, Finding, judge
from omni_fastpath.tools.servers import Server
from omni_fastpath.tools.tables import STYLES

SCHEMA = 2
"""Of the report; a key is only ever added under the same number."""

_PACKAGES = ("omni_fastpath", "vllm_omni", "vllm")
_FOR_AN_ISSUE = ("patch", "state", "package", "versions", "seams", "variable", "nearest")
"""Evidence that goes into an issue: names and words of ours. No path, reason of an exception or value does."""


def examine(facts: Facts) -> dict[str, Any]:
    """The report.

    Returns:
        ``schema``; ``versions`` of what is installed; ``environment``: our variables in this shell; ``servers``: each
        with ``pid``, ``processes`` that report, ``versions`` and ``patches``; ``findings``, the heaviest first;
        ``issue``: text to paste into an issue.
    """
    found, installation = judge(facts), facts.report["installation"]
    releases = {name: installation[name] for name in ("vllm_omni", "vllm")}
    versions = {
        "omni_fastpath": installation["omni_fastpath"],
        **{name: each and f"{each['distribution']} {each['version']}" for name, each in releases.items()},
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
    }
    servers = [_server(server) for server in facts.servers if server.snapshots]
    return {
        "schema": SCHEMA,
        "versions": versions,
        "environment": installation["environment"],
        "servers": servers,
        "findings": [dataclasses.asdict(each) for each in found],
        "issue": "\n".join(_issue(versions, installation["environment"], servers, found)),
    }


def is_trouble(report: Mapping[str, Any]) -> bool:
    """Whether anything weighs more than ``info``."""
    return any(finding["severity"] != "info" for finding in report["findings"])


def show(report: Mapping[str, Any], console: Console) -> None:
    """Every finding in full, then the block for an issue."""
    for finding in report["findings"]:
        severity = finding["severity"]
        console.print(f"{severity} {finding['id']}: {finding['subject']}", style=STYLES[severity])
        console.print(f"  {finding['what']}")
        for name, value in finding["evidence"].items():
            console.print(f"  {name}: {_written(value)}")
        console.print(f"  found from: {finding['threshold']}\n  do: {finding['do']}\n")
    counts = Counter(finding["severity"] for finding in report["findings"])
    told = ", ".join(f"{counts[each]} {each}" for each in SEVERITIES if counts[each])
    console.print(f"live servers that report: {len(report['servers'])}; {told or 'nothing found'}", style="bold")
    console.print(f"\nFor an issue:\n\n```\n{report['issue']}\n```")


def _server(server: Server) -> dict[str, Any]:
    states: dict[str, Counter[str]] = {}
    for snapshot in server.snapshots:
        for name, record in snapshot["patches"].items():
            states.setdefault(name, Counter())[record["state"]] += 1
    versions = {", ".join(f"{each} {snapshot[each]}" for each in _PACKAGES) for snapshot in server.snapshots}
    return {
        "pid": server.pid,
        "processes": len(server.snapshots),
        "versions": sorted(versions),
        "patches": {name: ", ".join(f"{state} x{n}" for state, n in each.items()) for name, each in states.items()},
    }


def _written(value: Any) -> str:
    return ("; ".join(value) or "none") if isinstance(value, list) else str(value)


def _issue(
    versions: Mapping[str, str | None],
    environment: Mapping[str, str | None],
    servers: Sequence[Mapping[str, Any]],
    found: Sequence[Finding],
) -> Iterator[str]:
    """Versions, variables of ours, states and findings; nothing that could name a user, a host or a secret."""
    yield "; ".join(f"{name.replace('_', '-')}: {version or 'none'}" for name, version in versions.items())
    said = [name if value is None else f"{name}={value}" for name, value in environment.items()]
    yield f"variables: {', '.join(said) or 'none'}"
    for server in servers:
        yield f"server {server['pid']}: {server['processes']} processes report; {'; '.join(server['versions'])}"
        yield from (f"  {name}: {states}" for name, states in server["patches"].items())
    yield "findings:" if found else "findings: none"
    for finding in found:
        seen = [f"{name} {_written(finding.evidence[name])}" for name in _FOR_AN_ISSUE if name in finding.evidence]
        yield f"  {finding.severity} {finding.id} ({finding.subject}){': ' if seen else ''}{', '.join(seen)}"
