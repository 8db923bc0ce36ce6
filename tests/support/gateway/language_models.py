"""Language models for tests of the OpenAI-compatible endpoints, with the tensors of Triton's vLLM backend.

A model repeats the words of its prompt, one word per token; choice i begins with word i. Some words have an effect:

    PARAMETERS   the token is the JSON of the sampling parameters
    DOCUMENT     the token is the JSON of the messages
    AUDIO        the token is the checksum of the audio
    IMAGES       the token is the JSON of the checksums of the images
    FAIL         fails
    GATE         waits until the gate, a named pipe, is opened
    FOREVER      repeats a word twenty times a second until the request is cancelled, and then writes a line to the log
    CALL         calls the first tool with {"x": 1}; as a stream, in two pieces
"""

from __future__ import annotations

import base64
import io
import os
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.ensemble_models import BATCHES, ensemble, tensors
from tests.support.model_files import parameters, python_model, write_model
from tests.support.patience import PATIENCE_S

_SOURCE = '''
import base64
import json
import select
import threading
import zlib

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
FLAGS = ("finish_reason", "num_input_tokens", "num_output_tokens")


def values(request, name):
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return [] if tensor is None else tensor.as_numpy().ravel().tolist()


def strings(name, texts):
    return pb_utils.Tensor(name, np.array([text.encode() for text in texts], object))


class Sequence:
    """One request."""

    def __init__(self, model, request):
        self.gate, self.log = model.gate, model.log
        self.sender = request.get_response_sender()
        (given,) = values(request, "sampling_parameters") or [request.parameters()]
        self.sampling = json.loads(given or "{}")
        (text,) = values(request, "text_input") or [b""]
        text = text.decode()
        self.document = None
        for document in values(request, "messages"):
            self.document = json.loads(document)
            content = self.document["messages"][-1]["content"]
            text = content if isinstance(content, str) else " ".join(part.get("text", "") for part in content)
        self.images = [zlib.crc32(base64.b64decode(image)) for image in values(request, "image")]
        self.audio = b"".join(values(request, "audio"))
        self.words = text.split()
        self.stream = any(values(request, "stream"))
        self.flags = [name for name in FLAGS if any(values(request, "return_" + name))]
        self.count = int(self.sampling.get("n", 1))

    def token(self, choice, index):
        word = self.words[(choice + index) % len(self.words)]
        if word == "FAIL":
            raise ValueError("a word that fails")
        if word == "GATE":
            with open(self.gate) as gate:
                gate.read()
        if word == "PARAMETERS":
            word = json.dumps(self.sampling, sort_keys=True)
        if word == "DOCUMENT":
            word = json.dumps(self.document, sort_keys=True, ensure_ascii=False)
        if word == "AUDIO":
            word = str(zlib.crc32(self.audio))
        if word == "IMAGES":
            word = json.dumps(self.images)
        return word if index == 0 else " " + word

    def steps(self):
        """For each step, the tokens of all choices, and why they ended."""
        length = min(len(self.words), int(self.sampling.get("max_tokens", 1 << 30)))
        end = "stop" if length == len(self.words) else "length"
        for index in range(length):
            texts = [self.token(choice, index) for choice in range(self.count)]
            yield texts, end if index + 1 == length else "None"

    def respond(self, texts, reason="None", tokens=1, calls=None):
        tensors = [strings("text_output", texts)]
        counts = {"num_input_tokens": [len(self.words)], "num_output_tokens": [tokens] * len(texts)}
        for name in self.flags:
            if name == "finish_reason":
                tensors.append(strings(name, [reason] * len(texts)))
            else:
                tensors.append(pb_utils.Tensor(name, np.array(counts[name], np.uint32)))
        if self.audio:
            spoken = [{"start": at, "end": at + 0.5, "text": word} for at, word in enumerate(self.words)]
            tensors.append(strings("segments", [json.dumps(spoken)]))
        if "prompt_logprobs" in self.sampling:
            tokens = [None, *[{word: {"logprob": -1.5, "rank": 1, "decoded_token": word}} for word in self.words[1:]]]
            tensors.append(strings("prompt_logprobs", [json.dumps(tokens)] * len(texts)))
        if calls is not None:
            tensors.append(strings("tool_calls", [json.dumps(calls)]))
        self.sender.send(pb_utils.InferenceResponse(tensors))

    def run(self):
        try:
            if self.words[0] == "CALL":
                self.call()
            elif self.words[0] == "FOREVER":
                self.proceed()
            elif self.stream:
                for texts, reason in self.steps():
                    self.respond(texts, reason)
            else:
                texts, reasons = zip(*self.steps())
                self.respond(["".join(one) for one in zip(*texts)], reasons[-1], len(texts))
            self.sender.send(flags=FINAL)
        except Exception as error:
            self.sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error))), flags=FINAL)

    def proceed(self):
        while not self.sender.is_cancelled():
            self.respond([self.words[1] + " "])
            select.select([], [], [], 0.05)
        with open(self.log, "a") as log:
            log.write("cancelled\\n")

    def call(self):
        tool = self.document["tools"][0]["function"]["name"]
        first = {"index": 0, "id": "call_1", "type": "function", "function": {"name": tool, "arguments": '{"x":'}}
        second = {"index": 0, "function": {"arguments": " 1}"}}
        if self.stream:
            self.respond([""], calls=[first])
            self.respond([""], "stop", calls=[second])
        else:
            first["function"]["arguments"] += " 1}"
            del first["index"]
            self.respond([""], "stop", 2, [first])


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        given = {name: one["string_value"] for name, one in config.get("parameters", {}).items()}
        self.gate, self.log = given.get("gate"), given.get("log")
        self.threads = []

    def execute(self, requests):
        self.threads = [thread for thread in self.threads if thread.is_alive()]
        for request in requests:
            thread = threading.Thread(target=Sequence(self, request).run)
            self.threads.append(thread)
            thread.start()

    def finalize(self):
        for thread in self.threads:
            thread.join()
'''
COUNT = "num_input_tokens:UINT32:[1]"
TEMPLATE = """
{%- for message in messages %}{{ message.role }}: {% if message.content is string %}{{ message.content }}{% else -%}
{%- for part in message.content %}{{ part.text or "<image>" }} {% endfor %}{% endif %} {% endfor -%}
{%- if tools %}{{ tools | tojson }} {% endif -%}
{%- if messages[0].role == "nobody" %}{{ raise_exception("nobody may not speak") }}{% endif -%}
{{ style or "" }}{{ eos_token }}
"""
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
"""A template that renders for hours without output."""
EMBEDDING = python_model("""
if b"FAIL" in x:
    raise ValueError("a text that fails")
return self.respond(np.array([[len(text), text[:1] == b"a", 0.1] for (text,) in x], np.float32))
""")
_EACH = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        given = [{tensor.name(): tensor.as_numpy() for tensor in request.inputs()} for request in requests]
        return [pb_utils.InferenceResponse(self.one(**inputs)) for inputs in given]
