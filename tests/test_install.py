"""Installing made-up patches on a made-up upstream: all or nothing, and back exactly."""

from __future__ import annotations

import functools
import logging
import sys
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest
from pydantic import Field
from wrapt import BoundFunctionWrapper, FunctionWrapper

from omni_fastpath import install as installing
from omni_fastpath.declare import AnySeam, Fit, Options, Patch, Process, Relies, Replace, Row, State
from omni_fastpath.install import apply, install, is_installed, uninstall, verify_patch
from omni_fastpath.ledger import LEDGER, state_of
from omni_fastpath.process_role import RefusedError
from omni_fastpath.seams import fingerprint
from tests.fakes.upstream import (
    ADDED,
    CHECK,
    LISTEN,
    MAKE,
    MODULE,
    MOVED,
    RUN,
    TESTED,
    Upstream,
    passes,
    patch,
    resolved,
    states,
    upstream,
)

__all__ = ["upstream"]

FOUR = patch("four", RUN, MAKE, CHECK, LISTEN)
REPLACING = Replace(MODULE, "Loop.run", wrapper="passes")
A = patch("a", RUN)
B = patch("b", MAKE, requires=("a",))
C = patch("c", CHECK, requires=("b",))
D = patch("d", LISTEN)
ALL = (A, B, C, D)


def assert_same_slots(upstream: Upstream, before: dict[str, dict[str, Any]]) -> None:
    """Every owner has exactly the objects that it had before."""
    after = upstream.slots()
    for owner, held in before.items():
        assert after[owner].keys() == held.keys()
        assert all(after[owner][name] is value for name, value in held.items())


def refused(upstream: Upstream, given: Patch, state: State) -> str:
    """The reason why a patch is not installed, after checking its state and that every slot is as before."""
    before = upstream.slots()
    assert install(given) is state
    assert_same_slots(upstream, before)
    assert not is_installed(given.name)
    return LEDGER.entry(given).reason


