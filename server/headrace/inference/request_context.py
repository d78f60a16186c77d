"""What a front end knows of a request while it serves it, in case somebody wants an account."""

from __future__ import annotations

from headrace.core.errors import HeadraceError
from headrace.core.request import InferResponse
from headrace.core.tensor import ModelSpec
from headrace.inference.request_options import NOTHING, Asked
from headrace.observability.access_log import OK, AccessRecord


class RequestContext:
    """One request so far; made only where an account is wanted.

    Args:
        protocol: http or grpc.
        model, version: as asked for.
        received_ns: monotonic.
        asked: what its headers ask.
        request_id: the caller's own, "" while it is not known.
        rows: of the request, 0 while they are not known.
        queued_ns: monotonic; 0 if it did not come to that.
    """

    __slots__ = ("asked", "id", "model", "protocol", "queued_ns", "received_ns", "rows", "version")

    def __init__(
        self,
        protocol: str,
        model: str,
        version: str,
        received_ns: int,
        asked: Asked = NOTHING,
        request_id: str = "",
        rows: int = 0,
        queued_ns: int = 0,
    ) -> None:
        self.protocol = protocol
        self.model = model
        self.version = version
        self.received_ns = received_ns
        self.asked = asked
        self.id = request_id
        self.rows = rows
        self.queued_ns = queued_ns

    def answered(
        self, spec: ModelSpec, response: InferResponse, done_ns: int, ended_ns: int, status: str
    ) -> AccessRecord:
        """The account of a request with an answer.

        Args:
            spec: of the version.
            response: its answer.
            done_ns: monotonic, when it was there.
            ended_ns: monotonic, when it was written.
            status: by the protocol.
        """
        return self._account(spec, ended_ns, status, OK, "", done_ns, response)

    def failed(self, spec: ModelSpec | None, error: HeadraceError, ended_ns: int, status: str) -> AccessRecord:
        """The account of a request with an error.

        Args:
            spec: of the version, None if none was found.
            error: what its caller gets.
            ended_ns: monotonic.
            status: by the protocol.
        """
        return self._account(spec, ended_ns, status, error.reason, str(error) or error.reason)

    def _account(
        self,
        spec: ModelSpec | None,
        ended_ns: int,
        status: str,
        reason: str,
        error: str,
        done_ns: int = 0,
        response: InferResponse | None = None,
    ) -> AccessRecord:
        return AccessRecord(
            protocol=self.protocol,
            model=self.model if spec is None else spec.name,
            version=self.version if spec is None else spec.version,
            status=status,
            received_ns=self.received_ns,
            ended_ns=ended_ns,
            queued_ns=self.queued_ns,
            done_ns=done_ns,
            request_id=self.id,
            client=self.asked.client,
            rows=self.rows,
            context=self.asked.trace,
            reason=reason,
            error=error,
            times=None if response is None else response.times,
            batch_rows=0 if response is None else response.batch_rows,
            closed="" if response is None else response.closed,
        )
