"""Ray Serve: bytes in, bytes out. The port is the argument; runs until SIGTERM."""

import signal
import sys
import tempfile

import ray
from network import BATCH, WAIT_MS, decode, make, stacked
from ray import serve
from starlette.requests import Request
from starlette.responses import Response


@serve.deployment(num_replicas=1, max_ongoing_requests=256, ray_actor_options={"num_cpus": 1})
class Infer:
    def __init__(self):
        self.model = make()

    @serve.batch(max_batch_size=BATCH, batch_wait_timeout_s=WAIT_MS / 1e3)
    async def batched(self, rows):
        return list(self.model(stacked(rows)))

    async def __call__(self, request: Request) -> Response:
        row = decode(await request.body())
        y = self.model(stacked([row]))[0] if BATCH == 1 else await self.batched(row)
        return Response(y.tobytes(), media_type="application/octet-stream")


if __name__ == "__main__":
    stop = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, stop)
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:  # a short path, because it contains sockets
        ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False, _temp_dir=folder)
        serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1])})
        serve.run(Infer.bind())
        signal.sigwait(stop)
        serve.shutdown()
        ray.shutdown()
