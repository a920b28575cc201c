"""What ``doctor`` says about the metrics, by their names without the prefix."""

from __future__ import annotations

from omni_fastpath.declare import Advice

ADVICE = {
    "first_output_api_process_seconds": Advice(
        finding="first-output",
        severity="info",
        what="first {output}: its time in the API process has a 99th percentile of about {value:.2f} s",
        do="If that is above 0.05 s and above a tenth of the engines' part, switch on the patches that are off "
        "(`OMNI_FASTPATH=1`), or use a higher `--api-server-count` (from vLLM-Omni 0.30 on).",
    ),
    "first_output_leg_seconds": Advice(
        finding="first-output",
        severity="info",
        labels={"leg": "engines"},
        what="first {output}: its time in the engines has a 99th percentile of about {value:.2f} s",
        do="If that is above 0.3 s and requests wait there (`vllm_omni:num_requests_waiting`), add GPUs or "
        "replicas. If none waits, the model itself takes that long. Neither this package nor another API server "
        "changes this part.",
    ),
    "requests_without_output": Advice(
        finding="requests-without-output",
        what="{value:.0f} requests wait for stage {stage} replica {replica} and had no output for 30 s",
        do="Check that replica's process and log. It may be stopped or hanging, or waiting for a chunk that the "
        "previous stage does not send. In an overloaded server, requests also wait that long.",
    ),
    "shared_memory_used_ratio": Advice(
        finding="shared-memory",
        above=0.8,
        what="shared memory is {value:.0%} full, and a stage that finds no room for a chunk fails",
        do="Give the container a larger /dev/shm (`--shm-size`, or an emptyDir of medium Memory).",
    ),
}
