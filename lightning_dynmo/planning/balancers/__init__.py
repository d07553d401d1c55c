"""Balancers: one file each; files with an underscore are parts of `PartitionBalancer`, one for each kind of placement.

A new balancer is imported here by name, so that editors and type checkers see it.
"""

from lightning_dynmo.planning.balancers.base import Balancer
from lightning_dynmo.planning.balancers.diffusion import Diffusion, DiffusionBalancer, diffuse, most_rounds
from lightning_dynmo.planning.balancers.partition import PartitionBalancer

__all__ = ["Balancer", "Diffusion", "DiffusionBalancer", "PartitionBalancer", "diffuse", "most_rounds"]
