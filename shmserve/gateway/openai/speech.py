"""/v1/audio/transcriptions: the file of a form becomes the input `audio` of a language model, whose text is that of the
speech."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from shmserve.errors import ModelFailed, NotFound
from shmserve.gateway.kserve.answers import Buffer
from shmserve.gateway.kserve.forms import Form, encoded_files
from shmserve.gateway.kserve.generate import event
from shmserve.gateway.kserve.plans import InputPlan
from shmserve.gateway.limits.turns import SlicedWork
from shmserve.gateway.openai import bodies
from shmserve.gateway.openai.bodies import CompletionRequest
from shmserve.gateway.openai.errors import BadParameter
from shmserve.gateway.openai.formats import DONE, Choice
from shmserve.gateway.openai.models import AUDIO, PROMPT, SEGMENTS, LanguageModel
from shmserve.gateway.openai.texts import Delta, TokenUsage
from shmserve.gateway.upstream.exchange import JSON

_TEXT = b"text/plain; charset=utf-8"
_encode = msgspec.json.Encoder().encode


class TranscriptionRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    model: str
    language: Annotated[str, Meta(max_length=32)] | None = None
    prompt: str = ""
    response_format: Literal["json", "text", "verbose_json", "srt", "vtt"] = "json"
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    stream: bool | None = None
    timestamp_granularities: list[Literal["segment"]] = msgspec.field(name="timestamp_granularities[]", default=[])
    chunking_strategy: Literal["auto"] | None = None


def request_of(form: Form) -> tuple[TranscriptionRequest, CompletionRequest]:
    """The request, and the completion that it becomes."""
    request = bodies.converted(form.fields, TranscriptionRequest)
    if request.stream and request.response_format not in ("json", "text"):
        raise BadParameter("stream", f"'stream' is not possible with the format {request.response_format}")
    if not form.files.get("file", [b""])[-1]:
        raise BadParameter("file", "the form has no 'file', or an empty one")
    more = {} if request.language is None else {"language": request.language}
    completion = CompletionRequest(
        model=request.model,
        prompt=request.prompt,
        stream=request.stream,
        temperature=request.temperature,
        sampling_parameters=more,
    )
    return request, completion


def check_model(model: LanguageModel, request: TranscriptionRequest) -> None:
    if AUDIO not in model.inputs:
        raise NotFound(f"model '{model.name[:80]}' is not a speech model: it has no input '{AUDIO}'")
    if request.response_format not in ("json", "text") and SEGMENTS not in model.outputs:
        raise BadParameter(
            "response_format",
            f"model '{model.name[:80]}' returns no times, which {request.response_format} needs: it has no output "
            f"'{SEGMENTS}'",
        )


def speech_tensors(model: LanguageModel, prompt: str, audio: memoryview) -> SlicedWork[list[InputPlan]]:
    data = yield from encoded_files([audio])
    return [model.inputs[PROMPT].text(prompt.encode()), model.inputs[AUDIO].plan(data)]


class TranscriptionFormat:
    """A transcription, or the events of its stream. It has one choice."""

    top = None
    shows_usage = False
    shows_stop = False

    def __init__(self, request: TranscriptionRequest, response_id: str) -> None:
        self.id = response_id
        self._format = request.response_format
        self._language = request.language
        self._segments: list[Any] = []
        self.kind = JSON if self._format in ("json", "verbose_json") else _TEXT

    def add(self, choice: Choice, delta: Delta) -> int:
        self._segments += delta.segments or ()
        return choice.add_text(delta.text)

    def whole(self, choices: list[Choice], usage: TokenUsage) -> list[Buffer]:
        text: list[Buffer] = [*choices[0].texts]
        match self._format:
            case "json":
                return [b'{"text":"', *text, b'"%b}' % self._counted(usage)]
            case "text":
                return [msgspec.json.decode(b'"%b"' % b"".join(text)).encode(), b"\n"]
            case "verbose_json":
                spoken = [{"id": number, **segment} for number, segment in enumerate(self._timed())]
                about: dict[str, Any] = {"task": "transcribe", "language": self._language or ""}
                about |= {"duration": spoken[-1]["end"] if spoken else 0.0, "segments": spoken}
                return [_encode(about)[:-1], b',"text":"', *text, b'"%b}' % self._counted(usage)]
            case "srt":
                return list(_subtitles(self._timed(), ","))
            case _:
                return [b"WEBVTT\n\n", *_subtitles(self._timed(), ".")]

    def chunk(self, index: int, choice: Choice, delta: Delta) -> bytes:
        choice.finish = delta.finish or choice.finish
        if not delta.text:
            return b""
        self.add(choice, delta)
        return event(_encode({"type": "transcript.text.delta", "delta": delta.text}))

    def end(self, choices: list[Choice], usage: TokenUsage) -> bytes:
        text = b"".join(choices[0].texts)
        return event(b'{"type":"transcript.text.done","text":"%b"%b}' % (text, self._counted(usage))) + DONE

    def error(self, body: bytes) -> bytes:
        return event(body)

    def _timed(self) -> list[dict[str, Any]]:
        try:
            return [
                {"start": float(one["start"]), "end": float(one["end"]), "text": str(one["text"])}
                for one in self._segments
            ]
        except (KeyError, TypeError, ValueError):
            text = f"the output '{SEGMENTS}' of the model is not a list of objects with 'start', 'end' and 'text'"
            raise ModelFailed(text) from None

    def _counted(self, usage: TokenUsage) -> bytes:
        """The field with the number of tokens, if the model counts them."""
        if usage.prompt is None or usage.completion is None:
            return b""
        counts = {"input_tokens": usage.prompt, "output_tokens": usage.completion}
        return b',"usage":%b' % _encode({"type": "tokens", **counts, "total_tokens": sum(counts.values())})


def _subtitles(segments: list[dict[str, Any]], point: str) -> Iterator[bytes]:
    for number, segment in enumerate(segments, 1):
        lines = f"{_clock(segment['start'], point)} --> {_clock(segment['end'], point)}\n{segment['text'].strip()}\n\n"
        yield (f"{number}\n{lines}" if point == "," else lines).encode()


def _clock(seconds: float, point: str) -> str:
    milliseconds = round(seconds * 1000)
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest // 1000:02}{point}{rest % 1000:03}"
