"""What a balancer is asked: layers with their costs, the split that runs now, and the ranks that there are."""

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_dynmo.planning.assignment import Assignment
from lightning_dynmo.planning.loads import non_negative

# Sums of byte counts stay exact in 64-bit integers, with room for a sentinel above them.
_MAX_TOTAL_BYTES = 2**60


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    """What layers take in memory, and how much each rank has.

    A stage holds its layers' parameters, gradients and optimizer state, and the activations of the microbatches that
    are in flight: with 1F1B those of min(S - s, M) microbatches on stage s.

    Args:
        layer_bytes: Parameters, buffers, gradients and optimizer state of each layer, ``[L]``.
        activation_bytes: What each layer keeps of one microbatch until its backward, ``[L]``.
        in_flight: Microbatches whose activations each stage holds at most, ``[S]``.
        cap_bytes: Most bytes that each rank may hold, ``[R]``.
    """

    layer_bytes: Sequence[int]
    activation_bytes: Sequence[int]
    in_flight: Sequence[int]
    cap_bytes: Sequence[int]

    def stage_bytes(self, stage: int, layers: range) -> int:
        """Returns the bytes of a stage that runs the given layers."""
        held = self.in_flight[stage]
        return sum(self.layer_bytes[layer] + held * self.activation_bytes[layer] for layer in layers)


