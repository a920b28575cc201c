"""Problems of an installation and its running servers: findings, each from a rule with a stable id.

A rule uses only ``Facts`` and knows no particular patch. Its id and its threshold do not change, because people use
them in scripts. A healthy installation has no finding above ``info``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from omni_fastpath import config, process_role
from omni_fastpath.declare import Patch, Process, State
from omni_fastpath.process_role import MASTER, NAMESPACE, ON_UNLISTED, master_off
from omni_fastpath.tools import entrypoint, servers
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
API_PROCESS_S, ENGINES_S = 0.05, 0.3
"""The times above which a shorter time in the API process or in the engines is a gain for listeners, unless the other
one takes ten times as long."""
FEWEST = 50
"""First outputs that are needed for a 99th percentile."""
SHARED_MEMORY = 0.8
UNSEEN = 20
"""Requests, or outputs of requests, that one patch has counted, after which another one must have counted some too."""
HELD_BY_NOBODY = ("--max-num-queued-tokens",)
"""Options that vLLM-Omni accepts and that neither it nor a patch implements."""


@dataclass(frozen=True)
class Facts:
    """The input of the rules.

    Attributes:
        patches: The declarations.
        environ: The variables of this shell.
        report: The report of ``status`` (``omni_fastpath.tools.status``), without findings.
        asked: The patches that must be supported on the installed release.
        servers: The running servers of this user.
        misspelt: Misspellings of ``fastpath`` in deploy YAMLs, as pairs of subject and key.
        refused: Why a server that is started here now would refuse to start. Empty if it would start.
    """

    patches: Sequence[Patch]
    environ: Mapping[str, str] = field(default_factory=dict)
    report: Mapping[str, Any] = field(default_factory=dict)
    asked: frozenset[str] = frozenset()
    servers: Sequence[Server] = ()
    misspelt: Sequence[tuple[str, str]] = ()
    refused: str = ""


@dataclass(frozen=True)
class Finding:
    """A problem, or a piece of information.

    Attributes:
        severity: Its severity.
        subject: ``installation`` or ``server PID``.
        what: The finding in one sentence.
        do: What to do about it.
        evidence: What was seen, by name.
        id: The id of the rule, set by ``judge``.
        threshold: The threshold of the rule, set by ``judge``.
    """

    severity: Severity
    subject: str
    what: str
    do: str
    evidence: Mapping[str, Any] = field(default_factory=dict)
    id: str = ""
    threshold: str = ""


_Rule = Callable[[Facts], Iterator[Finding]]
RULES: dict[str, tuple[str, _Rule]] = {}
"""The threshold and the function of each rule, by its id."""


def _rule(name: str, *, threshold: str) -> Callable[[_Rule], _Rule]:
    def register(rule: _Rule) -> _Rule:
        RULES[name] = (threshold, rule)
        return rule

    return register


def judge(facts: Facts) -> list[Finding]:
    """All findings, the most severe first, then in the order of the rules."""
    found = [
        dataclasses.replace(each, id=name, threshold=threshold)
        for name, (threshold, rule) in RULES.items()
        for each in rule(facts)
    ]
    return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))


# ---- This installation ----

REFUSED = "start-refused"


@_rule(REFUSED, threshold="a server with these variables or this deploy YAML would refuse to start")
def start_refused(facts: Facts) -> Iterator[Finding]:
    """The message with which a server would refuse this shell's variables or the given deploy YAML."""
    if facts.refused:
        yield Finding("error", HERE, facts.refused, "Correct it. Running servers are not affected.")


@_rule("upstream-missing", threshold="vllm-omni is not installed in this environment")
def upstream_missing(facts: Facts) -> Iterator[Finding]:
    """The server probably runs in another environment."""
    if facts.report["installation"]["vllm_omni"] is None:
        what = "vllm-omni is not installed in this environment"
        do = "Install omni-fastpath into the environment of your server, and run this command there."
        yield Finding("error" if facts.asked else "info", HERE, what, do)


