"""A PyTorch network in a Python model. Replace Network by your own, with the same names and shapes as in config.pbtxt.

Weights: save them with torch.save(network.state_dict(), "weights.pth"), and put weights.pth beside this file. Without
it the network has random weights. weights_only=True lets the file hold nothing but tensors, so loading it runs no code.

Without this file: a TorchScript or torch.export file is served as it is, also a little faster.
`shmserve init NAME --from model.pt` makes a directory for one.
"""

from pathlib import Path

import numpy as np
import torch
import triton_python_backend_utils as pb_utils

WEIGHTS = Path(__file__).with_name("weights.pth")


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))

    def forward(self, x):
        return self.layers(x).softmax(dim=1)


class TritonPythonModel:
    def initialize(self, args):
        """Runs once in each process of the model. If it raises, the load fails with that reason."""
        on_gpu = args["model_instance_kind"] == "GPU"
        self.device = torch.device("cuda", int(args["model_instance_device_id"])) if on_gpu else torch.device("cpu")
        torch.manual_seed(0)
        self.network = Network()
        if WEIGHTS.exists():
            self.network.load_state_dict(torch.load(WEIGHTS, weights_only=True, map_location="cpu"))
        else:
            print(f"{WEIGHTS.name} is missing: the network has random weights")
        self.network.to(self.device).eval()

    def execute(self, requests):
        """Runs the requests of a batch together: their rows are joined, and the rows of the result are split again."""
        inputs = [pb_utils.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        with torch.inference_mode():
            x = torch.from_numpy(np.concatenate(inputs)).to(self.device)
            scores = self.network(x).cpu().numpy()
        ends = np.cumsum([len(rows) for rows in inputs])[:-1]
        return [
            pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("scores", rows)])
            for rows in np.split(scores, ends)
        ]
