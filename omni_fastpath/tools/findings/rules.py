"""The rules, one function each. A rule sees ``Facts`` and nothing else, and knows no particular patch.

A rule's id, its kind of trouble and its threshold are promises: people write them into scripts. What is healthy gives
nothing above ``info``.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omni_fastpath import config, entrypoint
from omni_fastpath.config import Resolved
from omni_fastpath.declare import State
from omni_fastpath.tools.findings.facts import SCRAPE_S, Facts, Server, applied, configuration, is_on
from omni_fastpath.tools.findings.model import Evidence, Finding, Severity, as_text
from omni_fastpath.variables import HANDOFF, MASTER, NAMESPACE, master_off

ERROR, WARNING, INFO = Severity.ERROR, Severity.WARNING, Severity.INFO

HERE = "installation"
MACHINE = "machine"

SETTLED_S = 300.0
"""How long a process may take from its start until it reports, seconds: it imports vLLM first, beside others."""
IDLE_REQUESTS = 20
"""What upstream's counter must have reached before an idle patch is called idle."""
MUCH_BYTES = 64 * 2**20
MUCH_SHARE = 0.1
"""Left in shared memory: from so many bytes, or from this share of it, it is a warning."""
LISTED = 20
"""Files that a command names one by one."""
MULTIPROC = "PROMETHEUS_MULTIPROC_DIR"


@dataclass(frozen=True)
class Rule:
    """A rule.

    Attributes:
        id: Its stable name.
        threshold: From what on it is a finding, for people.
        look: Yields what it finds.
    """

    id: str
    threshold: str
    look: Callable[[Facts], Iterator[Found]]


@dataclass(frozen=True)
class Found:
    """What a rule has found; id and threshold are the rule's."""

    severity: Severity
    subject: str
    what: str
    do: str
    evidence: Mapping[str, Evidence]


RULES: list[Rule] = []


def _rule(
    name: str, *, threshold: str
) -> Callable[[Callable[[Facts], Iterator[Found]]], Callable[[Facts], Iterator[Found]]]:
    def register(look: Callable[[Facts], Iterator[Found]]) -> Callable[[Facts], Iterator[Found]]:
        RULES.append(Rule(name, threshold, look))
        return look

    return register


def judge(facts: Facts) -> list[Finding]:
    """All findings, the heaviest first, else in the order of the rules.

    A rule that raises is told as a finding of its own, so that it does not hide what the others find.
    """
    found = [
        Finding(
            id=rule.id,
            severity=each.severity,
            subject=each.subject,
            what=as_text(each.what),
            evidence={as_text(name): _shown(value) for name, value in each.evidence.items()},
            threshold=rule.threshold,
            do=as_text(each.do),
        )
        for rule in RULES
        for each in _guarded(rule, facts)
    ]
    return sorted(found, key=lambda finding: finding.severity.weight)


def _guarded(rule: Rule, facts: Facts) -> Iterator[Found]:
    try:
        yield from rule.look(facts)
    except Exception as error:
        yield Found(WARNING, HERE, f"this rule failed: {error!r}", "Please report it.", {})


def _shown(value: Evidence) -> Evidence:
    match value:
        case str():
            return as_text(value)
        case list():
            return [as_text(each) for each in value]
    return value


# ---- This installation ----


@_rule("patch-unsupported", threshold="the installed release has no row in the patch's declaration")
def patch_unsupported(facts: Facts) -> Iterator[Found]:
    """A patch whose behaviour on the installed release nobody has read: stock runs."""
    if facts.report["installation"]["vllm_omni"] is None:
        yield Found(
            ERROR if facts.asked else INFO,
            HERE,
            "vllm-omni is not installed in this environment",
            "Install omni-fastpath into the environment that your server runs in, and ask there.",
            {"asked_for": sorted(facts.asked)},
        )
        return
    for name, patch in facts.report["installation"]["patches"].items():
        if not patch["release_tested"]:
            yield Found(
                ERROR if name in facts.asked else INFO,
                HERE,
                f"{name}: {patch['release_problem']}",
                "`omni-fastpath status --verify` says what still fits. Install one of the tested releases, or a newer "
                "omni-fastpath; until then upstream's own code runs.",
                {"patch": name, "tested": list(patch["tested"]), "asked_for": name in facts.asked},
            )


