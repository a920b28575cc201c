"""How many outputs with a payload a server's schedulers make, before any patch sees them: a plugin that writes it down.

For each stage a file ``STAGE async=BOOL EXECUTOR``, one byte long for each such output.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

from benchmarks.trust import distribution

VARIABLE = "TEST_PAYLOADS"


def plugin(folder: Path) -> dict[str, str]:
    """Write the distribution that vLLM loads into the folder; the result is what the server's environment needs."""
    entry_points = "[vllm.general_plugins]\ntest_payloads = tests.fakes.payloads:arm\n"
    (folder / "counts").mkdir()
    return {"PYTHONPATH": distribution(folder, "test_payloads", entry_points), VARIABLE: str(folder / "counts")}


def read(folder: Path) -> dict[str, int]:
    """The counts by the names of the files."""
    return {path.name: path.stat().st_size for path in (folder / "counts").iterdir()}


def arm() -> None:
    """Count in this process, if it has a scheduler."""
    from vllm_omni.core.sched.omni_scheduler_mixin import OmniSchedulerMixin

    folder = os.environ.get(VARIABLE)
    upstream = OmniSchedulerMixin._append_request_output
    if not folder or hasattr(upstream, "__wrapped__"):
        return

    @functools.wraps(upstream)
    def appended(scheduler: Any, outputs: Any, request: Any, **fields: Any) -> None:
        config = scheduler.vllm_config
        executor = config.parallel_config.distributed_executor_backend
        name = f"{config.model_config.stage_id} async={config.scheduler_config.async_scheduling} {executor}"
        with Path(folder, name).open("ab") as file:
            file.write(b"." * (fields.get("multimodal_output") is not None))
        upstream(scheduler, outputs, request, **fields)

    OmniSchedulerMixin._append_request_output = appended
