"""Stands in for the example of the Python backend that the suites copy: IN responses, each with the value IN."""

import threading

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.threads = []

    def execute(self, requests):
        for request in requests:
            value = int(pb_utils.get_input_tensor_by_name(request, "IN").as_numpy().flat[0])
            self.threads.append(threading.Thread(target=self.answer, args=(request.get_response_sender(), value)))
            self.threads[-1].start()

    def answer(self, sender, value):
        for _ in range(value):
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([value], np.int32))]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def finalize(self):
        for thread in self.threads:
            thread.join()
