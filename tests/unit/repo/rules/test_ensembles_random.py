"""Random graphs of ensembles: valid ones are accepted, and a single mistake is reported with its place."""

from __future__ import annotations

from random import Random
from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from shmserve.repo.config.schema import (
    DataType,
    ModelConfig,
    ModelEnsembling,
    ModelEnsemblingStep,
    ModelInput,
    ModelOutput,
    ModelTransactionPolicy,
)
from shmserve.repo.rules.ensembles import StepModel, check_graph
from shmserve.repo.rules.schedulers import validate_scheduler
from tests.support.hypothesis_profiles import examples

Models = dict[str, StepModel]
TYPES: tuple[DataType, ...] = ("TYPE_FP32", "TYPE_UINT8", "TYPE_STRING", "TYPE_INT64")


class Tensor(NamedTuple):
    name: str
    data_type: DataType
    full: tuple[int, ...]
    """The shape, with the batch dimension if the ensemble has one."""


def some(random: Random, most: int) -> range:
    return range(random.randint(1, most))


def looser(random: Random, dims: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(-1 if random.random() < 0.3 else dim for dim in dims)


def make_graph(random: Random) -> tuple[ModelConfig, Models]:
    """A valid ensemble: each step reads existing tensors, and tensors that no step reads are outputs."""
    batch = random.choice((0, 4))
    lead = (-1,) if batch else ()

    def tensor(name: str) -> Tensor:
        dims = tuple(random.choice((-1, 1, 3, 224)) for _ in some(random, 3))
        return Tensor(name, random.choice(TYPES), lead + dims)

    inputs = [tensor(f"in{index}") for index in some(random, 3)]
    existing, unused = list(inputs), {made.name for made in inputs}
    steps: list[ModelEnsemblingStep] = []
    models: Models = {}
    streaming = random.randint(0, 8)
    for index in some(random, 6):
        read = random.sample(existing, random.randint(1, min(3, len(existing))))
        if index == 0:  # so that every input is used
            read = inputs
        made = [tensor(f"t{index}_{place}") for place in some(random, 2)]
        batches = bool(batch) and random.random() < 0.6
        skip = 1 if batches else 0
        config = ModelConfig(
            name=f"m{index}",
            max_batch_size=random.randint(4, 8) if batches else 0,
            input=(
                *(
                    ModelInput(name=f"x{place}", data_type=one.data_type, dims=looser(random, one.full)[skip:])
                    for place, one in enumerate(read)
                ),
                ModelInput(name="extra", data_type="TYPE_BOOL", dims=(1,), optional=True),
            ),
            output=tuple(
                ModelOutput(name=f"y{place}", data_type=one.data_type, dims=one.full[skip:])
                for place, one in enumerate(made)
            ),
            model_transaction_policy=ModelTransactionPolicy(decoupled=True) if index == streaming else None,
        )
        models[config.name] = StepModel(config, (1, 2))
        step = ModelEnsemblingStep(
            model_name=config.name,
            model_version=random.choice((-1, 0, 1, 2)),
            input_map={f"x{place}": one.name for place, one in enumerate(read)},
            output_map={f"y{place}": one.name for place, one in enumerate(made)},
        )
        steps.append(step)
        unused -= {one.name for one in read}
        unused |= {one.name for one in made}
        existing += made
    random.shuffle(steps)
    skip = len(lead)
    config = ModelConfig(
        name="e",
        platform="ensemble",
        max_batch_size=batch,
        input=tuple(ModelInput(name=one.name, data_type=one.data_type, dims=one.full[skip:]) for one in inputs),
        output=tuple(
            ModelOutput(name=one.name, data_type=one.data_type, dims=one.full[skip:])
            for one in existing
            if one.name in unused
        ),
        ensemble_scheduling=ModelEnsembling(step=tuple(steps)),
    )
    return config, models


def all_problems(config: ModelConfig, models: Models) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    validate_scheduler(config, lambda path, text: found.append((path, text)))
    return found + [(problem.path, problem.text) for problem in check_graph(config, models)]


@settings(max_examples=examples(30))
@given(st.integers(0, 2**32))
def test_valid_graphs_are_accepted(seed: int) -> None:
    assert all_problems(*make_graph(Random(seed))) == []
