"""The constraints of `shmserve tune` on several models."""

from __future__ import annotations

from pathlib import Path

import pytest

from shmserve.clients.cli.commands.tune import tune
from shmserve.clients.cli.parser import parser
from shmserve.terminal.errors import Misuse


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("mlp cnn", "--p99 TIME is the target"),
        ("mlp cnn --p99 mlp=20ms", "--p99 cnn=TIME is missing"),
        ("mlp cnn --p99 20ms --memory other=1GiB", "--memory other=...: no model 'other' is tuned; there is mlp, cnn"),
        ("mlp cnn --p99 20ms --rate mlp=5", "--rate is missing for some of the models"),
        ("mlp cnn --p99 20ms --objective latency", "--objective latency compares settings under a load"),
        ("mlp cnn --p99 20ms --html a.html", "--html shows a single model"),
        ("mlp cnn --p99 20ms --input x=1", "--input is for a single model"),
        ("mlp cnn --slo ttft=1s", "a language model is tuned alone"),
        ("mlp mlp --p99 20ms", "two of the models have the same name"),
        ("mlp --p99 20ms --rate 5 --objective throughput", "leave out --rate"),
    ],
)
def test_constraints_that_do_not_fit_are_refused(
    words: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("mlp", "cnn"):
        (tmp_path / name).mkdir()
    with pytest.raises(Misuse) as caught:
        tune(parser().parse_args(["tune", *words.split()]))
    assert text in str(caught.value)
