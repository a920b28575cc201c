"""What is wrong with an installation and its live servers: findings, each by a rule with a stable id.

A rule sees ``Facts`` and nothing else, and knows no particular patch. Its id and its threshold are promises: people
write them into scripts. What is healthy gives nothing above ``info``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from omni_fastpath import config, entrypoint
from omni_fastpath.config import Resolved
from omni_fastpath.declare import Patch, State
from omni_fastpath.tools.servers import Server
from omni_fastpath.variables import HANDOFF, MASTER, NAMESPACE, master_off

Severity = Literal["error", "warning", "info"]
"""``error``: something that was asked for does not happen. ``warning``: it happens, and something beside it is wrong.
``info``: to know, and nothing to do at once."""
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")

HERE = "installation"
IDLE_REQUESTS = 20
"""What upstream's counter must have reached before an idle patch is called idle."""


@dataclass(frozen=True)
class Facts:
    """Everything that the rules see.

    Attributes:
        patches: The declarations.
        environ: This shell's variables.
        report: What ``status`` shows (``omni_fastpath.tools.status``), without findings.
        asked: The patches whose release matters here.
        servers: The live ones of this user.
        hooks: The hook plugins as this shell finds them (``HookManager.told``); None where nobody loaded them.
    """

    patches: Sequence[Patch]
    environ: Mapping[str, str] = field(default_factory=dict)
    report: Mapping[str, Any] = field(default_factory=dict)
    asked: frozenset[str] = frozenset()
    servers: Sequence[Server] = ()
    hooks: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Finding:
    """One thing that is not as it should be, or that is to be known.

    Attributes:
        id: The rule's, which never changes its meaning.
        severity: How much it weighs.
        subject: What it is about: ``installation`` or ``server PID``.
        what: The finding in a sentence.
        do: What to do about it.
        evidence: What was seen, by name.
        threshold: From what on it is a finding.
    """

    id: str
    severity: Severity
    subject: str
    what: str
    do: str
    evidence: Mapping[str, Any]
    threshold: str


@dataclass(frozen=True)
class _Found:
    """What a rule has found; id and threshold are the rule's."""

    severity: Severity
    subject: str
    what: str
    do: str
    evidence: Mapping[str, Any] = field(default_factory=dict)


_Look = Callable[[Facts], Iterator[_Found]]
RULES: dict[str, tuple[str, _Look]] = {}
"""Each rule's id, with its threshold and the function that yields what it finds."""


def _rule(name: str, *, threshold: str) -> Callable[[_Look], _Look]:
    def register(look: _Look) -> _Look:
        RULES[name] = (threshold, look)
        return look

    return register


def judge(facts: Facts) -> list[Finding]:
    """All findings, the heaviest first, else in the order of the rules."""
    found = [
        Finding(name, each.severity, each.subject, each.what, each.do, each.evidence, threshold)
        for name, (threshold, look) in RULES.items()
        for each in look(facts)
    ]
    return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))


# ---- This installation ----


@_rule("upstream-missing", threshold="vllm-omni is not installed in this environment")
def upstream_missing(facts: Facts) -> Iterator[_Found]:
    """There is nothing here to patch: another environment runs the server."""
    if facts.report["installation"]["vllm_omni"] is None:
        yield _Found(
            "error" if facts.asked else "info",
            HERE,
            "vllm-omni is not installed in this environment",
            "Install omni-fastpath into the environment that your server runs in, and ask there.",
        )


@_rule("patch-unsupported", threshold="the installed release has no row in the patch's declaration")
def patch_unsupported(facts: Facts) -> Iterator[_Found]:
    """A patch whose behaviour on the installed release nobody has read: stock runs."""
    for name, patch in facts.report["installation"]["patches"].items():
        if facts.report["installation"]["vllm_omni"] is not None and not patch["release_tested"]:
            yield _Found(
                "error" if name in facts.asked else "info",
                HERE,
                f"{name}: {patch['release_problem']}",
                "`omni-fastpath status --verify` says what still fits. Install one of the tested releases, or a newer "
                "omni-fastpath; until then upstream's own code runs.",
                {"patch": name, "tested": list(patch["tested"])},
            )


@_rule("seam-moved", threshold="a function is not as the patch's row for this release says (looked at with --verify)")
def seam_moved(facts: Facts) -> Iterator[_Found]:
    """The release is known, and what is installed differs from it: a vendor's change, or a mixed installation."""
    for name, problems in (facts.report["verify"] or {}).items():
        known = facts.report["installation"]["patches"].get(name, {}).get("release_problem")
        if moved := [each for each in problems if each != known]:
            yield _Found(
                "error",
                HERE,
                f"{name}: {'; '.join(moved)}",
                "vllm and vllm-omni must be as released. Install them again; if they are a vendor's build, or another "
                "plugin wraps the function, switch the patch off.",
                {"patch": name, "seams": moved},
            )