"""
STATES = f"""{_EACH}
    def one(self, text):
        codes = np.frombuffer(text[0, 0], np.uint8)[:, None]
        states = (codes * [1, 0, 0, 1] + [0, 2, 4, 0]).astype(np.float16)
        mask = (codes[:, 0] != ord("_")).astype(np.int64)
        return [pb_utils.Tensor("states", states[None]), pb_utils.Tensor("attention_mask", mask[None])]
"""
"""A vector for each character. The mask excludes underlines."""
OVERLAP = f"""{_EACH}
    def one(self, query, document):
        pairs = [(query.split(), text.split()) for query, text in zip(query.ravel(), document.ravel())]
        scores = [[len({{*query}} & {{*text}}) / len(text)] for query, text in pairs]
        counts = [[len(query) + len(text)] for query, text in pairs]
        outputs = (("score", scores, np.float32), ("num_input_tokens", counts, np.uint32))
        return [pb_utils.Tensor(name, np.array(values, kind)) for name, values, kind in outputs]
"""
"""The part of a document's words that are in the query."""
ONCE = f"""{_EACH}
    def one(self, text_input):
        return [pb_utils.Tensor("text_output", np.array([[text.upper()] for (text,) in text_input], object))]
"""


def post(client: Any, path: str, **body: Any) -> Any:
    """Calls an endpoint that OpenAI's client does not know."""
    root = client.with_options(base_url=str(client.base_url).removesuffix("v1/"))
    return root.post(path, cast_to=object, body=body)


