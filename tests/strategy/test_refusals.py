"""What cannot work ends alike on all ranks, with an error that says what to change."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.strategy.scripts.launch import launch

pytestmark = pytest.mark.distributed

EXPECTED = {
    "too_many_stages": ("ValueError", r"3 stages for 2 layers\. Use at most 2 devices"),
    "sizes_of_another_product": (
        "ValueError",
        r"data_parallel_size=2 is 4, but there are 3 processes\. Leave",
    ),
    "too_few_microbatches": ("ValueError", r"num_microbatches=2 on 3 ranks\. Use num_microbatches=3"),
    "unknown_schedule": ("ValueError", r"Unknown schedule '1f2b'; choose one of 'gpipe', '1f1b'"),
    "balance_of_wrong_sum": ("ValueError", r"places 6 layers .* has 5 layers .*for example balance=\[2, 2, 1\]"),
    "balance_of_wrong_length": ("ValueError", r"on 2 stages, .* 3 stages.*for example balance=\[2, 2, 1\]"),
    "speeds_of_wrong_number": ("ValueError", r"each of the 3 ranks of a pipeline, got 2\. Use .*=\[1\.0, 1\.0, 1\.0\]"),
    "no_chain": ("TypeError", r"Plain has no configure_pipeline\(\) method.*Add one"),
    "parameters_outside": ("ValueError", r"trainable parameters are in no layer of .*: scale\. Move them"),
    "shared_counter": ("ValueError", r"on other ranks, .*: blocks\.0\.calls of layers 1, 3\. Give each layer"),
    "gradients_not_cleared": ("ValueError", r"optimizer_zero_grad has left gradients in place.*Let it clear them"),
    "layers_of_another_module": ("ValueError", r"Layer 1 \(Block\) .* not part of the model.*Create the layer"),
    "manual_optimization": ("ValueError", r"automatic_optimization=False.*Remove it"),
    "own_backward": ("ValueError", r"Own overrides backward\(\).*Use the hooks"),
    "lbfgs": ("ValueError", r"LBFGS .* which a pipeline cannot do\. Use an optimizer"),
    "dict_in_the_middle": ("ValueError", r"layer 3 \(Block\) could not be run .*not dict"),
    "step_without_forward": ("PipelineError", r"rank 2, stage 2, step method.*did not call self\(\.\.\.\)"),
    "step_with_other_arguments": ("PipelineError", r"'tokens' of self\(\.\.\.\).*Define pipeline_inputs"),
    "different_batches": ("ValueError", r"ranks \[1\] differ from rank 0.*Remove rank-dependent samplers"),
    "module_of_a_failed_run": ("ValueError", r"lost the layers .* an earlier run failed\. Create the module anew"),
}


@pytest.mark.parametrize("launcher", ["torchrun", "lightning"])
def test_refusals_are_alike_on_all_ranks(launcher: str, tmp_path: Path) -> None:
    outcome = launch(launcher, tmp_path, [*EXPECTED, "succeeds", "too_many_stages"])
    for case, (kind, pattern) in EXPECTED.items():
        found = outcome.records(case)
        assert sorted(found) == [0, 1, 2], f"{case}: {outcome.output[-3000:]}"
        assert {entry["kind"] for entry in found.values()} == {kind}, (case, found)
        texts = {entry["text"] for entry in found.values()}
        assert len(texts) == 1, (case, texts)
        assert re.search(pattern, texts.pop(), re.DOTALL), (case, found)
        if case != "module_of_a_failed_run":
            assert outcome.slowest_s(case) < 5.0, case
    outcome.check_end("too_many_stages")
    assert all(entry["kind"] is None for entry in outcome.records("succeeds").values()), outcome.records("succeeds")
    assert len(outcome.records("succeeds")[2]["losses"]) == 16  # as many as without the failures before it
