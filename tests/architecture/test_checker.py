"""Checks of the rules themselves: examples of sources that break one, and of sources that keep it."""

from __future__ import annotations

import re

import pytest

from tests.architecture.rules import (
    FILE_LINES,
    FUNCTION_LINES,
    code_lines,
    grown_packages,
    import_cycles,
    imported,
    package_lines,
    refused_identifiers,
    refused_prose,
    servers_on_default_ports,
    violations,
)


def _cycles_of(modules: dict[str, str]) -> set[tuple[str, ...]]:
    """Cycles of modules given by their source."""
    imports = {
        name: [result for _, result in imported(name.replace(".", "/") + ".py", source)]
        for name, source in modules.items()
    }
    return import_cycles(imports)


def test_cycles_and_refused_identifiers_are_reported() -> None:
    hidden = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from headrace.a import A"
    assert _cycles_of({"headrace.a": "from headrace import b", "headrace.b": hidden}) == {("headrace.a", "headrace.b")}
    assert _cycles_of({"headrace.a": "import headrace.b", "headrace.b": "", "headrace.c": hidden}) == set()
    assert refused_identifiers("told = 1\ndef f(asked_by): return x.Crew") == [
        (1, "told"),
        (2, "asked_by"),
        (2, "Crew"),
    ]
    assert refused_identifiers("untold = detail.folder") == []
    assert refused_prose('def f():\n    """What a model takes."""\n    # Tells nobody.') == [
        (2, "What ..."),
        (3, "Tells"),
        (3, "nobody"),
    ]
    assert refused_prose('"""See `X`."""\nclass _C:\n    """Record.\n\n    Attributes:\n        a: x.\n    """') == [
        (1, "See ..."),
        (3, "Attributes of _C"),
    ]
    assert refused_prose('def f():\n    """Return the tasks of a model."""\n    return "told"  # taskset') == []


