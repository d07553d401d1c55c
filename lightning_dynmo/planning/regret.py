"""What it has cost so far not to have moved."""

from dataclasses import dataclass


@dataclass(slots=True)
class Regret:
    """Adds up what a better split would have saved, as one who rents skis adds up the rent.

    Nobody knows how long a gain will last. Who buys skis once the rent has reached their price pays at most twice what
    the best decision in hindsight would have cost, however long the winter is. So layers move once not having moved has
    cost as much as the move. Gains below the minimum gap count against it, so that gains that come and go, as in models
    whose loads are drawn anew at every step, add up to nothing.

    Where gains scatter, a sum of them that reaches the price may be chance. How far the gain of a plan falls short of
    what it had promised says how much they scatter; chance alone then hardly ever reaches `noise_s`.

    Args:
        weight: What a new measurement counts for in the scatter, in ``(0, 1]``.
    """

    weight: float
    total_s: float = 0.0
    _scatter: float = 0.0
    _count: int = 0

    def add(self, gain: float, promised: float | None, pace_s: float, steps: int, min_gain: float) -> None:
        """Takes in what the plan made before a measurement would have gained in it.

        Args:
            gain: As a share of the time of the slowest rank.
            promised: What was predicted when the plan was made; None if the model has changed since.
            pace_s: Seconds per step of the slowest rank.
            steps: Steps that the measurement stands for.
            min_gain: The minimum gap.
        """
        counted = gain if gain > min_gain else gain - min_gain
        self.total_s = max(self.total_s + counted * pace_s * steps, 0.0)
        if promised is None:
            return
        self._count += 1
        self._scatter += max(self.weight, 1 / self._count) * (min(gain - promised, 0.0) ** 2 - self._scatter)

    def noise_s(self, pace_s: float, min_gain: float) -> float:
        """Returns what the sum may reach by chance: a random walk with a drift of -d stays below its variance / d."""
        return 3 * self._scatter / max(min_gain, 0.01) * pace_s

    def restart(self) -> None:
        """Begins anew after a move."""
        self.total_s = 0.0