@_rule("patch-unsupported", threshold="the installed release is not tested, and has not the same code as a tested one")
def patch_unsupported(facts: Facts) -> Iterator[Finding]:
    """The patch was not tested on the installed release, so upstream's own code runs."""
    do = (
        "`omni-fastpath status --verify` shows what has changed. Install one of the tested releases or a newer "
        f"omni-fastpath, or set {ON_UNLISTED}=same_code, which applies a patch if every function is as in a tested "
        "release. Until then upstream's own code runs."
    )
    for name, patch in facts.report["installation"]["patches"].items():
        differs = (facts.report["verify"] or {}).get(name) if patch.get("may_be") else None
        problem = "; ".join(differs or ()) or patch["release_problem"]
        if facts.report["installation"]["vllm_omni"] is not None and problem:
            severity: Severity = "error" if name in facts.asked else "info"
            evidence = {"patch": name, "tested": list(patch["tested"])}
            yield Finding(severity, HERE, f"{name}: {problem}", do, evidence)


@_rule("seam-moved", threshold="a function differs from this release's (checked with --verify)")
def seam_moved(facts: Facts) -> Iterator[Finding]:
    """The release is listed, but the installed code differs from it: a vendor's change, or a mixed installation."""
    do = (
        "Install vllm and vllm-omni again. If they are a vendor's build, or another plugin wraps the function, switch "
        "the patch off."
    )
    for name, moved in (facts.report["verify"] or {}).items():
        declared = facts.report["installation"]["patches"].get(name, {})
        if moved and not (declared.get("release_problem") or declared.get("may_be")):
            yield Finding("error", HERE, f"{name}: {'; '.join(moved)}", do, {"patch": name, "seams": moved})


@_rule("entry-point-missing", threshold="no entry point `omni_fastpath` in vLLM's plugin groups")
def entry_point_missing(facts: Facts) -> Iterator[Finding]:
    """The package can be imported but is not installed, so vLLM never loads it."""
    if not facts.report["installation"]["entry_points"]:
        what = "this environment has no entry point of omni-fastpath, so vllm never loads it"
        do = "Install omni-fastpath (its wheel, or `pip install .` in a clone) in the server's environment."
        yield Finding("error", HERE, what, do, {"groups": list(entrypoint.GROUPS)})


@_rule("plugins-leave-us-out", threshold=f"{entrypoint.ALLOW_LIST} is set and has no `{entrypoint.ENTRY_POINT}`")
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
            yield Finding(severity, subject, what, do, {entrypoint.ALLOW_LIST: allowed})


@_rule("variable-unknown", threshold=f"an unknown {NAMESPACE}... variable, or a misspelling of that name")
def variable_unknown(facts: Facts) -> Iterator[Finding]:
    """A variable that is misspelt, or that another version has."""
    known = config.variables(facts.patches)
    for subject, environ in _shell_and_servers(facts):
        if master_off(environ):
            continue  # no other variable is read
        ours = set(config.set_variables(environ, facts.patches)).difference(known)
        for name in sorted(each for each in environ if each in ours or config.is_beside(each)):
            meant = config.nearest(name, known) or MASTER
            consequence = "refuses to start with it" if name.startswith(NAMESPACE) else "ignores it"
            what = f"unknown variable {name}; did you mean {meant!r}? A server with a patch on {consequence}"
            evidence = {"variable": name, "nearest": meant}
            yield Finding("warning", subject, what, f"Rename it to {meant}, or unset it.", evidence)


@_rule("key-misspelt", threshold=f"a misspelling of `{config.KEY}` as a top-level key of a deploy YAML")
def key_misspelt(facts: Facts) -> Iterator[Finding]:
    """A block that both vLLM-Omni and this package ignore."""
    for subject, key in facts.misspelt:
        what = f"the top-level key {key!r} of the deploy YAML is ignored; did you mean {config.KEY!r}?"
        yield Finding("warning", subject, what, f"Rename it to {config.KEY}, or remove it.", {"key": key})


# ---- Running servers ----


@_rule("patch-not-serving", threshold=f"a patch is {State.UNSUPPORTED.value} or {State.FAILED.value} in a process")
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
            yield Finding("error", server.subject, what, do, {"patch": name, "state": state, "processes": where})


