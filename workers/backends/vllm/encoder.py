"""Models that do not generate: vLLM's pooling models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.entrypoints.pooling.factories import init_pooling_io_processors
from vllm.pooling_params import PoolingParams
from vllm.renderers.chat_utils import ChatTemplateConfig

from shmserve.errors import Unsupported
from shmserve.workers.backends.language.encoder import LIMIT, RANK
from shmserve.workers.backends.vllm.runtime import Runtime

if TYPE_CHECKING:
    from shmserve.workers.backends.language.encoder import Vector
    from shmserve.workers.backends.vllm.settings import VllmSettings

_TASKS = {True: "classify", False: "embed"}
"""Whether the model computes scores -> the task in vLLM."""


class VllmEncoder:
    """A loaded model. `close` is called when no call is in progress; the others in any thread."""

    def __init__(self, settings: VllmSettings) -> None:
        """Raises what vLLM raises if the model cannot be loaded, and Unsupported if it does not do what is wanted."""
        self._runtime = Runtime(settings.arguments)
        self.limits = self._runtime.limits
        self._parameters = PoolingParams(task="embed", use_activation=settings.normalize)
        self._template = settings.chat_template or None
        try:
            self._pairs = self._pairs_of(settings.pooling == RANK)
        except BaseException:
            self.close()
            raise

    def _pairs_of(self, scores: bool) -> Any:
        """Returns what renders pairs of texts to be scored. Checks that the model can do what is wanted."""
        engine = self._runtime.engine
        tasks = self._runtime.run(engine.get_supported_tasks())
        if _TASKS[scores] not in tasks:
            raise Unsupported(
                f"with this model, vLLM computes no {'scores' if scores else 'vectors'}: its tasks are "
                f"{', '.join(tasks)}, and not {_TASKS[scores]}"
            )
        if not scores:
            return None
        labels = engine.model_config.hf_config.num_labels
        if labels != 1:
            raise Unsupported(f"a model that scores pairs has 1 output, and not {labels}")
        processors = init_pooling_io_processors(tasks, engine.vllm_config, engine.renderer, ChatTemplateConfig())
        return processors["cross-encoder"]

    def embedding(self, text: str, limit: int | None = None) -> tuple[Vector, int]:
        options = None if limit is None else {LIMIT.name: limit if limit > 0 else -1}
        return self._runtime.run(self._encoded({"prompt": text}, self._parameters, options))

    def score(self, query: str, document: str) -> tuple[Vector, int]:
        return self._runtime.run(self._scored(query, document))

    async def _scored(self, query: str, document: str) -> tuple[Vector, int]:
        rendered = self._pairs.render(
            {
                "data_1": query,
                "data_2": document,
                "chat_template": self._template,
                "max_tokens_per_query": 0,
                "max_tokens_per_doc": 0,
                "tok_params": self._runtime.engine.renderer.default_cmpl_tok_params,
                "prompt_extras": None,
                "skip_mm_cache": False,
                "params": PoolingParams(task="classify"),
                "lora_requests": None,
                "priorities": 0,
            }
        )
        return await self._encoded(rendered["prompts"], rendered["params"])

    async def _encoded(
        self, prompt: Any, parameters: PoolingParams, options: dict[str, int] | None = None
    ) -> tuple[Vector, int]:
        """`options`: of the tokenizer."""
        number = self._runtime.number()
        async for output in self._runtime.engine.encode(prompt, parameters, number, tokenization_kwargs=options):
            last = output
        return np.asarray(last.outputs.data.float(), np.float32).reshape(-1), len(last.prompt_token_ids)

    def close(self) -> None:
        self._runtime.close()
