"""Roles from rules and from the credentials that the kernel reports, and the listener that checks them."""

from __future__ import annotations

import contextlib
import errno
import grp
import os
import pwd
import resource
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from shmserve.broker.listeners import lane
from shmserve.broker.listeners.access import AccessRules, Principal, Rule, rule
from shmserve.broker.listeners.lane import LaneListener, open_to_group, peer, raise_descriptor_limit, set_group_access
from shmserve.errors import Denied
from shmserve.protocol import codec
from shmserve.protocol.messages import BrokerMessage, Goodbye
from shmserve.protocol.roles import ALL_ROLES, FORWARD, INFER, NO_ROLES, OBSERVE, OPERATE
from tests.support.manual_loop import ManualLoop

ME = pwd.getpwuid(os.geteuid())
MINE = grp.getgrgid(os.getegid())
OTHER = ME.pw_uid + 1000


def others(*rules: str, uid: int = OTHER, groups: tuple[int, ...] = (OTHER,), group: Any = None) -> int:
    return AccessRules([rule(text) for text in rules], group).roles_of(Principal(uid, frozenset(groups)))


def test_rules_add_up() -> None:
    for access in (AccessRules(), AccessRules([rule("*=infer")]), AccessRules([rule(f"uid:{ME.pw_uid}=infer")])):
        assert access.roles_of(Principal(os.geteuid())) == ALL_ROLES
        assert access.roles_of(Principal(0, frozenset((5,)))) == ALL_ROLES
    assert others() == NO_ROLES
    assert others(f"uid:{OTHER}=infer") == INFER
    assert others(f"uid:{OTHER}=infer", f"uid:{OTHER}=observe", "*=observe") == INFER | OBSERVE
    assert others("gid:7=infer", "gid:8=operate", groups=(6, 7, 8)) == INFER | OPERATE
    assert others("gid:7=infer", f"uid:{OTHER + 1}=operate") == NO_ROLES
    assert others("*=infer,observe") == INFER | OBSERVE
    assert others(group=7, groups=(7,)) == INFER | OBSERVE
    assert others(f"uid:{OTHER}=operate", group=7, groups=(7,)) == ALL_ROLES
    assert rule(f"user:{ME.pw_name}=operate") == Rule("uid", ME.pw_uid, OPERATE)
    assert rule(f"group:{MINE.gr_name}=infer,observe") == Rule("gid", MINE.gr_gid, INFER | OBSERVE)


def test_only_the_servers_own_gateways_may_name_payers_that_count_like_users() -> None:
    gateways: set[int] = set()
    access = AccessRules((rule("*=infer,observe,operate"),), None, gateways)
    mine = Principal(os.geteuid(), pid=77)
    assert access.roles_of(mine) == ALL_ROLES
    gateways.add(77)
    assert access.roles_of(mine) == ALL_ROLES | FORWARD
    assert access.roles_of(Principal(os.geteuid(), pid=78)) == ALL_ROLES
    assert access.roles_of(Principal(4242, pid=77)) == ALL_ROLES, "another user's process that has the pid by chance"


@contextlib.contextmanager
def no_descriptor_left() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with open(os.devnull) as file:
        free = file.fileno()
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_connections_have_the_identity_of_their_peer_and_are_refused_while_out_of_descriptors(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The waiting connection gets the reason, and the loop does not spin."""
    loop, opened = ManualLoop(), list[tuple[socket.socket, int, int]]()
    listener = LaneListener(tmp_path / "lane.sock", loop, AccessRules(), lambda *one: opened.append(one))
    (accept,) = loop.readers.values()
    refused, accepted = (socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2))
    with refused:
        refused.connect(str(tmp_path / "lane.sock"))
        with no_descriptor_left():
            accept()
        assert (opened, loop.readers) == ([], {})
        assert os.strerror(errno.EMFILE) in caplog.text
        (goodbye,) = codec.Codec(BrokerMessage).decode(refused.recv(1 << 16))
        assert isinstance(goodbye, Goodbye)
        assert "too many open files" in goodbye.text
        assert refused.recv(1) == b""
    loop.fire()
    with accepted:
        accepted.connect(str(tmp_path / "lane.sock"))
        for _ in range(2):  # no other connection is waiting
            accept()
    ((sock, uid, roles),) = opened
    assert (uid, roles) == (os.geteuid(), ALL_ROLES)
    assert peer(sock) == Principal(os.geteuid(), frozenset((os.getegid(), *os.getgroups())), os.getpid())
    sock.close()
    listener.close()
    assert not loop.readers


def test_a_user_with_very_many_groups(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """If the groups do not fit into the buffer, only the first one counts, so that no user gets uncertain roles."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:

        class Many:
            def getsockopt(self, level: int, option: int, size: int) -> bytes:
                if option == lane.SO_PEERGROUPS:
                    raise OSError(errno.ERANGE, os.strerror(errno.ERANGE))
                return ours.getsockopt(level, option, size)

        many: Any = Many()
        assert peer(many) == Principal(os.geteuid(), frozenset((os.getegid(),)), os.getpid())
    assert "too many groups" in caplog.text


@pytest.mark.parametrize("umask", [0, 0o777])
def test_file_modes_do_not_depend_on_the_umask(umask: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.umask(umask)
    try:
        door = LaneListener(tmp_path / "lane.sock", ManualLoop(), AccessRules([], os.getegid()), lambda *_: None)
    finally:
        os.umask(before)
    open_to_group(tmp_path, os.getegid())
    assert stat.S_IMODE((tmp_path / "lane.sock").stat().st_mode) == 0o660
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o750
    door.close()
    # A group that the server is not in.
    monkeypatch.setattr(os, "chown", Mock(side_effect=PermissionError))
    (tmp_path / "x").touch()
    (tmp_path / "x").chmod(0o600)
    with pytest.raises(Denied, match=r"--socket-group.*not a member"):
        set_group_access(tmp_path / "x", 5, 0o600)
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == 0o600


def test_raise_descriptor_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, soft), hard))
        for wanted, found in ((300, min(300, hard)), (100, min(300, hard)), (10**12, hard)):
            raise_descriptor_limit(wanted)
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (found, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
