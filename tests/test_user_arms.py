"""What the demo and the parity run stand on: arms as a user has them, and requests; no server is started."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("omni_simulated_device")

from benchmarks.parity.__main__ import DEPLOY, main, requests
from benchmarks.rigs import user_arms, whole_server
from benchmarks.rigs.side_by_side import plan
from omni_fastpath.tools.ab.arm import Arm, WrongArmError
from tests.test_arms import server_files

# ---- Requests ----


def test_every_start_gets_the_same_requests_of_every_kind() -> None:
    """Streamed and whole, each mix of modalities, the same again when asked again."""
    asked = requests(24)
    assert asked == requests(24)
    kinds = {(tuple(each.body["modalities"]), bool(each.body.get("stream"))) for each in asked}
    assert len(kinds) == 6


# ---- The proof of an arm ----


def test_each_arm_is_on_by_the_means_that_a_user_has() -> None:
    """Stock by OMNI_FASTPATH=0, fastpath by its deploy YAML alone; anything else is not that arm."""
    user_arms.check_means(user_arms.STOCK, {"OMNI_FASTPATH": "0", "HOME": "/"})
    user_arms.check_means(user_arms.FASTPATH, {"HOME": "/"})
    with pytest.raises(WrongArmError, match=r"no fastpath arm.*OMNI_FASTPATH_BUDGETED_DRAIN"):
        user_arms.check_means(user_arms.FASTPATH, {"OMNI_FASTPATH_BUDGETED_DRAIN": "1"})
    with pytest.raises(WrongArmError, match="no stock arm"):
        user_arms.check_means(user_arms.STOCK, {})


def test_applied_but_idle_is_refused() -> None:
    """A counter of the API server that moved less than once a request means that the patch did not do the work."""
    files = server_files(Arm("fastpath", {"OMNI_FASTPATH": "1"}))
    proofs = []
    for count in (5, 15):
        for name, event in user_arms.ENGAGED.items():
            files["api"].patches[name].counters[event] = count
        proofs.append(user_arms.proof_of(files))
    before, after = proofs
    assert after.counters["budgeted_drain"] == {"items": 15}
    assert after.processes["stage0_replica0"]["budgeted_drain"]["state"] == "not_applicable"
    assert user_arms.check_engaged(before, after, 10)["nonblocking_dequeue"] == {"dequeued": 10}
    with pytest.raises(WrongArmError, match="items moved by 10 during 11 requests"):
        user_arms.check_engaged(before, after, 11)


def test_nothing_of_this_shell_reaches_an_arm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A variable that the user has exported would make an arm what it does not say."""
    monkeypatch.setenv("OMNI_FASTPATH_BUDGETED_DRAIN", "0")
    monkeypatch.setenv("OMNI_FASTPATH", "1")
    stock = user_arms.environment(user_arms.STOCK, "{}", tmp_path)
    fastpath = user_arms.environment(user_arms.FASTPATH, "{}", tmp_path)
    assert stock["OMNI_FASTPATH"] == "0"
    assert stock["OMNI_FASTPATH_BUDGETED_DRAIN"] is None
    assert fastpath["OMNI_FASTPATH"] is fastpath["OMNI_FASTPATH_BUDGETED_DRAIN"] is None


def test_the_fastpath_arm_is_the_overlay_that_a_user_writes(tmp_path: Path) -> None:
    """``fastpath: true`` on top of the base, and nothing else; the stock arm is the base itself."""
    import yaml

    base = whole_server.deploy(DEPLOY)
    assert user_arms.deploy_config(user_arms.STOCK, base, tmp_path) == base
    written = yaml.safe_load(user_arms.deploy_config(user_arms.FASTPATH, base, tmp_path).read_text(encoding="utf-8"))
    assert written == {"base_config": str(base.resolve()), "fastpath": True}


# ---- Command line ----


@pytest.mark.parametrize("arguments", [["--starts", "0"], ["--requests", "x"], ["--fast"]])
def test_usage_errors(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Named, before anything is started."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "error: " in capsys.readouterr().err


@pytest.mark.parametrize(("starts", "decides"), [(1, False), (2, False), (4, True), (6, True)])
def test_the_demo_says_beforehand_whether_it_can_decide(starts: int, decides: bool) -> None:
    """With too few starts for any verdict it says so before it begins, and how many would do."""
    said = plan("This", "make it", ["stock", "fastpath"] * starts, 1.7)
    assert f"starts {2 * starts} servers" in said[0]
    assert ("--starts 6" in " ".join(said)) == (not decides)
