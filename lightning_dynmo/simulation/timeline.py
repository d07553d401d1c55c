"""How one training step of a pipeline goes: what each rank does when, how long it idles and what it holds."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_dynmo.planning import bubble_ratio
from lightning_dynmo.planning.loads import non_negative
from lightning_dynmo.simulation.actions import Order
from lightning_dynmo.simulation.costs import AT_ONCE, Network, StageCost
from lightning_dynmo.simulation.execution import Execution, Span, execute
from lightning_dynmo.simulation.memory import in_flight, peak_activation_bytes


@dataclass(frozen=True, slots=True)
class Timeline:
    """One training step of one pipeline.

    Attributes:
        spans: All that takes time, those of each rank in order.
        makespan_s: Seconds from the begin of the step to the end of the last rank.
        busy_s: Seconds that each rank computes, ``[R]``; a sum over replicas goes on beside that.
        peak_activation_bytes: Most bytes of activations that each rank holds at a time, ``[R]``.
        peak_in_flight: Most microbatches whose activations each stage holds at a time, ``[S]``.
    """

    spans: tuple[Span, ...]
    makespan_s: float
    busy_s: tuple[float, ...]
    peak_activation_bytes: tuple[int, ...]
    peak_in_flight: tuple[int, ...]

    @property
    def idle_s(self) -> tuple[float, ...]:
        """Seconds of the step in which each rank does not compute, ``[R]``."""
        return tuple(max(self.makespan_s - busy, 0.0) for busy in self.busy_s)

    @property
    def bubble_ratio(self) -> float:
        """Share of the step in which ranks idle, in ``[0, 1]``; 0 where nothing takes any time."""
        return bubble_ratio(self.busy_s, self.makespan_s) if self.makespan_s else 0.0


def simulate(
    order: Order, placement: Sequence[int], stages: Sequence[StageCost], network: Network = AT_ONCE
) -> Timeline:
    """Returns the step of one pipeline. Arguments and errors as in `simulate_replicas`."""
    return simulate_replicas(order, placement, [stages], network)[0]


def simulate_replicas(
    order: Order, placement: Sequence[int], replicas: Sequence[Sequence[StageCost]], network: Network = AT_ONCE
) -> list[Timeline]:
    """Returns the steps of pipelines that train the same model on different data.

    They wait for each other where they add up gradients: the sum of a stage begins once it has all its gradients in
    all replicas, behind the sums that its ranks have begun before, and goes on beside the rest of the schedule. A ring
    of R replicas sends each byte 2 (R - 1) / R times. A rank updates its parameters once all that it does before is
    done.

    Args:
        order: What each rank does; the same in every replica.
        placement: The rank of each stage, ``[S]``.
        replicas: Costs of the stages, ``[S]``, in each replica.
        network: How long messages take.

    Raises:
        ValueError: If the numbers of ranks and stages do not fit, or a time is negative or not finite.
        RuntimeError: If a rank waits for what never comes.
    """
    for stages in replicas:
        _check(order, placement, stages)
    executions = [execute(order, placement, stages, network) for stages in replicas]
    sums = _sums(executions, placement, replicas, network)
    held = in_flight(order, len(placement))
    return [
        _timeline(execution, sums, placement, stages, peak_activation_bytes(order, stages), held)
        for execution, stages in zip(executions, replicas, strict=True)
    ]


def _sums(
    executions: Sequence[Execution],
    placement: Sequence[int],
    replicas: Sequence[Sequence[StageCost]],
    network: Network,
) -> list[Span]:
    """Returns the sums of gradients, in the order in which ranks begin them."""
    ready_s = [max(times) for times in zip(*(execution.gradients_s for execution in executions), strict=True)]
    share = 2 * (len(replicas) - 1) / len(replicas)
    free_s = [0.0] * len(executions[0].ended_s)
    sums = []
    # Each rank begins its sums in the order of its schedule, which is also that of the times.
    for stage in sorted(range(len(placement)), key=lambda stage: executions[0].gradients_s[stage]):
        rank, num_bytes = placement[stage], max(stages[stage].gradient_bytes for stages in replicas)
        begin_s = max(ready_s[stage], free_s[rank])
        free_s[rank] = begin_s + share * num_bytes / network.replica_bytes_per_s
        if free_s[rank] > begin_s:
            sums.append(Span(rank, stage, "gradient_sum", None, begin_s, free_s[rank]))
    return sums


def _timeline(
    execution: Execution,
    sums: Sequence[Span],
    placement: Sequence[int],
    stages: Sequence[StageCost],
    peak_bytes: tuple[int, ...],
    peak_in_flight: tuple[int, ...],
) -> Timeline:
    ended_s = list(execution.ended_s)
    for span in sums:
        ended_s[span.rank] = max(ended_s[span.rank], span.end_s)
    updates = []
    for stage, rank in enumerate(placement):
        begin_s = ended_s[rank]
        ended_s[rank] += stages[stage].update_s
        if ended_s[rank] > begin_s:
            updates.append(Span(rank, stage, "update", None, begin_s, ended_s[rank]))
    computed: list[list[float]] = [[] for _ in ended_s]
    for span in (*execution.spans, *updates):
        computed[span.rank].append(span.end_s - span.begin_s)
    spans = sorted((*execution.spans, *sums, *updates), key=lambda span: span.rank)
    return Timeline(tuple(spans), max(ended_s), tuple(map(math.fsum, computed)), peak_bytes, peak_in_flight)


def _check(order: Order, placement: Sequence[int], stages: Sequence[StageCost]) -> None:
    if len(stages) != len(placement):
        raise ValueError(
            f"Expected one cost per stage, {len(placement)} in all, got {len(stages)}. Pass those of all stages."
        )
    if set(order) != set(placement) or set(order) != set(range(len(order))):
        raise ValueError(
            f"Expected actions for ranks 0 to {max(placement)}, which the placement names, got those of "
            f"{sorted(order)}. Make both for the same number of ranks."
        )
    for name in ("forward_s", "input_gradient_s", "weight_gradient_s", "update_s"):
        non_negative([getattr(cost, name) for cost in stages], f"{name} of stage")
