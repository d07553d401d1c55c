"""What tests of the policy share: a policy whose moves cost a given time, and six uneven layers."""

from lightning_dynmo.planning import Assignment, MigrationCost, PartitionBalancer, RebalancePolicy

UNEVEN = [1.0, 1.0, 1.0, 3.0, 3.0, 3.0]
EVEN = Assignment((4, 2))
UNIFORM = Assignment((3, 3))  # 3 and 9 seconds; (4, 2) has 6 and 6


def policy(cost_s: float = 10.0, **options: object) -> RebalancePolicy:
    return RebalancePolicy(PartitionBalancer(), cost=MigrationCost(cost_s, 0.0), **options)  # type: ignore[arg-type]
