"""The settings to search: those that a model's configuration allows to change, and the text edits for each candidate.

Invariant: `max_batch_size` is never lowered, because clients may send requests of that size. Smaller batches are
configured by `preferred_batch_size`.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from shmserve.core.policy import InstanceSpec, ModelPolicy
from shmserve.errors import Unsupported
from shmserve.repo.compile import compile_instances, compile_policy
from shmserve.repo.config.edit import Edit, edited
from shmserve.repo.config.schema import ModelConfig, ModelDynamicBatching, ModelParameter, parameter
from shmserve.repo.load import parse
from shmserve.repo.parameters import PADDING_BATCH_COST, PADDING_MULTIPLE
from shmserve.repo.rules.padding import padding_of
from shmserve.tools.tune.language import DEFAULTS

THREADS = {
    "dali": "num_threads",
    "onnxruntime": "intra_op_thread_count",
    "pytorch": "INTRA_OP_THREAD_COUNT",
    "tensorflow": "TF_NUM_INTRA_THREADS",
    "llamacpp": "threads",
    "tflite": "tflite_num_threads",
    "openvino": "INFERENCE_NUM_THREADS",
    "fil": "cpu_nthread",
    "paddle": "cpu_threads",
}
"""Backend -> the parameter for the number of threads within an operator."""
DELAYS = (0.0, 0.025, 0.05, 0.1, 0.2, 0.35)
"""Queue delays to try, as shares of the latency target."""
MULTIPLES = (1, 8, 16, 32, 64)


class Candidate(Struct, frozen=True, order=True):
    """A setting. `instances`: count of each instance group. `threads`: number of engine threads per instance; 0: not
    adjustable. `batch`: largest batch in rows; 1: requests run alone. `multiple` and `batch_cost`: padding; 0: not
    padded."""

    instances: int
    threads: int = 0
    batch: int = 1
    delay_us: int = 0
    multiple: int = 0
    batch_cost: int = 0

    def describe(self) -> str:
        parts = [pair_text(self.instances, self.threads), f"batch {self.batch}"]
        parts.append(f"delay {self.delay_us / 1000:g} ms" if self.delay_us else "no delay")
        if self.multiple:
            parts.append(f"padding to multiples of {self.multiple}, batch cost {self.batch_cost}")
        return ", ".join(parts)


def pair_text(instances: int, threads: int) -> str:
    """The pair as text. 0 threads: not adjustable."""
    text = f"{instances} instance{'s' if instances > 1 else ''}"
    return text + (f", {threads} thread{'s' if threads > 1 else ''}" if threads else "")


class TunedModel(Struct, frozen=True):
    """The model to tune. `text`: its config.pbtxt; `config`: as completed by the server. `cores`: number of cores that
    an instance may use. `largest`: upper limit for batches."""

    text: str
    config: ModelConfig
    cores: int
    largest: int = 0

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def max_rows(self) -> int:
        """The largest batch to consider."""
        return max(self.config.max_batch_size, self.largest if self.config.max_batch_size else 0, 1)

    @property
    def thread_parameter(self) -> str:
        group = self.config.instance_group[0]
        return THREADS.get(self.config.backend, "") if group.kind == "KIND_CPU" else ""

    @property
    def devices(self) -> int:
        return devices_of(self.config)

    @property
    def pads(self) -> bool:
        return padding_of(self.config) is not None

    def share(self, instances: int) -> int:
        """The default number of threads of an instance."""
        return max(1, self.cores // max(1, instances * self.devices))

    @property
    def current(self) -> Candidate:
        config = self.config
        count = config.instance_group[0].count
        key = self.thread_parameter
        threads = (int(parameter(config, key) or 0) or self.share(count)) if key else 0
        dynamic = config.dynamic_batching
        padding = padding_of(config)
        multiple, cost = (padding.multiple, padding.batch_cost) if padding is not None else (0, 0)
        if dynamic is None or not config.max_batch_size:
            return Candidate(count, threads, 1, 0, multiple, cost)
        batch = max(dynamic.preferred_batch_size, default=config.max_batch_size)
        return Candidate(count, threads, batch, dynamic.max_queue_delay_microseconds, multiple, cost)

    # ------------------------------------------------------------------------------------ changes

    def edits(self, candidate: Candidate) -> list[Edit]:
        """The edits of config.pbtxt for a candidate. Settings that already have the desired value are not touched."""
        now, result = self.current, []
        if candidate.instances != now.instances:
            groups = range(len(self.config.instance_group))
            result += [Edit(("instance_group", "count"), str(candidate.instances), group) for group in groups]
        key = self.thread_parameter
        if key and candidate.threads:
            provided = int(parameter(self.config, key) or 0)
            if candidate.threads != (provided or self.share(candidate.instances)):
                result.append(Edit(("parameters", key), f'"{candidate.threads}"'))
        result += self._batching(candidate, now)
        if candidate.multiple and candidate.multiple != now.multiple:
            result.append(Edit(("parameters", PADDING_MULTIPLE.name), f'"{candidate.multiple}"'))
        if candidate.multiple and candidate.batch_cost != now.batch_cost:
            result.append(Edit(("parameters", PADDING_BATCH_COST.name), f'"{candidate.batch_cost}"'))
        return result

    def _batching(self, candidate: Candidate, now: Candidate) -> list[Edit]:
        maximum, result = self.config.max_batch_size, []
        preferred = ("dynamic_batching", "preferred_batch_size")
        if candidate.batch > maximum and maximum:
            result.append(Edit(("max_batch_size",), str(candidate.batch)))
        if candidate.batch != now.batch:
            if self.config.dynamic_batching is None:
                result.append(Edit(("dynamic_batching",), "{ }"))
            if candidate.batch < maximum:
                result.append(Edit(preferred, f"[ {candidate.batch} ]"))
            else:
                result.append(Edit(preferred, None))
        if candidate.delay_us != now.delay_us:
            value = str(candidate.delay_us) if candidate.delay_us else None
            result.append(Edit(("dynamic_batching", "max_queue_delay_microseconds"), value))
        return result

    def text_of(self, candidate: Candidate) -> str:
        return edited(self.text, self.edits(candidate))

    def config_of(self, candidate: Candidate) -> ModelConfig:
        """The completed configuration of a candidate."""
        base, edits = self.config, self.edits(candidate)
        if not edits:
            return base
        provided = parse(self.text_of(candidate))
        largest = provided.max_batch_size or base.max_batch_size
        dynamic: ModelDynamicBatching | None = provided.dynamic_batching
        if dynamic is not None and not dynamic.preferred_batch_size and largest:
            dynamic = replace(dynamic, preferred_batch_size=(largest,))
        parameters = dict(base.parameters)
        for edit in edits:
            if edit.path[0] == "parameters" and edit.value is not None:
                parameters[edit.path[1]] = ModelParameter(string_value=edit.value.strip('"'))
        groups = tuple(replace(group, count=candidate.instances) for group in base.instance_group)
        return replace(
            base, max_batch_size=largest, dynamic_batching=dynamic, parameters=parameters, instance_group=groups
        )

    def saturated(self, candidate: Candidate) -> ModelConfig:
        """The configuration for measurements with more requests in flight than usual. It has no queue limits, which do
        not affect the time of a batch."""
        config = self.config_of(candidate)
        dynamic = config.dynamic_batching
        if dynamic is None:
            return config
        return replace(config, dynamic_batching=replace(dynamic, default_queue_policy=None, priority_queue_policy={}))

    def policy_of(self, candidate: Candidate) -> ModelPolicy:
        return compile_policy(self.config_of(candidate), 1)

    def instances_of(self, candidate: Candidate) -> tuple[InstanceSpec, ...]:
        return compile_instances(self.config_of(candidate))

    # ------------------------------------------------------------------------------------ what to try

    def batches(self, rows: int) -> list[int]:
        """The batch sizes to try: powers of two, and the limit. `rows`: number of rows of a request."""
        if self.config.max_batch_size < 2:
            return [1]
        sizes = {self.max_rows, self.current.batch}
        size = 1
        while size < self.max_rows:
            sizes.add(size)
            size *= 2
        return sorted({max(size, rows) for size in sizes})

    def thread_counts(self, instances: int) -> list[int]:
        """The numbers of threads to try with this many instances."""
        if not self.thread_parameter:
            return [0]
        results = {1, self.share(instances)}
        threads = 2
        while threads <= self.share(instances):
            results.add(threads)
            threads *= 2
        if instances == self.current.instances:
            results.add(self.current.threads)
        return sorted(results)

    def delays_us(self, p99_ns: int, shares: Sequence[float] = DELAYS) -> list[int]:
        if self.config.max_batch_size < 2:
            return [0]
        results = {two_digits(share * p99_ns / 1000) for share in shares}
        if self.current.delay_us * 1000 < p99_ns:
            results.add(self.current.delay_us)
        return sorted(results)


def devices_of(config: ModelConfig) -> int:
    """Number of instances per unit of `count`, in all groups."""
    return sum(len(group.gpus) if group.kind == "KIND_GPU" else 1 for group in config.instance_group)


def two_digits(value: float) -> int:
    """The value with two significant digits, as a person would write a delay."""
    return int(float(f"{value:.2g}"))


def check_tunable(config: ModelConfig, step: bool = False) -> None:
    """Raises Unsupported for models whose load the search cannot describe. `step`: the model is one of an ensemble."""
    decoupled = config.decoupled
    groups = config.instance_group
    reasons: Sequence[tuple[bool, str]] = (
        (config.ensemble_scheduling is not None, "is an ensemble, whose steps have the settings"),
        (
            config.sequence_batching is not None,
            "has sequence_batching, whose load differs from that of the others: tune it alone",
        ),
        (decoupled and config.backend in DEFAULTS, "is a language model, whose target is --slo ttft=TIME,itl=TIME"),
        (
            decoupled and step,
            "is a decoupled step, whose responses the next step gets one by one: tune each model alone, and measure "
            "the ensemble with `shmserve bench`",
        ),
        (
            len({(group.kind, group.profile, group.passive) for group in groups}) > 1,
            "has instance groups of several kinds or profiles, whose batches take different times: tune it with one "
            "of them at a time",
        ),
        (
            len({group.count for group in groups}) > 1,
            "has instance groups with different counts, and `tune` sets one count for all: give them the same",
        ),
    )
    for applies, text in reasons:
        if applies:
            raise Unsupported(f"model '{config.name}' {text}")
