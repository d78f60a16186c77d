"""google.rpc.Status and its details as protobuf itself reads them, from descriptors written here by their published fields."""

from __future__ import annotations

from typing import Any

from google.protobuf import any_pb2, descriptor_pb2, descriptor_pool, duration_pb2, message_factory

_LABEL = {"one": 1, "many": 3}
_TYPE = {"int32": 5, "string": 9, "message": 11}


def _pool() -> descriptor_pool.DescriptorPool:
    pool = descriptor_pool.DescriptorPool()
    for module in (any_pb2, duration_pb2):
        pool.AddSerializedFile(module.DESCRIPTOR.serialized_pb)
    file = descriptor_pb2.FileDescriptorProto(name="rpc.proto", package="google.rpc", syntax="proto3")
    file.dependency.extend(["google/protobuf/any.proto", "google/protobuf/duration.proto"])

    def message(name: str, *fields: tuple[str, str, str, str]) -> Any:
        created = file.message_type.add(name=name)
        for number, (field, kind, label, of) in enumerate(fields, 1):
            created.field.add(name=field, number=number, type=_TYPE[kind], label=_LABEL[label], type_name=of or None)  # type: ignore[arg-type]
        return created

    message(
        "Status",
        ("code", "int32", "one", ""),
        ("message", "string", "one", ""),
        ("details", "message", "many", ".google.protobuf.Any"),
    )
    message("RetryInfo", ("retry_delay", "message", "one", ".google.protobuf.Duration"))
    message("Violation", ("subject", "string", "one", ""), ("description", "string", "one", ""))
    message("QuotaFailure", ("violations", "message", "many", ".google.rpc.Violation"))
    pool.Add(file)  # type: ignore[no-untyped-call]
    return pool


_POOL = _pool()


def _read(name: str, content: bytes) -> Any:
    message = message_factory.GetMessageClass(_POOL.FindMessageTypeByName(name))()
    message.ParseFromString(content)
    return message


def rich_status(content: bytes) -> tuple[int, str, dict[str, Any]]:
    """Code, text, and the details by their type's name."""
    status = _read("google.rpc.Status", content)
    result = {}
    for detail in status.details:
        host, _, name = detail.type_url.partition("/")
        assert host == "type.googleapis.com"
        result[name] = _read(name, detail.value)
    return status.code, status.message, result


def retry_delay_s(details: dict[str, Any]) -> float:
    """Return the retry delay in the details of a status."""
    delay = details["google.rpc.RetryInfo"].retry_delay
    return float(delay.seconds + delay.nanos / 1e9)