@_rule("seam-moved", threshold="a function is not as the patch's row for this release says (looked at with --verify)")
def seam_moved(facts: Facts) -> Iterator[Found]:
    """The release is known, and what is installed differs from it: a vendor's change, or a mixed installation."""
    foreign = facts.report["foreign_wrappers"] or {}
    for name, problems in (facts.report["verify"] or {}).items():
        patch = facts.report["installation"]["patches"].get(name, {})
        wrapped = [each.partition(": ")[0] for each in foreign.get(name, [])]
        own = [
            each for each in problems if each != patch.get("release_problem") and not each.startswith(tuple(wrapped))
        ]
        if own:
            yield Found(
                ERROR,
                HERE,
                f"{name}: {'; '.join(own)}",
                "vllm and vllm-omni must be as released. Install them again; if they are a vendor's build, switch the "
                "patch off.",
                {"patch": name, "seams": own},
            )


@_rule("seam-wrapped", threshold="one wrapper that is neither ours nor upstream's, on a function that a patch uses")
def seam_wrapped(facts: Facts) -> Iterator[Found]:
    """Somebody else wraps what a patch wraps or goes past: an error where the patch cannot run for it."""
    verified = facts.report["verify"] or {}
    for name, seams in (facts.report["foreign_wrappers"] or {}).items():
        paths = tuple(each.partition(": ")[0] for each in seams)
        kept_off = any(problem.startswith(paths) for problem in verified.get(name, ()))
        yield Found(
            ERROR if kept_off else WARNING,
            HERE,
            f"{name}: somebody else's wrapper stands on what it uses" + (", so that it cannot run" if kept_off else ""),
            "Find what brings the wrapper (another plugin, tracing, sitecustomize), and switch that or the patch off.",
            {"patch": name, "seams": list(seams)},
        )
    for server in facts.servers:
        for name in facts.declared:
            lines = {line for each in server.snapshots for line in each.get("foreign_wrappers", {}).get(name, ())}
            if lines:
                yield Found(
                    WARNING,
                    server.subject,
                    f"{name}: somebody else's wrapper stands on a slot of it; both run, and it cannot be taken off",
                    "Look whether the other wrapper is meant to be there (another plugin, tracing).",
                    {"patch": name, "seams": sorted(lines)},
                )


@_rule("entry-point-missing", threshold="no entry point `omni_fastpath` in vLLM's plugin groups")
def entry_point_missing(facts: Facts) -> Iterator[Found]:
    """The package can be imported and is not installed, so that vLLM never loads it."""
    if not facts.report["installation"]["entry_points"]:
        yield Found(
            ERROR,
            HERE,
            "no entry point of omni-fastpath is visible in this environment: vllm never loads it",
            "Install the package (`pip install omni-fastpath`) into the environment that runs the server.",
            {"groups": list(entrypoint.GROUPS)},
        )


@_rule("plugins-leave-us-out", threshold=f"{entrypoint.ALLOW_LIST} is set and has no `{entrypoint.ENTRY_POINT}`")
def plugins_leave_us_out(facts: Facts) -> Iterator[Found]:
    """An allow-list without our name: every server under it runs as upstream made it, which may be what is wanted."""
    wanting = {each.subject for each in facts.servers if _asks(each, facts)}
    for subject, environ in _shell_and_servers(facts):
        allowed = environ.get(entrypoint.ALLOW_LIST)
        if entrypoint.is_left_out(allowed):
            told = f"{entrypoint.ALLOW_LIST} is an allow-list without {entrypoint.ENTRY_POINT}"
            is_wanted = subject in wanting or (subject == HERE and not master_off(environ))
            yield Found(
                ERROR if is_wanted else INFO,
                subject,
                f"{told}: vllm never loads omni-fastpath, every server runs as upstream made it"
                if subject == HERE
                else f"it was started with another environment, in which {told}: it runs as upstream made it, whatever "
                "its deploy YAML says",
                f"Unset {entrypoint.ALLOW_LIST}, or add {entrypoint.ENTRY_POINT} to it."
                if is_wanted
                else "Nothing: nobody asked anything of us there.",
                {entrypoint.ALLOW_LIST: allowed},
            )


