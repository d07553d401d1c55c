"""Files and folders that are whole or not there: written beside their place under another name, then put there."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_HIDDEN = re.compile(r"\..+\.(?P<host>[^.]+)\.(?P<pid>\d+)\.(saving|removed)")


def beside(path: Path, purpose: str = "saving") -> Path:
    """Returns the hidden name beside `path` under which this process writes (``"saving"``) or removes (``"removed"``).

    It is in the same folder, and so on the same filesystem, where renaming is one step.
    """
    return path.with_name(f".{path.name}.{_host()}.{os.getpid()}.{purpose}")


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Opens a file for writing that takes the place of `path` when the body ends, and vanishes if the body fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(path.parent)
    temporary = beside(path)
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        put_in_place(temporary, path)
    except BaseException:
        discard(temporary)
        raise


def put_in_place(temporary: Path, path: Path) -> None:
    """Gives a file or folder its name, in one step; what had the name before is removed afterwards."""
    if os.path.lexists(path) and (temporary.is_dir() or (path.is_dir() and not path.is_symlink())):
        _exchange(temporary, path)
        _sync_folder(path.parent)
        discard(temporary)
    else:
        os.replace(temporary, path)
        _sync_folder(path.parent)


def discard(path: Path) -> None:
    """Removes a file, a link or a folder, if it is there; of a folder, nobody sees a part under its name."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    if _HIDDEN.fullmatch(path.name) is None:
        hidden = beside(path, "removed")
        shutil.rmtree(hidden, ignore_errors=True)
        os.rename(path, hidden)
        path = hidden
    shutil.rmtree(path)


def remove_leftovers(folder: Path) -> None:
    """Removes what processes of this machine that are no longer running have left half-written in a folder."""
    with suppress(OSError):  # only tidies up
        for entry in folder.iterdir():
            name = _HIDDEN.fullmatch(entry.name)
            if name is not None and name["host"] == _host() and not _is_running(int(name["pid"])):
                discard(entry)


def sync_folder_of(path: Path) -> None:
    """Makes the names in the folder of `path` outlast a power failure."""
    _sync_folder(path.parent)


def _exchange(left: Path, right: Path) -> None:
    """Swaps the names of two files or folders: in one step where the system can, which is Linux, else in three."""
    rename = _renameat2()
    if rename is not None:
        if rename(_AT_FDCWD, os.fsencode(left), _AT_FDCWD, os.fsencode(right), _RENAME_EXCHANGE) == 0:
            return
        if (code := ctypes.get_errno()) not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):  # not on this filesystem
            raise OSError(code, os.strerror(code), str(right))
    aside = beside(right, "removed")
    os.rename(right, aside)
    os.rename(left, right)
    os.rename(aside, left)


def _sync_folder(folder: Path) -> None:
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            with suppress(OSError):  # some filesystems cannot
                os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


@lru_cache(maxsize=1)
def _host() -> str:
    return socket.gethostname().replace(".", "-") or "localhost"


@lru_cache(maxsize=1)
def _renameat2() -> Any:
    with suppress(OSError, AttributeError):
        function = ctypes.CDLL(None, use_errno=True).renameat2
        function.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
        return function
    return None