def foreign(function: Any) -> Any:
    """A wrapper of another package, made with functools."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return ("theirs", function(*args, **kwargs))

    return wrapper


WRAPS = pytest.mark.parametrize("wrap", [foreign, lambda raw: FunctionWrapper(raw, passes)], ids=["functools", "wrapt"])


# ---- Install and undo ----


def test_installed_slots_hold_ours_and_undo_is_exact(upstream: Upstream) -> None:
    """A slot of each kind is wrapped once and still binds and answers as upstream's.

    After two installations and an uninstallation every slot has its own object, and added attributes are gone.
    """
    off: list[str] = []
    upstream.wrappers.added = lambda _self: "added"  # type: ignore[attr-defined]
    upstream.wrappers.step_aside = lambda: off.append("off")  # type: ignore[attr-defined]
    both = patch("both", RUN, MAKE, CHECK, LISTEN, ADDED)
    before = upstream.slots()
    assert install(both) is install(both) is State.APPLIED
    assert LEDGER.entry(both).reason == ""
    module, loop = upstream.module, upstream.module.Loop
    assert loop().run(3) == ("ours", ("stock", 3))
    assert loop.make(3) == ("ours", (loop, 3))
    assert loop.check(3) == loop().check(3) == ("ours", 3)
    assert module.listen(3) == ("ours", ("listening", 3, 5))
    assert loop().added() == "added"
    for _ in range(2):
        uninstall(both)
    assert_same_slots(upstream, before)
    assert (states(), off) == ({"both": State.OFF}, ["off"])


# ---- All or nothing ----


class _Copies(type):
    """A class whose ``make`` is not what was written into it."""

    def __setattr__(cls, name: str, value: Any) -> None:
        super().__setattr__(name, foreign(value) if isinstance(value, FunctionWrapper) and name == "make" else value)


@pytest.mark.parametrize(
    ("fields", "named"),
    [({}, "does not contain what was just written"), ({"wrappers_module": "made_up_missing"}, "made_up_missing")],
)
def test_a_patch_that_cannot_be_written_whole_is_put_back(upstream: Upstream, fields: Any, named: str) -> None:
    """If a slot does not keep what was written, or a wrapper is missing, the slots before are restored."""
    loop = upstream.module.Loop
    body = {name: value for name, value in vars(loop).items() if name not in ("__dict__", "__weakref__")}
    setattr(upstream.module, "Loop", _Copies("Loop", loop.__bases__, {**body, "make": loop.make.__func__}))  # noqa: B010
    upstream.read(MAKE.path, fingerprint(vars(upstream.module.Loop)["make"]))
    broken = patch("broken", RUN, LISTEN, MAKE, **fields)
    assert named in refused(upstream, broken, State.FAILED)


@pytest.mark.parametrize("line", ["from vllm_omni.gone import Thing", "from vllm_omni import Thing"])
def test_a_missing_import(upstream: Upstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    """A patch that imports a missing name of upstream is unsupported, and the reason names the module."""
    monkeypatch.setitem(sys.modules, "vllm_omni", ModuleType("vllm_omni"))
    (tmp_path / "made_up_importing.py").write_text(f"{line}\n")
    monkeypatch.syspath_prepend(tmp_path)
    importing = patch("importing", RUN, wrappers_module="made_up_importing")
    [problem] = verify_patch(importing)
    assert refused(upstream, importing, State.UNSUPPORTED) == f"a seam has changed: {problem}"
    assert problem.startswith(f"{line.split()[1]}: what the patch imports from it is missing (")


def test_error_while_verifying_fails_the_patch(upstream: Upstream, monkeypatch: pytest.MonkeyPatch) -> None:
    """An upstream module that raises on import makes only this patch fail, and a verification reports it."""
    monkeypatch.setattr("omni_fastpath.seams.importlib.import_module", lambda name: 1 / 0)
    broken = patch("broken", RUN)
    assert "division by zero" in refused(upstream, broken, State.FAILED)
    assert verify_patch(broken) == ["it cannot be verified: ZeroDivisionError('division by zero')"]


# ---- Adding ----


@pytest.mark.parametrize("owner", ["Loop", "Base"])
def test_upstreams_own_is_kept(upstream: Upstream, owner: str) -> None:
    """An attribute that upstream has or inherits is not overwritten, and the patch is unsupported."""
    setattr(getattr(upstream.module, owner), "added", lambda _self: "upstream's")  # noqa: B010 - a made-up class
    assert "already has it" in refused(upstream, patch("adding", RUN, ADDED), State.UNSUPPORTED)


# ---- Other packages' wrappers ----


@WRAPS
@pytest.mark.parametrize("below", [False, True], ids=["theirs alone", "theirs on ours"])
@pytest.mark.parametrize("seam", [REPLACING, Relies(MODULE, "Loop.run")], ids=["replace", "relies"])
def test_foreign_wrapper_on_a_body_that_matters_is_refused(
    upstream: Upstream, wrap: Any, below: bool, seam: AnySeam
) -> None:
    """A patch that replaces or relies on a function with another package's wrapper is unsupported, but may wrap it."""
    if below:
        install(patch("below", RUN))
    upstream.module.Loop.run = wrap(vars(upstream.module.Loop)["run"])
    reason = refused(upstream, patch("relying", LISTEN, seam), State.UNSUPPORTED)
    theirs = "tests.test_install" if wrap is foreign else "tests.fakes.upstream"
    assert f"Loop.run: {theirs} wraps it, and the patch would bypass that; switch off this patch, or {theirs}" in reason
    assert install(patch("wrapping", LISTEN, RUN)) is State.APPLIED


@WRAPS
def test_undo_under_foreign_wrapper_is_refused(upstream: Upstream, wrap: Any, caplog: pytest.LogCaptureFixture) -> None:
    """If another package has wrapped a slot, no slot is restored, the state stays, and the log names the slot."""
    install(FOUR)
    upstream.module.Loop.make = theirs = wrap(vars(upstream.module.Loop)["make"])
    before = upstream.slots()
    uninstall(FOUR)
    assert_same_slots(upstream, before)
    assert states() == {"four": State.APPLIED}
    assert "four stays, because another package has written made_up_upstream:Loop.make since" in caplog.text
    upstream.module.Loop.make = theirs.__wrapped__
    uninstall(FOUR)
    assert states() == {"four": State.OFF}


