"""Random schedules through an overlapped instance: every request is settled exactly once, with its own rows or its own error."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from headrace.core.errors import Cancelled, ModelFailed, Unavailable
from headrace.core.request import InferResponse
from headrace.inference.scheduling.policy import BatchPolicy
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.support.fake_overlapped import DIES, LOST, RAISES, FakeOverlapped
from tests.support.overlapped_bench import Bench, Caller


@dataclass
class Ask:
    """Requests that come together: (value, rows, width) each; a value of 0 stands for one of its own."""

    requests: list[tuple[float, int, int]]


@dataclass
class Leave:
    """Cancels the request with this number, modulo the number of requests sent so far."""

    number: int


@dataclass
class Land:
    """So many flights come back."""

    batches: int


BAD = [*RAISES.values()]
DEADLY = [*DIES.values(), *LOST.values()]


def steps(values: st.SearchStrategy[float]) -> st.SearchStrategy[list[Ask | Leave | Land]]:
    one = st.tuples(values, st.integers(1, 4), st.sampled_from([2, 2, 2, 3]))
    return st.lists(
        st.builds(Ask, st.lists(one, min_size=1, max_size=5))
        | st.builds(Leave, st.integers(0, 99))
        | st.builds(Land, st.integers(1, 4)),
        min_size=1,
        max_size=14,
    )


policies = st.builds(
    BatchPolicy,
    max_rows=st.integers(4, 9),
    preferred_rows=st.sampled_from([(), (4,)]),
    merge=st.booleans(),
)


def play(
    policy: BatchPolicy, depth: int, prompt: bool, script: list[Ask | Leave | Land]
) -> list[tuple[float, int, int, Caller]]:
    model = FakeOverlapped(depth=depth, manual=True, prompt=prompt)
    bench = Bench(model, policy)
    requests_sent: list[tuple[float, int, int, Caller]] = []
    try:
        for step in script:
            match step:
                case Ask(requests):
                    distinct = [
                        (value or 100.0 + len(requests_sent) + n, *more) for n, (value, *more) in enumerate(requests)
                    ]
                    try:
                        callers = bench.queue([np.full((rows, width), v, np.float32) for v, rows, width in distinct])
                    except Unavailable:
                        assert bench.exits, "refused by an instance that lives"
                        continue
                    requests_sent += [(*what, caller) for what, caller in zip(distinct, callers, strict=True)]
                case Leave(number):
                    if requests_sent:
                        requests_sent[number % len(requests_sent)][3].abandon()
                case Land(batches):
                    model.land(batches)
    finally:
        bench.close()
    assert model.most_open <= depth
    return requests_sent


@settings(max_examples=examples(80), deadline=None)
@given(policies, st.integers(2, 4), st.booleans(), steps(st.sampled_from([0.0] * 8 + BAD)))
def test_every_request_is_settled_once_with_its_own_rows(
    policy: BatchPolicy, depth: int, prompt: bool, script: list[Ask | Leave | Land]
) -> None:
    for value, rows, width, caller in play(policy, depth, prompt, script):
        answer = caller.answer()
        if isinstance(answer, Cancelled):
            continue
        if isinstance(answer, InferResponse):
            assert value not in (RAISES["launch"], RAISES["finish"])
            assert answer.outputs["y"].tolist() == [[2 * value] * width] * rows
        else:
            assert isinstance(answer, ModelFailed)
            assert value in BAD, "a good one failed with its neighbour"


@settings(max_examples=examples(80), deadline=None)
@given(policies, st.integers(2, 4), st.booleans(), steps(st.sampled_from([0.0] * 16 + BAD + DEADLY)))
def test_no_request_hangs_or_gets_rows_of_another_when_a_thread_dies(
    policy: BatchPolicy, depth: int, prompt: bool, script: list[Ask | Leave | Land]
) -> None:
    for value, rows, width, caller in play(policy, depth, prompt, script):
        answer = caller.answer()
        if isinstance(answer, InferResponse):
            assert answer.outputs["y"].tolist() == [[2 * value] * width] * rows
        else:
            assert isinstance(answer, Cancelled | ModelFailed | Unavailable)
