"""Upstream's own loop for one raw output: what its stand-in for a `self` gives it. On stand-ins."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("msgspec")

from omni_fastpath.patches.budgeted_drain.replicas import Replica
from omni_fastpath.patches.budgeted_drain.rounds import Rounds


class _Pool:
    """Stands for upstream's pool."""

    def __init__(self, calls: list[str], *, fails: Exception | None = None) -> None:
        self.calls = calls
        self.fails = fails
        self.stage_type: str | None = "llm"
        self.clients = ["client", "client"]
        self.name = "pool"

    def live_replica_ids(self) -> list[int]:
        return [at for at, client in enumerate(self.clients) if client is not None]

    def mark_replica_unavailable(self, replica_id: int) -> list[str]:
        self.clients[replica_id] = None  # type: ignore[call-overload]
        return ["bound"]

    def release_bindings(self, request_ids: list[str]) -> None:
        self.calls.append(f"release {request_ids}")

    async def process_llm_raw_outputs(self, replica_id: int, raw: Any, iteration_stats: Any = None) -> list[str]:
        self.calls.append(f"process {replica_id} {raw} {iteration_stats}")
        if self.fails is not None:
            raise self.fails
        return [f"{raw}, processed"]


class _Orchestrator:
    """Stands for upstream's: a loop that polls all pools, and writes down what it sees."""

    def __init__(self, *pools: _Pool, after: Callable[[_Orchestrator], None] = lambda _: None) -> None:
        self._shutdown_event = asyncio.Event()
        self.num_stages = len(pools)
        self.stage_pools: Any = pools
        self.calls: list[str] = []
        self.after = after
        self.fatal: Any = None

    async def route(self, stage_id: int, processed: Any) -> None:
        assert isinstance(self.stage_pools[stage_id], _Pool), "a helper's self is the orchestrator"
        self.calls.append(f"route {stage_id} {processed}")
        self.after(self)

    async def loop(self) -> None:
        while not self._shutdown_event.is_set():
            for stage_id in range(self.num_stages):
                pool = self.stage_pools[stage_id]
                for replica_id in pool.live_replica_ids():
                    if self._shutdown_event.is_set():
                        return
                    if pool.stage_type == "diffusion":
                        await self.route(stage_id, pool.poll_diffusion_output(replica_id))
                        continue
                    try:
                        raw = await pool.poll_llm_raw_output(replica_id, timeout_s=0.001)
                        processed = await pool.process_llm_raw_outputs(replica_id, raw, iteration_stats="stats")
                    except EOFError as error:
                        told = pool.mark_replica_unavailable(replica_id)
                        self.calls.append(f"dead {told}")
                        if pool.live_replica_ids():
                            continue
                        self.fatal = error
                        self._shutdown_event.set()
                        raise
                    except Exception:
                        if self._shutdown_event.is_set():
                            return
                        raise
                    await self.route(stage_id, processed)
            raise AssertionError("a round does not come to the sleep")


def world(stages: int = 3, **given: Any) -> tuple[_Orchestrator, list[_Pool], Rounds]:
    """An orchestrator, its pools, and the rounds."""
    pools = [_Pool([], **given) for _ in range(stages)]
    orchestrator = _Orchestrator(*pools)
    for pool in pools:
        pool.calls = orchestrator.calls
    return orchestrator, pools, Rounds(orchestrator, _Orchestrator.loop, _Pool.live_replica_ids)


def replica(pools: list[_Pool], stage_id: int, replica_id: int = 0) -> Replica:
    """One of a pool's replicas."""
    return Replica(stage_id, pools[stage_id], replica_id, "client", lambda _: True)


async def test_one_raw_output_goes_through_upstreams_loop_and_no_other() -> None:
    """The one that is given is processed and routed under its stage and replica, and the loop returns."""
    orchestrator, pools, rounds = world()
    found = await rounds.of(replica(pools, 1, 1)).run(1, "raw")
    assert found == ["raw, processed"]
    assert orchestrator.calls == ["process 1 raw stats", "route 1 ['raw, processed']"]
    assert not orchestrator._shutdown_event.is_set()


