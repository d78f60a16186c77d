"""Frames between the server and the process of a Python model: text tensors and the sockets."""

from __future__ import annotations

import enum
import os
import socket
from typing import Any

import numpy as np
import pytest
from headrace_model import protocol
from headrace_model.channel import Frames, Messages
from headrace_model.protocol import FRAME_BYTES, HEADER, ProtocolError, WrongResultError, pack_texts, unpack_texts
from hypothesis import given
from hypothesis import strategies as st


@given(st.lists(st.binary(max_size=20), max_size=12))
def test_text_tensors_return_as_they_were(texts: list[bytes]) -> None:
    array = np.empty(len(texts), object)
    array[:] = texts
    result = unpack_texts(pack_texts(array), (len(texts),))
    assert result.tolist() == texts


@given(st.binary(max_size=40), st.integers(0, 5))
def test_any_bytes_are_a_text_tensor_or_refused(content: bytes, count: int) -> None:
    try:
        result = unpack_texts(content, (count,))
    except ProtocolError:
        return
    assert pack_texts(result) == content


def test_text_may_be_str_or_elements_of_a_fixed_size() -> None:
    assert unpack_texts(pack_texts(np.array(["ü", "b"], object)), (2,)).tolist() == ["ü".encode(), b"b"]
    assert unpack_texts(pack_texts(np.array([b"one", b"four"])), (1, 2)).tolist() == [[b"one", b"four"]]


class Name(str):
    def __str__(self) -> str:
        return "a " + self[:]


class Color(enum.StrEnum):
    RED = "red"


@given(
    st.lists(st.one_of(
        st.binary(max_size=4), st.text(st.characters(exclude_categories=["Cs"]), max_size=4), st.none(), st.booleans(),
        st.integers(), st.floats(), st.decimals(), st.fractions(), st.complex_numbers(),
        st.sampled_from([np.str_("ü"), np.bytes_(b"b"), Name("n"), Color.RED, np.float32(0.1), np.int8(-1), np.bool_(True)]),
    ))
)  # fmt: skip
def test_elements_are_encoded_as_in_triton(elements: list[Any]) -> None:
    array = np.empty(len(elements), object)
    array[:] = elements
    expected = [bytes(each) if isinstance(each, bytes) else str(each).encode() for each in elements]
    assert unpack_texts(pack_texts(array), (len(elements),)).tolist() == expected


@pytest.mark.parametrize(
    "element",
    [[1], {"a": 1}, object(), "\ud800", Exception("x"), np.array(["a"])],
    ids=["list", "dict", "object", "half a surrogate pair", "exception", "array"],
)
def test_an_element_that_is_no_text_is_named(element: object) -> None:
    array = np.empty((2, 2), object)
    array[:] = "x"
    array[1, 0] = element
    with pytest.raises(WrongResultError, match=r"element 2 of output 'Y', \w+, cannot be encoded: "):
        pack_texts(array, "output 'Y'")


def test_datatype_numbers_are_those_of_triton() -> None:
    assert [(protocol.CODES[name], protocol.DTYPES[protocol.CODES[name]]) for name in ("BOOL", "INT64", "FP32")] == [
        (1, np.dtype("?")),
        (9, np.dtype("<i8")),
        (11, np.dtype("<f4")),
    ]
    assert (protocol.BYTES, protocol.BF16) == (13, 14)


def frames_pair() -> tuple[Frames, Frames]:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return Frames(left), Frames(right)


def test_a_frame_arrives_whole_and_the_end_is_seen() -> None:
    left, right = frames_pair()
    left.send(protocol.RUN, 3, 77, 2, b"body", protocol.SPILLED)
    size = right.receive()
    assert HEADER.unpack_from(right.buffer) == (1, protocol.RUN, protocol.SPILLED, 3, 77, 2, 4)
    assert bytes(right.buffer[HEADER.size : size]) == b"body"
    left.close()
    assert right.receive() == 0
    right.close()


def test_descriptors_travel_with_a_frame() -> None:
    left, right = frames_pair()
    reader, writer = os.pipe()
    left.share(protocol.SHARE, 0, [writer])
    descriptors: list[int] = []
    assert right.receive(descriptors) == HEADER.size
    os.write(descriptors[0], b"x")
    assert os.read(reader, 1) == b"x"
    for descriptor in (reader, writer, *descriptors):
        os.close(descriptor)
    left.close()
    right.close()


@pytest.mark.parametrize("frame", [b"short", bytes([9]) + bytes(40), bytes([1]) + bytes(FRAME_BYTES)])
def test_frames_that_do_not_follow_the_protocol_are_refused(frame: bytes) -> None:
    left, right = frames_pair()
    left.end.send(frame)
    with pytest.raises(ProtocolError):
        right.receive()
    left.close()
    right.close()


def test_messages_arrive_one_by_one() -> None:
    left, right = socket.socketpair()
    sender, receiver = Messages(left), Messages(right)
    sender.send({"a": 1})
    sender.send({"b": "ü"})
    assert receiver.receive() == {"a": 1}
    assert receiver.next_received() == {"b": "ü"}
    assert receiver.next_received() is None
    sender.close()
    with pytest.raises(EOFError):
        receiver.receive()
    receiver.close()


@pytest.mark.parametrize("content", [b"[]", b"{", b"\xff"])
def test_messages_that_are_no_objects_are_refused(content: bytes) -> None:
    left, right = socket.socketpair()
    left.sendall(len(content).to_bytes(4, "little") + content)
    receiver = Messages(right)
    with pytest.raises(ProtocolError):
        receiver.receive()
    left.close()
    receiver.close()
