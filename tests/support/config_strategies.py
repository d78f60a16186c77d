"""Hypothesis strategies that make valid configurations."""

from __future__ import annotations

from typing import Any

from headrace.config.model_config import ModelConfig
from headrace.config.optimization_config import METHODS, PRECISIONS
from headrace.core.tensor import BY_CONFIG_NAME
from hypothesis import strategies as st

# What YAML and protobuf both can carry; surrogates are no characters.
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_./:-]{0,12}", fullmatch=True)
counts = st.integers(1, 2**31 - 1)
sizes = st.one_of(st.just(-1), st.integers(1, 2**40))
durations = st.integers(0, 2**63 - 1)
data_types = st.sampled_from(sorted(BY_CONFIG_NAME))
text_maps = st.dictionaries(texts.filter(lambda key: not key.startswith("headrace.")), texts, max_size=3)


def some(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """A block with some of the fields."""
    return st.fixed_dictionaries({}, optional=fields)


queue_policies = some(
    timeout_action=st.sampled_from(["REJECT", "DELAY"]),
    default_timeout_microseconds=durations,
    allow_timeout_override=st.booleans(),
    max_queue_size=st.integers(0, 2**31 - 1),
)


@st.composite
def tensors(draw: st.DrawFn, output: bool) -> list[dict[str, Any]]:
    result = []
    for name in draw(st.lists(names, max_size=3, unique=True)):
        dims = draw(st.lists(sizes, max_size=4))
        tensor: dict[str, Any] = {"name": name, "data_type": draw(data_types), "dims": dims}
        if draw(st.booleans()):
            tensor["reshape"] = {"shape": [1, *dims]}
        if output:
            tensor["label_filename"] = draw(texts)
        else:
            tensor["optional"] = draw(st.booleans())
        result.append(tensor)
    return result


@st.composite
def batchings(draw: st.DrawFn, max_batch_size: int) -> dict[str, Any]:
    batching: dict[str, Any] = draw(some(max_queue_delay_microseconds=durations, default_queue_policy=queue_policies))
    if max_batch_size:
        batching["preferred_batch_size"] = draw(st.lists(st.integers(1, max_batch_size), max_size=3))
    levels = draw(st.integers(0, 5))
    if levels:
        policies = st.dictionaries(st.integers(1, levels), queue_policies, max_size=2)
        batching |= {
            "priority_levels": levels,
            "default_priority_level": draw(st.integers(1, levels)),
            "priority_queue_policy": draw(policies),
        }
    else:
        batching["preserve_ordering"] = draw(st.booleans())
    return batching


clients = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1, max_size=12)
weights = st.floats(1e-3, 1e3)
limits = st.fixed_dictionaries({"requests_per_s": st.floats(1e-6, 1e9)}, optional={"burst": st.integers(1, 2**31 - 1)})
rate_limits = some(default=limits, clients=st.dictionaries(clients, limits, max_size=2)).filter(
    lambda block: "default" in block or block.get("clients")
)

accelerators = st.lists(st.fixed_dictionaries({"name": names}, optional={"parameters": text_maps}), max_size=2)
shares = st.floats(0, 1)


@st.composite
def profiles(draw: st.DrawFn) -> dict[str, Any]:
    """A range of shapes; sizes ascend from the smallest to the largest."""
    steps = st.lists(st.tuples(*[st.integers(1, 2**20)] * 3).map(sorted), max_size=3)
    shapes = draw(
        st.dictionaries(names, steps.map(lambda sizes: [list(t) for t in zip(*sizes, strict=True)] or [[], [], []]))
    )
    batch = draw(st.none() | st.lists(counts, min_size=3, max_size=3).map(sorted))
    return {"shapes": shapes} | ({} if batch is None else {"batch": batch})