BROKEN: list[tuple[str, str, str]] = [
    # file, source, what the message must hold
    ("server/headrace/core/tensor.py", "import pydantic", "imports pydantic"),
    ("server/headrace/core/x.py", "class T(typing.Protocol[X]):\n" + "    def f(self): ...\n" * 7, "T has 7 methods"),
    ("server/headrace/core/tensor.py", "from headrace.inference.scheduling import queue",
     "imports headrace.inference.scheduling.queue"),
    ("server/headrace/core/tensor.py", "import os.path", "no I/O here"),
    ("server/headrace/runtimes/cuda/driver.py", "import tensorrt", "imports tensorrt"),
    ("server/headrace/observability/stats.py", "from ..inference.scheduling.queue import Queue",
     "imports headrace.inference.scheduling.queue.Queue"),
    ("server/headrace/runtimes/python_backend.py", "import onnxruntime", "imports onnxruntime"),
    ("server/headrace/runtimes/base.py", "def f():\n    from headrace.models import loader",
     ":2: imports headrace.models.loader"),
    ("server/headrace/inference/scheduling/queue.py", "from headrace.wire import http",
     "imports headrace.wire.http"),
    ("server/headrace/inference/scheduling/queue.py", "import pathlib", "no I/O here"),
    ("server/headrace/inference/scheduling/queue.py", "import fastapi", "imports fastapi"),
    ("server/headrace/models/loader.py", "from headrace.wire.requests import status", "imports headrace.wire.requests.status"),
    ("server/headrace/models/loader.py", "import rich", "imports rich"),
    ("server/headrace/wire/http/application.py", "import headrace.server.app", "imports headrace.server.app"),
    ("server/headrace/wire/http/application.py", "import importlib; importlib.import_module('headrace_bench')",
     "imports headrace_bench"),
    ("server/headrace/server/commands/health.py", "import requests", "imports requests"),
    ("server/headrace/inference/pipelines/image.py", "from headrace.server.commands import health",
     "imports headrace.server.commands"),
    ("server/headrace/inference/simulation/x.py", "from headrace.models.loader import Loader",
     "imports headrace.models.loader.Loader"),
    ("server/headrace/somewhere/new.py", "", "has no floor"),
    ("server/headrace/server/app.py", "import pycuda.driver", "imports pycuda"),
    ("server/headrace/__main__.py", "def f():\n    import headrace_engines.build", "never imports the builder"),
    ("server/headrace/__main__.py", "__import__('headrace_engines')", "never imports the builder"),
    ("engines/headrace_engines/build.py", "from headrace.inference.scheduling.batching import decide",
     "imports headrace.inference.scheduling"),
    ("engines/headrace_engines/build.py", "import torch", "imports torch"),
    ("server/headrace/server/app.py", "import os\nx = os.environ.get('A')", ":2: uses os.environ"),
    ("server/headrace/server/app.py", "import os as system\nx = system.getenv('A')", "uses os.getenv"),
    ("engines/headrace_engines/build.py", "from os import environ", "uses os.environ"),
    ("server/headrace/server/app.py", "import time\n\n\ntime.sleep(1)", ":4: uses time.sleep"),
    ("server/headrace/server/app.py", "from time import sleep as rest", "uses time.sleep"),
    ("server/headrace/core/clock.py", "import time\nx = time.time()", "uses time.time"),
    ("server/headrace/wire/http/x.py", "from datetime import datetime\nx = datetime.now()", "uses datetime.datetime.now"),
    ("server/headrace/models/x.py", "import pickle", "uses pickle"),
    ("server/headrace/models/x.py", "def f():\n    import marshal", "uses marshal"),
    ("loadtest/x.py", "import shelve, dill", "uses dill"),
    ("engines/headrace_engines/build.py", "import pickle", "only the restricted reader"),
    ("engines/headrace_engines/demo/x.py", "import pickle\npickle.load(f)", "uses pickle.load"),
    ("engines/headrace_engines/demo/x.py", "import pickle\npickle.Unpickler(f).load()", "may only be subclassed"),
    ("engines/headrace_engines/demo/x.py", "import numpy as np\nnp.load(f, allow_pickle=True)", "allow_pickle"),
    ("tests/unit/test_x.py", "x = 1\n" * FILE_LINES, "has 800 lines"),
    ("loadtest/x.py", "def f():\n" + "    x = 1\n" * (FUNCTION_LINES - 1), "f has 60 lines"),
    ("engines/headrace_engines/x.py", "class A:\n    async def g(self):\n" + "        x = 1\n" * FUNCTION_LINES,
     ":2: g has 61 lines"),
    ("server/headrace/core/x.py", "try:\n    f()\nexcept:\n    raise", ":3: bare except"),
    ("tests/unit/test_x.py", "try:\n    f()\nexcept Exception:\n    pass", "swallows every error"),
    ("server/headrace/core/x.py", "try:\n    f()\nexcept (OSError, BaseException) as e:\n    ...", "swallows every error"),
    ("server/headrace/core/x.py", "from contextlib import suppress\nwith suppress(Exception):\n    f()", "swallows every error"),
    ("server/headrace/core/utils.py", "", "'utils' names nothing"),
    ("server/headrace/models/model_manager.py", "", "'model_manager' names nothing"),
    ("tests/helpers/x.py", "", "'helpers' names nothing"),
    ("engines/headrace_engines/x.py", "x = 1  # TODO" + ": later", "TODO"),
    ("server/headrace/core/x.py", '"""Text.\n\nFIXME' + '"""', ":3: FIXME"),
    ("server/headrace/core/x.py", "from typing import Protocol\nclass Wide(Protocol):\n"
     + "".join(f"    def f{n}(self): ...\n" for n in range(7)), "Wide has 7 methods"),
]  # fmt: skip

