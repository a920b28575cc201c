"""``omni-fastpath doctor``: every finding of a ``status`` report in full, and a block to paste into an issue."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console

from omni_fastpath.tools.findings import PACKAGES, SEVERITIES
from omni_fastpath.tools.tables import STYLES

_FOR_AN_ISSUE = ("patch", "state", "package", "versions", "seams", "variable", "nearest")
"""Evidence that goes into an issue: names and words of ours. No path, reason of an exception or value does."""


def show(report: Mapping[str, Any], console: Console) -> None:
    """Every finding in full, then the block for an issue, which the report has as ``issue``."""
    for finding in report["findings"]:
        severity = finding["severity"]
        console.print(f"{severity} {finding['id']}: {finding['subject']}", style=STYLES[severity])
        console.print(f"  {finding['what']}")
        for name, value in finding["evidence"].items():
            console.print(f"  {name}: {_written(value)}")
        console.print(f"  found from: {finding['threshold']}\n  do: {finding['do']}\n")
    counts = Counter(finding["severity"] for finding in report["findings"])
    told = ", ".join(f"{counts[each]} {each}" for each in SEVERITIES if counts[each])
    servers = {process["server"] for process in report["processes"]}
    console.print(f"live servers that report: {len(servers)}; {told or 'nothing found'}", style="bold")
    console.print(f"\nFor an issue:\n\n```\n{report['issue']}\n```")


def issue(report: Mapping[str, Any]) -> str:
    """Versions, variables of ours, states and findings; nothing that could name a user, a host or a secret."""
    return "\n".join(_issue(report))


def _issue(report: Mapping[str, Any]) -> Iterator[str]:
    installation = report["installation"]
    versions = {"omni-fastpath": installation["omni_fastpath"]}
    for name in ("vllm_omni", "vllm"):
        found = installation[name]
        versions[name.replace("_", "-")] = f"{found['distribution']} {found['version']}" if found else "none"
    versions |= {name: installation[name] for name in ("python", "platform")}
    yield "; ".join(f"{name}: {version}" for name, version in versions.items())
    said = [name if value is None else f"{name}={value}" for name, value in installation["environment"].items()]
    yield f"variables: {', '.join(said) or 'none'}"
    for server, grouped in itertools.groupby(report["processes"], key=lambda process: process["server"]):
        processes = list(grouped)
        running = {", ".join(f"{each} {process[each]}" for each in PACKAGES) for process in processes}
        yield f"server {server}: {len(processes)} processes report; {'; '.join(sorted(running))}"
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


def _written(value: Any) -> str:
    return ("; ".join(value) or "none") if isinstance(value, list) else str(value)
