"""Ports for programs of tests: no port twice, in one process or in several at the same time."""

from __future__ import annotations

import subprocess
import sys

from tests.support import serving

PROGRAM = """
import itertools, sys
from tests.support import serving
if hasattr(serving, "_FIRST_PORT"):
    serving._ports = itertools.count(serving._FIRST_PORT)  # as two processes whose numbers give the same beginning
print(*[serving.free_port() for _ in range(40)], flush=True)
sys.stdin.read()
"""


def test_processes_that_run_at_the_same_time_get_different_ports() -> None:
    children = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM], cwd=serving.ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    try:
        ports = [line.split() for child in children if child.stdout is not None for line in [child.stdout.readline()]]
    finally:
        for child in children:
            child.communicate()
    assert [len(each) for each in ports] == [40] * 3
    assert len({port for each in ports for port in each}) == 120


def test_a_port_is_handed_out_once_and_is_below_those_of_the_system() -> None:
    ports = [serving.free_port() for _ in range(50)]
    assert len(set(ports)) == 50
    assert all(20_000 <= port < 32_000 for port in ports)
