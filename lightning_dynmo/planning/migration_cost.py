"""What a move of layers costs, learnt from the moves that were made."""

from collections import deque
from itertools import combinations
from statistics import median


class MigrationCost:
    """Seconds of a move: some whatever moves, and some per byte.

    Before the first move, values are assumed that suit a network of 1 GB/s. Moves of about the same size then say how
    much slower or faster it is here. Once there are moves of different sizes, medians of slopes and of what they leave
    (Theil and Sen) tell the two parts apart, so that a single move that had to wait for something else changes little.

    Args:
        fixed_s: Seconds of a move without any bytes, assumed until a move was made.
        s_per_byte: Seconds per byte, assumed until a move was made.

    Raises:
        ValueError: If `fixed_s` is not positive, or `s_per_byte` negative.
    """

    def __init__(self, fixed_s: float = 0.01, s_per_byte: float = 1e-9) -> None:
        if not (fixed_s > 0 and s_per_byte >= 0):
            raise ValueError(
                f"Expected moves to cost time, got fixed_s={fixed_s} and s_per_byte={s_per_byte}. "
                f"Use for example fixed_s=0.01 and s_per_byte=1e-9."
            )
        self._fixed_s = fixed_s
        self._s_per_byte = s_per_byte
        self._moves: deque[tuple[int, float]] = deque(maxlen=16)

    def learn(self, moved_bytes: int, seconds: float) -> None:
        """Notes what a move has cost; of all ranks, the slowest counts."""
        self._moves.append((moved_bytes, seconds))

    def predict(self, moved_bytes: int) -> float:
        """Returns the seconds that a move of so many bytes is expected to take."""
        if not self._moves:
            return self._assumed(moved_bytes)
        # Sizes that are nearly equal say nothing of how the time grows with the size.
        pairs = [sorted(pair) for pair in combinations(self._moves, 2)]
        slopes = [(large[1] - small[1]) / (large[0] - small[0]) for small, large in pairs if large[0] > 2 * small[0]]
        if not slopes:
            return self._assumed(moved_bytes) * median(seconds / self._assumed(size) for size, seconds in self._moves)
        s_per_byte = max(median(slopes), 0.0)
        fixed_s = max(median(seconds - s_per_byte * size for size, seconds in self._moves), 0.0)
        return fixed_s + s_per_byte * moved_bytes

    def _assumed(self, moved_bytes: int) -> float:
        return self._fixed_s + self._s_per_byte * moved_bytes
