"""Stands in for Triton's test backend `iterative_sequence`: counts INPUT down to 0, one response an execution."""

import threading

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
RESCHEDULE = pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE
DELAY_S = 0.5


class TritonPythonModel:
    def initialize(self, args):
        self.left = {}

    def execute(self, requests):
        for request in requests:
            sequence = request.correlation_id()
            value = int(pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy().flat[0])
            left = self.left.get(sequence, value) - 1
            self.left[sequence] = left
            output = pb_utils.Tensor("OUTPUT", np.array([[left]], np.int32))
            threading.Event().wait(DELAY_S)
            if left > 0:
                request.set_release_flags(RESCHEDULE)
                request.get_response_sender().send(pb_utils.InferenceResponse([output]))
            else:
                del self.left[sequence]
                request.get_response_sender().send(pb_utils.InferenceResponse([output]), flags=FINAL)
