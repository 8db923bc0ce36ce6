"""Language models for tests of the OpenAI-compatible endpoints, with the tensors of Triton's vLLM backend.

A model repeats the words of its prompt, one word per token; choice i begins with word i. Some words have an effect:

    PARAMETERS   the token is the JSON of the sampling parameters
    DOCUMENT     the token is the JSON of the messages
    FAIL         fails
    GATE         waits until the gate, a named pipe, is opened
    FOREVER      repeats a word until the request is cancelled, and then writes a line to the log
    CALL         calls the first tool with {"x": 1}; as a stream, in two pieces

Token j has the id 100 + j and the log probability -(j + 1). For odd j, the token "better" with the id 7 is more
probable; the chosen token comes first only if no token ids are returned.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.model_files import parameters, write_model

_SOURCE = '''
import json
import threading

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
FLAGS = ("finish_reason", "logprobs", "token_ids", "num_input_tokens", "num_output_tokens")


def string(request, name, otherwise):
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return otherwise if tensor is None else tensor.as_numpy().ravel()[0].decode()


def flag(request, name):
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return tensor is not None and bool(tensor.as_numpy().ravel()[0])


def strings(name, values):
    return pb_utils.Tensor(name, np.array([value.encode() for value in values], object))


def entry(text, logprob, rank):
    return {"logprob": logprob, "rank": rank, "decoded_token": text}


class Sequence:
    """One request."""

    def __init__(self, model, request):
        self.request = request
        self.names = model.names
        self.gate, self.log = model.gate, model.log
        self.sender = request.get_response_sender()
        given = string(request, "sampling_parameters", request.parameters())
        self.sampling = json.loads(given) if given else {}
        text, document = string(request, "text_input", ""), string(request, "messages", "")
        ids = pb_utils.get_input_tensor_by_name(request, "prompt_token_ids")
        self.document = json.loads(document) if document else None
        if self.document is not None:
            content = self.document["messages"][-1]["content"]
            text = content if isinstance(content, str) else " ".join(part["text"] for part in content)
        if ids is not None:
            text = " ".join(f"<{token}>" for token in ids.as_numpy().ravel())
        self.words = text.split()
        self.stream = flag(request, "stream")
        self.flags = [name for name in FLAGS if flag(request, "return_" + name)]
        self.count = int(self.sampling.get("n", 1))
        self.most = int(self.sampling.get("max_tokens", 1 << 30))
        stop = self.sampling.get("stop") or []
        self.stop = [stop] if isinstance(stop, str) else stop

    def word(self, choice, index):
        return self.words[(choice + index) % len(self.words)]

    def token(self, choice, index):
        """The text of a token; None at the end."""
        word = self.word(choice, index)
        if word == "FAIL":
            raise ValueError("a word that fails")
        if word == "GATE":
            with open(self.gate) as gate:
                gate.read()
        if any(stop in word for stop in self.stop):
            return None
        if word == "PARAMETERS":
            word = json.dumps(self.sampling, sort_keys=True)
        if word == "DOCUMENT":
            word = json.dumps(self.document, sort_keys=True, ensure_ascii=False)
        return word if index == 0 else " " + word

    def steps(self):
        """For each step, the tokens of all choices ("" if a choice has ended), and why they ended ("" if not)."""
        length = len(self.words)
        if not length:
            yield [""] * self.count, ["stop"] * self.count
        ended = [False] * self.count
        for index in range(min(length, self.most)):
            texts, reasons = [], []
            for choice in range(self.count):
                text = None if ended[choice] else self.token(choice, index)
                stopped = text is None and not ended[choice]
                over = text is not None and index + 1 == min(length, self.most)
                reasons.append("stop" if stopped or (over and index + 1 == length) else "length" if over else "")
                ended[choice] = ended[choice] or bool(reasons[-1])
                texts.append(text or "")
            yield texts, reasons
            if all(ended):
                return

    def logprobs(self, index, text):
        chosen = entry(text, -(index + 1.0), 1 + index % 2)
        found = {str(100 + index): chosen}
        if index % 2 and self.sampling.get("logprobs", 0) > 1:
            better = {"7": entry("better", -index / 2, 1)}
            found = {**better, **found} if "token_ids" in self.flags and self.count == 1 else {**found, **better}
        return [found]

    def respond(self, texts, reasons, logprobs, ids, counts, calls=None):
        tensors = [strings("text_output", texts)]
        for name in self.flags:
            if name == "finish_reason":
                tensors.append(strings(name, [reason or "None" for reason in reasons]))
            elif name == "logprobs":
                tensors.append(strings(name, [json.dumps(one) for one in logprobs]))
            elif name == "token_ids" and self.count == 1:
                tensors.append(pb_utils.Tensor(name, np.array(ids[0], np.uint32)))
            elif name == "num_input_tokens":
                tensors.append(pb_utils.Tensor(name, np.array([len(self.words)], np.uint32)))
            elif name == "num_output_tokens":
                tensors.append(pb_utils.Tensor(name, np.array(counts, np.uint32)))
        if calls is not None:
            tensors.append(strings("tool_calls", [json.dumps(calls)]))
        self.sender.send(pb_utils.InferenceResponse(tensors))

    def run(self):
        try:
            if self.words[:1] == ["CALL"]:
                self.call()
            elif self.words[:1] == ["FOREVER"]:
                self.go_on()
            elif self.stream:
                for index, (texts, reasons) in enumerate(self.steps()):
                    counts = [int(bool(text)) for text in texts]
                    logprobs = [self.logprobs(index, text) if text else [] for text in texts]
                    self.respond(texts, reasons, logprobs, [[100 + index] * counts[0]], counts)
            else:
                self.whole()
            self.sender.send(flags=FINAL)
        except Exception as error:
            self.sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error))), flags=FINAL)

    def whole(self):
        texts, reasons = [""] * self.count, [""] * self.count
        logprobs, counts = [[] for _ in texts], [0] * self.count
        for index, (step, ends) in enumerate(self.steps()):
            for choice, text in enumerate(step):
                texts[choice] += text
                reasons[choice] = reasons[choice] or ends[choice]
                counts[choice] += bool(text)
                logprobs[choice] += self.logprobs(index, text) if text else []
        self.respond(texts, reasons, logprobs, [[100 + index for index in range(counts[0])]], counts)

    def go_on(self):
        text = self.words[1] + " "
        while not self.sender.is_cancelled():
            self.respond([text], [""], [[]], [[]], [1])
        with open(self.log, "a") as log:
            log.write("cancelled\\n")

    def call(self):
        tool = self.document["tools"][0]["function"]["name"]
        first = {"index": 0, "id": "call_1", "type": "function", "function": {"name": tool, "arguments": '{"x":'}}
        second = {"index": 0, "function": {"arguments": " 1}"}}
        if self.stream:
            self.respond([""], [""], [[]], [[]], [1], [first])
            self.respond([""], ["stop"], [[]], [[]], [1], [second])
        else:
            whole = {"id": "call_1", "type": "function", "function": {"name": tool, "arguments": '{"x": 1}'}}
            self.respond([""], ["stop"], [[]], [[]], [2], [whole])


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        self.names = [one["name"] for one in config["input"]]
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
_FLAGS = ("stream", "exclude_input_in_output", "return_finish_reason", "return_cumulative_logprob", "return_logprobs",
          "return_num_input_tokens", "return_num_output_tokens")  # fmt: skip
_COUNTS = """
output [ { name: "num_input_tokens" data_type: TYPE_UINT32 dims: [ 1 ] } ]
output [ { name: "num_output_tokens" data_type: TYPE_UINT32 dims: [ -1 ] } ]
"""
TEMPLATE = """
{%- for message in messages %}{{ message.role }}: {{ message.content }} {% endfor -%}
{%- if tools %}{{ tools | tojson }} {% endif -%}
{%- if messages[0].role == "nobody" %}{{ raise_exception("nobody may not speak") }}{% endif -%}
{{ style or "" }}{{ eos_token }}
"""
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
"""A template that renders for hours without output."""
EMBEDDING = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.one(pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy()) for request in requests]

    def one(self, texts):
        if b"FAIL" in texts:
            raise ValueError("a text that fails")
        rows = [[len(text), text[:1] == b"a", np.nan if text == b"nan" else 0.1] for (text,) in texts]
        return pb_utils.InferenceResponse([pb_utils.Tensor("VECTOR", np.array(rows, np.float32))])
"""
EMBEDDING_CONFIG = """
backend: "python" max_batch_size: 64 dynamic_batching { }
input [ { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "VECTOR" data_type: TYPE_FP32 dims: [ 3 ] } ]
"""
ONCE = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        texts = [pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy() for request in requests]
        upper = [np.array([[text.upper()] for (text,) in rows], object) for rows in texts]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("text_output", rows)]) for rows in upper]
