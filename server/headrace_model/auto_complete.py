"""`pb_utils.ModelConfig`: the configuration that `auto_complete_config` of a model.py completes."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

_PROPERTIES = ("name", "data_type", "dims", "optional", "is_shape_tensor")


class AutoCompleteConfig:
    """A model's configuration, to be completed by `auto_complete_config`.

    Values that the file sets stay; a different value in the code is an error.

    Args:
        document: configuration in Triton's JSON form, without the fields that the file does not set.
    """

    def __init__(self, document: dict[str, Any]) -> None:
        # The lists and the batch size are always there, as model code expects them.
        self._document = {"max_batch_size": 0, "input": [], "output": [], **copy.deepcopy(document)}

    def as_dict(self) -> dict[str, Any]:
        """Return the configuration in Triton's JSON form."""
        return self._document

    def add_input(self, tensor: dict[str, Any]) -> None:
        """Add an input, or complete the one of this name.

        Args:
            tensor: name, data_type and dims; optional may be added.

        Raises:
            ValueError: a property is missing or unknown, or the file has another value.
        """
        self._add("input", tensor, _PROPERTIES)

    def add_output(self, tensor: dict[str, Any]) -> None:
        """Add an output, or complete the one of this name; raises ValueError as `add_input` does."""
        self._add("output", tensor, _PROPERTIES[:3])

    def set_max_batch_size(self, max_batch_size: int) -> None:
        """Set the maximum rows of a batch.

        Raises:
            ValueError: the file has another value.
        """
        present = self._document.get("max_batch_size")
        if present is not None and present > max_batch_size:
            raise ValueError(
                f"the configuration has max_batch_size {present}, auto_complete_config sets {max_batch_size}"
            )
        self._document["max_batch_size"] = max_batch_size

    def set_dynamic_batching(self) -> None:
        """Turn dynamic batching on, unless the file has a scheduler."""
        if "sequence_batching" not in self._document and "ensemble_scheduling" not in self._document:
            self._document.setdefault("dynamic_batching", {})

    def set_model_transaction_policy(self, policy: dict[str, Any]) -> None:
        """Set the transaction policy.

        Raises:
            ValueError: a property is unknown, or the policy is not that of the file.
        """
        unknown = [name for name in policy if name != "decoupled"]
        if unknown:
            raise ValueError(
                "model_transaction_policy has the property decoupled only, not {}".format(", ".join(unknown))
            )
        decoupled = bool(policy.get("decoupled", False))
        if not decoupled and self._document.get("model_transaction_policy", {}).get("decoupled"):
            raise ValueError("the configuration has decoupled: true, auto_complete_config sets false")
        self._document["model_transaction_policy"] = {"decoupled": decoupled}

    def _add(self, field: str, tensor: dict[str, Any], allowed: Iterable[str]) -> None:
        unknown = [name for name in tensor if name not in allowed]
        if unknown:
            raise ValueError(
                "{} {!r} has the unknown property {}".format(field, tensor.get("name"), ", ".join(unknown))
            )
        missing = [name for name in ("name", "data_type", "dims") if name not in tensor]
        if missing:
            raise ValueError("{} {!r} has no {}".format(field, tensor.get("name"), ", ".join(missing)))
        tensor = dict(tensor, dims=list(tensor["dims"]))
        tensors = self._document.setdefault(field, [])
        present = next((part for part in tensors if part.get("name") == tensor["name"]), None)
        if present is None:
            tensors.append(tensor)
            return
        for name, value in tensor.items():
            if present.setdefault(name, value) != value:
                raise ValueError(
                    "{} {!r} has the {} {} in the configuration, auto_complete_config sets {}".format(
                        field, tensor["name"], name, present[name], value
                    )
                )