@_rule("plugins-leave-upstream-out", threshold=f"{entrypoint.ALLOW_LIST} is set and lacks a plugin of vLLM-Omni's own")
def plugins_leave_upstream_out(facts: Facts) -> Iterator[Found]:
    """An allow-list without vLLM-Omni's own plugins: its models are not registered."""
    for subject, environ in _shell_and_servers(facts):
        allowed = environ.get(entrypoint.ALLOW_LIST)
        missing = entrypoint.upstreams_left_out(allowed)
        if missing:
            yield Found(
                WARNING,
                subject,
                f"{entrypoint.ALLOW_LIST} leaves out {', '.join(missing)} of vLLM-Omni: its models are not registered",
                f"Add {', '.join(missing)} to {entrypoint.ALLOW_LIST}, or unset it.",
                {entrypoint.ALLOW_LIST: allowed, "missing": missing},
            )


@_rule("variable-unknown", threshold=f"a name in or beside the namespace {NAMESPACE} that means nothing")
def variable_unknown(facts: Facts) -> Iterator[Found]:
    """A variable that looks like one of ours and is none: misspelt, or of another version."""
    known = config.variables(facts.patches)
    for subject, environ in _shell_and_servers(facts):
        if master_off(environ):
            continue  # nothing is looked at
        ours = set(config.said(environ, facts.patches)).difference(known)
        for name in sorted(each for each in environ if each in ours or _is_beside(each)):
            meant = config.nearest(name, known) or MASTER
            yield Found(
                WARNING,
                subject,
                f"the variable {name} means nothing; did you mean {meant!r}? A server with something on "
                + ("refuses to start with it" if name.startswith(NAMESPACE) else "ignores it"),
                f"Rename it to {meant}, or unset it.",
                {"variable": name, "nearest": meant},
            )


@_rule("variable-injected", threshold="one name that Kubernetes makes of a Service, or Docker of a link")
def variable_injected(facts: Facts) -> Iterator[Found]:
    """Variables in our namespace that nobody set for us; they are ignored."""
    known = config.variables(facts.patches)
    for subject, environ in _shell_and_servers(facts):
        said = config.said(environ, facts.patches)
        injected = sorted(each for each in environ if each.startswith(NAMESPACE) and each not in {*known, *said})
        if injected:
            yield Found(
                INFO,
                subject,
                f"{len(injected)} variables of a Service or link named like omni-fastpath are ignored",
                "Nothing. To be rid of them: `enableServiceLinks: false` in the pod, or another name for the Service.",
                {"variables": injected},
            )


@_rule("configuration-refused", threshold="a server started here and now would refuse to start")
def configuration_refused(facts: Facts) -> Iterator[Found]:
    """Variables, or the deploy YAML that was asked about, that a server refuses."""
    if (error := facts.report["configuration_error"]) is not None:
        yield Found(ERROR, HERE, f"the server would refuse to start: {error}", "Correct what it names.", {})


@_rule("hook-plugin-unusable", threshold="one hook plugin that cannot be loaded, registered or called")
def hook_plugin_unusable(facts: Facts) -> Iterator[Found]:
    """A plugin of ours that never ran, as this shell finds it or as a server said."""
    yield from _hooks(
        facts, "unusable", "cannot run and is left out", "Correct or uninstall the package that brings it."
    )


@_rule("hook-plugin-switched-off", threshold="one exception of a hook plugin")
def hook_plugin_switched_off(facts: Facts) -> Iterator[Found]:
    """A plugin that ran in a server, raised, and was switched off."""
    yield from _hooks(
        facts, "switched_off", "was switched off", "The server's log has the traceback. Restart after correcting it."
    )


# ---- Live servers ----


@_rule(
    "patch-not-serving", threshold=f"one process in which a patch is {State.UNSUPPORTED.value} or {State.FAILED.value}"
)
def patch_not_serving(facts: Facts) -> Iterator[Found]:
    """A patch that was asked for in a live server and does not serve there."""
    stray = [Server(pid=each["pid"], snapshots=(each,)) for each in facts.stray]
    for server in (*facts.servers, *stray):
        seen: dict[tuple[str, str, str], list[str]] = {}
        for snapshot in server.snapshots:
            for name, record in snapshot["patches"].items():
                if State(record["state"]).is_trouble:
                    process = f"{snapshot['pid']} ({snapshot['role']})"
                    seen.setdefault((name, record["state"], record["reason"]), []).append(process)
        for (name, state, reason), where in seen.items():
            yield Found(
                ERROR,
                server.subject,
                f"{name} is {state} in process {', '.join(where)}: {reason}",
                "The reason says why; the server's log has the traceback of an exception. Upstream's own code runs.",
                {"patch": name, "state": state, "processes": where},
            )