KEPT: list[tuple[str, str]] = [
    ("server/headrace/config/model_config.py", "import pydantic\nimport numpy as np"),
    (
        "server/headrace/inference/scheduling/instance.py",
        "from headrace.runtimes.base import Execution\nfrom headrace.runtimes import base",
    ),
    (
        "server/headrace/inference/scheduling/queue.py",
        "from .batching import decide\nimport time\nx = time.monotonic_ns()",
    ),
    ("server/headrace/runtimes/onnxruntime.py", "def f():\n    import onnxruntime"),
    ("server/headrace/config/pbtxt.py", "from google.protobuf import text_format\nimport yaml, onnx"),
    ("server/headrace/server/commands/validate.py", "from rich.console import Console"),
    ("server/headrace/server/settings.py", "import os\nx = os.environ['HEADRACE_HOST']"),
    ("server/headrace/server/app.py", "from headrace.models import registry\nfrom headrace import __version__"),
    (
        "engines/headrace_engines/demo/x.py",
        "import pickle\nclass Reader(pickle.Unpickler):\n    pass\nerror = pickle.UnpicklingError",
    ),
    ("engines/headrace_engines/build.py", "import onnxruntime\nfrom headrace.core.errors import HeadraceError"),
    ("loadtest/bench.py", "import os, onnxruntime\nx = os.environ"),
    ("tests/unit/test_x.py", "import pickle\ndef f():\n" + "    x = 1\n" * 200),
    ("server/headrace/core/x.py", "try:\n    f()\nexcept Exception as error:\n    raise ValueError from error"),
    ("server/headrace/core/x.py", "try:\n    f()\nexcept FileNotFoundError:\n    pass"),
    (
        "server/headrace/core/x.py",
        "class Narrow(Protocol):\n" + "".join(f"    def f{n}(self): ...\n" for n in range(6)),
    ),
    (
        "server/headrace/core/x.py",
        "class Wire(asyncio.Protocol):\n" + "".join(f"    def f{n}(self): ...\n" for n in range(7)),
    ),
    ("loadtest/x.py", "x = 1\n" * (FILE_LINES - 1)),
]


@pytest.mark.parametrize(("path", "source", "message"), BROKEN, ids=[message for _, _, message in BROKEN])
def test_a_broken_rule_is_reported(path: str, source: str, message: str) -> None:
    result = violations(path, source)
    assert any(message in text and text.startswith(f"{path}:") for text in result), result
    assert all(re.fullmatch(r"\S+:\d+: .+ \[.+\] .+", text) for text in result), result


@pytest.mark.parametrize(("path", "source"), KEPT)
def test_what_keeps_the_rules_is_not_reported(path: str, source: str) -> None:
    assert violations(path, source) == []


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        ('["headrace", "serve"]', [1]),
        ('["headrace", "serve", "--http-port", "0"]', [1]),
        ('["headrace", "serve", "--http-port", "0", "--no-grpc"]', []),
        ('["headrace", "build"]', []),
        ('["make", "-n", "serve"]', []),
    ],
)
def test_a_server_on_a_default_port_is_reported(words: str, lines: list[int]) -> None:
    assert servers_on_default_ports(f"def start():\n    run({words})\n") == lines


def test_lines_without_blanks_comments_and_docstrings_are_counted() -> None:
    source = '"""Docstring.\n\nMore."""\n\n# comment\nx = 1  # one\ntext = """\n# two\n\n"""\ndef f(\n):\n    """Docstring."""\n'
    assert code_lines(source) == 7
    lines = {"server/headrace/server/app.py": 10, "server/headrace/core/a.py": 5, "server/headrace/core/b/c.py": 6}
    lines |= {"tests/unit/core/test_a.py": 7, "tests/conftest.py": 1, "setup.py": 3}
    packages = {
        "product": 21,
        "server/headrace/server": 10,
        "server/headrace/core": 5,
        "server/headrace/core/b": 6,
        "tests": 8,
    }
    assert package_lines(lines) == packages


@pytest.mark.parametrize(("number", "grown"), [(0, False), (99, False), (103, False), (104, True)])
def test_a_package_that_grew_is_reported(number: int, grown: bool) -> None:
    assert bool(grown_packages({"server/headrace/core": number}, {"server/headrace/core": 100})) == grown
    assert grown_packages({"server/headrace/new": 1}, {}) == ["server/headrace/new has 1 code lines, the table says 0"]
