"""Loaders of which the ranks cannot know beforehand that they end together: one decision for all, batch by batch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from lightning.fabric.utilities.data import has_iterable_dataset, sized_len
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.utils.data import DataLoader

Vote = Callable[[int, str], list[int]]
"""Returns the small number that each rank has passed; told what it is for."""

_END = object()


class AgreedLoader:
    """A loader that hands out a batch only if all ranks have one, so that all ranks end after the shortest.

    Everything else is the loader's own.

    Args:
        loader: What this rank reads from.
        length: Its length where it is known to all ranks: the smallest of them.
        vote: Tells this rank's answer to the others; called once per batch and at the end.
    """

    def __init__(self, loader: Any, length: int | None, vote: Vote) -> None:
        self._loader = loader
        self._length = length
        self._vote = vote

    def __iter__(self) -> Iterator[Any]:
        return self._agreed(iter(self._loader))  # begins at once, as the loader would: that draws random numbers

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError(f"{type(self._loader).__name__} has no length on some rank.")
        return self._length

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # not there yet, while a copy is made
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("_loader", "_length", "_vote"):
            super().__setattr__(name, value)
        else:  # Lightning lets go of workers by setting the loader's iterator
            setattr(self._loader, name, value)

    def _agreed(self, batches: Iterator[Any]) -> Iterator[Any]:
        index = 0
        while True:
            batch = next(batches, _END)
            found = self._vote(batch is not _END, f"reading of batch {index}")
            if not all(found):
                if any(found):
                    ended = [rank for rank, has_batch in enumerate(found) if not has_batch]
                    _warn(f"ranks {ended} had no batch {index}, so all ranks stop there")
                return
            yield batch
            index += 1


class StatefulAgreedLoader(AgreedLoader):
    """The same for a loader that can be resumed, which Lightning recognises by these two methods."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the loader's state."""
        state: dict[str, Any] = self._loader.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resumes the loader."""
        self._loader.load_state_dict(state_dict)


def agree_on_loader(loader: Any, gather: Callable[[Any], list[Any]], vote: Vote) -> Any:
    """Returns the loader as it is where all ranks know that they end together, else an `AgreedLoader`.

    Args:
        loader: This rank's; all ranks call this for their loaders in the same order.
        gather: Returns what every rank has passed.
        vote: The same for small numbers; called with every batch, so it had better be fast.
    """
    if isinstance(loader, AgreedLoader):  # Lightning keeps what it has processed in the user's CombinedLoader
        loader = loader._loader
    length = sized_len(loader)
    lengths = gather((length, has_iterable_dataset(loader)))  # the length of an iterable dataset may be an estimate
    if (
        not any(iterable for _, iterable in lengths)
        and length is not None
        and lengths.count(lengths[0]) == len(lengths)
    ):
        return loader
    known = [length for length, _ in lengths if length is not None]
    shortest = min(known) if len(known) == len(lengths) else None
    if shortest is not None and shortest < max(known):
        _warn(f"they have {known} batches, so all ranks stop after {shortest}")
    stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
    return (StatefulAgreedLoader if stateful else AgreedLoader)(loader, shortest, vote)


def seed_workers(loader: Any, rank: int) -> None:
    """Has workers of all ranks of a pipeline draw the same random numbers, so that augmentation gives the same samples.

    Lightning would seed them by the global rank, after ``seed_everything(workers=True)``.

    Args:
        loader: Changed in place.
        rank: Which replica of the pipeline reads it.
    """
    if not isinstance(loader, DataLoader):
        return
    init = loader.worker_init_fn
    wanted = init is None and bool(int(os.environ.get("PL_SEED_WORKERS", "0")))
    if wanted or (isinstance(init, partial) and init.func is pl_worker_init_function):
        loader.worker_init_fn = partial(pl_worker_init_function, rank=rank)


def _warn(what: str) -> None:
    rank_zero_warn(
        f"The ranks' loaders end at different batches: {what}. All stages of a pipeline must see the same samples: "
        "give every rank the same data, or samples may be paired with targets that are not theirs."
    )
