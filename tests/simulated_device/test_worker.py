"""The payloads and probabilities of the simulated runner are as upstream's runner makes them."""

from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm_omni")

from omni_simulated_device import stages, worker
from tests.simulated_device.test_stages import SETTINGS, request, vllm_config

pytestmark = pytest.mark.upstream


@pytest.mark.every_release
@pytest.mark.parametrize(("info", "goes_on"), [({"omni_final_stage_id": 0}, False), ({"omni_final_stage_id": 2}, True)])
def test_request_for_text_alone_makes_no_payload(info: dict[str, int], goes_on: bool) -> None:
    """A request that ends at stage 0 has no payload for anybody; it is read plain and as the orchestrator packs it."""
    from vllm_omni.engine.serialization import serialize_additional_information

    assert worker._goes_on(info) is goes_on
    assert worker._goes_on(serialize_additional_information(dict(info))) is goes_on


def payloads(stage: str, prompts: list[int]) -> list[Any]:
    """Payloads of one step that computes whole prompts of these lengths."""
    runner = object.__new__(worker.SimulatedModelRunner)
    runner.model = stages.build(vllm_config(stage), SETTINGS)
    requests = [request(list(range(length)), str(number)) for number, length in enumerate(prompts)]
    return runner._payloads(requests, [runner.model.step(each, len(each.prompt_token_ids)) for each in requests])


@pytest.mark.every_release
def test_payloads_are_views_of_the_steps_batch() -> None:
    """As on a GPU stage, each request's rows are a part of one tensor a layer, which others' payloads keep too."""
    first, second = payloads("thinker", [3, 2])
    for name in ("hidden_states.layer_0", "hidden_states.layer_24", "hidden"):
        assert first[name].shape == (3, 16)
        assert second[name].shape == (2, 16)
        assert first[name].untyped_storage().data_ptr() == second[name].untyped_storage().data_ptr()
        assert second[name].data_ptr() - first[name].data_ptr() == 3 * 16 * 2
        assert second[name].is_contiguous()
    layers = {payload[name].untyped_storage().data_ptr() for payload in (first, second) for name in first}
    assert len(layers) == 3 + 2 * 3, "three batches, and the marks of speech are each request's own"


def test_log_probabilities_are_what_upstreams_scheduler_takes() -> None:
    """A row for each request, also while its prompt is computed; upstream finds in it the token that was sampled."""
    from vllm_omni.core.sched.omni_ar_scheduler import _slice_sampled_logprobs

    runner = object.__new__(worker.SimulatedModelRunner)
    runner.model = stages.build(vllm_config("thinker"), SETTINGS)
    requests = [request(list(range(4)), str(number)) for number in range(3)]
    requests[0].sampling_params.logprobs, requests[2].sampling_params.logprobs = 0, 2
    requests[2].sampling_params.prompt_logprobs = 1
    results = [runner.model.step(each, count) for each, count in zip(requests, (4, 3, 4), strict=True)]
    rows = runner._logprobs(requests, results)
    assert rows is not None
    assert rows.logprobs.shape == (3, 3)
    for index in (0, 2):
        assert len(_slice_sampled_logprobs(rows, index, results[index].tokens).logprobs) == 1
    [(name, prompt)] = runner._prompt_logprobs(requests, results).items()
    assert (name, prompt.logprob_token_ids.tolist()) == ("2", [[1, 1], [2, 2], [3, 3]])
