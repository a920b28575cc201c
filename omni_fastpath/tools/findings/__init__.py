"""What is wrong with an installation and its live servers: findings, each by a rule with a stable id.

``facts`` gathers what can be seen, ``rules`` judges it and sees nothing else, ``model`` is what comes out. Nothing here
imports vllm or vllm-omni, writes or deletes anything, or asks a server anything unless the caller did (``facts``).
"""

from __future__ import annotations

from omni_fastpath.tools.findings.facts import Facts
from omni_fastpath.tools.findings.model import Finding, Severity
from omni_fastpath.tools.findings.rules import RULES, judge

__all__ = ["RULES", "Facts", "Finding", "Severity", "judge"]
