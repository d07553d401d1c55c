"""The contract of every balancer."""

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Sequence

from lightning_dynmo.planning.assignment import Assignment
from lightning_dynmo.planning.loads import non_negative

# Sums of byte counts stay exact in 64-bit integers, with room for a sentinel above them.
_MAX_TOTAL_BYTES = 2**60


class Balancer(ABC):
    """Decides which stage runs which layers.

    Every rank calls the balancer with the same gathered loads and compares the answer with its peers, so a balancer
    is pure and deterministic: no clocks, no random numbers, no state that one call leaves for the next.
    """

    @abstractmethod
    def balance(
        self,
        loads: Sequence[float],
        current: Assignment,
        *,
        state_bytes: Sequence[int] | None = None,
        memory_bytes: Sequence[int] | None = None,
        memory_cap_bytes: int | None = None,
        rank_speeds: Sequence[float] | None = None,
    ) -> Assignment:
        """Returns the assignment to use from now on, with as many stages as ``current``.

        Args:
            loads: Cost of each layer, ``[L]``, any unit.
            current: The assignment that runs now.
            state_bytes: Bytes that travel when a layer moves, ``[L]``. Default: 1 each, so that layers are counted.
            memory_bytes: Bytes a layer takes on the rank that runs it, ``[L]``.
            memory_cap_bytes: Most bytes the layers of one stage may take together. Default: no limit.
            rank_speeds: Speed of the rank that runs each stage, ``[S]``, relative to one another: a stage takes
                load / speed. Default: all equal.

        Raises:
            ValueError: If an argument does not fit the model, or no assignment respects ``memory_cap_bytes``.
        """

    @staticmethod
    def check_inputs(
        loads: Sequence[float],
        current: Assignment,
        *,
        state_bytes: Sequence[int] | None = None,
        memory_bytes: Sequence[int] | None = None,
        memory_cap_bytes: int | None = None,
        rank_speeds: Sequence[float] | None = None,
    ) -> None:
        """Checks the arguments of :meth:`balance`; the first thing each balancer does.

        Raises:
            ValueError: If a length does not fit ``current``, a number is out of range, or a cap comes without the
                sizes it applies to.
        """
        num_layers, num_stages = current.num_layers, current.num_stages
        _check_length("loads", loads, num_layers, "layer")
        non_negative(loads, "the load of layer")
        for name, sizes in (("state_bytes", state_bytes), ("memory_bytes", memory_bytes)):
            if sizes is not None:
                _check_length(name, sizes, num_layers, "layer")
                _check_bytes(name, sizes)
        if memory_cap_bytes is not None:
            if memory_bytes is None:
                raise ValueError(
                    f"memory_cap_bytes={memory_cap_bytes} needs memory_bytes, the bytes of each layer, got None. "
                    f"Pass both, or memory_cap_bytes=None for no limit."
                )
            _check_bytes("memory_cap_bytes", [memory_cap_bytes], limit=None)
        if rank_speeds is not None:
            _check_length("rank_speeds", rank_speeds, num_stages, "stage")
            for stage, speed in enumerate(rank_speeds):
                if not (math.isfinite(speed) and speed > 0):
                    raise ValueError(
                        f"Expected the speed of stage {stage} to be finite and positive, got {speed}. "
                        f"Use 1.0 for a rank of usual speed."
                    )


def _check_length(name: str, values: Sequence[float], expected: int, owner: str) -> None:
    if len(values) != expected:
        raise ValueError(
            f"Expected {name} to have one value per {owner}, {expected} in all, got {len(values)}. "
            f"Pass the values of the whole pipeline, or an assignment of the same size."
        )


def _check_bytes(name: str, sizes: Sequence[int], limit: int | None = _MAX_TOTAL_BYTES) -> None:
    for index, size in enumerate(sizes):
        try:
            valid = operator.index(size) >= 0
        except TypeError:
            valid = False
        if not valid:
            raise ValueError(
                f"Expected {name} to hold whole, non-negative numbers of bytes, got {size} at index {index}. "
                f"Round it up, or pass 0."
            )
    if limit is not None and sum(sizes) > limit:
        raise ValueError(
            f"Expected {name} to sum to at most 2**60 bytes, got {sum(sizes)}. Check that the unit is bytes."
        )
