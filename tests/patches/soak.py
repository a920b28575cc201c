"""A soak of the save queue against a model: the real adapter, ``save_loop`` and credits under random trouble.

    python -m tests.patches.soak --chunks 1000000 [--shared 0.1] [--seed 1]

Rounds of some thousand chunks, each on a stage of its own, most in memory, some in shared memory. In each step of a
round the scheduler's thread holds, saves with random sizes, ends, aborts, preempts and ends segments, uses external ids
again, stalls streams inside ``put``, and makes ``put`` raise or fail. The model is a list per request of what was
queued. Round by round: every chunk of a request that lives to its end arrives once and in order, one of an aborted
request at most once and in order, nothing but what ``put`` refused is lost, all counts are zero, every thread ends, and
shared memory holds nothing of it. A round in three is stopped in the middle instead.
"""

from __future__ import annotations

import argparse
import logging
import random
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.patches.soak_stage import PATIENCE_S, SHARED_MEMORY, Request, Stage, patched, shared_memory, unique, until

ROUND = 4000
"""Chunks a round."""
STREAMS = 24
"""Requests that live at a time."""


class Member(Request):
    """A request of the model: what was queued of it, and what the holds read and write."""

    def __init__(self, external_req_id: str, number: int, *, resumable: bool) -> None:
        super().__init__(external_req_id, f"{external_req_id}-{number}")
        from vllm.v1.request import RequestStatus

        self.number = number
        self.resumable = resumable
        self.status = RequestStatus.RUNNING
        self.next_decode_eligible_step = 0
        self.queued: list[int] = []
        self.aborted = False
        self._omni_segment_generation = 0


@dataclass
class Report:
    """What happened, all rounds together."""

    chunks: int = 0
    received: int = 0
    lost_to_failures: int = 0
    requests: int = 0
    aborted: int = 0
    reused_ids: int = 0
    preemptions: int = 0
    stopped_rounds: int = 0
    rounds: int = 0
    held_steps: int = 0
    expired_holds: int = 0
    managed: int = 0
    trouble: list[str] = field(default_factory=list)