def closes_over(raw: Any) -> Any:
    """A wrapper of another package that names what it calls in its closure alone, beside a name without a value."""
    empty = None

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return raw(*args, **kwargs) or empty  # noqa: F821

    del empty
    return wrapper


@pytest.mark.parametrize("wrap", [foreign, lambda raw: FunctionWrapper(raw, passes), closes_over])
@pytest.mark.parametrize("seam", [RUN, REPLACING, Relies(MODULE, "Loop.run")], ids=["wrap", "replace", "relies"])
def test_a_wrapper_that_comes_later_is_told(upstream: Upstream, wrap: Any, seam: AnySeam) -> None:
    """A patch stays applied under a wrapper that another package has put over its slot, or what it relies on, since.

    Its state then has that package and function. Our own later patch on the slot is nothing to tell.
    """
    first = patch("first", LISTEN, seam)
    install(first)
    install(patch("second", RUN))
    installing.look_again()
    assert LEDGER.entry(first).reason == ""
    upstream.module.Loop.run = wrap(vars(upstream.module.Loop)["run"])
    for _ in range(2):
        installing.look_again()
    package = "tests.fakes.upstream" if isinstance(upstream.module.Loop.run, BoundFunctionWrapper) else __name__
    told = f"since installed, {package} wrapped {MODULE}:Loop.run; it does not see what this patch does itself"
    assert (states()["first"], LEDGER.entry(first).reason) == (State.APPLIED, told)


@pytest.mark.parametrize("how", ["put back", "replaced", "deleted"])
def test_a_patch_that_was_written_over_steps_aside(upstream: Upstream, how: str) -> None:
    """Where another package has put back what it had saved, or its own function, the patch is failed."""
    loop = upstream.module.Loop
    saved = vars(loop)["run"]
    install(FOUR)
    if how == "deleted":
        del loop.run
    else:
        loop.run = saved if how == "put back" else lambda _self, _rounds: "theirs"
    installing.look_again()
    assert states() == {"four": State.FAILED}
    assert f"wrapped {MODULE}:Loop.run, without the patch inside" in LEDGER.entry(FOUR).reason
    assert upstream.module.listen(3) == ("listening", 3, 5)


# ---- Apply ----


@pytest.mark.parametrize(
    ("required", "state", "reason"),
    [
        (patch("a", MOVED), State.UNSUPPORTED, "a seam has changed"),
        (patch("a", RUN, wrappers_module="made_up_missing"), State.FAILED, "made_up_missing"),
    ],
)
def test_dependants_follow_their_requirement(upstream: Upstream, required: Patch, state: State, reason: str) -> None:
    """Patches that require one that does not serve get its state, also indirectly, and the others are applied."""
    apply(resolved(required, B, C, D), Process.SERVER, (required, B, C, D))
    assert states() == {"a": state, "b": state, "c": state, "d": State.APPLIED}
    assert LEDGER.named("c").reason.startswith(f"requires b, which is {state.value}: requires a, which is ")
    assert reason in LEDGER.named("c").reason


def test_other_process_touches_nothing(upstream: Upstream) -> None:
    """In another kind of process a patch is not applicable, and its modules are not imported."""
    elsewhere = patch("elsewhere", Relies("made_up_missing", "x"), processes=frozenset({Process.STAGE}))
    apply(resolved(elsewhere), Process.HEADLESS, (elsewhere,))
    assert states() == {"elsewhere": State.NOT_APPLICABLE}
    assert LEDGER.named("elsewhere").reason == "it is used in a stage process, and this is a headless process"


class _Values(Options):
    size: int = Field(default=1, ge=1)


