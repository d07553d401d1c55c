"""What ranks tell each other before a move: the layers' costs, and that all have come to the same plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from torch import Tensor
from torch.optim import Optimizer

from lightning_dynmo._torch import tree_leaves
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
    state_factors = [_state_factor(chain, optimizer) for optimizer in optimizers]
    mine = {index: _load(chain, index, timer, optimizers) for index in chain.owned}
    to_come = {index: _without_state(chain, index, optimizers) for index in chain.owned}
    loads: dict[int, LayerLoad] = {}
    unstepped: dict[int, list[int]] = {}
    busy_s, step_s, factors = [], [], []
    for part, waiting, factor, busy, step in groups.gather(
        (mine, to_come, state_factors, timer.busy_s(), timer.step_s())
    ):
        loads.update(part)
        unstepped.update(waiting)
        factors.append(factor)
        busy_s.append(busy)
        step_s.append(step)
    largest = [max(column) for column in zip(*factors, strict=True)]
    for index, load in loads.items():
        state = sum(round(factor * size) for factor, size in zip(largest, unstepped[index], strict=True))
        loads[index] = replace(load, layer_bytes=load.layer_bytes + state)
    costs = tuple(loads[index] for index in range(len(chain)))
    profile = Profile(costs, tuple(busy_s), max(step_s), assignment, num_microbatches)
    return _slowest(groups.gather_replicas(profile))


def _load(chain: LayerChain, index: int, timer: LayerTimer, optimizers: Sequence[Optimizer]) -> LayerLoad:
    state_bytes = pack(chain, index, optimizers).manifest.num_bytes
    gradients = sum(parameter.nbytes for parameter in chain.parameters(index) if parameter.requires_grad)
    return LayerLoad(
        forward_s=timer.forward_s(index),
        backward_s=timer.backward_s(index),
        num_parameters=sum(parameter.numel() for parameter in chain.parameters(index)),
        state_bytes=state_bytes,
        num_tokens=timer.num_tokens(index),
        layer_bytes=state_bytes + gradients,
        activation_bytes=timer.activation_bytes(index),
    )


def _state_factor(chain: LayerChain, optimizer: Optimizer) -> float:
    """Returns the bytes of state that an optimizer keeps per byte of a parameter, as far as it has made a step."""
    stepped = [parameter for parameter in chain.owned_parameters() if parameter in optimizer.state]
    leaves = [leaf for parameter in stepped for leaf in tree_leaves(dict(optimizer.state[parameter]))]
    held = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))
    return held / max(sum(parameter.nbytes for parameter in stepped), 1)


def _without_state(chain: LayerChain, index: int, optimizers: Sequence[Optimizer]) -> list[int]:
    """Returns, for each optimizer, the bytes of a layer's parameters that it will yet make state for."""
    own = {parameter for parameter in chain.parameters(index) if parameter.requires_grad}
    return [
        sum(
            parameter.nbytes
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter in own and parameter not in optimizer.state
        )
        for optimizer in optimizers
    ]


def _slowest(profiles: Sequence[Profile]) -> Profile:
    """Reduces the replicas' profiles by max, so that all replicas plan from the same loads."""
    names = [field.name for field in fields(LayerLoad)]
    loads = [
        LayerLoad(**{name: max(getattr(load, name) for load in layer) for name in names})
        for layer in zip(*(profile.loads for profile in profiles), strict=True)
    ]
    busy_s = tuple(map(max, *(profile.busy_s for profile in profiles))) if len(profiles) > 1 else profiles[0].busy_s
    return replace(profiles[0], loads=tuple(loads), busy_s=busy_s, step_s=max(profile.step_s for profile in profiles))


def agree_on(plan: Assignment, reason: str, groups: PipelineGroups) -> None:
    """Checks that every rank has come to the same plan.

    Args:
        plan: The plan of this rank.
        reason: Why it does what with it.
        groups: Process groups of this rank.

    Raises:
        RuntimeError: If not, on every rank; a balancer is then not a pure function of the loads.
    """
    mine = (plan.balance, reason)
    plans = [plan for replica in groups.gather_replicas(groups.gather(mine)) for plan in replica]
    if len(set(plans)) > 1:
        differ = len({balance for balance, _ in plans}) > 1
        listed = "; ".join(
            f"rank {rank}: {list(balance) if differ else why}" for rank, (balance, why) in enumerate(plans)
        )
        what, cause = ("plans", "A balancer") if differ else ("decisions", "steps_until_change() of a callback")
        raise RuntimeError(
            f"The ranks came to different {what} from the same loads ({listed}), so nothing was moved. {cause} must "
            "be a pure function of its arguments: no randomness, clocks, ranks or state of its own."
        )