class Round:
    """One stage and one model of it.

    Args:
        seed: Of everything but the threads' timing.
        chunks: Chunks to queue.
        shared: Through shared memory instead of memory.
        stop: Stop in the middle instead of draining.
        report: Added to.
    """

    def __init__(self, seed: int, chunks: int, *, shared: bool, stop: bool, report: Report) -> None:
        self._rng = random.Random(seed)
        self._chunks, self._stop, self._report = chunks, stop, report
        self._shared = shared
        from omni_fastpath.patches.save_queue_cap.calm import Calm

        # Calm and managed in turns, a few steps each; one round in four managed always.
        calm = Calm(steps=self._rng.choice((0, 2, 4, 12)), tasks=40, nbytes=2**16, quiet_s=0.002)
        self._stage = Stage(memory=not shared, calm=calm)
        self.running: list[Member] = []
        self.current_step = 0
        self.num_spec_tokens = 0
        self._members: list[Member] = []
        self._current: dict[str, Member] = {}
        self._free_ids: list[str] = []
        self._received: dict[int, list[int]] = defaultdict(list)
        self._put: dict[str, int] = {}
        self._lost: set[int] = set()
        self._stalled: dict[str, int] = {}
        self._deaf: dict[str, int] = {}
        self._values = 0
        self._watch_puts()

    def _watch_puts(self) -> None:
        put, rng = self._stage.gate.put, self._rng

        def watched(from_stage: str, to_stage: str, put_key: str, data: Any) -> Any:
            stream = put_key.rsplit("_", 2)[0]
            value = None if data.codes is None or data.codes.audio is None else int(data.codes.audio[0])
            done = False
            try:
                result = put(from_stage, to_stage, put_key, data)
                done = bool(result[0])
                return result
            finally:
                if value is not None:
                    if not done:
                        self._lost.add(value)
                    self._put[stream] = value

        del rng
        self._stage.connector.put = watched

    # ---- The scheduler's thread ----

    def run(self) -> None:
        """The whole round."""
        from omni_fastpath.patches.save_queue_cap.credits import Credits

        with patched_limits(self._shared) as (options, counters):
            before = dict(counters)
            with self._stage:
                credits_ = Credits(self, self._stage.queue.fair, self._stage.adapter, options, counters)
                while self._values < self._chunks:
                    self._step(credits_)
                    if self._stop and self._values > self._chunks * 0.6:
                        break
                if self._stop:
                    self._check_stopped()
                else:
                    self._drain()
                    self._check()
            assert not any(lane.is_alive() for lane in self._stage.lanes)
            self._report.held_steps += counters["held_steps"] - before["held_steps"]
            self._report.expired_holds += counters["expired_holds"] - before["expired_holds"]
            self._report.managed += counters["managed"] - before["managed"]
            assert not self._stage.queue.is_aside
        self._report.rounds += 1
        self._report.stopped_rounds += self._stop
        self._report.chunks += self._values
        self._report.lost_to_failures += len(self._lost)
        self._report.received += sum(len(found) for found in self._received.values())

    def _step(self, credits_: Any) -> None:
        rng = self._rng
        while len(self.running) < STREAMS and rng.random() < 0.5:
            self._admit()
        queue = self._stage.queue
        if queue.before_step():
            credits_.hold()
            queue.calm_down(is_holding=credits_.is_holding)
        self.current_step += 1
        moved = False
        for member in list(self.running):
            if self.current_step < member.next_decode_eligible_step:
                continue
            moved = True
            self._member_step(member)
        self._trouble()
        self._fetch()
        if not moved or rng.random() < 0.02:
            time.sleep(0.0002)

    def _admit(self) -> None:
        rng = self._rng
        name = None
        if self._free_ids and rng.random() < 0.3:
            candidate = rng.choice(self._free_ids)
            # Upstream refuses chunks while the old generation's send is in flight; and its receiver has read it all.
            old = self._current[candidate]
            ready = old.aborted or len(self._received[old.number]) == self._sent_of(old)
            if candidate not in self._stage.adapter._sender_tokens and ready:
                name = candidate
                self._free_ids.remove(name)
                self._report.reused_ids += 1
                self._stage._next[name] = 0
        if name is None:
            name = unique("soak")
        member = Member(name, len(self._members), resumable=rng.random() < 0.2)
        self._members.append(member)
        self._current[name] = member
        self.running.append(member)
        self._report.requests += 1

    def _sent_of(self, member: Member) -> int:
        return sum(value not in self._lost for value in member.queued)

    def _member_step(self, member: Member) -> None:
        import torch

        rng = self._rng
        if rng.random() < 0.01 and member.num_computed_tokens > 3:  # preempted: an old position is computed again
            now, member.num_computed_tokens = member.num_computed_tokens, 1
            sent = self._stage.adapter.requests_num_chunks_sent.get(member.external_req_id, 0)
            if sent > 1:
                self._stage.adapter.save_async({"codes.audio": torch.full((1,), -1)}, member)
                self._report.preemptions += 1
            member.num_computed_tokens = now
        if rng.random() < 0.01:
            self._abort(member)
            return
        ends = rng.random() < 0.02
        segment = member.resumable and not ends and rng.random() < 0.1
        if ends:
            member.resumable = False
            member.finished = True
            self.running.remove(member)
            self._free_ids.append(member.external_req_id)
        member.num_computed_tokens += 1
        value = self._values
        self._values += 1
        member.queued.append(value)
        size = rng.choice((1, 1, 1, 7, 64, 500))
        payload = torch.full((size * 2,), value, dtype=torch.int64)
        if rng.random() < 0.2:
            payload = payload[:size]
        generation = member._omni_segment_generation
        self._stage.adapter.save_async(
            {"codes.audio": payload}, member, is_segment_finished=segment, segment_generation=generation
        )
        if segment:
            member._omni_segment_generation += 1

    def _abort(self, member: Member) -> None:
        member.aborted = True
        self.running.remove(member)
        self._stage.abort(member)
        self._free_ids.append(member.external_req_id)
        self._report.aborted += 1

    def _trouble(self) -> None:
        rng, gate = self._rng, self._stage.gate
        for name, until_step in list(self._stalled.items()):
            if self.current_step >= until_step:
                del self._stalled[name]
                gate.open(name)
        if rng.random() < 0.05 and self.running and len(self._stalled) < 3:
            name = rng.choice(self.running).external_req_id
            if name not in self._stalled:
                gate.shut(name)
                self._stalled[name] = self.current_step + rng.randrange(1, 60)
        if rng.random() < 0.05 and self.running:
            name = rng.choice(self.running).external_req_id
            gate.fails.setdefault(name, rng.choice((None, RuntimeError("soak"))))
        if rng.random() < 0.05 and self.running:
            self._deaf[rng.choice(self.running).external_req_id] = self.current_step + rng.randrange(1, 100)
        failed = self._stage.adapter.collect_failed_send_request_ids()
        for member in list(self.running):
            if member.request_id in failed and rng.random() < 0.5:
                self._abort(member)

    # ---- The next stage ----

    def _fetch(self, *, everything: bool = False) -> None:
        for name, member in self._current.items():
            if member.aborted:
                continue
            if not everything and (self._rng.random() < 0.5 or self._deaf.get(name, 0) > self.current_step):
                continue
            # Before the new generation's first put the old one's chunks may still be there, as with upstream.
            if not member.queued or self._put.get(name, -1) < member.queued[0]:
                continue
            found = self._stage.fetch(name)
            self._received[member.number] += [value for value in found if value >= 0]

    # ---- What must hold ----

    def _drain(self) -> None:
        gate = self._stage.gate
        gate.fails.clear()
        gate.open()
        for member in list(self.running):
            self._abort(member) if self._rng.random() < 0.3 else self._end(member)
        deadline = time.monotonic() + PATIENCE_S
        while self._stage.queue.tasks:
            assert time.monotonic() < deadline, f"{self._stage.queue.tasks} tasks are left"
            time.sleep(0.001)
        self._fetch(everything=True)

    def _end(self, member: Member) -> None:
        import torch

        self.running.remove(member)
        member.resumable, member.finished = False, True
        member.num_computed_tokens += 1
        member.queued.append(self._values)
        self._stage.adapter.save_async(
            {"codes.audio": torch.full((1,), self._values)}, member, segment_generation=member._omni_segment_generation
        )
        self._values += 1

    def _check_streams(self, *, complete: bool) -> None:
        for member in self._members:
            received = self._received[member.number]
            expected = [value for value in member.queued if value not in self._lost]
            if complete and not member.aborted and self._current[member.external_req_id] is member:
                assert received == expected, f"{member.request_id}: {received} of {expected}"
            else:
                assert received == expected[: len(received)], f"{member.request_id}: {received} of {expected}"

    def _check(self) -> None:
        self._check_streams(complete=True)
        queue = self._stage.queue
        assert (queue.tasks, len(queue)) == (0, 0)
        assert queue.is_plain or not queue.fair.account.storage
        assert not self._stage.gate.overlaps
        assert not any(stream.tasks for stream in queue.streams.values())
        if self._shared:
            until(lambda: queue.nbytes == 0, "the look at the last chunks")
            assert not shared_memory(), shared_memory()
        else:
            assert not self._stage.connector.chunks, list(self._stage.connector.chunks)[:5]
            assert queue.nbytes == 0

    def _check_stopped(self) -> None:
        """Stopped with a backlog and streams that hang: what had arrived by then was in order, and threads end."""
        self._stage.adapter.shutdown()
        self._stage.gate.open()
        for lane in self._stage.lanes:
            lane.join(PATIENCE_S)
            assert not lane.is_alive(), "a lane still waits after the end"
        self._check_streams(complete=False)
        assert not self._stage.gate.overlaps
        for name in shared_memory():  # what a stage that stops leaves to nobody, as stock
            (SHARED_MEMORY / name).unlink(missing_ok=True)


