"""Strings as values that a run can be bound to.

The rule: for a bound run, the engine takes strings from no array, only from what it has made itself. So they are
written as the constant of a model that has nothing else, and that model is run.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime as ort

from shmserve.repo.onnx.protobuf import strings

Array = np.ndarray[Any, np.dtype[Any]]
_NAME = "strings"


def value_of(array: Array) -> Any:
    """A value of the engine with these strings, which are str."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.enable_cpu_mem_arena = False
    session = ort.InferenceSession(strings(array, _NAME), options, providers=["CPUExecutionProvider"])
    bound = session.io_binding()
    bound.bind_output(_NAME, "cpu")
    session.run_with_iobinding(bound)
    return bound.get_outputs()[0]
