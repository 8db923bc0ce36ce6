"""The table of the model parameters that the server reads: values, defaults, errors and hints."""

from __future__ import annotations

from typing import Any

import pytest

from shmserve.errors import InvalidRequest
from shmserve.gateway.openai.inputs import DEFAULT_MAX_TOKENS
from shmserve.gateway.openai.requests import CHAT_TEMPLATE
from shmserve.repo.config.schema import ModelConfig, ModelParameter
from shmserve.repo.parameters import GROUPS, TABLE, misspelt, validate_values
from shmserve.repo.rules.ensemble_steps import IF, MAP
from shmserve.settings.table import BY_NAME
from tests.support.cases import cases

LIMIT, FLAG = 'MiB, such as "2048", or "0" for no limit', '"true" or "false"'
ADAPTERS = 'NAME=PATH, such as "french=french.gguf", with paths in the directory of the version'
COUNT, SHARE = 'a number of instances from 1 to 1024, such as "4"', 'VERSION=PERCENT, such as "3=10"'
CASES: dict[str, tuple[Any, dict[str, Any], str, tuple[str, ...]]] = {
    "execution_limit_secs": (None, {"2.5": 2_500_000_000, "0": 0}, 'seconds, such as "2.5", or "0" for no limit',
                             ("soon", "-1", "nan", "", "9999999")),
    "crash_limit": (None, {"5": 5, "0": 0}, 'a number of crashes, such as "5", or "0" for no limit', ("-1", "", "1.5")),
    "retry_alone": (True, {"False": False, "true": True}, FLAG, ("no", "")),
    "memory_limit_mb": (None, {"512": 512 << 20, "0": 0}, LIMIT, ("2 GiB", "")),
    "gpu_memory_limit_mb": (None, {"7": 7 << 20}, LIMIT, ("-5",)),
    "memory_mb": (None, {"512": 512 << 20}, 'MiB, such as "2048"', ("2g",)),
    "gpu_memory_mb": (None, {"999999999": 999_999_999 << 20}, 'MiB, such as "2048"', ("",)),
    "idle_unload_secs": (None, {"0.5": 500_000_000}, 'seconds, such as "300", or "0" for never', ("never",)),
    "stay_loaded": (False, {"TRUE": True}, FLAG, ("1",)),
    "EXECUTION_ENV_PATH": ("", {path: path for path in ("/opt/e", "$$TRITON_MODEL_DIRECTORY/e")},
                           "an absolute path, or one that begins with $$TRITON_MODEL_DIRECTORY/", ("env.tar.gz", "")),
    "min_instances": (None, {"1": 1}, COUNT, ("0", "1025")),
    "max_instances": (None, {"1024": 1024}, COUNT, ("many",)),
    "scale_up_queue_ms": (50_000_000, {"2.5": 2_500_000}, 'milliseconds, such as "50"', ("-1",)),
    "scale_down_secs": (30_000_000_000, {"0.1": 100_000_000}, 'seconds, such as "30"', ("",)),
    "traffic": ({}, {"1=60, 2=40%": {1: 60, 2: 40}, " ": {}}, SHARE, ("3:10", "latest=5")),
    "adapters": ({}, {"a=b.gguf, c=d/e": {"a": "b.gguf", "c": "d/e"}}, ADAPTERS, ("a", "a=/b", "a=../b", "a b=c")),
    "chat_template_kwargs": ("", {'{"a": 1}': '{"a": 1}'}, 'a JSON object, such as {"enable_thinking": false}',
                             ("[]", "{", "")),
    "aliases": ({}, {"prod=1, next=2": {"prod": 1, "next": 2}}, 'NAME=VERSION, such as "prod=2"', ("a=b", "a@b=2")),
    "shadow": ({}, {"3=5": {3: 5}}, SHARE, ("3=101", "0=5")),
    "padding_lookahead": (64, {"4096": 4096}, "an integer from 1 to 4096", ("0", "4097")),
    "padding_multiple": (1, {"8": 8}, "an integer from 1 to 1048576", ("8.5",)),
    "padding_batch_cost": (128, {"0": 0}, "an integer from 0 to 1099511627776", ("-1",)),
    "stacked": (False, {"true": True}, FLAG, ("maybe",)),
    "strict_outputs": (False, {"true": True}, FLAG, ("maybe",)),
    "send_waits": (True, {"false": False}, FLAG, ("maybe",)),
    "FORCE_CPU_ONLY_INPUT_TENSORS": (True, {"no": False, "False": False, "yes": True}, '"yes" or "no"', ()),
    "embedding_pooling": ("", {"cls": "cls"}, '"mean", "cls" or "last"', ("max", "")),
    "embedding_normalize": (False, {"true": True}, FLAG, ("1",)),
    "max_queue_tokens": (0, {"5000": 5000, "0": 0}, 'a number of tokens, such as "100000", or "0" for no limit',
                         ("many", "-1")),
    "overlap_batches": (True, {"Off": False, "1": True}, FLAG, ("maybe",)),
}  # fmt: skip
"""Name -> the default, valid values and what is read, a description of them, invalid values. Other rows are texts."""


