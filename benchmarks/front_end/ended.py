"""Requests that have ended, as upstream's aggregator knows them."""

from __future__ import annotations

import random
import time
from typing import Any

STEP_MS = (15.0, 12.0, 8.0)
"""Of thinker, talker and code2wav."""
FRAMES_A_CHUNK = 25
SAMPLES_A_FRAME = 1920
RATE = 24000


def ended(request_id: str, text_tokens: int, seed: int = 0) -> Any:
    """The aggregator of a request of three stages (Qwen3-Omni's) that has just ended.

    Args:
        request_id: Its id.
        text_tokens: Of the thinker; the talker makes as many frames.
        seed: Of its latencies.
    """
    from vllm_omni.metrics.stats import OrchestratorAggregator, StageRequestStats, StageStats

    rng = random.Random(seed)
    began = time.time() - text_tokens * STEP_MS[0] / 1000 - 0.5
    found = OrchestratorAggregator(len(STEP_MS), True, began, len(STEP_MS) - 1)
    for stage, step_ms in enumerate(STEP_MS):
        steps = text_tokens if stage < len(STEP_MS) - 1 else -(-text_tokens // FRAMES_A_CHUNK)
        latencies = [step_ms * rng.uniform(0.8, 1.4) for _ in range(steps - 1)]
        mean = sum(latencies) / len(latencies) if latencies else 0.0
        is_audio = stage == len(STEP_MS) - 1
        stats = StageRequestStats(
            batch_id=-1,
            batch_size=1,
            num_tokens_in=23 if not stage else steps,
            num_tokens_out=0 if is_audio else steps,
            stage_gen_time_ms=sum(latencies) + 40.0,
            rx_transfer_bytes=0,
            rx_decode_time_ms=0.0,
            rx_in_flight_time_ms=0.0,
            stage_stats=StageStats(),
            replica_id=0,
            output_unit_type="audio_frame" if is_audio else "token",
            output_unit_count=steps,
            serving_time_to_first_output_ms=40.0 + rng.random(),
            time_per_output_unit_ms=mean,
            inter_output_latency_ms=mean,
            inter_output_latencies_ms=latencies,
            vllm_ttft_ms=38.0 + rng.random(),
            vllm_tpot_ms=mean,
            vllm_itl_ms=mean,
            vllm_itls_ms=[] if is_audio else list(latencies),
            pipeline_timings={"queue_wait_ms": rng.random(), "preprocess_ms": 1.0 + rng.random()},
        )
        stats.finish_reason = "stop"
        if is_audio:
            stats.audio_generated_frames = text_tokens * SAMPLES_A_FRAME
            stats.audio_sample_rate = RATE
            stats.audio_duration_s = stats.audio_generated_frames / RATE
        if stage:
            found.on_forward(stage - 1, stage, request_id, 4096 + rng.randrange(4096), rng.random(), used_shm=True)
        found.on_stage_metrics(stage, request_id, stats, "audio" if is_audio else "text")
        found.stage_first_ts[stage] = began
        found.stage_last_ts[stage] = time.time()
    found.on_finalize_request(len(STEP_MS) - 1, request_id, began)
    return found
