"""Has a move brought what it promised? Measured, it is compared with the split that it replaced."""

import math
from dataclasses import dataclass, field
from statistics import median_high

from lightning_dynmo.planning.assignment import Assignment
from lightning_dynmo.planning.problem import BalancingProblem

SETTLED = 2
"""Steps after a move until one is as any other."""


@dataclass(slots=True)
class Trial:
    """A move that is still to be confirmed.

    Loads change while a model trains, so the new split is compared with what the old one would cost now: layers that
    stayed count as they are measured now, and layers that moved as they were before, scaled by how those that stayed
    have changed since.

    Args:
        before: The split that ran until the move.
        after: The split that runs since.
        seconds: Seconds per step of each layer before the move, ``[L]``.
        promised: Gain that was predicted, as a share of the time of the slowest rank.
        step: Step of the last measurement; the next step is not looked at, since stages are built anew in it.
    """

    before: Assignment
    after: Assignment
    seconds: tuple[float, ...]
    promised: float
    step: int
    gains: list[float] = field(default_factory=list)
    lost_s: float = 0.0

    def observe(self, problem: BalancingProblem, step: int) -> None:
        """Takes in a measurement under the new split.

        Args:
            problem: With seconds of each layer as loads.
            step: Step that was measured.
        """
        if not self.gains and step < self.step + SETTLED:
            return
        now_s = problem.bottleneck(self.after)
        then_s = problem.with_loads(self._as_before(problem)).bottleneck(self.before)
        self.gains.append(1.0 - now_s / then_s if then_s > 0 else 0.0)
        self.lost_s += (now_s - then_s) * max(step - self.step, 1)
        self.step = step

    @property
    def gain(self) -> float:
        """The measured gain, as a share of what the old split would take now.

        Of two measurements the better one, of three the middle one: whatever disturbs a single measurement makes it
        slower.
        """
        return median_high(self.gains) if self.gains else 0.0

    @property
    def is_kept(self) -> bool:
        """Whether the gain is at least half of what was promised."""
        return bool(self.gains) and self.gain >= self.promised / 2

    def is_worse(self, min_gain: float) -> bool:
        """Whether at least two measurements say that the old split was better, by more than `min_gain`."""
        return len(self.gains) >= 2 and self.gain < -min_gain

    def is_over(self, min_gain: float) -> bool:
        """Whether further measurements would change nothing."""
        return self.is_kept or (len(self.gains) >= 3 and not self.is_worse(min_gain))

    def _as_before(self, problem: BalancingProblem) -> list[float]:
        ranks = problem.ranks
        stayed = [
            ranks[self.before.stage_of(layer)] == ranks[self.after.stage_of(layer)]
            for layer in range(problem.num_layers)
        ]
        pairs = list(zip(problem.loads, self.seconds, stayed, strict=True))
        now = math.fsum(now for now, _, stays in pairs if stays)
        then = math.fsum(then for _, then, stays in pairs if stays)
        change = now / then if then > 0 else 1.0
        return [now if stays else then * change for now, then, stays in pairs]
