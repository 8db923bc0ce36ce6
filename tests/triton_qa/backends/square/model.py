"""Stands in for Triton's backend `square`: IN responses, each with the value IN. The parameters of the suites set
delays in ns before each response, and how many of the last responses are errors or have no outputs.
"""

import json
import threading

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    def initialize(self, args):
        parameters = json.loads(args["model_config"]).get("parameters", {})
        names = ("INFER_DELAY_NS", "OUTPUT_DELAY_NS", "CANCEL_DELAY_NS", "FAIL_COUNT", "EMPTY_COUNT")
        found = [int(parameters.get(f"CUSTOM_{name}", {}).get("string_value", 0)) for name in names]
        self.infer_s, self.output_s, self.cancel_s = (delay / 1e9 for delay in found[:3])
        self.fails, self.empties = found[3:]
        self.threads = []

    def execute(self, requests):
        for request in requests:
            value = int(pb_utils.get_input_tensor_by_name(request, "IN").as_numpy().flat[0])
            self.threads.append(threading.Thread(target=self.answer, args=(request.get_response_sender(), value)))
            self.threads[-1].start()

    def answer(self, sender, value):
        wait = threading.Event().wait
        for index in range(value - self.empties):
            if sender.is_cancelled():
                wait(self.cancel_s)
                error = pb_utils.TritonError("cancelled", pb_utils.TritonError.CANCELLED)
                sender.send(pb_utils.InferenceResponse(error=error), flags=FINAL)
                return
            wait(self.infer_s)
            wait(self.output_s)
            if index < value - self.empties - self.fails:
                response = pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([value], np.int32))])
            else:
                response = pb_utils.InferenceResponse(error=pb_utils.TritonError("as configured"))
            sender.send(response)
        wait(self.infer_s * min(self.empties, value))
        sender.send(flags=FINAL)

    def finalize(self):
        for thread in self.threads:
            thread.join()
