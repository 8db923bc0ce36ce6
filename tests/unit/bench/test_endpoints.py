"""How `bench.endpoints` reads the output of `perf_analyzer`, and that its models can be served. Starts no server."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from bench.endpoints import __main__, perf_analyzer, servers
from shmserve.repo.load import ModelContext, examine

TABLE = (
    "Concurrency,Inferences/Second,Client Send,Network+Server Send/Recv,Server Queue,Server Compute Input,"
    "Server Compute Infer,Server Compute Output,Client Recv,p50 latency,p90 latency,p95 latency,p99 latency\n"
    "4,2000.5,1,2,30,4,50,6,7,800,900,950,990\n"
    "1,1000,1,2,3,4,5,6,7,8,9,10,11\n"
)


def tool(folder: Path, code: int = 0, valid: int = 0) -> Path:
    """Writes the table to the given file and exits, but not before its windows are long enough."""
    made = folder / "perf_analyzer"
    made.write_text(
        "#!/usr/bin/env python3\nimport sys\nwords = sys.argv\n"
        f"if int(words[words.index('-p') + 1]) < {valid}:\n    sys.exit('No valid requests recorded')\n"
        f"open(words[words.index('-f') + 1], 'w').write({TABLE!r})\nsys.exit({code})\n"
    )
    made.chmod(made.stat().st_mode | stat.S_IXUSR)
    return made


def test_the_report_of_perf_analyzer_is_parsed(tmp_path: Path) -> None:
    server = servers.Serving("some", {}, "127.0.0.1:1")
    four, one = perf_analyzer.rows(tool(tmp_path), server, "m", "http", [], 1.0)
    assert (four.per_s, four.p50_us, four.p99_us) == (2000.5, 800, 990)
    assert four.server_us == {"queue": 30, "in": 4, "model": 50, "out": 6}
    assert one.per_s == 1000
    with pytest.raises(RuntimeError, match="some has no door for grpc"):
        perf_analyzer.rows(tool(tmp_path), server, "m", "grpc", [], 1.0)
    unstable = perf_analyzer.rows(tool(tmp_path, code=2), server, "m", "http", [], 1.0)
    longer = perf_analyzer.rows(tool(tmp_path, valid=1000), server, "m", "http", [], 1.0)
    assert [ran.per_s for ran in unstable] == [ran.per_s for ran in longer] == [2000.5, 1000]
    with pytest.raises(RuntimeError, match="perf_analyzer ended with 1: No valid requests recorded"):
        perf_analyzer.rows(tool(tmp_path, valid=9000), server, "m", "http", [], 1.0)


def test_the_configurations_of_the_models_are_valid(tmp_path: Path) -> None:
    network = tmp_path / "mlp.onnx"
    network.write_bytes(b"")
    root = servers.repository(tmp_path, network)
    names = {path.name for path in root.iterdir()}
    assert names == {"identity", "mlp", "whole", "first"} == {point.model for point in __main__.points(quick=False)}
    for name in names:
        text = (root / name / "config.pbtxt").read_text()
        assert not examine(text, "config.pbtxt", ModelContext(name, ("python",), (), ())).problems