@_rule(
    "server-silent",
    threshold=f"{SETTLED_S:.0f} s after a stage's start its server, whose variables or deploy YAML ask for us, has no "
    "state file",
)
def server_silent(facts: Facts) -> Iterator[Found]:
    """A server that was told to switch something on, and of which nothing is to be seen.

    Its deploy YAML is read before the first stage is spawned, and often only once the whole model has been downloaded.
    """
    for server in facts.servers:
        settled = any(each.loads_plugins and each.age_s >= SETTLED_S for each in server.members)
        if server.own is not None or server.pid in server.unreadable or not settled or _leaves_us_out(server):
            continue
        if server.is_elsewhere:
            continue  # ``server_elsewhere``
        resolved, _ = configuration(server, facts.patches)
        if resolved is not None and resolved.asked:
            yield Found(
                ERROR,
                server.subject,
                "its variables and deploy YAML switch something on, and it has no state file",
                "Look into its log for omni-fastpath: it runs without the package, or cannot write its state folder.",
                {
                    "asked_for": list(resolved.enabled),
                    "state_folder": str(server.folder),
                    "age_s": round(server.age_s),
                },
            )


@_rule(
    "process-silent",
    threshold=f"{SETTLED_S:.0f} s after its start a process of a server in which something is on has no state file",
)
def process_silent(facts: Facts) -> Iterator[Found]:
    """A stage, worker or API process that runs as stock below a server that does not."""
    for server in facts.servers:
        told = {each["pid"] for each in server.snapshots} | server.unreadable
        silent = [each for each in server.members if each.loads_plugins and each.pid not in told]
        late = [each for each in silent if each.age_s >= SETTLED_S]
        if server.is_on and late:
            yield Found(
                WARNING,
                server.subject,
                f"{len(late)} of its processes say nothing: they run without omni-fastpath",
                "Every process must run the same environment. Look into the log for what kept the plugin away there.",
                {
                    "processes": [f"{each.pid} {each.title}" for each in late],
                    "reporting": len(told),
                    "least_age_s": round(min(each.age_s for each in late)),
                },
            )


@_rule("stage-without-server", threshold="one live stage process above which no server lives")
def stage_without_server(facts: Facts) -> Iterator[Found]:
    """A stage whose server is gone: it holds its device's memory and serves nobody.

    Not where everything is off: under ``OMNI_FASTPATH=0`` a stage says so, and the plain vLLM or the program above it
    says nothing.
    """
    left = [each for each in facts.stray if is_on(each)]
    if left:
        pids = [str(each["pid"]) for each in left]
        yield Found(
            WARNING,
            MACHINE,
            f"{len(pids)} stage processes live on without a server",
            f"If nobody uses them: kill {' '.join(pids)}",
            {"processes": [f"{each['pid']} {each['process_name']}" for each in left]},
        )


@_rule("versions-mixed", threshold="two versions of omni-fastpath, vllm-omni or vllm in one server's tree")
def versions_mixed(facts: Facts) -> Iterator[Found]:
    """Processes of one server that do not run the same packages: one was exchanged under it."""
    for server in facts.servers:
        for package in ("omni_fastpath", "vllm_omni", "vllm"):
            found = sorted({str(each[package]) for each in server.snapshots})
            if len(found) > 1:
                yield Found(
                    ERROR,
                    server.subject,
                    f"its processes run different versions of {package.replace('_', '-')}: {', '.join(found)}",
                    "Restart the server: a package was exchanged while it ran, or its stages have another environment.",
                    {"package": package, "versions": found},
                )


@_rule("yaml-mixed", threshold="two deploy YAMLs in one server's tree")
def yaml_mixed(facts: Facts) -> Iterator[Found]:
    """Processes of one server that took their configuration from different files."""
    for server in facts.servers:
        sources = {each["source"] for each in server.snapshots} - {None, "environment", HANDOFF}
        found = sorted({os.path.normpath((server.cwd or Path()) / each) for each in sources})
        if len(found) > 1:
            yield Found(
                WARNING,
                server.subject,
                "its processes took their configuration from different deploy YAMLs",
                "A program that runs several engines does this; in `vllm serve` restart the server.",
                {"files": found},
            )


