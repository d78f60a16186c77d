"""Text that a model generates step by step: requests at the same time, which share the batches of their steps, and one by one."""

from __future__ import annotations

import json
import selectors
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from loadtest import servers
from loadtest.bench.inprocess import WrongAnswer
from loadtest.bench.results import CaseResult, Comparison, Target, at_least, figures_of
from loadtest.bench.session import Bench, Case, interleave
from loadtest.servers import HOST, Running

MODEL = "rnn_text"
TOKENS = 100
TOKEN = b'"text_output"'
END = b"\r\n0\r\n\r\n"
SILENCE_LIMIT_S = 60.0
ALONE = "one by one"


@dataclass(frozen=True, slots=True)
class GenerateSample:
    """Tokens of some requests over the time from the first request to the last token."""

    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Generate(Case):
    """The same requests at the same time, and one after the other, to one server on both cores; its client has one of them.

    Attributes:
        ratio: target of the tokens/s at the same time over those one by one.
    """

    ratio: Target

    contenders = 2

    @property
    def title(self) -> str:
        """One-line description of the measurement."""
        return f"generate_stream of {MODEL}, {self.connections} requests of {TOKENS} tokens"

    def run(self, bench: Bench) -> CaseResult:
        """Check the number of tokens of every request, and measure in interleaved rounds."""
        if not list((bench.repository / MODEL).glob("*/model.py")):
            raise FileNotFoundError(f"no {MODEL}/<version>/model.py in {bench.repository}: build it with `make models`")
        command = servers.headrace(
            bench.repository.resolve(), command=bench.command, models=(MODEL,), cpus=bench.cores.both
        )
        together = f"{self.connections} at the same time"
        with bench.start(command) as server:
            generate(server, range(self.connections))  # warm-up
            measures = {
                ALONE: partial(self._measure, bench, server, ALONE),
                together: partial(self._measure, bench, server, together),
            }
            samples = interleave(measures, self.rounds(bench))
        figures = figures_of(samples, {"tokens_per_s": "tokens/s"})
        label = f"{together} / {ALONE}, tokens/s"
        comparison = Comparison.ratio(label, "tokens_per_s", samples[together], samples[ALONE], self.ratio)
        note = "server on both cores, client on one of them"
        return CaseResult(self.name, self.title, figures, [comparison], (note,))

    def _measure(self, bench: Bench, server: Running, contender: str) -> GenerateSample:
        bench.progress(contender, bench.seconds(self.sample_s))
        groups = [[seed] for seed in range(self.connections)] if contender == ALONE else [range(self.connections)]
        begun_s = time.perf_counter()
        for seeds in groups:
            generate(server, seeds)
        return GenerateSample(self.connections * TOKENS / (time.perf_counter() - begun_s))


def generate(server: Running, seeds: Sequence[int]) -> None:
    """Send a request for each seed at the same time, and read their events to the end.

    Raises:
        WrongAnswer: a response has another number of tokens.
    """
    with selectors.DefaultSelector() as selector:
        answers: dict[socket.socket, bytearray] = {}
        for seed in seeds:
            connection = socket.create_connection((HOST, server.port), timeout=SILENCE_LIMIT_S)
            body = json.dumps({"text_input": "The ", "max_tokens": TOKENS, "seed": seed}).encode()
            head = f"POST /v2/models/{MODEL}/generate_stream HTTP/1.1\r\nHost: {HOST}\r\nContent-Length: {len(body)}\r\n\r\n"
            connection.sendall(head.encode() + body)
            answers[connection] = bytearray()
            selector.register(connection, selectors.EVENT_READ)
        while selector.get_map():
            ready = selector.select(SILENCE_LIMIT_S)
            if not ready:
                raise WrongAnswer(f"{server.name} sent nothing for {SILENCE_LIMIT_S:g} s")
            for key, _ in ready:
                connection = key.fileobj  # type: ignore[assignment]
                part = connection.recv(1 << 16)
                answers[connection] += part
                if not part or answers[connection].endswith(END):
                    selector.unregister(connection)
                    connection.close()
    counts = [answer.count(TOKEN) for answer in answers.values()]
    if counts != [TOKENS] * len(counts):
        raise WrongAnswer(f"{server.name} sent {counts} tokens: {bytes(next(iter(answers.values())))[:300]!r}")


CASES: tuple[Case, ...] = (Generate("generate-8", 8, ratio=at_least(4.0)),)