# What Triton's message has no field for.
own_optimizations = {
    "precision": st.sampled_from(PRECISIONS),
    "profiles": st.lists(profiles(), max_size=2),
    "workspace_mb": counts,
    "calibration": some(
        method=st.sampled_from(METHODS),
        data=texts,
        samples=counts,
        percentile=st.floats(50, 100, exclude_min=True),
        keep=st.lists(texts, max_size=2),
    ),
    "accuracy": some(data=texts, samples=counts, min_top1_agreement=shares, max_drop=shares, min_cosine=shares),
}
optimizations = some(
    **own_optimizations,
    graph=some(level=st.integers(-1, 2)),
    priority=st.sampled_from(["PRIORITY_DEFAULT", "PRIORITY_MAX", "PRIORITY_MIN"]),
    cuda=some(graphs=st.booleans(), busy_wait_events=st.booleans(), output_copy_stream=st.booleans()),
    execution_accelerators=some(gpu_execution_accelerator=accelerators, cpu_execution_accelerator=accelerators),
    input_pinned_memory=some(enable=st.booleans()),
    gather_kernel_buffer_threshold=st.integers(0, 2**31 - 1),
    eager_batching=st.booleans(),
)
groups = st.one_of(
    some(name=texts, kind=st.sampled_from(["KIND_AUTO", "KIND_CPU", "KIND_MODEL"]), count=st.integers(1, 128)),
    st.fixed_dictionaries({"kind": st.just("KIND_GPU"), "gpus": st.lists(st.integers(0, 7), max_size=3)}),
)
versions = st.integers(1, 2**63 - 1)
policies = st.one_of(
    st.just({"all": {}}),
    st.fixed_dictionaries({"latest": some(num_versions=counts)}),
    st.fixed_dictionaries(
        {"specific": st.fixed_dictionaries({"versions": st.lists(versions, min_size=1, max_size=3)})}
    ),
)
numbers = st.one_of(st.integers(-255, 255), st.floats(allow_nan=False, allow_infinity=False)).filter(bool)
preprocesses = some(
    color=st.just("rgb"),
    resize_short_side=st.integers(224, 9999),
    interpolation=st.sampled_from(["bilinear", "bicubic"]),
    mean=st.lists(numbers, min_size=3, max_size=3),
    std=st.one_of(numbers, st.lists(numbers, min_size=1, max_size=1)),
    layout=st.sampled_from(["nchw", "nhwc"]),
)
feeds = st.one_of(
    st.fixed_dictionaries({"zero_data": st.just(True)}),
    st.fixed_dictionaries({"random_data": st.just(True), "data_type": data_types, "dims": st.lists(sizes, max_size=2)}),
    st.fixed_dictionaries({"input_data_file": names}),
)


@st.composite
def config_data(draw: st.DrawFn) -> dict[str, Any]:
    """The plain data of a valid configuration, as `config.yaml` would hold it."""
    max_batch_size = draw(st.integers(0, 64))
    inputs = draw(tensors(output=False))
    data: dict[str, Any] = {"max_batch_size": max_batch_size, "input": inputs, "output": draw(tensors(output=True))}
    data |= draw(
        some(
            name=st.from_regex(r"[a-z0-9_][a-z0-9_-]{0,20}", fullmatch=True),
            backend=st.sampled_from(["onnxruntime", "tensorrt"]),
            version_policy=policies,
            optimization=optimizations,
            dynamic_batching=batchings(max_batch_size),
            instance_group=st.lists(groups, max_size=2),
            default_model_filename=texts,
            parameters=text_maps,
            metric_tags=text_maps,
            oversize=st.sampled_from(["split", "reject"]),
            labels=st.dictionaries(st.from_regex(r"[A-Za-z_][A-Za-z0-9_-]{0,9}", fullmatch=True), versions, max_size=2),
            slo=some(p99_ms=st.floats(1e-9, 1e9)),
            rate_limits=rate_limits,
            fair_sharing=some(default_weight=weights, weights=st.dictionaries(clients, weights, max_size=2)),
            priority_aging_microseconds=durations,
            fallback=st.just("onnxruntime"),
            build_on_load=st.booleans(),
            gpu_memory_budget=st.integers(1, 2**63 - 1),
            keep_loaded=st.booleans(),
            isolation=st.sampled_from(["none", "process"]),
            isolation_timeout_s=st.floats(1e-3, 86400),
            isolation_memory_limit=st.integers(1, 2**63 - 1),
        )
    )
    if not data.get("keep_loaded") and draw(st.booleans()):
        data["unload_after_s"] = draw(st.floats(1, 31_536_000))
    if len(inputs) == 1 and draw(st.booleans()):
        data["preprocess"] = {**draw(preprocesses), "input": inputs[0]["name"]}
    feedable = st.sampled_from([tensor["name"] for tensor in inputs]) if inputs else st.nothing()
    if inputs and draw(st.booleans()):
        data["model_warmup"] = [{"name": draw(texts), "count": 1, "inputs": draw(st.dictionaries(feedable, feeds))}]
    return data


configs = config_data().map(ModelConfig.model_validate)
