"""A balancer of your own is one class: a pure function from loads to a split.

This one fills stage after stage until the next layer would take it further from an equal share. Every rank calls it
with the same loads and gets the same answer, so it must use no randomness, clock or state.

    python examples/add_a_balancer.py
"""

from lightning.pytorch import Trainer
from typing_extensions import override

from lightning_dynmo import (
    GPT,
    Assignment,
    Balancer,
    BalancingProblem,
    DynMoStrategy,
    RebalanceCallback,
    TextDataModule,
)


class GreedyBalancer(Balancer):
    """Gives each stage layers until it has its share of what is left; looks at loads only."""

    @override
    def balance(self, problem: BalancingProblem) -> Assignment:
        balance = []
        rest = list(problem.loads)
        for stages_left in range(problem.num_stages, 1, -1):
            share, taken = sum(rest) / stages_left, 1
            while len(rest) - taken >= stages_left and sum(rest[: taken + 1]) - share < share - sum(rest[:taken]):
                taken += 1
            balance.append(taken)
            rest = rest[taken:]
        return Assignment((*balance, len(rest)))


def main() -> None:
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        max_steps=60,
        strategy=DynMoStrategy(balance=[1, 9], balancer=GreedyBalancer()),
        callbacks=[RebalanceCallback(every_n_steps=20)],
        limit_val_batches=0,
    )
    trainer.fit(GPT(num_blocks=8), TextDataModule())


if __name__ == "__main__":
    main()
