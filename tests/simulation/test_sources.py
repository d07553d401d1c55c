"""Costs over a training: traces in seconds, blocks cut in two, and recorded runs."""

from dataclasses import replace

import pytest

from lightning_dynmo.simulation import TRACES, LayerCost, RecordedStep, Recording
from lightning_dynmo.simulation.sources import Period, RecordedCosts, TraceCosts
from tests.simulation.test_recording import STEP

BLOCK = LayerCost(1.0, 1.25, 0.75, activation_bytes=64, output_bytes=10, gradient_bytes=90)
SCHEMES = pytest.mark.parametrize("scheme", TRACES)


def costs_of(scheme: str, **options: object) -> TraceCosts:
    settings = {"block_parameters": 30, "block_bytes": 480, "num_blocks": 12, **options}
    return TraceCosts(TRACES[scheme], BLOCK, **settings)  # type: ignore[arg-type]


def total(layer: LayerCost) -> float:
    return layer.forward_s + layer.input_gradient_s + layer.weight_gradient_s


@SCHEMES
@pytest.mark.parametrize("step", [0, 700, 4321, 9999])
def test_halves_add_up_to_their_block(scheme: str, step: int) -> None:
    whole, split = costs_of(scheme), costs_of(scheme, split_blocks=True)
    assert split.num_layers == 24
    for wholes, halves in (
        (whole.layer_costs(step, 3), split.layer_costs(step, 3)),
        (whole.expected(step), split.expected(step)),
        (whole.dense(), split.dense()),
    ):
        for block, attention, mlp in zip(wholes, halves[::2], halves[1::2], strict=True):
            assert total(attention) + total(mlp) == pytest.approx(total(block), rel=1e-12)
            assert min(total(attention), total(mlp)) > 0
            assert attention.trains == mlp.trains == block.trains
            assert attention.gradient_bytes + mlp.gradient_bytes == block.gradient_bytes
            assert attention.activation_bytes + mlp.activation_bytes == block.activation_bytes
            assert attention.output_bytes == mlp.output_bytes == block.output_bytes
    assert sum(split.state_bytes(step)) == sum(whole.state_bytes(step)) == 12 * 480
    pairs = zip(split.num_parameters(step)[::2], split.num_parameters(step)[1::2], strict=True)
    assert [one + other for one, other in pairs] == list(whole.num_parameters(step))


def test_the_scheme_changes_the_half_that_it_is_about() -> None:
    experts, sparse = costs_of("moe", split_blocks=True), costs_of("sparse_attention", split_blocks=True)

    attention = {round(layer.forward_s, 9) for layer in experts.layer_costs(100, 0)[::2]}
    experts_s = {layer.forward_s for layer in experts.layer_costs(100, 0)[1::2]}
    assert attention == {0.35}
    assert len(experts_s) == 12

    assert {round(layer.forward_s, 9) for layer in sparse.layer_costs(5000, 0)[1::2]} == {0.2}
    assert len({layer.forward_s for layer in sparse.layer_costs(5000, 0)[::2]}) == 12


@SCHEMES
def test_what_is_expected_is_the_mean_of_what_is_drawn(scheme: str) -> None:
    costs = costs_of(scheme)
    draws = [costs.layer_costs(2500, replica) for replica in range(2000)]
    for layer, expected in enumerate(costs.expected(2500)):
        mean = sum(draw[layer].forward_s for draw in draws) / len(draws)
        assert mean == pytest.approx(expected.forward_s, rel=0.05)
    if scheme in ("moe", "mod"):  # one draw alone would not do
        assert draws[0][1].forward_s != pytest.approx(costs.expected(2500)[1].forward_s, rel=0.05)


def test_replicas_and_seeds_draw_apart() -> None:
    costs, again, other = costs_of("moe"), costs_of("moe"), costs_of("moe", seed=1)
    assert costs.layer_costs(10, 2) == again.layer_costs(10, 2)
    assert costs.layer_costs(10, 2) != costs.layer_costs(10, 3)
    assert costs.layer_costs(10, 2) != other.layer_costs(10, 2)


def test_callbacks_that_change_the_model_say_so_and_when() -> None:
    pruning, experts = costs_of("pruning"), costs_of("moe")
    assert not pruning.changed(3000, 3999)
    assert pruning.changed(3999, 4000)
    assert pruning.steps_until_change(3400) == 600
    assert pruning.steps_until_change(7000) == float("inf")
    assert not experts.changed(0, 5000)
    assert experts.steps_until_change(0) is None
    frozen = costs_of("freezing")
    for step in (0, 1000, 2345, 5999, 6000):
        steps = frozen.steps_until_change(step)
        if steps == float("inf"):
            assert step >= 5990
        else:
            assert frozen.changed(step, step + steps)  # type: ignore[arg-type]
            assert not frozen.changed(step, step + steps - 1)  # type: ignore[arg-type]


def test_only_what_is_left_after_pruning_counts_as_parameters() -> None:
    assert list(costs_of("pruning").num_parameters(0)) == [30] * 12
    assert sum(costs_of("pruning").num_parameters(8000)) == pytest.approx(0.1 * 12 * 30, abs=6)
    assert list(costs_of("freezing").num_parameters(8000)) == [30] * 12


def test_periods_cover_the_training() -> None:
    periods = costs_of("moe", num_steps=1100, every_n_steps=500).periods
    assert periods == [Period(0, 500, 250), Period(500, 1000, 750), Period(1000, 1100, 1050)]


def recorded(*steps: int) -> RecordedCosts:
    entries: list[RecordedStep] = [replace(STEP, step=step, step_s=float(step)) for step in steps]
    loads = [replace(load, forward_s=load.forward_s * 2) for load in STEP.loads]
    entries[-1] = replace(entries[-1], loads=tuple(loads))
    return RecordedCosts(Recording({}, tuple(entries)), output_bytes=5)


def test_a_recorded_step_stands_for_those_since_the_one_before() -> None:
    costs = recorded(10, 25, 60)
    assert costs.periods == [Period(0, 10, 10), Period(10, 25, 25), Period(25, 60, 60)]
    first, last = STEP.layer_costs(5), costs.recording.steps[-1].layer_costs(5)
    assert costs.dense() == first
    assert costs.layer_costs(25, 7) == costs.expected(25) == first
    assert costs.layer_costs(60, 0) == last != first
    assert list(costs.state_bytes(25)) == [load.state_bytes for load in STEP.loads]
    assert not costs.between
