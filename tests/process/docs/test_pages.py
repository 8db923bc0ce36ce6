"""Pages whose commands and programs are all run, in order."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from shmserve.repo.samples import EXAMPLES
from tests.support.docs import pages
from tests.support.docs.page_blocks import NEEDS, RUN, reason_not_to_run
from tests.support.docs.page_runner import SAMPLES, Block, PageRunner, blocks_of
from tests.support.model_files import write_model

pytestmark = pytest.mark.process

REPEAT = """
backend: "python"
input [ { name: "IN" data_type: TYPE_INT32 dims: [ -1 ] } ]
output [ { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] } ]
model_transaction_policy { decoupled: true }
"""


def blocks_to_run(name: str) -> list[Block]:
    found = [block for block in blocks_of(pages.page(name)) if not reason_not_to_run(name, block.text)]
    if name != "clients":
        return found
    # Its Python blocks are one program.
    programs = [block.text for block in found if block.language == "python" and not block.file]
    return [Block("python", "\n".join(programs), "")]


@pytest.mark.parametrize("name", RUN)
def test_page(name: str, tmp_path: Path) -> None:
    for module in NEEDS.get(name, ()):
        pytest.importorskip(module)
    with PageRunner(tmp_path) as runner:
        options = ""
        if name == "clients":
            options = " --model-control-mode explicit --load-model *"
            shutil.copyfile(EXAMPLES / "mlp" / "1" / "model.onnx", tmp_path / "model.onnx")
            (program,) = [text for text in pages.blocks(pages.page("python"), "python") if "import threading" in text]
            write_model(tmp_path / SAMPLES, "repeat", REPEAT, program)
        if RUN[name]:
            runner.serve_samples(options)
        for block in blocks_to_run(name):
            runner.run(block)
