"""Response cache of a model version: `VersionHandle.infer` calls it in place of `compute`.

A hit is answered on the event loop: no queue, no thread, no copy. Equal requests in flight run once: the first one is computed,
and the others wait for its response. Errors are not cached. If the model fails, all of them get its error. If the computed
request is cancelled, late or rejected, the oldest waiting request is computed next.

With Redis the first of equal requests waits a few milliseconds for a response of another server, then it is computed.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import TYPE_CHECKING

from blake3 import blake3

from headrace.core.clock import NS_PER_MS, NS_PER_S, NS_PER_US, Clock, monotonic_ns
from headrace.core.completion import LoopCompletion, Mailbox, Outcome
from headrace.core.errors import BadRequest, DeadlineExceeded, ModelFailed
from headrace.core.request import InferRequest, InferResponse
from headrace.core.tensor import Array, ModelSpec
from headrace.inference.caching.cache_switch import QUEUE_NS, CacheBenefit
from headrace.inference.caching.key import KeyFactory
from headrace.inference.caching.local import VersionEntries, frozen, memory_bytes
from headrace.inference.caching.policy import CacheEntry
from headrace.inference.caching.values import Lookup, RemoteTotals, RemoteWrite, StoredResponse
from headrace.inference.scheduling.version_handle import VersionHandle

if TYPE_CHECKING:
    from headrace.inference.caching.redis_store import RedisStore

logger = logging.getLogger("headrace.cache")

Compute = Callable[[InferRequest], LoopCompletion]
Revision = tuple[int, ...]

# Larger requests are hashed on a thread: at 6 GB/s the event loop would wait longer than 0.2 ms.
LARGE_BYTES = 1 << 20


class Follower:
    """A request that waits for the response of an equal one.

    Attributes:
        request: the request, which is computed if its leader has no response.
        completion: its completion.
        lookup_ns: time of the lookup.
    """

    __slots__ = ("completion", "lookup_ns", "request")

    def __init__(self, request: InferRequest, completion: LoopCompletion, lookup_ns: int) -> None:
        self.request, self.completion, self.lookup_ns = request, completion, lookup_ns


class PendingResponse:
    """A request that is computed, and the equal requests that follow it.

    Attributes:
        key: its key.
        request: the leader.
        completion: of the leader; None until `compute` has returned.
        lookup_ns: time of the leader's lookup, with that in Redis.
        fetched: response from Redis, which settled the leader; None for one that was computed.
        followers: the others; appended on the event loop, removed by any thread.
        outcome: of the leader, once `ended`; None if it has none.
        outputs: read-only copies of the leader's outputs.
        revision: of the version when the key was computed; a response of another revision is not stored.
        ended: True once `outcome` is set: a follower that is appended later is settled by the event loop.
    """

    __slots__ = (
        "completion", "ended", "fetched", "followers", "key", "lookup_ns", "once", "outcome", "outputs", "request",
        "revision",
    )  # fmt: skip

    def __init__(self, key: bytes, request: InferRequest, lookup_ns: int, revision: Revision) -> None:
        self.key, self.request, self.lookup_ns, self.revision = key, request, lookup_ns, revision
        self.completion: LoopCompletion | None = None
        self.fetched: StoredResponse | None = None
        self.followers: deque[Follower] = deque()
        self.outcome: Outcome | None = None
        self.outputs: dict[str, Array] = {}
        self.ended = False
        self.once = threading.Lock()


NO_REVISION: tuple[Revision, bytes] = ((), b"")


class VersionStates:
    """Digests of the versions that compute a pipeline's steps, or the calls of a model, so that keys change with them.

    Args:
        handle: the pipeline, or the model that calls others.
        shared: keys are the same in other servers with the same files, as far as their digests are known.

    Attributes:
        is_shareable: True while the keys are the same in other servers.
        reads_ids: see `VersionHandle`.
    """

    def __init__(self, handle: VersionHandle, shared: bool = False) -> None:
        self._handle, self._shared = handle, shared
        self._current = NO_REVISION
        self.is_shareable = self.reads_ids = False

    def current(self) -> tuple[Revision, bytes]:
        """Return the revision of the version and the digest for keys; called on the loop."""
        revision = self._handle.revision()
        if revision != self._current[0]:
            digests = self._handle.digests() if self._shared else ""
            self.is_shareable, self.reads_ids = bool(digests), self._handle.reads_ids
            self._current = (
                revision,
                blake3(f"files {digests}".encode() if digests else repr(revision).encode()).digest(),
            )
        return self._current

    def may_store(self, response: InferResponse, revision: Revision) -> bool:
        """Return True if a response may be stored under a key of a revision; any thread may call.

        A version that is replaced in between may have computed a step; serials never return. A fallback answers for another
        model, for as long as that one fails or is late.
        """
        return revision == self._handle.revision() and all(step.outcome != "fallback" for step in response.steps)


class VersionCache:
    """Response cache in front of one version. `infer` is called on the event loop.

    Args:
        handle: the version.
        keys: computes keys.
        entries: its part of the store.
        mailbox: mailbox of the event loop on which callers wait.
        hash_thread: computes keys of large requests.
        clock: returns monotonic nanoseconds.
        remote: its part of Redis; None without Redis.

    Attributes:
        benefit: switches the cache off while it does not pay.
        hits: requests answered from the store.
        merged: requests answered with the response of an equal one that was in flight.
        misses: requests that were looked up and computed.
    """

    def __init__(
        self,
        handle: VersionHandle,
        keys: KeyFactory,
        entries: VersionEntries,
        mailbox: Mailbox,
        hash_thread: ThreadPoolExecutor,
        clock: Clock = monotonic_ns,
        remote: RemoteEntries | None = None,
    ) -> None:
        self.hits = self.merged = self.misses = 0
        self.benefit = CacheBenefit(f"{handle.spec.name}/{handle.spec.version}")
        self._handle, self._recorder = handle, handle.recorder
        self._keys, self._entries = keys, entries
        self._mailbox, self._hash_thread, self._clock = mailbox, hash_thread, clock
        self._pending: dict[bytes, PendingResponse] = {}
        # Only of versions whose responses depend on others; the revision of a model is its serial, which its keys include.
        self._versions = (
            VersionStates(handle, remote is not None) if handle.calls or handle.callee_revision is not None else None
        )
        self._reads_ids = handle.reads_ids
        self._remote = remote

    def infer(self, request: InferRequest, compute: Compute) -> LoopCompletion:
        """Return the completion of a cached response, or compute it; raises as `VersionHandle.compute`."""
        benefit = self.benefit
        if benefit.passing:
            benefit.rest -= 1
            if benefit.rest > 0 and request.received_ns < benefit.trial_ns:
                return compute(request)
            benefit.begin_trial()
        if request.size_bytes > LARGE_BYTES:
            return self._infer_large(request, compute)
        start_ns = self._clock()
        revision, state, reads_ids = self._state()
        key = self._keys.key(request, state, reads_ids)
        if key is None:
            return compute(request)
        return self._look_up(request, compute, key, revision, start_ns)

    def _state(self) -> tuple[Revision, bytes, bool]:
        """Return revision and digest of the versions, and whether ids of requests are part of keys."""
        if self._versions is None:
            return (*NO_REVISION, self._reads_ids)
        revision, state = self._versions.current()
        return revision, state, self._versions.reads_ids

    def _look_up(
        self, request: InferRequest, compute: Compute, key: bytes, revision: Revision, start_ns: int
    ) -> LoopCompletion:
        entry = self._entries.get(key, start_ns)
        if entry is not None:
            completion = self._hit(request, entry, start_ns)
        else:
            pending = self._pending.get(key)
            if pending is not None and self._may_follow(pending.request, request):
                completion = self._follow(request, compute, pending, start_ns)
            else:
                completion = self._lead(request, compute, key, revision, start_ns)
        self.benefit.count_lookup(request.received_ns)
        return completion

    # Hits

    def _hit(self, request: InferRequest, entry: CacheEntry, start_ns: int) -> LoopCompletion:
        self._admit(request, start_ns)
        completion = LoopCompletion(self._mailbox)
        now_ns = self._clock()
        completion.claim(InferResponse(entry.outputs, cached=True, done_ns=now_ns))
        completion.wake()
        self.hits += 1
        self._recorder.record_cache_hit(request.received_ns, now_ns - start_ns, now_ns)
        self.benefit.count_hit(entry.compute_ns - (now_ns - start_ns))
        return completion

    def _admit(self, request: InferRequest, now_ns: int) -> None:
        """Apply the checks of `compute` that concern a request without a queue."""
        if request.deadline_ns and request.deadline_ns <= now_ns:
            raise DeadlineExceeded("the request's deadline had passed before it was looked up in the response cache")
        self._handle.charge(request.client, now_ns)

    # Requests in flight

    def _may_follow(self, leader: InferRequest, request: InferRequest) -> bool:
        """Return False for a request that would be served later as a follower than in the queue by itself."""
        if request.priority != leader.priority:
            return False
        if not request.deadline_ns or 0 < leader.deadline_ns <= request.deadline_ns:
            return True
        # With an empty queue the leader runs already. The steps of a pipeline wait in other queues.
        return self._versions is None and self._handle.depth == 0

    def _follow(
        self, request: InferRequest, compute: Compute, pending: PendingResponse, start_ns: int
    ) -> LoopCompletion:
        self._admit(request, start_ns)
        completion = LoopCompletion(self._mailbox)
        if request.deadline_ns:
            after_us = (request.deadline_ns - request.received_ns) // NS_PER_US
            error = DeadlineExceeded(f"the request's deadline passed after {after_us} us")
            completion.call_after(request.deadline_ns - start_ns, completion.settle, error)
        pending.followers.append(Follower(request, completion, self._clock() - start_ns))
        if (
            pending.ended
        ):  # after the append: the thread that ended it has seen the follower, or the follower is settled here
            self._settle_followers(pending, compute)
        return completion

    def _lead(
        self, request: InferRequest, compute: Compute, key: bytes, revision: Revision, start_ns: int
    ) -> LoopCompletion:
        pending = PendingResponse(key, request, self._clock() - start_ns, revision)
        remote = self._remote
        if remote is not None and (wait_ns := self._wait_ns(remote, request, start_ns)):
            completion = self._fetch(pending, request, compute, remote, wait_ns)
        else:
            completion = compute(request)
            self.misses += 1
        self._watch(pending, completion, compute)
        return completion

    def _watch(self, pending: PendingResponse, completion: LoopCompletion, compute: Compute) -> None:
        """End a pending response when its leader is settled; any thread may settle it, also before or while this runs."""
        pending.completion = completion
        self._pending.setdefault(pending.key, pending)
        before = completion.after

        def after() -> None:
            if before is not None:
                before()
            self._end(pending, compute)

        completion.after = after
        if completion.outcome is not None:  # settled before `after` was set, at least in part
            self._end(pending, compute)

    def _end(self, pending: PendingResponse, compute: Compute) -> None:
        """Store a response and settle its followers; any thread, once."""
        if not pending.once.acquire(False):
            return
        completion = pending.completion
        outcome = pending.outcome = None if completion is None else completion.outcome
        pending.completion = None
        if pending.fetched is not None and isinstance(outcome, InferResponse):
            self._end_fetched(pending, pending.fetched, outcome.done_ns)
            spent_ns = 0
        elif isinstance(outcome, InferResponse):
            start_ns = self._clock()
            self._store(pending, outcome, start_ns)
            spent_ns = pending.lookup_ns + self._clock() - start_ns
            self._recorder.record_cache_miss(spent_ns)
        else:
            spent_ns = pending.lookup_ns
        self.benefit.add_cost(spent_ns)
        if self._pending.get(pending.key) is pending:
            del self._pending[pending.key]
        pending.ended = True
        if pending.followers:
            self._settle_followers(pending, compute)

    def _store(self, pending: PendingResponse, response: InferResponse, now_ns: int) -> None:
        """Copy the outputs of a leader for the store and its followers."""
        try:
            pending.outputs = frozen(response.outputs)
        except MemoryError:  # the followers get the arrays of the batch, like the leader
            pending.outputs = response.outputs
            return
        if response.parameters:  # an entry has outputs only
            return
        if self._versions is not None and not self._versions.may_store(response, pending.revision):
            return
        compute_ns = _compute_ns(response, pending.request, now_ns)
        self._entries.put(pending.key, pending.outputs, compute_ns, now_ns)
        if self._remote is not None and (self._versions is None or self._versions.is_shareable):
            self._remote.put(pending.key, pending.outputs, compute_ns)

    def _settle_followers(self, pending: PendingResponse, compute: Compute) -> None:
        """Settle the followers of an ended response, or compute the first of them; any thread."""
        outcome = pending.outcome
        if isinstance(outcome, InferResponse):
            self._share(pending, outcome)
        elif isinstance(outcome, ModelFailed | BadRequest):
            while (follower := _pop(pending.followers)) is not None:
                follower.completion.settle(outcome)
        else:
            try:
                self._mailbox.loop.call_soon_threadsafe(self._promote, pending, compute)
            except RuntimeError:  # the loop is closed, so nothing waits
                pending.followers.clear()

    def _share(self, pending: PendingResponse, response: InferResponse) -> None:
        """Settle the followers with the leader's response, with one wake-up of the loop."""
        settled: list[LoopCompletion] = []
        now_ns = self._clock()
        compute_ns = _compute_ns(response, pending.request, now_ns)
        while (follower := _pop(pending.followers)) is not None:
            shared = InferResponse(pending.outputs, cached=True, parameters=response.parameters, done_ns=now_ns)
            if follower.completion.claim(shared):
                settled.append(follower.completion)
                self.merged += 1
                self._recorder.record_cache_hit(follower.request.received_ns, follower.lookup_ns, now_ns)
                self.benefit.count_hit(compute_ns - follower.lookup_ns)
        if settled:
            self._mailbox.post(settled)
        for completion in settled:
            completion.finish()

    def _promote(self, ended: PendingResponse, compute: Compute) -> None:
        """Compute the first follower that still waits, as the leader of the others; called on the loop."""
        followers = ended.followers
        while (follower := _pop(followers)) is not None:
            if follower.completion.is_settled:
                continue
            pending = PendingResponse(ended.key, follower.request, follower.lookup_ns, ended.revision)
            try:
                computed = compute(follower.request)
            except Exception as error:
                follower.completion.settle(error)
                continue
            self.misses += 1
            self._forward(follower.request, computed, follower.completion)
            pending.followers.extend(followers)
            followers.clear()
            self._watch(pending, computed, compute)
            return

    # Redis

    def _wait_ns(self, remote: RemoteEntries, request: InferRequest, now_ns: int) -> int:
        """Return the time for which a request may wait for Redis; 0: it is computed at once."""
        if self._versions is not None and not self._versions.is_shareable:
            return 0
        wait_ns = remote.store.wait_ns(request, now_ns)
        if not wait_ns:
            remote.totals.skipped += 1
        return wait_ns

    def _fetch(
        self, pending: PendingResponse, request: InferRequest, compute: Compute, remote: RemoteEntries, wait_ns: int
    ) -> LoopCompletion:
        """Look a request up in Redis, and compute it without an answer in time; errors settle its completion."""
        completion = LoopCompletion(self._mailbox)
        lookup = RemoteLookup(self, remote, pending, request, compute, completion, self._clock())
        lookup.timer = self._mailbox.loop.call_later(wait_ns / NS_PER_S, lookup.give_up)
        spec, outputs = self._handle.spec, request.outputs
        lookup.answer = Lookup(pending.key, spec, request.rows, outputs, remote.totals, lookup.resume)
        remote.store.read(lookup.answer)
        return completion

    def proceed(
        self,
        response: StoredResponse | None,
        pending: PendingResponse,
        request: InferRequest,
        compute: Compute,
        completion: LoopCompletion,
    ) -> None:
        """Answer a request with a response from Redis, or compute it; called on the loop.

        Args:
            response: from Redis; None for none.
            pending: of the request.
            request, compute: as in `infer`.
            completion: that its caller waits for.
        """
        if completion.is_settled:  # its caller has disconnected
            return
        try:
            if response is None:
                inner = compute(request)
            else:
                self._admit(request, self._clock())
        except Exception as error:
            completion.settle(error)
            return
        if response is None:
            self.misses += 1
            self._forward(request, inner, completion)
            return
        pending.fetched, pending.outputs = response, response.outputs
        completion.settle_now(InferResponse(response.outputs, cached=True, done_ns=self._clock()))

    def _end_fetched(self, pending: PendingResponse, response: StoredResponse, now_ns: int) -> None:
        """Count a response from Redis, and store it here; called on the loop."""
        self.hits += 1
        if self._remote is not None:
            self._remote.totals.hits += 1
        self._recorder.record_cache_hit(pending.request.received_ns, pending.lookup_ns, now_ns)
        self.benefit.count_hit(response.compute_ns - pending.lookup_ns)
        expires_ns = 0
        if response.expires_ms:
            expires_ns = now_ns + max(response.expires_ms * NS_PER_MS - time.time_ns(), 1)
        self._entries.put(pending.key, response.outputs, response.compute_ns, now_ns, expires_ns)

    def _forward(self, request: InferRequest, inner: LoopCompletion, outer: LoopCompletion) -> None:
        """Settle `outer` with the outcome of `inner`, and abandon `inner` once nothing waits for `outer`; called on the loop."""

        def settle() -> None:
            outcome = inner.outcome
            if outcome is not None and not outer.settle_now(outcome) and isinstance(outcome, InferResponse):
                # `outer` had an error first, and `inner` was counted as answered
                self._recorder.record_undelivered(1, outcome.duration_ns(request.received_ns))

        before = outer.after

        def after() -> None:
            if before is not None:
                before()
            inner.abandon()

        outer.after = after
        inner.then(settle)

    # Large requests

    def _infer_large(self, request: InferRequest, compute: Compute) -> LoopCompletion:
        """Look a request up whose key another thread computes; errors of `compute` settle its completion."""
        completion = LoopCompletion(self._mailbox)
        loop = self._mailbox.loop
        start_ns = self._clock()
        revision, state, reads_ids = self._state()

        def resume(key: bytes | None, spent_ns: int) -> None:
            if completion.is_settled:  # its caller has disconnected
                return
            try:
                begin_ns = self._clock() - spent_ns
                inner = compute(request) if key is None else self._look_up(request, compute, key, revision, begin_ns)
            except Exception as error:
                completion.settle(error)
            else:
                self._forward(request, inner, completion)

        def hash_inputs() -> None:
            begin_ns = self._clock()
            try:
                key = self._keys.key(request, state, reads_ids)
            except Exception:  # such as MemoryError: the request is computed
                logger.exception("the inputs of a request to model %s could not be hashed", self._handle.spec.name)
                key = None
            try:
                loop.call_soon_threadsafe(resume, key, self._clock() - begin_ns)
            except RuntimeError:  # the loop is closed, so nothing waits
                completion.withdraw()

        try:
            self._hash_thread.submit(hash_inputs)
        except RuntimeError:  # the server is shutting down
            resume(None, self._clock() - start_ns)
        return completion

    # Reports

    def now_ns(self) -> int:
        """Return the monotonic time in nanoseconds."""
        return self._clock()

    def report(self) -> Mapping[str, object]:
        """Return its figures for `headrace explain` and the metrics."""
        totals, benefit = self._entries.totals, self.benefit
        lookups = self.hits + self.merged + self.misses
        report: dict[str, object] = {
            "state": benefit.state,
            "reason": benefit.reason(),
            "hits": self.hits,
            "merged": self.merged,
            "misses": self.misses,
            "hit_ratio": (self.hits + self.merged) / lookups if lookups else 0.0,
            "entries": totals.entries,
            "size_bytes": totals.size_bytes,
            "max_bytes": self._entries.limit_bytes,
            "insertions": totals.insertions,
            "evictions": totals.evictions,
            "expirations": totals.expirations,
            "switched_off": benefit.switches,
        }
        if self._remote is not None:
            report["redis"] = self._remote.report()
        return report

    def close(self) -> None:
        """Remove its entries, because the version is closed; any thread but that of the event loop."""
        self._entries.close()


