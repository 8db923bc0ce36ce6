"""Tasks as other users of the machine: a forked child changes its user, runs a task and reports the result.

Invariant: the child uses only the code of its parent, and exits without any of the parent's clean-up.
"""

from __future__ import annotations

import ctypes
import grp
import json
import os
import pwd
from collections.abc import Callable, Iterable
from typing import Any

import pytest

ALICE, BOB = 65534, 65533
_PR_SET_DUMPABLE = 4

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def some_group() -> str:
    """A group that no user of the tests belongs to by default."""
    taken = {0, ALICE, BOB, os.getegid(), *(user.pw_gid for user in pwd.getpwall() if user.pw_uid in (ALICE, BOB))}
    return next(group.gr_name for group in grp.getgrall() if group.gr_gid not in taken)


def as_user(uid: int, task: Callable[[], Any], groups: Iterable[int] = ()) -> Any:
    """The result of the task, which must fit into JSON; an exception is "Type: text"."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(reader)
            os.setgroups(list(groups))
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)  # else it could not even look at itself in /proc
            found = task()
        except BaseException as error:
            found = f"{type(error).__name__}: {error}"
        finally:
            with os.fdopen(writer, "w") as pipe:
                json.dump(found, pipe)
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return json.loads(text)


def attempt(*tasks: Callable[[], Any]) -> list[str]:
    """The result of each task: its value, or the name of its errno."""
    found = []
    for task in tasks:
        try:
            found.append(f"done: {task()!r}")
        except OSError as error:
            found.append(type(error).__name__ if error.errno is None else _name(error.errno))
    return found


def _name(number: int) -> str:
    import errno

    return errno.errorcode[number]
