"""Rules for the configuration of Python models, and for clients that send configurations and files of them.

Code of a model runs with the rights of the server's user. So a client may send files of a Python model, or a configuration that
changes the code or its interpreter, only if the server allows it (`--allow-python-uploads`): docs/decisions/0022.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from headrace.config.auto_complete import incomplete
from headrace.config.binding import problems_of
from headrace.config.config_base import Problem
from headrace.config.model_config import DynamicBatching, ModelConfig, ModelTransactionPolicy
from headrace.config.tensor_config import ModelInput, ModelOutput
from headrace.core.errors import ConfigError, Finding

OPTION = "--allow-python-uploads"

_Tensor = TypeVar("_Tensor", ModelInput, ModelOutput)

# Parameters of a configuration that choose the interpreter of a model's code.
INTERPRETER_PARAMETERS = ("EXECUTION_ENV_PATH",)
# Parameter of a configuration: "no" gives a model inputs in the memory of a GPU as they are.
CPU_INPUTS_PARAMETER = "FORCE_CPU_ONLY_INPUT_TENSORS"
_NO_PREPARATION = "do it in the model's code, or remove it"


def python_problems(config: ModelConfig) -> Iterator[Problem]:
    """Yield the fields of a Python model that have no meaning for code.

    Args:
        config: configuration of a Python model, identity completed.
    """
    if config.preprocess is not None:
        yield Problem(("preprocess",), "preprocess is not for Python models", _NO_PREPARATION)
    if config.postprocess is not None:
        yield Problem(("postprocess",), "postprocess is not for Python models", _NO_PREPARATION)
    if config.runtime != "auto":
        yield Problem(("runtime",), f'runtime "{config.runtime}" does not run Python models', "remove runtime")
    if config.fallback is not None:
        yield Problem(("fallback",), "fallback is not for Python models", "remove fallback")
    if config.build_on_load:
        yield Problem(("build_on_load",), "no engine is built from a Python model", "remove build_on_load")
    value = config.parameters.get(CPU_INPUTS_PARAMETER, "yes")
    if value not in ("yes", "no"):
        message = f'the parameter {CPU_INPUTS_PARAMETER} is "yes" or "no", not "{value[:80]}"'
        yield Problem(("parameters", CPU_INPUTS_PARAMETER), message, 'write "no" for inputs in the memory of a GPU')


def decoupled_problems(config: ModelConfig) -> Iterator[Problem]:
    """Yield the problems of a configuration with any number of responses to a request.

    Args:
        config: configuration, identity completed.
    """
    loc = ("model_transaction_policy", "decoupled")
    # The steps of a pipeline decide: see headrace.inference.pipelines.decoupled_rules.
    if not config.is_decoupled or config.kind == "pipeline":
        return
    if config.kind != "python" or config.backend != "python":
        kind = f'a model of the backend "{config.backend}"'
        message = f"decoupled is true, and {kind} has one response to a request; Python models have any number"
        yield Problem(loc, message, "remove it, or write the model as model.py with request.get_response_sender()")
    if config.response_cache is not None and config.response_cache.enable:
        message = "response_cache is for models with one response to a request, and decoupled is true"
        yield Problem(("response_cache",), message, "remove response_cache")
    if config.dynamic_batching is not None and config.dynamic_batching.preserve_ordering:
        message = "preserve_ordering is for models with one response to a request, and decoupled is true"
        yield Problem(("dynamic_batching", "preserve_ordering"), message, "remove preserve_ordering")


def reads_device_rows(config: ModelConfig) -> bool:
    """Return True for a Python model that gets inputs in the memory of a GPU as they are."""
    return config.parameters.get(CPU_INPUTS_PARAMETER) == "no"


def check_client_config(name: str, config: ModelConfig, folder_config: ModelConfig | None) -> None:
    """Check a configuration or files that a client sends: they must not bring code, or change the code that runs.

    Args:
        name: name of the model.
        config: the configuration in force if the load is accepted, identity completed.
        folder_config: configuration of the model's own folder; None if the client sends the files too, or if the folder's own
            configuration cannot be read.

    Raises:
        ConfigError: it would run code, or other code than that of the folder's own configuration.
    """
    if config.kind != "python":
        return
    if folder_config is None:
        message = "the load request has a model whose files are run as code, which clients may not send"
    elif _code_of(config) != _code_of(folder_config):
        message = (
            "the configuration of the load request changes the code that the model runs or its interpreter "
            f"(backend, default_model_filename, {', '.join(INTERPRETER_PARAMETERS)})"
        )
    else:
        return
    cure = (
        f"put the model into the repository, or start the server with {OPTION} if every client that may load is trusted"
    )
    raise ConfigError([Finding(name, None, message, cure)])


def _code_of(config: ModelConfig) -> tuple[str, ...]:
    parameters = [config.parameters.get(name, "") for name in INTERPRETER_PARAMETERS]
    return (config.backend, config.default_model_filename, *parameters)


def complete_from_code(config: ModelConfig, document: Mapping[str, Any], path: str) -> ModelConfig:
    """Return a configuration with the tensors and the batching that the model's code sets; values of the file stay.

    Args:
        config: configuration of the file, identity completed.
        document: configuration in Triton's JSON form, as the code has completed it.
        path: name of the model's file for findings.

    Raises:
        ConfigError: a value is not valid or contradicts others, or outputs are still missing.
    """
    try:
        completed = _merge(config, document)
        problems = [each for each in incomplete(completed) if each.loc != ("input",) or not completed.output]
        problems = problems or list(decoupled_problems(completed))
    except ValidationError as error:
        problems = problems_of(error)
    if problems:
        raise ConfigError([Finding(path, None, problem.message, problem.cure) for problem in problems])
    return completed


def _merge(config: ModelConfig, document: Mapping[str, Any]) -> ModelConfig:
    """Return the configuration with the tensors and the batching of `document`; values of the file stay.

    Raises:
        ValidationError: a value is not valid, or contradicts others.
    """
    update: dict[str, Any] = {
        "input": _merged(config.input, document.get("input"), ModelInput),
        "output": _merged(config.output, document.get("output"), ModelOutput),
    }
    if "max_batch_size" in document:
        update["max_batch_size"] = document["max_batch_size"]
    policy = document.get("model_transaction_policy")
    if isinstance(policy, dict) and policy.get("decoupled") is True:
        update["model_transaction_policy"] = ModelTransactionPolicy(decoupled=True)
    has_scheduler = config.dynamic_batching is not None or config.sequence_batching is not None
    if not has_scheduler and isinstance(document.get("dynamic_batching"), dict):
        update["dynamic_batching"] = DynamicBatching.model_validate(document["dynamic_batching"])
    fields = config.model_fields_set | {"name", "backend", "platform", "default_model_filename", "instance_group"}
    return ModelConfig.model_validate({name: getattr(config, name) for name in fields} | update)


def _merged(present: tuple[_Tensor, ...], tensors: object, kind: type[_Tensor]) -> tuple[_Tensor, ...]:
    result = {tensor.name: tensor for tensor in present}
    for item in tensors if isinstance(tensors, list) else ():
        values = {name: value for name, value in item.items() if name in kind.model_fields}
        old = result.get(str(values.get("name")))
        if old is None:
            added = kind.model_validate(values)
            result[added.name] = added
            continue
        absent = {name: value for name, value in values.items() if name not in old.model_fields_set}
        written = {name: getattr(old, name) for name in old.model_fields_set}
        result[old.name] = kind.model_validate({**written, **absent})
    return tuple(result.values())
