"""Is a move worth it? Gains are weighed against what the move costs, and moves that failed to gain are taken back."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from lightning_dynmo.planning.assignment import Assignment
from lightning_dynmo.planning.balancers import Balancer
from lightning_dynmo.planning.migration_cost import MigrationCost
from lightning_dynmo.planning.prediction import Prediction, predict
from lightning_dynmo.planning.problem import BalancingProblem
from lightning_dynmo.planning.regret import Regret
from lightning_dynmo.planning.smoothing import SmoothedLoads
from lightning_dynmo.planning.trial import SETTLED, Trial

MoveWhen = Literal["worthwhile", "always"]


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do after a measurement.

    Args:
        proposed: What the balancer asks for.
        target: The assignment to move to now; None to stay.
        prediction: Time of the slowest rank now and under `proposed`, from smoothed loads, in their unit; where a move
            is undone, as measured, relative to `proposed`.
        gain_s: Seconds per step that `proposed` is expected to save.
        cost_s: Seconds that the move to `proposed` is expected to take.
        reason: Why, as a clause for people.
        undone: Whether `target` is the split before the last move, which made things worse.
        measure_in: Steps after which another measurement could change the answer; None if it need not be sought.
    """

    proposed: Assignment
    target: Assignment | None
    prediction: Prediction
    gain_s: float
    cost_s: float
    reason: str
    undone: bool = False
    measure_in: int | None = None


def check_move_when(move_when: str) -> None:
    """Checks that there is a rule of this name for when to move.

    Raises:
        ValueError: If not; lists the choices.
    """
    if move_when not in get_args(MoveWhen):
        raise ValueError(f"Expected move_when to be 'worthwhile' or 'always', got {move_when!r}. Use 'worthwhile'.")