def given(name: str, text: str) -> ModelConfig:
    return ModelConfig("m", backend=(*TABLE[name].backends, "")[0], parameters={name: ModelParameter(text)})


def problems(config: ModelConfig) -> list[str]:
    found: list[str] = []
    validate_values(config, lambda path, text: found.append(f"{path}: {text}"))
    return found


@pytest.mark.parametrize("name", TABLE)
def test_values(name: str) -> None:
    row = TABLE[name]
    default, valid, expected, invalid = CASES.get(name, ("", {"any text": "any text"}, "", ()))
    assert row.read(ModelConfig("m")) == default
    for text, value in valid.items():
        assert problems(given(name, text)) == []
        assert row.read(given(name, text)) == value
    for text in invalid:
        assert problems(given(name, text)) == [f'parameters["{name}"]: found "{text}", expected {expected}']
        with pytest.raises(InvalidRequest) as caught:
            row.read(given(name, text))
        assert str(caught.value) == f"parameter {name} of model 'm' must be {expected}, not '{text}'"


def test_rows_agree_with_the_rest() -> None:
    for text, found in (
        ("3=10,3=20", 'found "3" twice'),
        (",".join(f"{n}=0" for n in range(1, 66)), "found 65 entries"),
    ):
        assert problems(given("traffic", text)) == [f'parameters["traffic"]: {found}, expected {SHARE}']
    assert problems(ModelConfig("m", backend="own", parameters={"stacked": ModelParameter("twice")})) == []
    assert CASES.keys() <= TABLE.keys()
    assert {CHAT_TEMPLATE, DEFAULT_MAX_TOKENS, f"step[INDEX].{MAP}", f"step[INDEX].{IF}"} <= TABLE.keys()
    assert [*dict.fromkeys(row.group for row in TABLE.values())] == [*GROUPS]
    for row in TABLE.values():
        assert not row.flag or row.name in BY_NAME[row.flag].help


@cases(
    ("execution_limit_sec", "execution_limit_secs"),
    ("execution_limit", "execution_limit_secs"),
    ("memory_limit_gb", "memory_limit_mb"),
    ("execution_env_path", "EXECUTION_ENV_PATH"),
    *[(key, "") for key in ("stay_loaded", "step[0].map", "gpu_mem_limit", "eos_token_id", "memory", "stackd")],
)
def test_only_names_that_are_almost_right_get_a_hint(key: str, name: str) -> None:
    expected = [(f'parameters["{key}"]', f'not read by the server; did you mean "{name}"?')] if name else []
    assert list(misspelt(ModelConfig("m", backend="own", parameters={key: ModelParameter("1")}))) == expected
