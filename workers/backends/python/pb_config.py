"""The object that a Python model's `auto_complete_config` fills in.

Invariant: values in the configuration file are not replaced; a model may add to them, and a conflict raises an error.
"""

from __future__ import annotations

from typing import Any

_INPUT_KEYS = ("name", "data_type", "dims", "optional", "allow_ragged_batch")
_OUTPUT_KEYS = ("name", "data_type", "dims")


class ModelConfig:
    """A model configuration that `auto_complete_config` completes through the methods."""

    def __init__(self, model_config: dict[str, Any]) -> None:
        self._model_config = model_config

    def as_dict(self) -> dict[str, Any]:
        return self._model_config

    def set_max_batch_size(self, max_batch_size: int) -> None:
        configured = self._model_config.get("max_batch_size", 0)
        if configured > max_batch_size:
            raise ValueError(
                f"configuration specified max_batch_size {configured}, but auto_complete_config of model "
                f"'{self._name()}' sets the smaller max_batch_size {max_batch_size}"
            )
        self._model_config["max_batch_size"] = max_batch_size

    def add_input(self, input: dict[str, Any]) -> None:
        self._add("input", input, _INPUT_KEYS)

    def add_output(self, output: dict[str, Any]) -> None:
        self._add("output", output, _OUTPUT_KEYS)

    def set_dynamic_batching(self) -> None:
        for other in ("sequence_batching", "ensemble_scheduling"):
            if other in self._model_config:
                raise ValueError(
                    f"configuration specified scheduling_choice as {other}, but auto_complete_config of model "
                    f"'{self._name()}' tries to set dynamic_batching"
                )
        self._model_config.setdefault("dynamic_batching", {})

    def set_model_transaction_policy(self, transaction_policy_dict: dict[str, Any]) -> None:
        unknown = [key for key in transaction_policy_dict if key != "decoupled"]
        if unknown:
            raise ValueError(f"model transaction policy property in auto_complete_config has unknown keys {unknown}")
        if "decoupled" not in transaction_policy_dict:
            return
        wanted = bool(transaction_policy_dict["decoupled"])
        policy = self._model_config.get("model_transaction_policy")
        if policy is not None and policy.get("decoupled", False) and not wanted:
            raise ValueError(
                f"configuration specified decoupled as true, but auto_complete_config of model '{self._name()}' "
                "sets it to false"
            )
        self._model_config["model_transaction_policy"] = {"decoupled": wanted}

    def _name(self) -> str:
        return str(self._model_config.get("name", ""))

    def _add(self, kind: str, tensor: dict[str, Any], known: tuple[str, ...]) -> None:
        unknown = [key for key in tensor if key not in known]
        if unknown:
            raise ValueError(f"{kind} of model '{self._name()}' in auto_complete_config has unknown keys {unknown}")
        for key in ("name", "data_type", "dims"):
            if key not in tensor:
                raise ValueError(f"{kind} of model '{self._name()}' in auto_complete_config lacks '{key}'")
        entry = {**tensor, "dims": list(tensor["dims"])}
        entries = self._model_config.setdefault(kind, [])
        existing = next((have for have in entries if have["name"] == entry["name"]), None)
        if existing is None:
            entries.append(entry)
            return
        for key, value in entry.items():
            if existing.get(key) != value:
                raise ValueError(
                    f"unable to change {kind} '{entry['name']}' of model '{self._name()}': the configuration has "
                    f"{key} {existing.get(key)}, auto_complete_config gives {value}"
                )
