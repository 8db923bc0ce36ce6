"""vLLM in this process. Its scheduler and the network run in processes of its own; an event loop in a thread of this
process receives what they generate. The sockets between them are in a private directory, which others cannot enter."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import CancelledError
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import uvloop
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMClientError
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from shmserve.errors import InvalidRequest
from shmserve.workers.backends.language.engine import Limits, Step
from shmserve.workers.backends.vllm.parameters import messages_of, parameters_of
from shmserve.workers.backends.vllm.tools import CallReaders, ToolParsers
from shmserve.workers.model_calls.coroutines import Coroutines
from shmserve.workers.process.exit_codes import Exit, exit_process
from shmserve.workers.process.log import log_message

if TYPE_CHECKING:
    from shmserve.workers.backends.language.engine import Listener
    from shmserve.workers.backends.language.requests import Generation
    from shmserve.workers.backends.vllm.settings import Settings


class VllmEngine:
    """A loaded model. `close` is called when no call is in progress; all others in any thread."""

    def __init__(self, settings: Settings) -> None:
        """Raises what vLLM raises if the model cannot be loaded."""
        try:
            arguments = AsyncEngineArgs(**settings.arguments)
        except TypeError as error:
            raise InvalidRequest(f"vLLM does not accept an argument of the model: {error}") from error
        self._defaults = settings.defaults
        self._template = settings.chat_template or None
        self._adapters = {
            name: LoRARequest(name, number, str(path))
            for number, (name, path) in enumerate(settings.adapters.items(), 1)
        }
        self._numbers = count(1)
        self._sockets = tempfile.TemporaryDirectory(prefix="vllm-")
        os.environ.setdefault("VLLM_RPC_BASE_PATH", self._sockets.name)
        self._coroutines = Coroutines(uvloop.new_event_loop())
        try:
            self._engine = self._coroutines.submit(_started(arguments)).result()
        except BaseException:
            self._coroutines.close()
            self._sockets.cleanup()
            raise
        self._tokenizer = self._engine.get_tokenizer()
        self._tools = ToolParsers(settings.tool_parser, self._tokenizer) if settings.tool_parser else None
        config = self._engine.vllm_config
        cache = (config.cache_config.num_gpu_blocks or 0) * config.cache_config.block_size
        self.limits = Limits(config.scheduler_config.max_num_seqs, config.model_config.max_model_len, max(1, cache))

    # ------------------------------------------------------------------------------------ generation

    def prepared(self, generation: Generation) -> Callable[[Listener], None]:
        values, structured = parameters_of(generation, self._defaults)
        try:
            calls = self._call_readers(generation)
            if calls is not None and not calls.skip_special_tokens:
                values["skip_special_tokens"] = False
            if structured:
                values["structured_outputs"] = StructuredOutputsParams(**structured)
            parameters = SamplingParams(output_kind=RequestOutputKind.DELTA, **values)
        except (TypeError, ValueError, VLLMClientError) as error:
            raise InvalidRequest(f"vLLM: {error}") from error
        return partial(self._run, generation, parameters, calls)

    def _call_readers(self, generation: Generation) -> CallReaders | None:
        chat = generation.chat or {}
        if self._tools is None or generation.forced or not chat.get("tools") or chat.get("tool_choice") == "none":
            return None
        return self._tools.reader(chat, generation.count)

    def _run(
        self, generation: Generation, parameters: SamplingParams, calls: CallReaders | None, listener: Listener
    ) -> None:
        prompt = self._prompt(generation)
        adapter = self._adapters.get(generation.sampling.lora_name or "")
        running = self._coroutines.submit(self._generate(prompt, parameters, adapter, calls, listener))
        listener.abort_with(running.cancel)
        try:
            running.result()
        except CancelledError:
            return
        except (ValueError, VLLMClientError) as error:
            raise InvalidRequest(f"vLLM: {error}") from error
        except EngineDeadError as error:
            log_message(f"vLLM has ended: {error}")
            exit_process(Exit.INTERNAL)

    async def _generate(
        self,
        prompt: Any,
        parameters: SamplingParams,
        adapter: LoRARequest | None,
        calls: CallReaders | None,
        listener: Listener,
    ) -> None:
        outputs = self._engine.generate(prompt, parameters, str(next(self._numbers)), lora_request=adapter)
        try:
            async for output in outputs:
                steps = [_step(one, output, calls) for one in output.outputs]
                if steps and output.prompt_logprobs:
                    steps[0].prompt_scores = [one and _all_described(one) for one in output.prompt_logprobs]
                if listener.step(steps):
                    break
        finally:
            await outputs.aclose()

    def _prompt(self, generation: Generation) -> Any:
        if generation.chat is not None:
            return {"prompt_token_ids": self.chat_tokens(generation.chat)}
        if isinstance(generation.prompt, str):
            return {"prompt": generation.prompt}
        return {"prompt_token_ids": generation.prompt}

    # ------------------------------------------------------------------------------------ conversions

    def tokens(self, prompt: str) -> list[int]:
        found: list[int] = self._tokenizer.encode(prompt)
        return found

    def chat_tokens(self, chat: dict[str, Any]) -> list[int]:
        values = chat.get("chat_template_kwargs") or {}
        try:
            text = self._tokenizer.apply_chat_template(
                messages_of(chat),
                tools=chat.get("tools"),
                chat_template=self._template,
                add_generation_prompt=chat.get("add_generation_prompt", True),
                continue_final_message=chat.get("continue_final_message", False),
                tokenize=False,
                **values,
            )
            found: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        except Exception as error:  # of the template, which is the model's
            raise InvalidRequest(f"the chat template refuses the messages: {error}") from error
        return found

    def text(self, tokens: list[int]) -> str:
        found: str = self._tokenizer.decode(tokens)
        return found

    def close(self) -> None:
        self._coroutines.close()
        self._engine.shutdown()
        self._sockets.cleanup()


async def _started(arguments: AsyncEngineArgs) -> AsyncLLM:
    """With the defaults of vLLM's own server, which depend on the context."""
    context = UsageContext.OPENAI_API_SERVER
    return await asyncio.to_thread(AsyncLLM.from_engine_args, arguments, usage_context=context)


def _step(text: Any, output: Any, calls: CallReaders | None) -> Step:
    step = Step(text.index, text.text, generated=len(text.token_ids), finish=text.finish_reason or "")
    step.prompt = len(output.prompt_token_ids or ())
    if step.finish:
        step.cached = max(0, output.num_cached_tokens or 0)
    if calls is not None:
        calls.read(step, list(text.token_ids), output.prompt_token_ids)
    for token, scores in zip(text.token_ids, text.logprobs or (), strict=False):
        step.ids.append(token)
        step.scores.append(_all_described(scores))
        step.logprob += scores[token].logprob
    return step


def _all_described(scores: Any) -> dict[str, Any]:
    return {str(token): _described(score) for token, score in scores.items()}


def _described(score: Any) -> dict[str, Any]:
    return {"logprob": score.logprob, "rank": score.rank, "decoded_token": score.decoded_token}