@_rule("patch-without-effect", threshold=f"{UNSEEN} requests or outputs seen by one applied patch, none by another")
def patch_without_effect(facts: Facts) -> Iterator[Finding]:
    """A patch is applied, but a copy of the function that it wraps is what runs."""
    do = "Start the server with `vllm serve --omni`. If it was, please report this."
    counters = {each.name: next((one.name for one in each.counters if one.per_request), "") for each in facts.patches}
    unused = {each.name: [fit.without_api_server for fit in each.fits] for each in facts.patches}
    for server in facts.servers:
        for snapshot in server.snapshots:
            applied = {
                name: record["counters"]
                for name, record in snapshot["patches"].items()
                if counters.get(name) and record["state"] == State.APPLIED.value
                # a patch says so itself where there is no API server
                if not any(words and words in record["remarks"] for words in unused[name])
            }
            seen = max((found.get(counters[name], 0) for name, found in applied.items()), default=0)
            for name, found in applied.items():
                if seen >= UNSEEN and not any(found.values()):
                    what = f"{name} is applied in process {snapshot['pid']} and has seen no request, others {seen}"
                    yield Finding("error", server.subject, what, do, {"patch": name, "seen_by_others": seen})


@_rule("option-not-held", threshold="a server was started with an option that vLLM-Omni accepts but does not implement")
def option_not_held(facts: Facts) -> Iterator[Finding]:
    """A limit without effect: vLLM-Omni accepts the option but ignores it, and no patch implements it here."""
    options = dict.fromkeys(HELD_BY_NOBODY, "")
    options |= {patch.upstream_option: patch.name for patch in facts.patches if patch.upstream_option}
    for server in facts.servers:
        for option, name in options.items():
            states = {State(each["patches"][name]["state"]) for each in server.snapshots if name in each["patches"]}
            is_held = any(state.satisfies_requirement for state in states)
            if process_role.value(server.command, option) is not None and not is_held:
                what = f"it was started with {option}, which vLLM-Omni accepts but ignores"
                do = f"Switch {name} on, or see why it is not applied." if name else "Start the server without it."
                severity: Severity = "error" if server.is_on else "info"
                yield Finding(severity, server.subject, what, do, {"option": option, "patch": name or None})


@_rule(
    "api-process-full", threshold=f"front end and orchestrator use more than {FULL} of a core, each more than {ALONE}"
)
def api_process_full(facts: Facts) -> Iterator[Finding]:
    """The API process limits the server, because its two threads can use about one core together."""
    for server in facts.servers:
        shares = {name: round(share, 2) for name, share in server.busy.items()}
        if sum(shares.values()) > FULL and min(shares.values()) > ALONE:
            used = ", ".join(f"{name.replace('_', ' ')} {share:.2f}" for name, share in shares.items())
            what = f"its API process is full ({used}), because these two threads can use about one core together"
            do = f"Reduce its work: {'; '.join(_relief(server, facts))}."
            yield Finding("warning", server.subject, what, do, shares)


def _relief(server: Server, facts: Facts) -> Iterator[str]:
    """Ways to reduce the work of a full API process, the most effective first."""
    given = {word.partition("=")[0].replace("_", "-") for word in server.command if word.startswith("--")}
    more = "a higher `--api-server-count`" if "--api-server-count" in given else "`--api-server-count 2`"
    yield f"{more} (from vLLM-Omni 0.30 on, which refuses to start if its other options do not allow it)"
    states = [each["patches"] for each in server.snapshots if each["role"] == Process.SERVER.value]
    on = {name for each in states for name, record in each.items() if record["state"] != State.OFF.value}
    patches = (each for each in facts.patches if each.default_on and Process.SERVER in each.processes)
    off = [each.name for each in patches if each.name not in on]
    if off:
        yield f"switch on the patches that are off: {', '.join(off)}" if on else f"{MASTER}=1, because no patch is on"
    if "--disable-log-stats" not in given:
        yield "`--disable-log-stats`, which also removes vLLM-Omni's own metrics"


_FIRST = "omni_fastpath_first_output"
_PARTS: tuple[tuple[str, str, Mapping[str, str]], ...] = (
    ("engines", "leg_seconds", {"leg": "engines"}),
    ("api_process", "api_process_seconds", {}),
)