class RemoteLookup:
    """A request that waits for Redis. On the event loop only.

    Redis may hold it for longer than the request waits, so it drops the request and its inputs at the end of the wait.

    Args:
        cache: cache of the version.
        remote: its part of Redis.
        pending: of the request.
        request, compute: as in `VersionCache.infer`.
        completion: that the caller waits for.
        begin_ns: monotonic time of the lookup.

    Attributes:
        timer: of the end of the wait.
        answer: what the reader has received.
    """

    __slots__ = ("_arguments", "_begin_ns", "_cache", "_remote", "answer", "timer")

    def __init__(
        self,
        cache: VersionCache,
        remote: RemoteEntries,
        pending: PendingResponse,
        request: InferRequest,
        compute: Compute,
        completion: LoopCompletion,
        begin_ns: int,
    ) -> None:
        self._cache, self._remote, self._begin_ns = cache, remote, begin_ns
        self._arguments: tuple[PendingResponse, InferRequest, Compute, LoopCompletion] | None
        self._arguments = pending, request, compute, completion
        self.timer: asyncio.TimerHandle | None = None
        self.answer: Lookup | None = None

    def resume(self, response: StoredResponse | None) -> bool:
        """Continue with the answer of Redis; returns False if the request waits no more."""
        arguments, self._arguments = self._arguments, None
        if arguments is None:
            return False
        if self.timer is not None:
            self.timer.cancel()
        arguments[0].lookup_ns += self._cache.now_ns() - self._begin_ns
        self._cache.proceed(response, *arguments)
        return True

    def give_up(self) -> None:
        """Continue without an answer, unless one has come that the loop, which was busy, has not delivered."""
        answer = self.answer
        if answer is not None and answer.is_answered:
            self.resume(answer.response)
            return
        self._remote.totals.late += 1
        self._remote.store.report_late()
        self.resume(None)


