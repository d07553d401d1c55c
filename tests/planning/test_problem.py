"""What follows from a problem: times, bytes and memory of ranks."""

import numpy as np

from lightning_dynmo.planning import Assignment, BalancingProblem, DiffusionBalancer, MemoryLimits, PartitionBalancer

IN_V = BalancingProblem(
    [1.0, 2.0, 3.0, 4.0, 5.0],
    Assignment((1, 1, 1, 2)),
    placement=[0, 1, 1, 0],
    state_bytes=[10, 20, 30, 40, 50],
    rank_speeds=[2.0, 1.0],
    stage_costs=[0.0, 0.5, 0.0, 1.0],
    memory=MemoryLimits([100] * 5, [1, 2, 3, 4, 5], in_flight=[4, 3, 2, 1], cap_bytes=[320, 212]),
)


def test_a_rank_takes_what_its_stages_take() -> None:
    assert IN_V.num_ranks == 2
    assert IN_V.rank_times(IN_V.current) == ((1 + 4 + 5 + 1) / 2, 2 + 0.5 + 3)
    assert IN_V.bottleneck(IN_V.current) == 5.5


def test_only_bytes_that_change_their_rank_are_moved() -> None:
    # Layer 2 goes from stage 2 to stage 1, both on rank 1; layer 3 from stage 3 on rank 0 to stage 2 on rank 1.
    assert IN_V.moved_bytes(Assignment((1, 2, 1, 1))) == 40
    assert IN_V.moved_bytes(IN_V.current) == 0


def test_memory_counts_what_is_in_flight_on_each_stage() -> None:
    assert IN_V.rank_bytes(IN_V.current) == (100 + 4 * 1 + 200 + 4 + 5, 100 + 3 * 2 + 100 + 2 * 3)
    assert IN_V.fits(IN_V.current)
    assert not IN_V.fits(Assignment((1, 2, 1, 1)))


def test_arrays_are_as_good_as_lists() -> None:
    given = BalancingProblem(
        np.array([1.0, 2.0, 3.0, 4.0]),  # type: ignore[arg-type]
        Assignment((2, 2)),
        state_bytes=np.array([1, 2, 3, 4]),  # type: ignore[arg-type]
        rank_speeds=np.array([1.0, 2.0]),  # type: ignore[arg-type]
        stage_costs=np.array([0.5, 0.0]),  # type: ignore[arg-type]
    )
    listed = BalancingProblem([1.0, 2.0, 3.0, 4.0], Assignment((2, 2)), None, [1, 2, 3, 4], [1.0, 2.0], [0.5, 0.0])
    for balancer in (PartitionBalancer(), DiffusionBalancer()):
        assert balancer.balance(given) == balancer.balance(listed)
    assert given.moved_bytes(Assignment((1, 3))) == listed.moved_bytes(Assignment((1, 3))) == 2