async def test_rounds_follow_each_other() -> None:
    """A stage's next round is as its first; one pool that took another's place gets rounds of its own."""
    orchestrator, pools, rounds = world()
    first = rounds.of(replica(pools, 2))
    await first.run(0, "one")
    await first.run(1, "two")
    assert [call for call in orchestrator.calls if "process " in call] == ["process 0 one stats", "process 1 two stats"]
    assert rounds.of(replica(pools, 2)) is first
    pools[2] = _Pool(orchestrator.calls)
    assert rounds.of(replica(pools, 2)) is not first


async def test_judge_is_told_before_routing() -> None:
    """Of the raw output and of what was made of it; the next round's word is its own."""
    orchestrator, pools, rounds = world()
    stage = rounds.of(replica(pools, 0))

    def judge(raw: Any, processed: Any) -> bool:
        orchestrator.calls.append(f"judge {raw} {processed}")
        return True

    await stage.run(0, "raw", judge=judge)
    assert orchestrator.calls[1:] == ["judge raw ['raw, processed']", "route 0 ['raw, processed']"]
    assert stage.said
    await stage.run(0, "raw")
    assert not stage.said


async def test_what_was_taken_is_dispatched_in_a_shutdown() -> None:
    """The round's event is not set before its raw output is read, whatever the orchestrator's is."""
    orchestrator, pools, rounds = world()
    orchestrator._shutdown_event.set()
    assert await rounds.of(replica(pools, 0)).run(0, "raw") == ["raw, processed"]


async def test_an_exception_of_processing_takes_upstreams_own_branch() -> None:
    """It comes out, and nothing is routed; in a shutdown upstream's branch lets it be."""
    orchestrator, pools, rounds = world(fails=ValueError("odd"))
    with pytest.raises(ValueError, match="odd"):
        await rounds.of(replica(pools, 0)).run(0, "raw")
    orchestrator._shutdown_event.set()
    assert await rounds.of(replica(pools, 0)).run(0, "raw") is None
    assert not [call for call in orchestrator.calls if call.startswith("route")]


async def test_a_death_comes_out_of_the_read() -> None:
    """Upstream's branch asks the real pool whom it strands and who is left; what it writes is the orchestrator's."""
    orchestrator, pools, rounds = world()
    assert await rounds.of(replica(pools, 1)).run(0, error=EOFError("gone")) is None
    assert (orchestrator.calls, orchestrator.fatal) == (["dead ['bound']"], None)
    with pytest.raises(EOFError):
        await rounds.of(replica(pools, 1)).run(1, error=EOFError("gone"))
    assert isinstance(orchestrator.fatal, EOFError)
    assert orchestrator._shutdown_event.is_set()


async def test_the_death_of_one_who_was_replaced_spares_the_one_in_its_slot() -> None:
    """Who was stranded is told and let go; the slot stays as it is."""
    orchestrator, pools, rounds = world()
    await rounds.of(replica(pools, 1)).run(0, error=EOFError("gone"), stranded=["lost"])
    assert orchestrator.calls == ["release ['lost']", "dead ['lost']"]
    assert pools[1].clients[0] == "client"


async def test_a_diffusion_stages_output_is_given_by_the_other_poll() -> None:
    """A pool that had no replica, and so no type, is asked again."""
    orchestrator, pools, rounds = world()
    pools[0].stage_type = None
    assert rounds.of(replica(pools, 0)).pool.stage_type is None
    pools[0].stage_type = "diffusion"
    await rounds.of(replica(pools, 0)).run(0, "image")
    assert orchestrator.calls == ["route 0 image"]


async def test_what_the_loop_writes_is_the_orchestrators() -> None:
    """And is read as it was written."""
    orchestrator, pools, rounds = world()
    stand_in = rounds.of(replica(pools, 0))._round
    assert stand_in.fatal is None
    stand_in.fatal = "error"
    assert stand_in.fatal == orchestrator.fatal == "error"


async def test_what_else_upstream_asks_of_its_pool_is_the_pools() -> None:
    """The stand-in has every attribute of what it stands for, and nothing of the round is kept when it is over."""
    _, pools, rounds = world()
    stage = rounds.of(replica(pools, 0))
    assert stage.pool.name == "pool"
    await stage.run(0, "raw")
    assert stage.pool.item is stage.pool.processed is None
