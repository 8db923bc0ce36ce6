"""Client processes that load a server, for the measures of throughput and of single requests.

Only the public client (`shmserve.Client`) is used, as documented.
"""

from __future__ import annotations

from itertools import cycle
from typing import Any

from bench.lib.bare_engine import session
from bench.lib.child import Answer, Handler
from bench.lib.clock import durations, pipelined, summary

VARIETY = 64
"""Number of different inputs in a load, so that responses can come only from the model."""


def _inputs(shape: list[int], variety: int) -> Any:
    import numpy as np

    return np.random.default_rng(2).standard_normal((variety, 1, *shape)).astype(np.float32)


def _checked(client: Any, model: str, inputs: list[Any], oracle: str) -> None:
    """Compares the response to each input with the engine's result."""
    import numpy as np

    run = session(oracle).run
    for x in inputs:
        expected = run(None, {"x": np.asarray(x)})[0]
        np.testing.assert_allclose(client.infer(model, {"x": x})["y"], expected, rtol=2e-4, atol=2e-4)


def stream(url: str, model: str, flight: int, shape: list[int], oracle: str, shared: bool = False) -> Handler:
    """Keeps `flight` requests in flight: collects the oldest, sends another. `shared`: inputs are in shared memory."""
    from shmserve import Client

    client = Client(url)
    variety = min(flight, 16) if shared else VARIETY
    inputs = list(_inputs(shape, variety))
    if shared:
        for number, values in enumerate(inputs):
            inputs[number] = client.empty(values.shape, "float32")
            inputs[number][...] = values
    _checked(client, model, inputs, oracle)
    submit, feeds = client.submit, cycle([{"x": x} for x in inputs])
    return lambda seconds: {
        "per_s": pipelined(seconds, flight, lambda: submit(model, next(feeds)), lambda future: future.result()["y"])
    }


def lone(url: str, model: str, shape: list[int], oracle: str) -> Handler:
    """One caller, one request at a time."""
    from shmserve import Client

    client = Client(url)
    inputs = list(_inputs(shape, 8))
    _checked(client, model, inputs, oracle)
    feed = {"x": inputs[0]}
    return lambda seconds: summary(durations(lambda: client.infer(model, feed)["y"], seconds, warm=50))


def first(url: str, model: str, sizes: list[int]) -> Handler:
    """A model that reads one element, with inputs of these sizes in bytes from `empty()`. Order: which size."""
    from shmserve import Client

    client = Client(url)
    feeds = {}
    for number, size in enumerate(sizes):
        x = client.empty((size // 4,), "float32")
        x[...] = number + 0.5
        feeds[size] = ({"x": x}, number + 0.5)

    def handle(seconds: float, size: int) -> Answer:
        feed, expected = feeds[size]
        assert client.infer(model, feed)["y"][0] == expected
        return summary(durations(lambda: client.infer(model, feed)["y"], seconds, warm=20))

    return handle


def whole(url: str, model: str, size: int) -> Handler:
    """Identity of one large tensor, from `empty()` into `empty()`."""
    import numpy as np

    from shmserve import Client

    client = Client(url)
    x, y = (client.empty((size // 4,), "float32") for _ in range(2))
    x[...] = np.arange(size // 4, dtype=np.float32)
    y[...] = 0
    feed, place = {"x": x}, {"y": y}
    client.infer(model, feed, outputs=place)
    assert np.array_equal(x, y)

    def handle(seconds: float) -> Answer:
        x[-1] += 1
        taken = summary(durations(lambda: client.infer(model, feed, outputs=place), seconds, warm=3))
        assert y[-1] == x[-1]
        return taken

    return handle


def many(urls: list[str], models: list[str], each: int) -> Handler:
    """Several clients in one process, each of which has sent requests to every model and stays connected."""
    import numpy as np

    from shmserve import Client

    clients = [Client(urls[number % len(urls)]) for number in range(each)]
    small, large = np.ones(16, np.float32), np.ones(16384, np.float32)

    def handle(requests: int) -> Answer:
        for client in clients:
            for number in range(requests):
                x = large if number % 4 == 0 else small
                assert np.array_equal(client.infer(models[number % len(models)], {"x": x})["y"], x)
        return {"clients": len(clients)}

    return handle