"""
ONCE_CONFIG = """
backend: "python" max_batch_size: 8 dynamic_batching { }
input [ { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "text_output" data_type: TYPE_STRING dims: [ 1 ] } ]
"""
ENSEMBLE = """
platform: "ensemble" max_batch_size: 64
input [ { name: "text" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "vector" data_type: TYPE_FP32 dims: [ 3 ] } ]
ensemble_scheduling { step [ {
  model_name: "embed" model_version: -1
  input_map { key: "TEXT" value: "text" } output_map { key: "VECTOR" value: "vector" }
} ] }
"""


def openai_client(address: str, token: str = "none", **more: Any) -> Any:
    """OpenAI's own client, for the endpoint at this address. With an `http_client` it uses TLS."""
    import openai

    url = f"{'https' if 'http_client' in more else 'http'}://{address}/v1"
    return openai.OpenAI(base_url=url, api_key=token, max_retries=0, timeout=60, **more)


class LanguageModels(NamedTuple):
    """Files with which a test controls the models."""

    gate: Path
    log: Path


def _tensors(kind: str, dtype: str, dims: str, *names: str) -> str:
    optional = "" if kind == "output" or names == ("text_input",) else " optional: true"
    return "".join(f'{kind} [ {{ name: "{name}" data_type: {dtype} dims: [ {dims} ]{optional} }} ]\n' for name in names)


