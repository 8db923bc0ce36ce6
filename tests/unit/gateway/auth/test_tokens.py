"""Tokens: new ones, the file of them, and its errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from shmserve.clients.cli import main
from shmserve.gateway.auth import tokens
from tests.support.gateway.credentials import digest


def test_a_new_token_and_its_line() -> None:
    token, line = tokens.new("alice", "infer,observe")
    assert token not in line
    assert len(token) >= 40
    holder = tokens.Tokens(f"# people\n\n{line}\n").holder(f"Bearer {token}")
    assert holder == ("alice", frozenset({"infer", "observe"}))
    assert tokens.new("alice", "infer")[0] != token
    with pytest.raises(tokens.BadTokens):
        tokens.new("a b", "infer")


def test_the_command_for_a_new_token(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["gateway", "--new-token", "alice=infer"]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"alice infer {digest(printed.err.split()[-1])}\n"


@pytest.mark.parametrize(("line", "text"), [
    ("alice infer", "NAME ROLE,ROLE SHA256"),
    ("alice infer secret", "not the token itself"),
    (f"alice root {digest('x')}", "'root' is not a role"),
    (f"al/ce infer {digest('x')}", "a name may have"),
    (f"a infer {digest('x')}\nb infer {digest('x')}", "line 2: the same token"),
])  # fmt: skip
def test_invalid_lines_of_tokens_are_refused(line: str, text: str) -> None:
    with pytest.raises(tokens.BadTokens, match=text) as caught:
        tokens.Tokens(line)
    assert "secret" not in str(caught.value)


def test_an_invalid_file_of_tokens_is_refused(tokens_file: Path) -> None:
    path = tokens_file
    path.chmod(0o640)
    assert len(tokens.load(str(path))) == 1
    valid = path.read_bytes()
    for mode, content, text in (
        (0o660, valid, "chmod go-w"),
        (0o600, b"\xff", "UTF-8"),
        (0o600, b"#" * (tokens.FILE_BYTES + 1), "exceeds"),
    ):
        path.chmod(mode)
        path.write_bytes(content)
        with pytest.raises(tokens.BadTokens, match=text):
            tokens.load(str(path))
    with pytest.raises(tokens.BadTokens, match="No such file"):
        tokens.load(f"{path}.none")