def picture(colour: str) -> str:
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (40, 30), colour).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def openai_client(address: str, **more: Any) -> Any:
    """OpenAI's own client, for the endpoint at this address. With an `http_client` it uses TLS."""
    import openai

    url = f"{'https' if 'http_client' in more else 'http'}://{address}/v1"
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE_S, **more)


class LanguageModels(NamedTuple):
    """Files with which a test controls the models."""

    gate: Path
    log: Path


def _config(*more: str, inputs: tuple[str, ...] = (), outputs: tuple[str, ...] = ()) -> str:
    """`inputs` are optional."""
    found = tensors("text_input:STRING:[1]", *[f"{one}:optional: true" for one in inputs])
    return (
        'backend: "python" model_transaction_policy { decoupled: true }\n'
        f"input {found} output {tensors('text_output:STRING', *outputs)}\n" + "".join(more)
    )


def write_language_models(repository: Path) -> LanguageModels:
    """`talk`: with messages and tool calls; `thinks`: the same, with thinking in its text. `vllm`: as Triton's backend,
    with a chat template in its configuration. `speech`: with audio. `bare`: with a prompt and a text only; `once`: it
    answers with one response, in batches. `embed`, `embedded`: embeddings, also by an ensemble. `overlap`: scores.
    `pooled-mean` and others: embeddings that the gateway pools."""
    files = LanguageModels(*(repository.with_name(f"{repository.name}-{name}") for name in ("gate", "log")))
    os.mkfifo(files.gate)
    files.log.touch()
    given = parameters(gate=str(files.gate), log=str(files.log))
    flags = ("stream", "return_finish_reason", "return_num_input_tokens", "return_num_output_tokens")
    inputs = ("sampling_parameters:STRING:[1]", *[f"{flag}:BOOL:[1]" for flag in flags])
    outputs = ("finish_reason:STRING", COUNT, "num_output_tokens:UINT32")
    chat = (*inputs, "messages:STRING:[1]", "image:STRING:[-1]")
    talk = _config(given, inputs=chat, outputs=(*outputs, "tool_calls:STRING", "prompt_logprobs:STRING"))
    write_model(repository, "talk", talk, _SOURCE)
    write_model(repository, "thinks", f"{talk} {parameters(reasoning_tags='<think> </think>')}", _SOURCE)
    template = TEMPLATE.replace("\n", "").replace('"', '\\"')
    vllm = parameters(chat_template=template, eos_token="</s>", default_max_tokens="20")
    seeing = (*inputs, "image:STRING:[1]")
    write_model(repository, "vllm", _config(vllm, given, inputs=seeing, outputs=outputs), _SOURCE)
    write_model(repository, "bare", _config(given), _SOURCE)
    speech = _config(given, inputs=(*inputs, "audio:STRING:[1]"), outputs=(*outputs, "segments:STRING"))
    write_model(repository, "speech", speech, _SOURCE)
    text = f"input {tensors('text_input:STRING:[1]')} output {tensors('text_output:STRING:[1]')}"
    write_model(repository, "once", f'backend: "python" {BATCHES} {text}', ONCE)
    pair = f"input {tensors('query:STRING:[1]', 'document:STRING:[1]')} output {tensors('score:FP32:[1]', COUNT)}"
    write_model(repository, "overlap", f'backend: "python" {BATCHES} {pair}', OVERLAP)
    vector = f"input {tensors('x:STRING:[1]')} output {tensors('y:FP32:[3]')}"
    declared = parameters(embedding_output="y")
    write_model(repository, "embed", f'backend: "python" {BATCHES} {vector} {declared}', EMBEDDING)
    states = f"input {tensors('text:STRING:[1]')} output {tensors('states:FP16:[-1, 4]', 'attention_mask:INT64:[-1]')}"
    for pooling in ("mean", "cls", "last"):
        declared = parameters(embedding_pooling=pooling, embedding_normalize=str(pooling != "mean").lower())
        write_model(repository, f"pooled-{pooling}", f'backend: "python" {BATCHES} {states} {declared}', STATES)
    step = "embed(x:text)->(y:vector)"
    ensemble(repository, "embedded", "text:STRING:[1]", "vector:FP32:[3]", step, more="max_batch_size: 64")
    return files