@_rule("entry-point-missing", threshold="no entry point `omni_fastpath` in vLLM's plugin groups")
def entry_point_missing(facts: Facts) -> Iterator[_Found]:
    """The package can be imported and is not installed, so that vLLM never loads it."""
    if not facts.report["installation"]["entry_points"]:
        yield _Found(
            "error",
            HERE,
            "no entry point of omni-fastpath is visible in this environment: vllm never loads it",
            "Install the package (`pip install omni-fastpath`) into the environment that runs the server.",
            {"groups": list(entrypoint.GROUPS)},
        )


@_rule("plugins-leave-us-out", threshold=f"{entrypoint.ALLOW_LIST} is set and has no `{entrypoint.ENTRY_POINT}`")
def plugins_leave_us_out(facts: Facts) -> Iterator[_Found]:
    """An allow-list without our name: every server under it runs as upstream made it, which may be what is wanted."""
    asking = {each.subject for each in facts.servers if each.asks(facts.patches)}
    for subject, environ in _shell_and_servers(facts):
        if entrypoint.is_left_out(environ.get(entrypoint.ALLOW_LIST)):
            is_wanted = subject in asking or (subject == HERE and not master_off(environ))
            where = "vllm never loads omni-fastpath" if subject == HERE else "it was started so, and runs as stock"
            yield _Found(
                "error" if is_wanted else "info",
                subject,
                f"{entrypoint.ALLOW_LIST} is an allow-list without {entrypoint.ENTRY_POINT}: {where}",
                f"Unset {entrypoint.ALLOW_LIST}, or add {entrypoint.ENTRY_POINT} to it."
                if is_wanted
                else "Nothing: nobody asked anything of us there.",
                {entrypoint.ALLOW_LIST: environ.get(entrypoint.ALLOW_LIST)},
            )


@_rule("variable-unknown", threshold=f"a name in or beside the namespace {NAMESPACE} that means nothing")
def variable_unknown(facts: Facts) -> Iterator[_Found]:
    """A variable that looks like one of ours and is none: misspelt, or of another version."""
    known = config.variables(facts.patches)
    for subject, environ in _shell_and_servers(facts):
        if master_off(environ):
            continue  # nothing is looked at
        ours = set(config.said(environ, facts.patches)).difference(known)
        for name in sorted(each for each in environ if each in ours or _is_beside(each)):
            meant = config.nearest(name, known) or MASTER
            consequence = "refuses to start with it" if name.startswith(NAMESPACE) else "ignores it"
            yield _Found(
                "warning",
                subject,
                f"the variable {name} means nothing; did you mean {meant!r}? A server with something on {consequence}",
                f"Rename it to {meant}, or unset it.",
                {"variable": name, "nearest": meant},
            )


@_rule("configuration-refused", threshold="a server started here and now would refuse to start")
def configuration_refused(facts: Facts) -> Iterator[_Found]:
    """Variables, or the deploy YAML that was asked about, that a server refuses."""
    if (error := facts.report["configuration_error"]) is not None:
        yield _Found("error", HERE, f"the server would refuse to start: {error}", "Correct what it names.")


@_rule("hook-plugin-unusable", threshold="one hook plugin that cannot be loaded, registered or called")
def hook_plugin_unusable(facts: Facts) -> Iterator[_Found]:
    """A plugin of ours that never ran, as this shell finds it or as a server said."""
    yield from _hooks(
        facts, "unusable", "cannot run and is left out", "Correct or uninstall the package that brings it."
    )


@_rule("hook-plugin-switched-off", threshold="one exception of a hook plugin")
def hook_plugin_switched_off(facts: Facts) -> Iterator[_Found]:
    """A plugin that ran in a server, raised, and was switched off."""
    yield from _hooks(
        facts, "switched_off", "was switched off", "The server's log has the traceback. Restart after correcting it."
    )


# ---- Live servers ----


@_rule(
    "patch-not-serving", threshold=f"one process in which a patch is {State.UNSUPPORTED.value} or {State.FAILED.value}"
)
def patch_not_serving(facts: Facts) -> Iterator[_Found]:
    """A patch that was asked for in a live server and does not serve there."""
    for server in facts.servers:
        seen: dict[tuple[str, str, str], list[str]] = {}
        for snapshot in server.snapshots:
            for name, record in snapshot["patches"].items():
                if State(record["state"]).is_trouble:
                    process = f"{snapshot['pid']} ({snapshot['role']})"
                    seen.setdefault((name, record["state"], record["reason"]), []).append(process)
        for (name, state, reason), where in seen.items():
            yield _Found(
                "error",
                server.subject,
                f"{name} is {state} in process {', '.join(where)}: {reason}",
                "The reason says why; the server's log has the traceback of an exception. Upstream's own code runs.",
                {"patch": name, "state": state, "processes": where},
            )


@_rule("versions-mixed", threshold="two versions of omni-fastpath, vllm-omni or vllm in one server's tree")
def versions_mixed(facts: Facts) -> Iterator[_Found]:
    """Processes of one server that do not run the same packages: one was exchanged under it."""
    for server in facts.servers:
        for package in ("omni_fastpath", "vllm_omni", "vllm"):
            found = sorted({str(each[package]) for each in server.snapshots})
            if len(found) > 1:
                yield _Found(
                    "error",
                    server.subject,
                    f"its processes run different versions of {package.replace('_', '-')}: {', '.join(found)}",
                    "Restart the server: a package was exchanged while it ran, or its stages have another environment.",
                    {"package": package, "versions": found},
                )