def test_what_is_installed_stays_with_its_values(upstream: Upstream, caplog: pytest.LogCaptureFixture) -> None:
    """A later configuration installs only new patches, and each difference is one warning."""
    valued = patch("valued", RUN, options=_Values)
    apply(resolved(valued, D, off=(C,)), Process.SERVER, (valued, C, D))
    assert (states()["c"], LEDGER.named("c").reason) == (State.OFF, "made off")
    before = upstream.slots()
    for _ in range(2):
        apply(resolved(valued, options={"valued": _Values(size=7)}, off=(D,)), Process.SERVER, (valued, D))
    assert_same_slots(upstream, before)
    assert (state_of("valued").options.size, states()["d"]) == (1, State.APPLIED)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == [
        "omni-fastpath: valued keeps its values _Values(size=1) until the process ends; requested now: _Values(size=7)",
        "omni-fastpath: d stays on, because an installed patch stays until the process ends",
    ]
    apply(resolved(valued, A), Process.SERVER, (valued, A))
    assert states()["a"] is State.APPLIED


@pytest.mark.parametrize("broken", [patch("e", MOVED), patch("e", RUN, wrappers_module="made_up_missing"), None])
def test_refusal_undoes_its_installs(upstream: Upstream, monkeypatch: pytest.MonkeyPatch, broken: Patch | None) -> None:
    """A refused start names every patch and uninstalls only what it has installed, and so does an internal error."""
    apply(resolved(D), Process.SERVER, (D,))
    before, last = upstream.slots(), patch("last", CHECK, requires=("e",))
    error: type[Exception] = RefusedError
    words = r"'fail' and e is (unsupported|failed): .*; last is \w+: requires e"
    if broken is None:
        monkeypatch.setattr(
            "omni_fastpath.install.install", lambda each, *how: 1 / 0 if each is C else install(each, *how)
        )
        error, words, broken = ZeroDivisionError, "by zero", patch("e")
    asked = (*ALL, broken, last)
    with pytest.raises(error, match=words):
        apply(resolved(*asked, on_unsupported="fail"), Process.SERVER, asked)
    assert_same_slots(upstream, before)
    assert [each.name for each in ALL if is_installed(each.name)] == ["d"]
    assert states()["d"] is State.APPLIED


# ---- Releases ----


@pytest.mark.parametrize("version", [None, "0.30.1", "0.29.0", "0.30.0rc1", "0.30.0.dev4+cpu", "1!0.30.0", "main"])
def test_other_release_is_unsupported(upstream: Upstream, version: str | None) -> None:
    """Any other or unreadable release is unsupported unless ``same_code`` is set."""
    upstream.release(version)
    found = "vllm-omni is not installed; tested" if version is None else f"vllm-omni {version} is not among the tested"
    reason = refused(upstream, A, State.UNSUPPORTED)
    assert verify_patch(A) == [reason]
    assert (reason.startswith(found), reason[-8:]) == (True, ": 0.30.0")
    assert install(A, None, "same_code") is (State.UNSUPPORTED if version is None else State.APPLIED)


@pytest.mark.parametrize("version", ["0.30.0+cu130", "0.30.0.post1", "0.30.0.post1+vendor.2"])
def test_a_build_of_a_listed_release_is_served_where_it_is_the_same_code(upstream: Upstream, version: str) -> None:
    """Local versions and post-releases with the same code are served, and the state names the release.

    One function with another body makes them unsupported.
    """
    upstream.release(version)
    assert "not among the tested releases" in verify_patch(A, "unsupported")[0]
    assert install(A, None, "unsupported") is State.UNSUPPORTED
    assert verify_patch(A) == []
    apply(resolved(A), Process.SERVER, (A,))
    assert states() == {"a": State.APPLIED}
    assert LEDGER.named("a").reason == f"vllm-omni {version}: every function is as in 0.30.0"
    assert LEDGER.snapshot()["a"]["same_as"] == "0.30.0"
    upstream.read(RUN.path, "0" * 16)
    other = patch("other", LISTEN, Relies(MODULE, RUN.qualname))
    reason = refused(upstream, other, State.UNSUPPORTED)
    assert f"0.30.0; unlike 0.30.0: {RUN.path}: it has changed: found" in reason
    assert verify_patch(other) == [reason]