class RebalancePolicy:
    """Decides from measurements when layers move. Pure arithmetic: equal measurements give equal decisions.

    Call `observe` with every measurement, `decide` where layers could move, and `moved` once they have.

    * Loads are averaged over measurements. The average starts anew when the model is known to have changed.
    * Where it is known how long a gain will last, layers move if it is more than the move costs. Else they move once
      staying has cost as much (see `Regret`). What counts is the gain of a plan in measurements after the one that it
      was made from, where noise does not look like gain.
    * After a move, measurements tell whether it did what was predicted (see `Trial`). One that made things worse is
      undone, that plan is not tried again until the model changes, and others have to promise twice as much.

    Args:
        balancer: Plans new assignments.
        move_when: ``"always"`` plans from the last measurement alone, moves whenever the plan is better at all, and
            never looks back: the original's rule.
        min_gain: Predicted gain, as a share of the slowest rank's time, that is worth nothing.
        smoothing: What a new measurement counts for in the average once there are enough, in ``(0, 1]``.
        cost: What moves cost; by default as assumed for a network of 1 GB/s until the first move.

    Raises:
        ValueError: If an argument is out of range.
    """

    def __init__(
        self,
        balancer: Balancer,
        *,
        move_when: MoveWhen = "worthwhile",
        min_gain: float = 0.02,
        smoothing: float = 0.15,
        cost: MigrationCost | None = None,
    ) -> None:
        check_move_when(move_when)
        if not 0 <= min_gain < 1:
            raise ValueError(f"Expected min_gain in [0, 1), got {min_gain}. Use for example 0.02.")
        self.balancer = balancer
        self.move_when = move_when
        self.min_gain = min_gain
        self.cost = cost or MigrationCost()
        self._loads = SmoothedLoads(smoothing if move_when == "worthwhile" else 1.0)
        self._seconds = SmoothedLoads(smoothing)
        self._regret = Regret(smoothing)
        self._problem: BalancingProblem | None = None
        self._step = 0
        self._plan: Assignment | None = None
        self._plan_gain = 0.0
        self._no_plan = ""
        self._trial: Trial | None = None
        self._undone: set[Assignment] = set()

    def observe(
        self,
        problem: BalancingProblem,
        *,
        step: int,
        seconds: Sequence[float] | None = None,
        changed: bool = False,
    ) -> None:
        """Takes in one measurement.

        Args:
            problem: With the loads as measured, and the assignment that they were measured under.
            step: Optimizer step that was measured; the measurement stands for the steps since the last one.
            seconds: Seconds per step that each layer takes on a rank of speed 1, ``[L]``; by default the loads.
            changed: Whether the model was changed since the last measurement, so that older ones no longer hold.
        """
        timed = problem if seconds is None else replace(problem, loads=seconds, stage_costs=None)
        if changed:
            self._loads.restart()
            self._seconds.restart()
            self._trial, self._undone = None, set()
        steps = 1 if changed or self._problem is None else max(step - self._step, 1)
        self._add_regret(problem, None if changed else self._plan_gain, timed.bottleneck(problem.current), steps)
        if self._trial is not None and self._trial.after != problem.current:
            self._trial = None
        if self._trial is not None:
            self._trial.observe(timed, step)
        self._loads.add(problem.loads)
        self._seconds.add(timed.loads)
        self._problem, self._step = problem.with_loads(self._loads.values), step
        self._make_plan(self._problem)

    def decide(self, *, horizon_steps: float | None = None, at_most_steps: float | None = None) -> Decision:
        """Says what to do after the measurements so far.

        Args:
            horizon_steps: Steps for which the loads will stay as they are, where that is known.
            at_most_steps: Steps after which they will not, where only that is known.

        Raises:
            RuntimeError: If nothing was measured yet.
        """
        if self._problem is None:
            raise RuntimeError("There is no measurement to decide from. Call observe() before decide().")
        if horizon_steps is not None and at_most_steps is not None:
            horizon_steps = min(horizon_steps, at_most_steps)
        problem = self._problem
        plan = self._proposal(problem)
        if self._no_plan:
            return replace(plan, reason=self._no_plan)
        if not problem.fits(problem.current) and plan.proposed != problem.current:
            reason = "the split that runs takes more memory than there is"
            return replace(plan, target=plan.proposed, reason=reason, measure_in=SETTLED)
        if self.move_when == "always":
            if plan.prediction.gain > 0:
                return replace(plan, target=plan.proposed, reason=_gains(plan))
            return replace(plan, reason=_stays(plan, problem.current))
        told = self._close_trial()
        decision = self._weigh(plan, problem, horizon_steps, at_most_steps)
        if self._trial is not None and self._trial.gains:
            decision = self._continue_trial(self._trial, plan, decision, horizon_steps)
        return replace(decision, reason=told + decision.reason)

    def moved(self, decision: Decision, moved_bytes: int, seconds: float) -> None:
        """Notes that a decision was carried out.

        Args:
            decision: With a target.
            moved_bytes: Bytes that travelled.
            seconds: Seconds that it took the slowest rank.
        """
        assert decision.target is not None
        assert self._problem is not None
        self.cost.learn(moved_bytes, seconds)
        problem, tried = self._problem, self._trial
        self.placed(decision.target)
        if decision.undone:
            assert tried is not None
            self._undone.add(tried.after)
        elif self.move_when == "worthwhile" and problem.fits(problem.current):
            gain = decision.prediction.gain
            self._trial = Trial(problem.current, decision.target, self._seconds.values, gain, self._step)

    def placed(self, assignment: Assignment) -> None:
        """Notes that another assignment runs from now on, whoever has decided that."""
        self._trial = None
        self._regret.restart()
        if self._problem is not None:
            self._problem = replace(self._problem, current=assignment)
            self._make_plan(self._problem)

    def _add_regret(self, problem: BalancingProblem, promised: float | None, pace_s: float, steps: int) -> None:
        plan = self._plan
        if plan is None or plan == problem.current or plan in self._undone:
            return
        self._regret.add(predict(problem, plan).gain, promised, pace_s, steps, self.min_gain)

    def _make_plan(self, problem: BalancingProblem) -> None:
        self._no_plan, plan = "", problem.current
        try:
            plan = self.balancer.balance(problem)
        except ValueError as error:
            if problem.memory is None:
                raise
            # The split that runs goes on running, whatever the measured sizes say.
            self._no_plan = str(error)
        _check_plan(plan, problem, type(self.balancer).__name__)
        if not self._no_plan and not problem.fits(plan):
            self._no_plan = _does_not_fit(plan, problem)
            plan = problem.current
        self._plan = plan
        self._plan_gain = predict(problem, plan).gain

    def _proposal(self, problem: BalancingProblem) -> Decision:
        assert self._plan is not None
        prediction = predict(problem, self._plan)
        gain_s = prediction.gain * self._pace_s(problem)
        cost_s = self.cost.predict(problem.moved_bytes(self._plan))
        return Decision(self._plan, None, prediction, gain_s, cost_s, "")

    def _pace_s(self, problem: BalancingProblem) -> float:
        return replace(problem, loads=self._seconds.values, stage_costs=None).bottleneck(problem.current)

    def _close_trial(self) -> str:
        """Ends the trial of the last move once it is decided that it stays; returns what there is to say of it."""
        trial = self._trial
        if trial is None or not trial.is_over(self.min_gain):
            return ""
        self._trial = None
        kept = "" if trial.is_kept else "only "
        return f"the last move gained {kept}{trial.gain:.1%} of {trial.promised:.1%} predicted; "

    def _continue_trial(
        self, trial: Trial, plan: Decision, decision: Decision, horizon_steps: float | None
    ) -> Decision:
        """Says what the measurements since the last move ask for, if they do not confirm it."""
        assert self._problem is not None
        told = f"the last move was to gain {trial.promised:.1%}, but measured {trial.gain:+.1%}"
        if not trial.is_worse(self.min_gain):
            return replace(plan, reason=f"{told}; measuring once more", measure_in=1)
        loss_s = -trial.gain * self._pace_s(self._problem)
        cost_s = self.cost.predict(self._problem.moved_bytes(trial.before))
        wait = _wait(loss_s, cost_s, trial.lost_s, horizon_steps)
        if wait == 0:
            prediction = Prediction(1.0 - trial.gain, 1.0)
            return Decision(trial.before, trial.before, prediction, loss_s, cost_s, told, undone=True)
        if decision.target is not None:
            return decision
        return replace(plan, reason=f"{told}; undoing it costs {format_seconds(cost_s)}", measure_in=wait)

    def _weigh(
        self,
        plan: Decision,
        problem: BalancingProblem,
        horizon_steps: float | None,
        at_most_steps: float | None,
    ) -> Decision:
        """Says whether the plan is worth its move."""
        if plan.prediction.gain <= self.min_gain:
            return replace(plan, reason=_stays(plan, problem.current))
        if plan.proposed in self._undone:
            return replace(plan, reason=f"{list(plan.proposed.balance)} was undone before")
        price_s = plan.cost_s * 2 ** len(self._undone)
        needed_s = max(price_s, self._regret.noise_s(self._pace_s(problem), self.min_gain))
        if at_most_steps is not None and plan.gain_s * at_most_steps <= price_s:
            return replace(plan, reason=f"{_would_gain(plan)}, but for {at_most_steps:.0f} more steps only")
        certain = horizon_steps is not None and plan.gain_s * horizon_steps > price_s
        if certain or self._regret.total_s >= needed_s:
            return replace(plan, target=plan.proposed, reason=_gains(plan), measure_in=SETTLED)
        if horizon_steps is not None:
            return replace(plan, reason=f"{_would_gain(plan)}, but for {horizon_steps:.0f} more steps only")
        wait = _wait(plan.gain_s, needed_s, self._regret.total_s, None)
        reason = f"{_would_gain(plan)}; staying has cost {format_seconds(self._regret.total_s)} so far"
        return replace(plan, reason=reason, measure_in=wait)


