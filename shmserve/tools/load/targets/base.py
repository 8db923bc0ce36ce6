"""The interface of a target, and the parts of a request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from msgspec import Struct

Arrays = Mapping[str, Any]
"""Input name -> array. BF16 as its bits, uint16."""

ASK_S = 30.0
"""Maximum wait for metadata and statistics. A peer that is not a KServe server may accept the connection and never
answer."""


def latest_statistics(answer: Mapping[str, Any]) -> dict[str, Any]:
    """The entry of the latest version, which a request without a version gets; {} without statistics."""
    entries: list[dict[str, Any]] = list(answer.get("model_stats") or ())
    return max(entries, key=lambda entry: int(entry.get("version") or 0), default={})


class ModelFacts(Struct, frozen=True, kw_only=True):
    """A server's metadata about a model and about itself."""

    inputs: dict[str, dict[str, Any]]
    outputs: dict[str, dict[str, Any]]
    optional: frozenset[str] = frozenset()
    """Names of inputs that a request need not have."""
    max_batch: int = 0
    decoupled: bool = False
    server: dict[str, str] = {}
    """Name and version."""


def facts_of(metadata: Mapping[str, Any], config: Mapping[str, Any], server: Mapping[str, Any]) -> ModelFacts:
    """The facts in these three documents of a server."""

    def specs(kind: str) -> dict[str, dict[str, Any]]:
        return {
            spec["name"]: {
                "name": spec["name"],
                "datatype": spec["datatype"],
                "shape": [int(dim) for dim in spec.get("shape", ())],
            }
            for spec in metadata.get(kind, ())
        }

    return ModelFacts(
        inputs=specs("inputs"),
        outputs=specs("outputs"),
        optional=frozenset(spec["name"] for spec in config.get("input", ()) if spec.get("optional")),
        max_batch=int(config.get("max_batch_size", 0)),
        decoupled=bool(config.get("model_transaction_policy", {}).get("decoupled", False)),
        server={name: str(server.get(name, "")) for name in ("name", "version")},
    )


class TargetOptions(Struct, frozen=True, kw_only=True):
    """Options that all requests of a run share."""

    model: str
    version: str = ""
    outputs: tuple[str, ...] = ()
    deadline_ns: int = 0
    stream: bool = False
    """Requests are sent with `RequestSlot.stream`, else with `RequestSlot.send`."""
    sampling: Mapping[str, Any] = {}
    """Of prompts: parameters beside `max_tokens`."""
    chat: bool = False
    """A prompt that is a text is sent as a chat."""


class SequencePart(Struct, frozen=True):
    """The place of a request in its sequence."""

    sequence: int
    start: bool
    end: bool


class PromptRequest(Struct, frozen=True):
    """A request to a language model: `messages` (a list of objects) or a text."""

    text: str = ""
    messages: Any = None
    max_tokens: int = 1


class Receiver(Protocol):
    """Learns of the responses of a stream."""

    def __call__(self) -> None:
        """A response has arrived."""
        ...

    def count(self, prompt: int, output: int) -> None:
        """The numbers of tokens of a language model's prompt and of all its responses."""
        ...


class RequestSlot(Protocol):
    """Sends one request at a time."""

    async def send(self, body: Any, part: SequencePart | None) -> None:
        """Returns with the response; raises ServeError."""
        ...

    async def stream(self, body: Any, part: SequencePart | None, on_answer: Receiver) -> None:
        """Returns after the last response; calls `on_answer` at each."""
        ...


class LoadTarget(Protocol):
    """A connection to a server. Belongs to the event loop of its first call."""

    async def facts(self, model: str, version: str) -> ModelFacts: ...

    def prepare(self, arrays: Arrays, facts: ModelFacts, options: TargetOptions) -> Any:
        """The request with these inputs, in the form that `RequestSlot.send` takes."""
        ...

    async def slot(self) -> RequestSlot: ...

    async def statistics(self, model: str, version: str) -> dict[str, Any]:
        """The model's statistics in Triton's format: an entry of `model_stats`, or {} if the server has none."""
        ...

    async def close(self) -> None: ...


@runtime_checkable
class PromptTarget(LoadTarget, Protocol):
    """A target that also takes requests to language models."""

    def prepare_prompt(self, prompt: PromptRequest, facts: ModelFacts, options: TargetOptions) -> Any:
        """The request in the form that `RequestSlot.stream` takes. Raises Unsupported if the model does not take it."""
        ...
