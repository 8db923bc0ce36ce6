"""LitServe: bytes in, bytes out. The port is the argument."""

import sys
from typing import Annotated

import litserve
from fastapi import Body, Response
from network import BATCH, WAIT_MS, decode, make, stacked


class Api(litserve.LitAPI):
    def setup(self, device):
        self.model = make()

    def decode_request(self, request: Annotated[bytes, Body()]):
        return decode(request)

    def batch(self, inputs):
        return stacked(inputs)

    def unbatch(self, output):
        return list(output)

    def predict(self, x):
        return self.model(x) if self.max_batch_size > 1 else self.model(stacked([x]))[0]

    def encode_response(self, output):
        return Response(content=output.tobytes(), media_type="application/octet-stream")


if __name__ == "__main__":
    batching = {"max_batch_size": BATCH, "batch_timeout": WAIT_MS / 1e3} if BATCH > 1 else {}
    server = litserve.LitServer(
        Api(**batching), accelerator="cpu", devices=1, workers_per_device=1, timeout=60, fast_queue=True
    )
    server.run(
        host="127.0.0.1",
        port=int(sys.argv[1]),
        log_level="error",
        generate_client_file=False,
        num_api_servers=1,
        access_log=False,
    )
