"""BentoML: arrays as JSON, its format for them that, unlike pickle, is safe with untrusted callers.

Run by `bentoml serve bentoml_app:Peer`.
"""

import bentoml
import numpy as np
from network import BATCH, PIPELINES, WORKLOAD, decode_text, make

BATCHING = {"batchable": True, "max_batch_size": BATCH, "max_latency_ms": 60_000} if BATCH > 1 else {}
"""BentoML chooses how long a batch waits, and refuses requests that would take longer than `max_latency_ms`."""


@bentoml.service(name="peer", workers=1, traffic={"timeout": 60, "max_concurrency": 1024}, metrics={"enabled": False})
class Peer:
    def __init__(self) -> None:
        self.model = make()

    if WORKLOAD in PIPELINES:

        @bentoml.api(**BATCHING)
        def infer(self, x: list[str]) -> np.ndarray:
            return self.model([decode_text(text) for text in x])

    else:

        @bentoml.api(**BATCHING)
        def infer(self, x: np.ndarray) -> np.ndarray:
            return self.model(np.asarray(x, np.float32))
