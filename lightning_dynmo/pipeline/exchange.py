"""What ranks tell each other before a move: the layers' costs, and that all have come to the same plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch.optim import Optimizer

from lightning_dynmo.ownership import LayerChain
from lightning_dynmo.pipeline.groups import PipelineGroups
from lightning_dynmo.pipeline.migration import pack
from lightning_dynmo.planning import Assignment, LayerLoad, bubble_ratio
from lightning_dynmo.profiling import LayerTimer


@dataclass(frozen=True, slots=True)
class Profile:
    """One measured iteration, the same on every rank; of replicas, the slowest counts.

    Attributes:
        loads: Cost of each layer.
        busy_s: Seconds in which each rank of a pipeline worked.
        step_s: Seconds of the iteration, of the slowest rank.
        assignment: Which stage ran which layers.
        num_microbatches: Microbatches of the iteration.
    """

    loads: tuple[LayerLoad, ...]
    busy_s: tuple[float, ...]
    step_s: float
    assignment: Assignment
    num_microbatches: int

    @property
    def wait_s(self) -> tuple[float, ...]:
        """Seconds in which each rank waited for others."""
        return tuple(max(self.step_s - busy, 0.0) for busy in self.busy_s)

    @property
    def bubble_ratio(self) -> float:
        """Idle over total time of the ranks, in ``[0, 1]``."""
        return bubble_ratio(self.busy_s, self.step_s)


def gather_profile(
    chain: LayerChain,
    timer: LayerTimer,
    groups: PipelineGroups,
    optimizers: Sequence[Optimizer],
    assignment: Assignment,
    num_microbatches: int,
) -> Profile:
    """Gathers what each rank measured of its layers in one iteration; every rank returns the same."""
    mine = {
        index: LayerLoad(
            forward_s=timer.forward_s(index),
            backward_s=timer.backward_s(index),
            num_parameters=chain.sizes[index].num_parameters,
            state_bytes=pack(chain, index, optimizers).manifest.num_bytes,
        )
        for index in chain.owned
    }
    loads: dict[int, LayerLoad] = {}
    busy_s, step_s = [], []
    for part, busy, step in groups.gather((mine, timer.busy_s(), timer.step_s())):
        loads.update(part)
        busy_s.append(busy)
        step_s.append(step)
    costs = tuple(loads[index] for index in range(len(chain)))
    profile = Profile(costs, tuple(busy_s), max(step_s), assignment, num_microbatches)
    return _slowest(groups.gather_replicas(profile))


def _slowest(profiles: Sequence[Profile]) -> Profile:
    """Reduces the replicas' profiles by max, so that all replicas plan from the same loads."""
    loads = [
        LayerLoad(
            forward_s=max(load.forward_s for load in layer),
            backward_s=max(load.backward_s for load in layer),
            num_parameters=max(load.num_parameters for load in layer),
            state_bytes=max(load.state_bytes for load in layer),
        )
        for layer in zip(*(profile.loads for profile in profiles), strict=True)
    ]
    busy_s = tuple(map(max, *(profile.busy_s for profile in profiles))) if len(profiles) > 1 else profiles[0].busy_s
    return replace(profiles[0], loads=tuple(loads), busy_s=busy_s, step_s=max(profile.step_s for profile in profiles))


def agree_on(plan: Assignment, groups: PipelineGroups) -> None:
    """Checks that every rank has come to the same plan.

    Raises:
        RuntimeError: If not, on every rank; a balancer is then not a pure function of the loads.
    """
    plans = [balance for replica in groups.gather_replicas(groups.gather(plan.balance)) for balance in replica]
    if len(set(plans)) > 1:
        listed = "; ".join(f"rank {rank}: {list(balance)}" for rank, balance in enumerate(plans))
        raise RuntimeError(
            f"The ranks came to different plans from the same loads ({listed}), so nothing was moved. A balancer must "
            "be a pure function of its arguments: no randomness, clocks or state of its own."
        )