@_rule("yaml-changed", threshold="one value or switch of a deploy YAML that a running server does not have")
def yaml_changed(facts: Facts) -> Iterator[Found]:
    """A server's deploy YAML says something else than it did when the server read it."""
    for server in facts.servers:
        if server.own is None or not server.arguments or server.deploy_yaml is None:
            continue
        if server.own["omni_fastpath"] != facts.report["installation"]["omni_fastpath"]:
            continue  # its keys and defaults may be others than ours
        resolved, refusal = configuration(server, facts.patches)
        if resolved is None and not refusal:
            continue
        differences = [refusal] if resolved is None else list(_differences(server, resolved, facts))
        if differences:
            yield Found(
                WARNING,
                server.subject,
                "its deploy YAML has changed since it was read" + (": a restart would be refused" if refusal else ""),
                "Restart the server for the file to take effect, or put the file back.",
                {"file": str(server.deploy_yaml), "differences": differences},
            )


def _differences(server: Server, resolved: Resolved, facts: Facts) -> Iterator[str]:
    assert server.own is not None
    for name, record in server.own["patches"].items():
        origins = record["origin"] + resolved.origins.get(name, "")
        if name not in facts.declared or NAMESPACE in origins or not origins:
            continue  # a variable may have been set in the process, where nobody sees it
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
def patch_idle(facts: Facts) -> Iterator[Found]:
    """A patch that is applied and never takes effect, though upstream does what it should take effect on."""
    for server in (each for each in facts.servers if each.scrape is not None):
        assert server.scrape is not None
        unjudged: dict[str, str] = {}
        for name in applied(server):
            counters = facts.declared[name].counters if name in facts.declared else ()
            if not counters or any(each["counters"].get(counters[0].name) for each in server.records(name)):
                continue
            upstreams = counters[0].moves_with
            reached = server.scrape.totals.get(upstreams)
            if not upstreams:
                unjudged[name] = "upstream has no counter that must move with it"
            elif reached is None:
                unjudged[name] = server.scrape.problem or f"/metrics has no {upstreams}"
            elif reached >= IDLE_REQUESTS:
                yield Found(
                    WARNING,
                    server.subject,
                    f"{name} is applied and idle: {counters[0].name} is 0 in all of its processes",
                    "The server is not used in the way that the patch is for (`omni-fastpath explain "
                    f"{name}`), or something goes past it. Please report it.",
                    {"patch": name, counters[0].name: 0, upstreams: reached},
                )
        if unjudged:
            yield Found(
                INFO,
                server.subject,
                f"whether {', '.join(unjudged)} should have taken effect by now cannot be judged",
                "Nothing, where the load has not called for it yet.",
                {"idle": [f"{name}: {why}" for name, why in unjudged.items()]},
            )


@_rule(
    "server-unreadable",
    threshold="the environment of a live server, or the state file of one of its processes, cannot be read from here",
)
def server_unreadable(facts: Facts) -> Iterator[Found]:
    """A server that is judged by its state files alone, or one that has some of another version of this package."""
    for server in facts.servers:
        if server.unreadable:
            yield Found(
                WARNING,
                server.subject,
                f"{len(server.unreadable)} of its processes have a state file of another version of omni-fastpath: "
                "what is on there is not seen from here",
                "Run the omni-fastpath of the environment that the server runs in; if this is the one, restart the "
                "server: the package was exchanged while it ran.",
                {"processes": [str(pid) for pid in sorted(server.unreadable)]},
            )
        if server.environ is None:
            yield Found(
                INFO,
                server.subject,
                "its variables cannot be read: it is judged by its state files alone",
                "Run this as the server's user, where /proc is the server's.",
                {},
            )


@_rule(
    "server-elsewhere",
    threshold="a live server without a state file that sees other processes or other files than this shell",
)
def server_elsewhere(facts: Facts) -> Iterator[Found]:
    """A container's server, seen from outside, or one whose files systemd hides: our paths are not its paths."""
    for server in facts.servers:
        if server.is_elsewhere and server.own is None and server.pid not in server.unreadable:
            yield Found(
                INFO,
                server.subject,
                "it runs in another container or mount namespace: its state file and deploy YAML are not seen from "
                "here",
                "Run `omni-fastpath doctor` in there, to judge it.",
                {},
            )


# ---- /metrics ----


