"""Calls a server with KServe's own clients; run by the Python of `programs.CLUSTER`.

Arguments: the URL for HTTP, and address and port for gRPC. Prints a JSON object with what each call returned.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import numpy as np
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest, RESTConfig

MODEL = "mlp"
TIMEOUT_S = 60


def request() -> InferRequest:
    x = np.arange(64, dtype=np.float32).reshape(1, 64)
    tensor = InferInput(name="x", shape=list(x.shape), datatype="FP32")
    tensor.set_data_from_numpy(x, binary_data=True)
    return InferRequest(model_name=MODEL, infer_inputs=[tensor])


async def over_http(url: str) -> dict[str, Any]:
    """Omits is_server_live and is_server_ready, which expect a body that neither Triton nor shmserve sends."""
    client = InferenceRESTClient(RESTConfig(protocol="v2", timeout=TIMEOUT_S))
    try:
        answer = await client.infer(url, request(), model_name=MODEL)
        return {"model": await client.is_model_ready(url, MODEL), "y": answer.outputs[0].as_numpy().tolist()}
    finally:
        await client.close()


async def over_grpc(address: str) -> dict[str, Any]:
    client = InferenceGRPCClient(url=address, timeout=TIMEOUT_S)
    try:
        answer = await client.infer(request())
        return {
            "live": await client.is_server_live(),
            "ready": await client.is_server_ready(),
            "model": await client.is_model_ready(MODEL),
            "y": answer.outputs[0].as_numpy().tolist(),
        }
    finally:
        await client.close()


async def main(url: str, address: str) -> None:
    json.dump({"http": await over_http(url), "grpc": await over_grpc(address)}, sys.stdout)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