@contextmanager
def patched_limits(shared: bool) -> Iterator[tuple[Any, dict[str, int]]]:
    """The limits of a round; they hold often, and a hold ends within the round."""
    from tests.patches.soak_stage import entry

    options = entry().patch.options(
        per_stream_tasks=5,
        unfetched_chunks=12 if shared else None,
        total_tasks=60,
        total_bytes=2**17,
        max_hold_s=0.02,
        holds="always",
    )
    yield options, entry().counters


def soak(chunks: int, *, seed: int = 1, shared: float = 0.1) -> Report:
    """So many chunks, of which about that share through shared memory."""
    report = Report()
    rng = random.Random(seed)
    loggers = [logging.getLogger(name) for name in ("vllm_omni", "vllm", "vllm.omni_fastpath")]
    levels = [each.level for each in loggers]
    with patched():
        from vllm_omni.distributed.omni_connectors.transfer_adapter import base, chunk_transfer_adapter

        loggers += [base.logger, chunk_transfer_adapter.logger]
        levels += [base.logger.level, chunk_transfer_adapter.logger.level]
        for each in loggers:
            each.setLevel(logging.CRITICAL)  # failures are made by the thousand
        try:
            through_memory = through_shared = 0
            while report.chunks < chunks:
                in_shared = through_shared < shared * (through_memory + through_shared)
                size = min(ROUND // 4 if in_shared else ROUND, max(200, chunks - report.chunks))
                stop = report.rounds % 3 == 2
                Round(rng.getrandbits(32), size, shared=in_shared, stop=stop, report=report).run()
                if in_shared:
                    through_shared += size
                else:
                    through_memory += size
        finally:
            for each, level in zip(loggers, levels, strict=True):
                each.setLevel(level)
    return report


def main() -> None:
    """From the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, default=1_000_000)
    parser.add_argument("--shared", type=float, default=0.1, help="share of the chunks through shared memory")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    began = time.monotonic()
    report = soak(given.chunks, seed=given.seed, shared=given.shared)
    for name, value in vars(report).items():
        if name != "trouble":
            print(f"{name}: {value}")  # noqa: T201
    print(f"{time.monotonic() - began:.0f} s")  # noqa: T201


if __name__ == "__main__":
    main()