def test_the_row_with_the_same_code_is_found(upstream: Upstream) -> None:
    """The nearest release with the same code is used with its row's state and note. Rows without seams go by name."""
    superseded = Row(releases=("0.32.0rc1",), state=State.SUPERSEDED, note="theirs", seams=(RUN,))
    nothing = Row(releases=("0.28.0",), state=State.NOT_APPLICABLE, note="no flag")
    rows = (nothing, Fit(releases=("0.30.0",), seams=(RUN,), note="a note"), superseded)
    for version, other, state, reason in (
        ("0.32.0", "0.30.0", State.SUPERSEDED, "preview; theirs; vllm-omni 0.32.0: every function is as in 0.32.0rc1"),
        ("0.32.0", "0.32.0rc1", State.APPLIED, "a note; vllm-omni 0.32.0: every function is as in 0.30.0"),
        ("0.28.0.post1", "0.28.0", State.NOT_APPLICABLE, "no flag; vllm-omni 0.28.0.post1: every function is as in"),
        ("0.28.1", "0.28.0", State.APPLIED, "a note; vllm-omni 0.28.1: every function is as in 0.30.0"),
    ):
        many = patch(f"many{version}{other}", rows=rows)
        upstream.functions.clear()
        upstream.read(RUN.path, "0" * 16, release=other)
        upstream.release(version)
        assert install(many, None, "same_code") is state
        assert LEDGER.entry(many).reason.startswith(reason)
        uninstall(many)


@pytest.mark.parametrize(
    ("state", "dependants"), [(State.SUPERSEDED, State.APPLIED), (State.NOT_APPLICABLE, State.NOT_APPLICABLE)]
)
def test_a_row_without_an_install_says_what_a_patch_is(upstream: Upstream, state: State, dependants: State) -> None:
    """State and reason are the row's and are no trouble, and patches that require a superseded one are applied."""
    row = Row(releases=(TESTED,), state=state, note="upstream waits itself")
    nothing = patch("a", rows=(row,))
    apply(resolved(nothing, B, on_unsupported="fail"), Process.SERVER, (nothing, B))
    assert states() == {"a": state, "b": dependants}
    assert LEDGER.named("a").reason == "upstream waits itself"
    assert verify_patch(nothing) == []


# ---- Server and stages ----


def test_the_stages_slots_refuse_a_servers_start(upstream: Upstream) -> None:
    """Under ``fail`` a server verifies the stages' seams too, because a stage cannot refuse a start."""
    stages = frozenset({Process.STAGE})
    row = Row(releases=(TESTED,), state=State.SUPERSEDED, note="upstream's own")
    fine = (patch("same", RUN, processes=stages), patch("superseded", rows=(row,), processes=stages))
    apply(resolved(*fine, on_unsupported="fail"), Process.SERVER, fine)
    theirs = patch("theirs", MOVED, processes=stages)
    with pytest.raises(RefusedError, match=r"theirs is unsupported: in the stages: made_up_upstream:Loop\.gone"):
        apply(resolved(theirs, on_unsupported="fail"), Process.SERVER, (theirs,))


def test_a_copy_and_earlier_references_are_written_too(upstream: Upstream, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a module that runs as ``__main__``, and of modules that imported a function by name. Both are put back."""
    module = sys.modules[MODULE]
    module.__file__ = "/made_up/upstream.py"
    copy: Any = ModuleType("__main__")
    user: Any = ModuleType("a_program")
    copy.__file__ = module.__file__
    copy.listen = user.hear = module.listen
    monkeypatch.setitem(sys.modules, "__main__", copy)
    monkeypatch.setitem(sys.modules, "a_program", user)
    stock, given = module.listen, patch("listening", LISTEN)
    assert install(given) is State.APPLIED
    assert copy.listen is user.hear is module.listen is not stock
    uninstall(given)
    assert copy.listen is user.hear is module.listen is stock
    copy.listen = FunctionType(stock.__code__, vars(copy), argdefs=stock.__defaults__)
    copy.listen.__kwdefaults__ = stock.__kwdefaults__
    other = copy.listen
    assert install(given) is State.APPLIED
    assert copy.listen.__wrapped__ is other
    assert user.hear is module.listen
    uninstall(given)
    assert copy.listen is other