@_rule("metrics-folder", threshold=f"{MULTIPROC} names what is no folder, or one that cannot be written")
def metrics_folder(facts: Facts) -> Iterator[Found]:
    """Prometheus' multiprocess mode without its folder: /metrics loses series, or the server does not start."""
    for subject, environ in _shell_and_servers(facts):
        named = environ.get(MULTIPROC)
        if named is None:
            continue
        if any(each.is_elsewhere for each in facts.servers if each.subject == subject):
            continue  # it means another folder
        cwd = next((each.cwd for each in facts.servers if each.subject == subject), None)
        folder = Path(named) if cwd is None else cwd / named
        problem = "is no folder" if not folder.is_dir() else "cannot be written"
        if not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
            yield Found(
                WARNING,
                subject,
                f"{MULTIPROC} names what {problem}",
                f"Make it writable for the server, or unset {MULTIPROC}: vLLM makes a folder of its own.",
                {MULTIPROC: named},
            )


@_rule("metrics-without-us", threshold="a server in which something is on answers /metrics without a series of ours")
def metrics_without_us(facts: Facts) -> Iterator[Found]:
    """A scrape shows upstream's series and none of ours."""
    for server in facts.servers:
        if server.scrape is None or server.scrape.problem or not server.is_on:
            continue
        if not any(name.startswith("omni_fastpath_") for name in server.scrape.totals):
            yield Found(
                WARNING,
                server.subject,
                "its /metrics has no series of omni-fastpath",
                "Look into its log for `the metrics cannot be exported`. The patches work without.",
                {"series": len(server.scrape.totals)},
            )


@_rule(
    "metrics-silent",
    threshold=f"no answer from /metrics in {SCRAPE_S:.0f} s, {SETTLED_S:.0f} s after the server's start",
)
def metrics_silent(facts: Facts) -> Iterator[Found]:
    """A server that accepts a connection and hangs; one that is loading or speaks TLS refuses ours at once."""
    for server in facts.servers:
        if server.scrape is not None and server.scrape.timed_out and server.age_s >= SETTLED_S:
            yield Found(
                WARNING,
                server.subject,
                f"it listens, and does not answer /metrics within {SCRAPE_S:.0f} s",
                "Look whether it answers requests: its event loop stands still or is overloaded (`py-spy dump --pid "
                f"{server.pid}` shows where).",
                {"waited_s": SCRAPE_S},
            )


@_rule("metrics-stats-off", threshold="--disable-log-stats")
def metrics_stats_off(facts: Facts) -> Iterator[Found]:
    """/metrics has our series and not upstream's counters, so that idle patches cannot be told."""
    for server in facts.servers:
        if "--disable-log-stats" in server.arguments:
            yield Found(
                INFO,
                server.subject,
                "it runs with --disable-log-stats: /metrics lacks upstream's counters, with which ours are compared",
                "Leave the option out to have them.",
                {"arguments": ["--disable-log-stats"]},
            )


# ---- Folders and leftovers ----


@_rule("state-folder-unusable", threshold="the runtime folder is not this user's alone, or cannot be written")
def state_folder_unusable(facts: Facts) -> Iterator[Found]:
    """State files can be neither written nor trusted: ``status`` and the stages' part of /metrics stay empty."""
    told = {facts.folder_problem: HERE} if facts.folder_problem else {}
    for server in facts.servers:
        if (
            server.folder_problem
            and not server.is_elsewhere
            and (server.is_on or (server.own is None and _asks(server, facts)))
        ):
            told.setdefault(server.folder_problem, server.subject)
    for problem, subject in told.items():
        yield Found(
            ERROR,
            subject,
            f"the state files cannot be kept or read: {problem}",
            "Set XDG_RUNTIME_DIR to a folder of this user's alone, for the server and for this shell.",
            {"problem": problem},
        )


@_rule(
    "state-folder-shared", threshold="one state file of another process namespace, written since this machine booted"
)
def state_folder_shared(facts: Facts) -> Iterator[Found]:
    """Containers share the folder, or did: whether theirs live cannot be told from here, and nobody clears up."""
    if facts.other_namespaces:
        yield Found(
            INFO,
            HERE,
            f"{facts.other_namespaces} state files are of other containers, or of ones that have ended: what runs in "
            "them is not seen from here",
            "Give each container a runtime folder of its own (XDG_RUNTIME_DIR), and run this inside the container.",
            {
                "files": facts.other_namespaces,
                "state_folder": facts.report["installation"]["state_folder"],
            },
        )