@_rule("yaml-changed", threshold="one value or switch of a deploy YAML that a running server does not have")
def yaml_changed(facts: Facts) -> Iterator[_Found]:
    """A server's deploy YAML says something else than it did when the server read it."""
    for server in facts.servers:
        if server.own is None or not server.arguments or server.deploy_yaml is None:
            continue
        if server.own["omni_fastpath"] != facts.report["installation"]["omni_fastpath"]:
            continue  # its keys and defaults may be others than ours
        resolved, refusal = server.resolved(facts.patches)
        differences = [refusal] if refusal else list(_differences(server.own, resolved, facts.patches))
        if differences:
            yield _Found(
                "warning",
                server.subject,
                "its deploy YAML has changed since it was read" + (": a restart would be refused" if refusal else ""),
                "Restart the server for the file to take effect, or put the file back.",
                {"file": str(server.deploy_yaml), "differences": differences},
            )


def _differences(own: Mapping[str, Any], resolved: Resolved | None, patches: Sequence[Patch]) -> Iterator[str]:
    declared = {patch.name for patch in patches}
    for name, record in own["patches"].items() if resolved is not None else ():
        assert resolved is not None
        origins = record["origin"] + resolved.origins.get(name, "")
        if name not in declared or NAMESPACE in origins or not origins:
            continue  # a variable may have been set in the process, where it cannot be seen from here
        on = record["state"] != State.OFF.value
        if on != (name in resolved.enabled):
            yield f"{name} is {'on' if on else 'off'} in the server and {'off' if on else 'on'} in the file"
        elif on:
            now = resolved.enabled[name].model_dump(mode="json")
            for key in sorted(now.keys() & record["options"].keys()):
                if record["options"][key] != now[key]:
                    yield f"{name}.{key} is {record['options'][key]} in the server and {now[key]} in the file"


@_rule(
    "patch-idle",
    threshold=f"the patch's first counter is 0 in the server's tree, and upstream's {IDLE_REQUESTS} or more",
)
def patch_idle(facts: Facts) -> Iterator[_Found]:
    """A patch that is applied and never takes effect, though upstream does what it should take effect on."""
    for server in facts.servers:
        for patch in facts.patches:
            records = [each["patches"][patch.name] for each in server.snapshots if patch.name in each["patches"]]
            first = patch.counters[0]
            reached = server.scrape.totals.get(first.moves_with, 0.0) if server.scrape is not None else 0.0
            is_applied = any(record["state"] == State.APPLIED.value for record in records)
            if (
                is_applied
                and reached >= IDLE_REQUESTS
                and not any(each["counters"].get(first.name) for each in records)
            ):
                yield _Found(
                    "warning",
                    server.subject,
                    f"{patch.name} is applied and idle: {first.name} is 0 in all of its processes",
                    "The server is not used in the way that the patch is for (`omni-fastpath explain "
                    f"{patch.name}`), or something goes past it. Please report it.",
                    {"patch": patch.name, first.name: 0, first.moves_with: reached},
                )


@_rule("metrics-without-us", threshold="a server in which something is on answers /metrics without a series of ours")
def metrics_without_us(facts: Facts) -> Iterator[_Found]:
    """A scrape shows upstream's series and none of ours."""
    for server in facts.servers:
        if server.scrape is None or server.scrape.problem or not server.is_on:
            continue
        if not any(name.startswith("omni_fastpath_") for name in server.scrape.totals):
            yield _Found(
                "warning",
                server.subject,
                "its /metrics has no series of omni-fastpath",
                "Look into its log for `the metrics cannot be exported`. The patches work without.",
                {"series": len(server.scrape.totals)},
            )


# ---- What several rules need ----


def _shell_and_servers(facts: Facts) -> Iterator[tuple[str, Mapping[str, str]]]:
    yield HERE, facts.environ
    yield from ((each.subject, each.environ) for each in facts.servers if each.environ is not None)


def _is_beside(name: str) -> bool:
    """Whether a name would be in our namespace if it were spelt right: OMNI_FAST_PATH, omni_fastpath."""
    if name.startswith(NAMESPACE) or name == HANDOFF:
        return False
    return re.sub(r"[^A-Z0-9]", "", name.upper()).startswith(("OMNIFASTPATH", "VLLMOMNIFASTPATH"))


def _hooks(facts: Facts, key: str, what: str, do: str) -> Iterator[_Found]:
    told: list[tuple[str, Mapping[str, Any]]] = [(HERE, facts.hooks)] if facts.hooks is not None else []
    told += [
        (server.subject, each["hooks"]) for server in facts.servers for each in server.snapshots if each.get("hooks")
    ]
    seen = dict.fromkeys((subject, name, why) for subject, hooks in told for name, why in hooks[key].items())
    for subject, name, why in seen:
        yield _Found("warning", subject, f"the hook plugin {name} {what}: {why}", do, {"plugin": name})