@dataclass(frozen=True, slots=True)
class BalancingProblem:
    """Which stage should run which layers?

    A rank takes (loads of its stages' layers + fixed costs of its stages) / speed, and the slowest sets the pace.

    Args:
        loads: Cost of each layer, ``[L]``, any unit.
        current: The assignment that runs now. A balancer's answer has as many layers and stages.
        placement: The rank that runs each stage, ``[S]``; ranks are numbered from 0. Default: stage s on rank s.
        state_bytes: Bytes that travel when a layer moves to another rank, ``[L]``. Default: 1 each, so that layers are
            counted.
        rank_speeds: Speed of each rank, ``[R]``, relative to one another. Default: all equal.
        stage_costs: What each stage costs whatever its layers, ``[S]``, in the unit of the loads: such as the loss on
            the last one. Default: nothing.
        memory: What has to fit where. Default: no limit.

    Raises:
        ValueError: If a length does not fit, or a number is out of range.
    """

    loads: Sequence[float]
    current: Assignment
    placement: Sequence[int] | None = None
    state_bytes: Sequence[int] | None = None
    rank_speeds: Sequence[float] | None = None
    stage_costs: Sequence[float] | None = None
    memory: MemoryLimits | None = None

    def __post_init__(self) -> None:
        _check_length("loads", self.loads, self.num_layers, "layer")
        non_negative(self.loads, "the load of layer")
        if self.placement is not None:
            _check_length("placement", self.placement, self.num_stages, "stage")
            if set(self.placement) != set(range(self.num_ranks)):
                raise ValueError(
                    f"Expected every rank from 0 to {self.num_ranks - 1} in placement, got {list(self.placement)}. "
                    f"Number the ranks without gaps, for example [0, 1, 1, 0]."
                )
        if self.state_bytes is not None:
            _check_length("state_bytes", self.state_bytes, self.num_layers, "layer")
            _check_counts("state_bytes", self.state_bytes, _MAX_TOTAL_BYTES)
        if self.rank_speeds is not None:
            _check_length("rank_speeds", self.rank_speeds, self.num_ranks, "rank")
            _check_speeds(self.rank_speeds)
        if self.stage_costs is not None:
            _check_length("stage_costs", self.stage_costs, self.num_stages, "stage")
            non_negative(self.stage_costs, "the fixed cost of stage")
        if self.memory is not None:
            self._check_memory(self.memory)

    def _check_memory(self, memory: MemoryLimits) -> None:
        for name, values in (("layer_bytes", memory.layer_bytes), ("activation_bytes", memory.activation_bytes)):
            _check_length(name, values, self.num_layers, "layer")
            _check_counts(name, values, _MAX_TOTAL_BYTES)
        _check_length("in_flight", memory.in_flight, self.num_stages, "stage")
        _check_counts("in_flight", memory.in_flight, None)
        _check_length("cap_bytes", memory.cap_bytes, self.num_ranks, "rank")
        _check_counts("cap_bytes", memory.cap_bytes, None)
        held = max(memory.in_flight) * sum(memory.activation_bytes) + sum(memory.layer_bytes)
        if held > _MAX_TOTAL_BYTES:
            raise ValueError(
                f"Expected layers and activations in flight to take at most 2**60 bytes, got {held}. Check that the "
                f"unit is bytes."
            )

    @property
    def num_layers(self) -> int:
        """Number of layers L."""
        return self.current.num_layers

    @property
    def num_stages(self) -> int:
        """Number of stages S."""
        return self.current.num_stages

    @property
    def num_ranks(self) -> int:
        """Number of ranks R."""
        return self.num_stages if self.placement is None else max(self.placement) + 1

    @property
    def ranks(self) -> tuple[int, ...]:
        """The rank of each stage, ``[S]``."""
        return tuple(range(self.num_stages)) if self.placement is None else tuple(self.placement)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes that travel when a layer moves, ``[L]``."""
        return (1,) * self.num_layers if self.state_bytes is None else tuple(self.state_bytes)

    @property
    def speeds(self) -> tuple[float, ...]:
        """Speed of each rank, ``[R]``."""
        return (1.0,) * self.num_ranks if self.rank_speeds is None else tuple(self.rank_speeds)

    @property
    def fixed_costs(self) -> tuple[float, ...]:
        """What each stage costs whatever its layers, ``[S]``."""
        return (0.0,) * self.num_stages if self.stage_costs is None else tuple(self.stage_costs)

    def with_loads(self, loads: Sequence[float]) -> "BalancingProblem":
        """Returns the same problem with other costs of the layers."""
        return replace(self, loads=loads)

    def rank_times(self, assignment: Assignment) -> tuple[float, ...]:
        """Returns the time that each rank takes under an assignment, ``[R]``, in the unit of the loads."""
        parts: list[list[float]] = [[] for _ in self.speeds]
        for load, cost, rank in zip(assignment.stage_loads(self.loads), self.fixed_costs, self.ranks, strict=True):
            parts[rank] += [load, cost]
        return tuple(math.fsum(part) / speed for part, speed in zip(parts, self.speeds, strict=True))

    def bottleneck(self, assignment: Assignment) -> float:
        """Returns the time of the slowest rank under an assignment."""
        return max(self.rank_times(assignment))

    def moved_bytes(self, assignment: Assignment) -> int:
        """Returns the bytes of all layers that would change their rank."""
        ranks = self.ranks
        return sum(
            size
            for layer, size in enumerate(self.sizes)
            if ranks[assignment.stage_of(layer)] != ranks[self.current.stage_of(layer)]
        )

    def rank_bytes(self, assignment: Assignment) -> tuple[int, ...]:
        """Returns the bytes that each rank would hold, ``[R]``; zeros where no memory is given."""
        held = [0] * self.num_ranks
        if self.memory is not None:
            for stage, rank in enumerate(self.ranks):
                held[rank] += self.memory.stage_bytes(stage, assignment.layers_of(stage))
        return tuple(held)

    def fits(self, assignment: Assignment) -> bool:
        """Returns whether every rank has the memory that an assignment asks for."""
        if self.memory is None:
            return True
        return all(held <= cap for held, cap in zip(self.rank_bytes(assignment), self.memory.cap_bytes, strict=True))


def _check_length(name: str, values: Sequence[float], expected: int, owner: str) -> None:
    if len(values) != expected:
        raise ValueError(
            f"Expected {name} to have one value per {owner}, {expected} in all, got {len(values)}. "
            f"Pass the values of the whole pipeline, or an assignment of the same size."
        )


def _check_counts(name: str, values: Sequence[int], most: int | None) -> None:
    for index, value in enumerate(values):
        try:
            valid = operator.index(value) >= 0
        except TypeError:
            valid = False
        if not valid:
            raise ValueError(
                f"Expected {name} to hold whole, non-negative numbers, got {value} at index {index}. "
                f"Round it up, or pass 0."
            )
    if most is not None and sum(values) > most:
        raise ValueError(f"Expected {name} to sum to at most 2**60, got {sum(values)}. Check that the unit is bytes.")


def _check_speeds(speeds: Sequence[float]) -> None:
    for rank, speed in enumerate(speeds):
        if not (math.isfinite(speed) and speed > 0):
            raise ValueError(
                f"Expected the speed of rank {rank} to be finite and positive, got {speed}. "
                f"Use 1.0 for a rank of usual speed."
            )
