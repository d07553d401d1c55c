"""How many weights are pruned at which step."""

import math
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, slots=True)
class CubicSparsity:
    """The schedule of gradual pruning: fast at first, where much is superfluous, then ever slower.

    At step t the share S_t = S_f + (S_i - S_f) (1 - (t - t_0) / (n dt))^3 of the weights is gone (eq. 3 of the paper),
    for t = t_0, t_0 + dt, ..., t_0 + n dt. It stays in between and after the last of them; before the first, nothing
    is gone.

    Args:
        start_step: Optimizer step of the first pruning, t_0.
        end_step: Optimizer step of the last pruning, t_0 + n dt.
        every_n_steps: Steps from one pruning to the next, dt.
        initial_sparsity: Share of the weights that the first pruning removes, S_i, in ``[0, 1)``. With 0, that step
            does nothing.
        final_sparsity: Share of the weights that are gone in the end, S_f, in ``[0, 1)``.

    Raises:
        ValueError: If the steps do not fit each other, or a share is out of range.
    """

    start_step: int = 3000
    end_step: int = 7000
    every_n_steps: int = 1000
    initial_sparsity: float = 0.0
    final_sparsity: float = 0.9

    def __post_init__(self) -> None:
        for name in ("start_step", "end_step", "every_n_steps"):
            if not isinstance(getattr(self, name), int):
                raise ValueError(
                    f"Expected {name} to be an integer, got {getattr(self, name)!r}. Use for example 1000."
                )
        if self.start_step < 0:
            raise ValueError(f"Expected start_step of at least 0, got {self.start_step}. Use for example 3000.")
        if self.every_n_steps < 1:
            raise ValueError(f"Expected every_n_steps of at least 1, got {self.every_n_steps}. Use for example 1000.")
        length, interval = self.end_step - self.start_step, self.every_n_steps
        if length < 1 or length % interval:
            nearest = self.start_step + interval * max(round(length / interval), 1)
            raise ValueError(
                f"Expected end_step to follow start_step={self.start_step} by a multiple of every_n_steps={interval}, "
                f"got end_step={self.end_step}. Use end_step={nearest}."
            )
        if not 0 <= self.final_sparsity < 1:
            raise ValueError(f"Expected final_sparsity in [0, 1), got {self.final_sparsity}. Use for example 0.9.")
        if not 0 <= self.initial_sparsity <= self.final_sparsity:
            raise ValueError(
                f"Expected initial_sparsity between 0 and final_sparsity={self.final_sparsity}, got "
                f"{self.initial_sparsity}. Use for example 0.0."
            )

    def sparsity(self, step: int) -> float:
        """Returns the share of the weights that are gone once the pruning of this step, if it has one, is done."""
        if step < self.start_step:
            return 0.0
        num_prunings = (self.end_step - self.start_step) // self.every_n_steps
        done = Fraction(min((step - self.start_step) // self.every_n_steps, num_prunings), num_prunings)
        initial, final = _decimal(self.initial_sparsity), _decimal(self.final_sparsity)
        return float(final + (initial - final) * (1 - done) ** 3)

    def prunes_at(self, step: int) -> bool:
        """Returns whether weights are pruned at this step: whether the sparsity grows."""
        return self.sparsity(step) > self.sparsity(step - 1)

    def steps_until_pruning(self, step: int) -> float:
        """Returns the steps until weights are pruned next: 0 at a step that prunes, infinity after the last of them."""
        steps = range(self.start_step, self.end_step + 1, self.every_n_steps)
        return next((other - step for other in steps if other >= step and self.prunes_at(other)), math.inf)


def num_kept(num_weights: int, sparsity: float) -> int:
    """Returns how many weights are kept: num_weights (1 - sparsity), to the nearest integer, and a half upwards.

    The sparsity counts as the decimal that it is written as, so that 90 % of 10 weights leave one, whatever the double
    next to 0.9 is.

    Args:
        num_weights: Number of weights before the first of them was pruned.
        sparsity: Share of them that are pruned, in ``[0, 1]``.

    Raises:
        ValueError: If an argument is out of range.
    """
    if num_weights < 0:
        raise ValueError(f"Expected num_weights of at least 0, got {num_weights}. Count weights, pruned ones too.")
    if not 0 <= sparsity <= 1:
        raise ValueError(f"Expected a sparsity in [0, 1], got {sparsity}. Use for example 0.9 for 90 %.")
    return math.floor(num_weights * (1 - _decimal(sparsity)) + Fraction(1, 2))


def _decimal(value: float) -> Fraction:
    """Returns the shortest decimal that rounds to this double: for 0.9 nine tenths, not the double next to it."""
    return Fraction(repr(float(value)))
