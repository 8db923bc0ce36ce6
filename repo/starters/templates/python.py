"""A Python model: multiplies its input by a factor. Replace the parts that compute; docs/python.md has the whole API.

Other modules and files can lie beside this file, for example Path(__file__).with_name("words.txt"). Output of print
goes to the server's log: `shmserve logs MODEL`.
"""

import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        """Runs once in each process of the model: read files here. If it raises, the load fails with that reason.

        `args` has "model_config" (config.pbtxt as JSON), "model_name", "model_version", "model_repository" (a copy of
        this model's directory), "model_instance_name", "model_instance_kind" and "model_instance_device_id".
        """
        config = json.loads(args["model_config"])
        self.factor = np.float32(config["parameters"]["factor"]["string_value"])

    def execute(self, requests):
        """Gets the requests of a batch, and returns a response for each, in the same order.

        An exception fails the whole batch; a response with an error fails only its own request.
        """
        responses = []
        for request in requests:
            # A read-only view of the caller's memory: [rows, numbers]. Copy it to change it or to keep it.
            x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
            if np.isnan(x).any():
                error = pb_utils.TritonError("X has values that are not numbers")
                responses.append(pb_utils.InferenceResponse(error=error))
                continue
            y = pb_utils.Tensor("Y", x * self.factor)
            responses.append(pb_utils.InferenceResponse(output_tensors=[y]))
        return responses

    def finalize(self):
        """Runs when the process stops. Optional, as is initialize."""
