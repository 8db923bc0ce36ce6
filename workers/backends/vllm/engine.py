"""Models that generate texts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextlib import aclosing, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm.exceptions import VLLMClientError
from vllm.lora.request import LoRARequest
from vllm.renderers.inputs.preprocess import parse_model_prompt
from vllm.renderers.params import ChatParams
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

from shmserve.errors import InvalidRequest, ServeError
from shmserve.workers.backends.language.engine import Step
from shmserve.workers.backends.language.sampling import sampling_of
from shmserve.workers.backends.vllm.images import check_images
from shmserve.workers.backends.vllm.parameters import messages_of, parameters_of
from shmserve.workers.backends.vllm.runtime import Runtime, translated_errors
from shmserve.workers.backends.vllm.tools import CallReaders, ToolParsers

if TYPE_CHECKING:
    from shmserve.workers.backends.language.engine import Listener
    from shmserve.workers.backends.language.requests import GenerationRequest
    from shmserve.workers.backends.vllm.settings import VllmSettings


SHORT = 4096
"""Maximum length of a prompt, in characters or tokens, that is tokenized in the thread that receives requests."""
IMAGES = "multi_modal_data"
"""Where a prompt of vLLM has them."""


class VllmEngine:
    """A loaded model. `close` is called when no call is in progress; all others in any thread."""

    def __init__(self, settings: VllmSettings) -> None:
        """Raises what vLLM raises if the model cannot be loaded."""
        self._runtime = runtime = Runtime(settings.arguments)
        self.limits = runtime.limits
        self.coroutines = runtime.coroutines
        self._announced = False
        """Whether responses will be sent in the next round of the loop."""
        self._tokenizer = runtime.tokenizer
        self._defaults = settings.defaults
        self._template = settings.chat_template or None
        self._adapters = {
            name: LoRARequest(name, number, str(path))
            for number, (name, path) in enumerate(settings.adapters.items(), 1)
        }
        self._sees_images = settings.sees_images
        recommended = runtime.engine.model_config.get_diff_sampling_param()
        recommended.pop("max_tokens", None)  # a chat may use the rest of the context
        self.recommended = sampling_of(recommended, "generation_config.json")
        try:
            self._tools = ToolParsers(settings.tool_parser, self._tokenizer) if settings.tool_parser else None
        except InvalidRequest:
            self.close()
            raise

    # ------------------------------------------------------------------------------------ generation

    def prepared(self, generation: GenerationRequest) -> Callable[[Listener], Coroutine[Any, Any, None]]:
        values, structured = parameters_of(generation, self._defaults)
        try:
            calls = self._call_readers(generation)
            if calls is not None and not calls.skip_special_tokens:
                values["skip_special_tokens"] = False
            if structured:
                values["structured_outputs"] = StructuredOutputsParams(**structured)
            # As in vLLM's server: they are made for one request, so that the engine need not copy them.
            parameters = SamplingParams(output_kind=RequestOutputKind.DELTA, skip_clone=True, **values)
            prompt = generation.prompt
            rendered = None
            if generation.chat is None and len(prompt) <= SHORT:
                # Here, and not in a thread of its own: two more switches between threads would take longer.
                rendered = self._rendered(prompt)
        except (TypeError, ValueError, VLLMClientError) as error:
            raise InvalidRequest(f"vLLM: {error}") from error
        adapter = self._adapters.get(generation.sampling.lora_name or "")
        return partial(self._run, generation, rendered, parameters, adapter, calls)

    def _call_readers(self, generation: GenerationRequest) -> CallReaders | None:
        chat = generation.chat or {}
        if self._tools is None or generation.forced or not chat.get("tools") or chat.get("tool_choice") == "none":
            return None
        return self._tools.reader(chat, generation.count)

    async def _run(
        self,
        generation: GenerationRequest,
        prompt: Any,
        parameters: SamplingParams,
        adapter: LoRARequest | None,
        calls: CallReaders | None,
        listener: Listener,
    ) -> None:
        task = asyncio.current_task()
        assert task is not None
        listener.abort_with(partial(self.coroutines.loop.call_soon_threadsafe, task.cancel))
        with suppress(asyncio.CancelledError), translated_errors():
            if prompt is None:
                prompt = await asyncio.to_thread(self._prompt, generation)
            if IMAGES in prompt:  # computed in another thread than that of the loop, which serves all requests
                prompt = await self._runtime.engine.renderer.process_for_engine_async(prompt, time.time())
            number = self._runtime.number()
            outputs = self._runtime.engine.generate(prompt, parameters, number, lora_request=adapter)
            async with aclosing(outputs):
                async for output in outputs:
                    self._announce(listener)
                    steps = [_step(one, output, calls) for one in output.outputs]
                    if steps and output.prompt_logprobs:
                        steps[0].prompt_scores = [one and _all_described(one) for one in output.prompt_logprobs]
                    if listener.step(steps):
                        break

    def _announce(self, listener: Listener) -> None:
        """A step of the engine resumes the coroutines of all its texts in one round of the loop."""
        if not self._announced:
            self._announced = True
            self.coroutines.loop.call_soon(self._send, listener.announce())

    def _send(self, responses: Callable[[], None]) -> None:
        self._announced = False
        responses()

    def _prompt(self, generation: GenerationRequest) -> Any:
        """The prompt as the engine takes it; with images, it is computed from what this returns."""
        if generation.chat is None:
            return self._rendered(generation.prompt)
        prompt = self._chat_prompt(generation.chat)
        return prompt if IMAGES in prompt else self._rendered(prompt["prompt_token_ids"])

    def _rendered(self, prompt: str | list[int]) -> Any:
        engine = self._runtime.engine
        parsed = parse_model_prompt(engine.model_config, prompt)
        (rendered,) = engine.renderer.render_cmpl([parsed])
        return rendered

    # ------------------------------------------------------------------------------------ conversions

    def tokens(self, prompt: str) -> list[int]:
        tokens: list[int] = self._tokenizer.encode(prompt)
        return tokens

    def chat_tokens(self, chat: dict[str, Any]) -> list[int]:
        tokens: list[int] = self._chat_prompt(chat)["prompt_token_ids"]
        return tokens

    def _chat_prompt(self, chat: dict[str, Any]) -> dict[str, Any]:
        """The tokens of a chat, and its images."""
        try:
            values = dict(
                chat_template=self._template,
                tools=chat.get("tools"),
                add_generation_prompt=chat.get("add_generation_prompt", True),
                continue_final_message=chat.get("continue_final_message", False),
                tokenize=False,
                **(chat.get("chat_template_kwargs") or {}),
            )
            if not self._sees_images:
                text = self._tokenizer.apply_chat_template(messages_of(chat), **values)
                return {"prompt_token_ids": self._tokenizer.encode(text, add_special_tokens=False)}
            check_images(chat)
            parameters = ChatParams(self._template, chat_template_kwargs=values)
            prompt: dict[str, Any]
            _, prompt = self._runtime.engine.renderer.render_messages(chat["messages"], parameters)
            prompt["prompt_token_ids"] = self._tokenizer.encode(prompt.pop("prompt"), add_special_tokens=False)
        except ServeError:
            raise
        except Exception as error:  # of the template, which is the model's
            raise InvalidRequest(f"the chat template refuses the messages: {error}") from error
        return prompt

    def text(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens)
        return text

    def close(self) -> None:
        self._runtime.close()


def _step(text: Any, output: Any, calls: CallReaders | None) -> Step:
    step = Step(text.index, text.text, generated=len(text.token_ids), finish=text.finish_reason or "")
    step.prompt = len(output.prompt_token_ids or ())
    if step.finish:
        step.stop = text.stop_reason if isinstance(text.stop_reason, str) else ""
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
