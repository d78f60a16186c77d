"""Keys of cached responses."""

from __future__ import annotations

import numpy as np
import pytest
from headrace.core.request import InferRequest
from headrace.core.tensor import BY_NAME, Array, ModelSpec, ResidentRows, TensorSpec, as_input
from headrace.inference.caching.key import KEY_BYTES, KeyFactory

SECRET = bytes(range(KEY_BYTES))
NUMBERS = {
    "a": TensorSpec("a", BY_NAME["FP32"], (-1, -1)),
    "b": TensorSpec("b", BY_NAME["INT64"], (-1, -1), optional=True),
}
TEXTS = {"a": TensorSpec("a", BY_NAME["BYTES"], (-1, -1)), "b": TensorSpec("b", BY_NAME["BYTES"], (-1, -1))}


def spec(inputs: dict[str, TensorSpec] | None = None, version: str = "1") -> ModelSpec:
    return ModelSpec("m", version, "test", NUMBERS if inputs is None else inputs, {}, max_batch_size=8)


def request(a: Array, b: Array | None = None, **fields: object) -> InferRequest:
    inputs = {"a": a} if b is None else {"a": a, "b": b}
    return InferRequest(inputs=inputs, rows=1, shape_key=None, received_ns=0, **fields)  # type: ignore[arg-type]


def texts(*values: bytes) -> Array:
    array = np.empty((1, len(values)), object)
    array[0] = values
    return array


KEYS = KeyFactory(spec(), "digest", SECRET)
X = np.arange(6, dtype=np.float32).reshape(1, 6)


def test_equal_requests_have_equal_keys() -> None:
    first = KEYS.key(request(X, id="1", priority=1, client="a"))
    assert first is not None
    assert len(first) == KEY_BYTES
    assert KEYS.key(request(X.copy(), id="2", priority=2, client="b", deadline_ns=5)) == first
    assert KeyFactory(spec(), "digest", SECRET).key(request(X)) == first


def test_inputs_in_another_order_and_layout_have_the_same_key() -> None:
    b = np.ones((1, 2), np.int64)
    swapped = InferRequest(inputs={"b": b, "a": X}, rows=1, shape_key=None, received_ns=0)
    assert KEYS.key(swapped) == KEYS.key(request(X, b))
    wide = np.repeat(X, 2, axis=1)[:, ::2]
    assert not wide.flags.c_contiguous
    assert KEYS.key(request(wide)) == KEYS.key(request(X))


@pytest.mark.parametrize(
    "other",
    [
        request(X + 1),
        request(X.reshape(6, 1)),  # the same bytes in another shape
        request(X.reshape(2, 3)),
        request(X, np.zeros((1, 1), np.int64)),
        request(X, outputs=("y",)),
        request(-X * 0),  # -0.0 is another value than 0.0: a model may return another result
    ],
)
def test_other_requests_have_other_keys(other: InferRequest) -> None:
    assert KEYS.key(other) != KEYS.key(request(X))


def test_the_datatype_the_version_and_the_identity_count() -> None:
    integers = {"a": TensorSpec("a", BY_NAME["UINT32"], (-1, -1))}
    floats = {"a": NUMBERS["a"]}
    keys = [
        KeyFactory(spec(floats), "digest", SECRET),
        KeyFactory(spec(integers), "digest", SECRET),
        KeyFactory(spec(floats, "2"), "digest", SECRET),
        KeyFactory(spec(floats), "another", SECRET),
        KeyFactory(spec(floats), "digest", bytes(KEY_BYTES)),
    ]
    assert len({each.key(request(X)) for each in keys}) == len(keys)


def test_requested_outputs_count_and_their_order_does_not() -> None:
    assert KEYS.key(request(X, outputs=("y", "z"))) == KEYS.key(request(X, outputs=("z", "y")))
    assert KEYS.key(request(X, outputs=("y",))) != KEYS.key(request(X, outputs=("z",)))


def test_parameters_count_only_if_the_model_reads_them() -> None:
    reads = KeyFactory(spec(), "digest", SECRET, reads_parameters=True)
    plain, warm = request(X), request(X, parameters={"temperature": 0.5})
    assert KEYS.key(plain) == KEYS.key(warm)
    assert reads.key(plain) != reads.key(warm)
    assert reads.key(request(X, parameters={"a": 1, "b": 2})) == reads.key(request(X, parameters={"b": 2, "a": 1}))
    assert reads.key(request(X, parameters={"a": 1})) != reads.key(request(X, parameters={"a": "1"}))
    assert reads.key(request(X, parameters={"a": 1})) != reads.key(request(X, parameters={"a": True}))


def test_borders_of_texts_count() -> None:
    keys = KeyFactory(spec(TEXTS), "digest", SECRET)
    one = texts(b"x")
    splits = [texts(b"ab", b"c"), texts(b"a", b"bc"), texts(b"abc", b""), texts(b"", b"abc"), texts(b"abc")]
    assert len({keys.key(request(split, one)) for split in splits}) == len(splits)
    # A text that moves from one input to the next.
    assert keys.key(request(texts(b"ab"), texts(b"c"))) != keys.key(request(texts(b"a"), texts(b"bc")))
    assert keys.key(request(texts(b"ab"), one)) == keys.key(request(texts(b"ab"), texts(b"x")))


def test_large_inputs_are_hashed_in_parts_with_every_byte() -> None:
    large = np.zeros((1, 1 << 16), np.float32)
    first = KEYS.key(request(large))
    for place in (0, 1 << 15, -1):
        changed = large.copy()
        changed[0, place] = 1
        assert KEYS.key(request(changed)) != first
    assert KEYS.key(request(large.copy())) == first


def test_empty_and_scalar_tensors_have_keys() -> None:
    assert KEYS.key(request(np.zeros((1, 0), np.float32))) != KEYS.key(request(np.zeros((0, 1), np.float32)))
    assert KEYS.key(request(np.float32(1)[()].reshape(()))) is not None


def test_rows_in_the_memory_of_a_gpu_are_not_cached() -> None:
    rows = ResidentRows(4096, 0, np.dtype(np.float32), (1, 6), None, lambda _address, size: np.zeros(size, np.uint8))
    assert KEYS.key(request(as_input(rows))) is None