def _config(*more: str) -> str:
    return (
        'backend: "python" max_batch_size: 0\nmodel_transaction_policy { decoupled: true }\n'
        + _tensors("input", "TYPE_STRING", "1", "text_input")
        + _tensors("output", "TYPE_STRING", "-1", "text_output")
        + "".join(more)
    )


def _triton_config() -> str:
    """The tensors of Triton's vLLM backend."""
    return _config(
        _tensors("input", "TYPE_STRING", "1", "sampling_parameters"),
        _tensors("input", "TYPE_BOOL", "1", *_FLAGS),
        _tensors("output", "TYPE_STRING", "-1", "finish_reason", "logprobs"),
        _tensors("output", "TYPE_FP32", "-1", "cumulative_logprob"),
        _COUNTS,
    )


def write_language_models(repository: Path) -> LanguageModels:
    """`talk`: with all tensors of the contract. `vllm`: as Triton's backend, with a chat template in its configuration.
    `endless`: with one that takes hours. `bare`: with a prompt and a text only; `once`: it answers with one response,
    in batches. `embed`, `embedded`: embeddings, also by an ensemble."""
    files = LanguageModels(*(repository.with_name(f"{repository.name}-{name}") for name in ("gate", "log")))
    os.mkfifo(files.gate)
    files.log.touch()
    given = parameters(gate=str(files.gate), log=str(files.log))
    talk = (
        _tensors("input", "TYPE_STRING", "1", "messages"),
        _tensors("input", "TYPE_BOOL", "1", "return_token_ids"),
        _tensors("input", "TYPE_INT32", "-1", "prompt_token_ids"),
        _tensors("output", "TYPE_UINT32", "-1", "token_ids"),
        _tensors("output", "TYPE_STRING", "-1", "tool_calls"),
    )
    write_model(repository, "talk", _triton_config() + "".join(talk) + given, _SOURCE)
    template = TEMPLATE.replace("\n", "").replace('"', '\\"')
    vllm = parameters(chat_template=template, eos_token="</s>", default_max_tokens="20")
    write_model(repository, "vllm", _triton_config() + vllm + given, _SOURCE)
    write_model(repository, "bare", _config() + given, _SOURCE)
    write_model(repository, "once", ONCE_CONFIG, ONCE)
    write_model(repository, "embed", EMBEDDING_CONFIG, EMBEDDING)
    write_model(repository, "embedded", ENSEMBLE)
    return files