def _wait(gain_s: float, cost_s: float, spent_s: float, horizon_steps: float | None) -> int | None:
    """Returns the steps until a move is worth its cost: 0 for now, None for not within the horizon."""
    if spent_s >= cost_s or (horizon_steps is not None and gain_s * horizon_steps > cost_s):
        return 0
    if horizon_steps is not None or gain_s <= 0:
        return None
    return max(math.ceil((cost_s - spent_s) / gain_s), 1)


def _check_plan(plan: Any, problem: BalancingProblem, balancer: str) -> None:
    if not isinstance(plan, Assignment):
        raise TypeError(
            f"Expected {balancer}.balance() to return an Assignment, got {plan!r}. Return for example "
            f"Assignment({problem.current.balance})."
        )
    if (plan.num_layers, plan.num_stages) != (problem.num_layers, problem.num_stages):
        raise ValueError(
            f"Expected {balancer}.balance() to return {problem.num_layers} layers on {problem.num_stages} stages, got "
            f"{list(plan.balance)}. Return for example Assignment({problem.current.balance})."
        )


def _does_not_fit(plan: Assignment, problem: BalancingProblem) -> str:
    assert problem.memory is not None
    pairs = zip(problem.rank_bytes(plan), problem.memory.cap_bytes, strict=True)
    rank, (held, cap) = max(enumerate(pairs), key=lambda entry: entry[1][0] - entry[1][1])
    return f"{list(plan.balance)} takes {held} bytes on rank {rank}, which has {cap}"


def _stays(plan: Decision, current: Assignment) -> str:
    if plan.proposed == current:
        return f"{list(current.balance)} is the best split already"
    if plan.prediction.gain < 0:
        return f"{list(plan.proposed.balance)} would take {-plan.prediction.gain:.1%} longer"
    return f"{list(plan.proposed.balance)} would gain only {plan.prediction.gain:.1%}"


def _would_gain(plan: Decision) -> str:
    return (
        f"{list(plan.proposed.balance)} would gain {format_seconds(plan.gain_s)} per step for a move of "
        f"{format_seconds(plan.cost_s)}"
    )


def _gains(plan: Decision) -> str:
    steps = max(math.ceil(plan.cost_s / plan.gain_s), 1) if plan.gain_s > 0 else 1
    return f"gains {format_seconds(plan.gain_s)} per step, paid back after {steps} step{'s' if steps > 1 else ''}"


def format_seconds(seconds: float) -> str:
    """Returns a time as people read it, such as ``"1.5 ms"``."""
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
