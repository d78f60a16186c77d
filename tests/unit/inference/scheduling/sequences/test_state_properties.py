"""No sequence reads another's state that the server keeps, in any order of events, with the states of real ONNX models."""

from __future__ import annotations

import pytest
from headrace.inference.scheduling.policy import SequencePolicy

from tests.support.examples import examples
from tests.support.virtual_sequences import random_run
from tests.support.virtual_states import VirtualStates, policies


def run(seed: int, policy: SequencePolicy) -> VirtualStates:
    result = random_run(seed, policy, make=VirtualStates, failing=0.1)
    assert isinstance(result, VirtualStates)
    return result


@pytest.mark.parametrize("policy", policies())
def test_random_interleavings(policy: SequencePolicy) -> None:
    runs = [run(seed, policy) for seed in range(40)]
    assert sum(each.answers for each in runs) > 150
    assert sum(each.failures for each in runs) > 10
    assert sum(each.refusals for each in runs) > 15


@pytest.mark.slow
@pytest.mark.parametrize("policy", policies())
def test_ten_thousand_random_interleavings(policy: SequencePolicy) -> None:
    for seed in range(1000, 1000 + examples(1700)):
        run(seed, policy)
