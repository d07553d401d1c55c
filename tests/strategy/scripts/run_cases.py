"""Runs cases that must fail, one after the other, and writes what each rank got: python run_cases.py FOLDER CASE...

Started by `torchrun` or, without it, by Lightning's own launcher. Exceptions of all cases but the last are caught.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence

from tests.strategy.scripts import cases_failing, cases_refused
from tests.strategy.scripts.run_case import Case, rank, record


def succeeds(case: Case) -> None:
    """Trains, after all that, as if nothing had happened."""


CASES = {"succeeds": succeeds, **vars(cases_refused), **vars(cases_failing)}


def main(names: Sequence[str]) -> None:
    warnings.simplefilter("ignore")
    faulthandler.dump_traceback_later(float(os.environ.get("DUMP_S", "90")), exit=True)
    atexit.register(record, "exit")
    record("started", pid=os.getpid())
    for index, name in enumerate(names):
        make: Callable[[Case], None] = CASES[name]
        case = Case()
        make(case)
        try:
            case.run()
            record(name, kind=None, text="", losses=getattr(case.module, "losses", None))
        except BaseException as error:
            record(name, kind=type(error).__name__, text=str(error))
            if index == len(names) - 1:
                if os.environ.get("STAYS_ALIVE") == str(rank()):
                    time.sleep(8.0)
                raise


if __name__ == "__main__":
    main(sys.argv[2:])
