"""Balancers: one file each. A new one is imported here by name, so that editors and type checkers see it."""

from lightning_dynmo.planning.balancers.base import Balancer
from lightning_dynmo.planning.balancers.diffusion import Diffusion, DiffusionBalancer, diffuse, most_rounds
from lightning_dynmo.planning.balancers.partition import PartitionBalancer

__all__ = ["Balancer", "Diffusion", "DiffusionBalancer", "PartitionBalancer", "diffuse", "most_rounds"]
