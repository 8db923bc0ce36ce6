"""String values for bound runs.

A binding does not accept strings from an array, only values that the engine created. So a model that consists of one
constant with these strings is run.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime as ort

from shmserve.repo.onnx.protobuf import strings

Array = np.ndarray[Any, np.dtype[Any]]
_NAME = "strings"


def value_of(array: Array) -> Any:
    """Returns a value of the engine with these strings, which must be str."""
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
