"""What to run where: loads, assignments and the balancers that map one to the other. Pure Python and numpy."""

from lightning_dynmo.planning.assignment import Assignment, Move, moves_between
from lightning_dynmo.planning.balancers import Balancer, Diffusion, DiffusionBalancer, PartitionBalancer, diffuse
from lightning_dynmo.planning.decision import Decision, MoveWhen, RebalancePolicy, check_move_when
from lightning_dynmo.planning.initial import initial_assignment
from lightning_dynmo.planning.loads import (
    LayerLoad,
    LoadMetric,
    bubble_ratio,
    check_load_metric,
    expected_bubble_ratio,
    idle_share,
    imbalance,
    load_values,
    speedup,
    speedup_bound,
)
from lightning_dynmo.planning.migration_cost import MigrationCost
from lightning_dynmo.planning.prediction import Prediction, predict
from lightning_dynmo.planning.problem import BalancingProblem, MemoryLimits
from lightning_dynmo.planning.sparsity import CubicSparsity, num_kept

__all__ = [
    "Assignment",
    "Balancer",
    "BalancingProblem",
    "CubicSparsity",
    "Decision",
    "Diffusion",
    "DiffusionBalancer",
    "LayerLoad",
    "LoadMetric",
    "MemoryLimits",
    "MigrationCost",
    "Move",
    "MoveWhen",
    "PartitionBalancer",
    "Prediction",
    "RebalancePolicy",
    "bubble_ratio",
    "check_load_metric",
    "check_move_when",
    "diffuse",
    "expected_bubble_ratio",
    "idle_share",
    "imbalance",
    "initial_assignment",
    "load_values",
    "moves_between",
    "num_kept",
    "predict",
    "speedup",
    "speedup_bound",
]