@_rule(
    "shared-memory-left",
    threshold=f"one file; a warning from {MUCH_BYTES >> 20} MiB or {MUCH_SHARE:.0%} of /dev/shm, outside containers",
)
def shared_memory_left(facts: Facts) -> Iterator[Found]:
    """Chunks and segments that dead servers left in /dev/shm; in a container they may be a live one's elsewhere."""
    left = [each for each in facts.leftovers if each.kind == "shared memory"]
    if left:
        size = sum(each.size for each in left)
        share = size / facts.shared_memory_bytes if facts.shared_memory_bytes else 0.0
        much = size >= MUCH_BYTES or share >= MUCH_SHARE
        yield Found(
            WARNING if much and not facts.contained else INFO,
            MACHINE,
            f"no process seen from here has {len(left)} files of {size} bytes in shared memory open"
            if facts.contained
            else f"dead servers left {len(left)} files of {size} bytes in shared memory",
            "This is a container, and others may share its /dev/shm (--ipc=host, a volume) and use them. "
            "`omni-fastpath doctor --leftovers` names them: they may go once no server runs in any of those."
            if facts.contained
            else f"No process that can be seen from here has them open. {_remove([each.path for each in left])}",
            {
                "files": len(left),
                "bytes": size,
                "share_of_shared_memory": round(share, 4),
                "youngest_age_s": round(min(each.age_s for each in left)),
            },
        )


@_rule("device-locks-left", threshold="one lock file of vLLM-Omni's that no process has open")
def device_locks_left(facts: Facts) -> Iterator[Found]:
    """Upstream never removes them: harmless, unless another user cannot open them."""
    left = [each for each in facts.leftovers if each.kind == "lock"]
    if left:
        yield Found(
            INFO,
            MACHINE,
            f"{len(left)} device locks of ended servers",
            "Nothing: the next server takes them again. To be rid of them while no server of anybody's starts: "
            f"{_remove([each.path for each in left])}",
            {"files": [str(each.path) for each in left[:LISTED]], "bytes": sum(each.size for each in left)},
        )


# ---- What several rules need ----


def _shell_and_servers(facts: Facts) -> Iterator[tuple[str, Mapping[str, str]]]:
    yield HERE, facts.environ
    yield from ((each.subject, each.environ) for each in facts.servers if each.environ is not None)


def _plain(name: str) -> str:
    return re.sub(r"[^A-Z0-9]", "", name.upper())


def _is_beside(name: str) -> bool:
    """Whether a name would be in our namespace if it were spelt right: OMNI_FAST_PATH, omni_fastpath."""
    if name.startswith(NAMESPACE) or name == HANDOFF:
        return False
    return _plain(name).startswith(("OMNIFASTPATH", "VLLMOMNIFASTPATH"))


def _leaves_us_out(server: Server) -> bool:
    return server.environ is not None and entrypoint.is_left_out(server.environ.get(entrypoint.ALLOW_LIST))


def _asks(server: Server, facts: Facts) -> bool:
    """Whether its variables or its deploy YAML switch something on, or would be refused: that is asked for too."""
    resolved, refusal = configuration(server, facts.patches)
    return bool(refusal) or (resolved is not None and resolved.asked)


def _hooks(facts: Facts, key: str, what: str, do: str) -> Iterator[Found]:
    told: list[tuple[str, Mapping[str, Any]]] = [(HERE, facts.hooks)] if facts.hooks is not None else []
    told += [
        (server.subject, each["hooks"]) for server in facts.servers for each in server.snapshots if each.get("hooks")
    ]
    seen: dict[tuple[str, str, str], int] = {}
    for subject, hooks in told:
        for name, why in hooks[key].items():
            seen[subject, name, why] = seen.get((subject, name, why), 0) + 1
    for (subject, name, why), times in seen.items():
        yield Found(WARNING, subject, f"the hook plugin {name} {what}: {why}", do, {"plugin": name, "processes": times})


def _remove(paths: Sequence[Path]) -> str:
    if len(paths) > LISTED:
        return "Remove them: omni-fastpath doctor --leftovers | xargs -0 rm --"
    return f"Remove them: rm -- {' '.join(shlex.quote(str(each)) for each in paths)}"