class RemoteEntries:
    """The part of one model version in Redis.

    Args:
        store: connection to Redis.
        spec: tensor specs of the version.
        ttl_ms: time to live of its responses in milliseconds; 0 for no limit.

    Attributes:
        totals: counts of its lookups.
    """

    def __init__(self, store: RedisStore, spec: ModelSpec, ttl_ms: int) -> None:
        self.store, self.totals = store, RemoteTotals()
        self._spec, self._ttl_ms = spec, ttl_ms

    def put(self, key: bytes, outputs: dict[str, Array], compute_ns: int) -> None:
        """Write a response in the background; any thread may call."""
        size_bytes = memory_bytes(outputs)
        self.store.write(RemoteWrite(key, outputs, self._spec, compute_ns, self._ttl_ms, size_bytes, self.totals))

    def report(self) -> dict[str, object]:
        """Return the state of the connection, and the counts."""
        store = self.store
        state = {"address": store.address, "is_up": store.is_up, "problem": store.problem, "tls": store.tls}
        return state | asdict(self.totals)


def _compute_ns(response: InferResponse, request: InferRequest, now_ns: int) -> int:
    """Return the time that a response took: its share of the batch; with steps or parts, the time since its arrival."""
    times = response.times
    if times is None:
        return now_ns - request.received_ns
    return (times.split_ns - times.taken_ns) * request.rows // max(response.batch_rows, 1) + QUEUE_NS


def _pop(followers: deque[Follower]) -> Follower | None:
    try:
        return followers.popleft()
    except IndexError:  # another thread has taken the last one
        return None