@_rule("first-output", threshold="one streamed answer, in a server that measures first outputs")
def first_output(facts: Facts) -> Iterator[Finding]:
    """Which part of the time to first audio and first text is whose, and what would reduce it."""
    for server in facts.servers:
        for output in ("audio", "text"):
            whole = servers.histogram(server.figures(f"{_FIRST}_seconds", output=output), FEWEST)
            if 0 < whole.count < FEWEST:
                what = f"first {output}: {whole.count} answers so far, {FEWEST} are needed for percentiles"
                yield Finding("info", server.subject, what, "Run this again later.", {"answers": whole.count})
            elif whole.count:
                seconds = {}
                for part, name, labels in _PARTS:
                    samples = server.figures(f"{_FIRST}_{name}", output=output, **labels)
                    seconds[part] = round(servers.histogram(samples, FEWEST).quantile(0.99), 2)
                when = "last 5 minutes" if whole.is_recent else "since it started"
                what = (
                    f"first {output}, {when}: p99 {whole.quantile(0.99):.2f} s; p99 of the part in the engines "
                    f"{seconds['engines']:.2f} s, in the API process {seconds['api_process']:.2f} s"
                )
                do = " ".join(_sooner(server, facts, **seconds))
                yield Finding("info", server.subject, what, do, {"answers": whole.count, **seconds})


def _sooner(server: Server, facts: Facts, engines: float, api_process: float) -> Iterator[str]:
    """Ways to get a first output earlier. A part that is less than a tenth of the other is not considered."""
    is_api_process = api_process > max(API_PROCESS_S, engines / 10)
    if is_api_process:
        relief = "; ".join(_relief(server, facts))
        yield f"The API process takes more than {API_PROCESS_S} s. To reduce that: {relief}."
    if engines > max(ENGINES_S, api_process / 10):
        yield (
            f"The engines take more than {ENGINES_S} s. If requests wait there (`vllm_omni:num_requests_waiting`), add "
            "GPUs or replicas. If none waits, the model itself takes that long, and a faster GPU may help. Neither "
            "this package nor another API server changes that part."
        )
    elif not is_api_process:
        yield "Nothing. Neither this package nor another API server nor more GPUs would make a noticeable difference."


@_rule("requests-without-output", threshold="one request without an output of any stage for 30 seconds")
def requests_without_output(facts: Facts) -> Iterator[Finding]:
    """Requests that a stage does not answer. Sessions that wait for their client are not counted."""
    do = (
        "Check that replica's process and log. It may be stopped or hanging, or waiting for a chunk that the previous "
        "stage does not send. In an overloaded server, requests also wait that long."
    )
    for server in facts.servers:
        for sample in server.figures("omni_fastpath_requests_without_output"):
            if sample["value"] > 0:
                where = sample["labels"]
                [longest, *_] = server.figures("omni_fastpath_longest_without_output_seconds", **where)
                what = (
                    f"{sample['value']} requests wait for stage {where['stage']} replica {where['replica']} and had no "
                    f"output for 30 s, the longest one for {longest['value']:.0f} s"
                )
                yield Finding("warning", server.subject, what, do, {**where, "requests": sample["value"]})


@_rule("shared-memory", threshold=f"more than {SHARED_MEMORY} of shared memory is used, or one chunk is never fetched")
def shared_memory(facts: Facts) -> Iterator[Finding]:
    """Stages need shared memory for their chunks. Without it they fail."""
    for server in facts.servers:
        fill, orphans = (
            max((each["value"] for each in server.figures(f"omni_fastpath_shared_memory_{name}")), default=0)
            for name in ("used_ratio", "orphans")
        )
        if fill > SHARED_MEMORY:
            own = sum(each["value"] for each in server.figures("omni_fastpath_shared_memory_chunk_bytes"))
            what = f"shared memory is {fill:.0%} full; {own / 2**20:.0f} MiB are chunks of this server's requests"
            do = "Give the container a larger /dev/shm (`--shm-size`, or an emptyDir of medium Memory)."
            yield Finding("warning", server.subject, what, do, {"used_ratio": round(fill, 3), "chunk_bytes": own})
        if orphans:
            what = f"shared memory has {orphans} chunks of unknown requests that were not fetched for ten minutes"
            do = "They are from earlier servers or requests. Delete them from /dev/shm if no other server uses it."
            yield Finding("warning", server.subject, what, do, {"orphans": orphans})


# ---- Used by several rules ----


def _shell_and_servers(facts: Facts) -> Iterator[tuple[str, Mapping[str, str]]]:
    yield HERE, facts.environ
    yield from ((each.subject, each.environ) for each in facts.servers if each.environ is not None)
