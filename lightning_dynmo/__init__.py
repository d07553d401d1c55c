"""Pipeline parallelism for PyTorch Lightning that stays balanced while the model changes."""

from lightning_dynmo.module import PipelineModule
from lightning_dynmo.planning import Assignment, Balancer, PartitionBalancer
from lightning_dynmo.strategy import DynMoStrategy

__version__ = "0.1.0"

__all__ = ["Assignment", "Balancer", "DynMoStrategy", "PartitionBalancer", "PipelineModule"]
