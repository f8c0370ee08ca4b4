"""Encapsulation: private names, imports by string, existing modules, global state."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from offload.transformers_api import ATTRIBUTES, MODULE_OF, OPTIONAL_ATTRIBUTES
from tests.test_house import FLOORS, KNOWN, MODULES, PACKAGE, dotted, room

Trees = dict[str, ast.Module]


@pytest.fixture(scope="module")
def trees() -> Trees:
    """The modules of the package, parsed."""
    return {dotted(path): ast.parse(path.read_text(encoding="utf-8")) for path in MODULES}


# Private names of others but transformers, whose are listed in `transformers_api`: module, name, and whose it is.
OF_OTHERS = {
    ("offload.cache.incoming", "_fields"): "a named tuple's",
    ("offload.generation.chat", "_exit"): "a forked child's",
    ("offload.cli.main", "_SubParsersAction"): "argparse's",
    ("offload.cli.main", "_actions"): "argparse's",
    ("offload.integrations.tensordict", "_tensordict"): "a tensorclass's",
    ("offload.system.locks", "_at_fork_reinit"): "a lock's, for a child",
    ("offload.system.locks", "_is_owned"): "a lock's, for an interrupt",
    ("offload.storage.pickled", "_Unpickler"): "pickle's in Python, which is given another find_class",
    ("offload.tensor.replacing", "_getframe"): "sys has no other way",
    ("offload.tensor.wrapper", "_getframe"): "sys has no other way",
    ("offload.storage.nodes", "_fields"): "a named tuple's",
}
OF_TRANSFORMERS = {*MODULE_OF, *" ".join([*ATTRIBUTES.values(), OPTIONAL_ATTRIBUTES]).split()}

# Calls that create immutable values.
CONSTANTS = (
    "Format", "Kind", "Path", "TypeVar", "attrgetter", "bytes", "float", "frozenset", "getattr", "logging.getLogger",
    "np.array", "object", "range", "re.compile", "struct.Struct", "torch.device", "b'offload rows'.ljust", "dedent",
)  # fmt: skip

# Global state, and why it is not an argument.
STATE = {
    "offload.batches.scheduler._CURRENT": "what a thread is in the middle of",
    "offload.cache.columns._empty_head": "a pure function, remembered",
    "offload.cache.columns._start": "a pure function, remembered",
    "offload.generation.alike._AT_WORK": "calls with drafts that are under way, by the model's configuration",
    "offload.generation.alike._LOCK": "of `_AT_WORK`",
    "offload.generation.alike._on": "which kind of pass follows, in this context",
    "offload.generation.candidates._LOCK": "of `_MEASURED`",
    "offload.generation.candidates._MEASURED": "what the passes of a model took, for as long as it lives",
    "offload.integrations.keys_values._kind_on_disk": "a class made of each class of transformers'",
    "offload.transformers_api.check_attributes": "classes do not change",
    "offload.generation.past._stored_kind": "a class made of each class of transformers'",
    "offload.integrations.torchao._AT_WORK": "what `quantize_` is at, in this context",
    "offload.kernels.accelerated._kernels": "imported once",
    "offload.kernels.accelerated.is_there": "does not change",
    "offload.kernels.accelerated._table": "a pure function, remembered",
    "offload.kernels.packed._codebook": "a pure function, remembered",
    "offload.kernels.native._forked": "the team of threads is gone in a forked child",
    "offload.kernels.native._team": "does not change",
    "offload.kernels.native.best_level": "does not change",
    "offload.kernels.native.most_rows": "does not change",
    "offload.kernels.native.library": "loaded once",
    "offload.memory._freed": "when memory was last given back to the system",
    "offload.tensor.deferred._meta_of_many": "a pure function, remembered",
    "offload.checkpoints.forms.decoding._tried": "a pure function, remembered",
    "offload.checkpoints.forms.numbers._pairs_of_halves": "a pure function, remembered",
    "offload.checkpoints.forms.numbers._powers": "a pure function, remembered",
    "offload.tensor.blocks._is_decoded": "a pure function, remembered",
    "offload.models.pretrained._LOADINGS": "that are under way, with transformers told to convert one by one",
    "offload.models.pretrained._LOCK": "of `_LOADINGS`",
    "offload.generation.mtp._LAYERS": "that draft for a model, for as long as it lives",
    "offload.models.pretrained._FEATURES": "filled when the package is imported, and then as it is",
    "offload.models.pretrained._kind_from_disk": "a class made of each class of models",
    "offload.offloading.context._LOCK": "of `_watching`",
    "offload.offloading.context._NOTES": "what threads leave when they look into each other",
    "offload.offloading.context._watching": "whether torch's hook is on: it stays",
    "offload.offloading.made._way_of": "a pure function, remembered",
    "offload.prefetch.engine.POOL": "memory is the process's",
    "offload.prefetch.engine.UNTRACKED": "does not change",
    "offload.prefetch.engine._ENGINE": "one thread reads for all; a forked child makes its own",
    "offload.prefetch.filling._FILLINGS": "who shares the process's memory: rows of caches",
    "offload.prefetch.value._LOCK": "of the first access to the state of a value",
    "offload.prefetch.plan._POOLS": "who shares the process's memory",
    "offload.prefetch.plan._LOCK": "of `_POOLS`",
    "offload.prefetch.copies._RECENT": "of each thread: what it used last",
    "offload.prefetch.staging._RATES": "of the bus to each device, measured once",
    "offload.prefetch.staging._LOCK": "of `_STAGINGS`",
    "offload.prefetch.staging._STAGINGS": "pinned memory, one for each device",
    "offload.prefetch.direct._CAN_BE_READ": "is a file system's",
    "offload.storage.file._LOCK": "of `_OPENED`",
    "offload.storage.file._OPENED": "a file is parsed once, for as long as somebody has it",
    "offload.storage.folders._CLAIMS": "who has which name in which folder",
    "offload.storage.folders._LOCK": "of claims and private folders",
    "offload.storage.folders._NUMBERS": "of names that are nobody's",
    "offload.storage.folders._PREPARED": "folders that were swept",
    "offload.storage.folders._PRIVATE_FOLDERS": "which go when the process ends",
    "offload.storage.handle._LOCK": "of `_MAPPED`",
    "offload.storage.handle._MAPPED": "mappings are the process's, and few",
    "offload.storage.layout.contiguous": "a pure function, remembered",
    "offload.system.locks._LOCKS": "which a forked child makes free again",
    "offload.storage.mapping.libc": "does not change",
    "offload.prefetch.pages._HOST_TAKES_FREE_PAGES": "does not change",
    "offload.storage.replacing._machine": "does not change",
    "offload.storage.replacing._tag": "one for each process",
    "offload.storage.subclasses._REGISTERED": "what `register_subclass` is for",
    "offload.tensor.views.meta_of_layout": "a pure function, remembered",
    "offload.storage.folders._RANK_CLAIMS": "the names that this rank has in named folders",
    "offload.tensor.backends.any_rows": "what drafts ask for, in this context",
    "offload.tensor.experts._GATHERING": "whom this thread gives the experts of a layer to",
    "offload.tensor.experts._STACKS": "what is known of the experts of a module, as long as that lives",
    "offload.prefetch.loads._THREAD": "what this thread takes stored values from",
    "offload.tensor.bound.exactly": "what `exact()` asks for, in this context",
    "offload.tensor.processes._COUNT": "of `_NUMBERS`",
    "offload.tensor.processes._LOCK": "of `_PASSED` and `_NUMBERS`",
    "offload.tensor.processes._NUMBERS": "what tells a value without a file from others, in other processes",
    "offload.tensor.processes._PASSED": "what came from another process is one value here",
    "offload.tensor.processes._pickler": "the class of what is installed",
    "offload.tensor.small._ALL_KEPT": "small computed values, as long as what computes them lives",
    "offload.prefetch.scratch._SCRATCH": "memory that is used again, by whoever computes or loads a value next",
    "offload.tensor.rules._returned_arguments": "pure: of an op's schema",
    "offload.tensor.rules.is_composite": "pure: of an op",
    "offload.tensor.rules.written_arguments": "pure: of an op's schema",
    "offload.tensor.registry.FUNCTIONS": "filled when the package is imported, and then as it is",
    "offload.tensor.registry.RULES": "filled when the package is imported, and then as it is",
    "offload.tensor.guests._AS_MAPPED": "does not change",
    "offload.tensor.replacing._ONE_HOLDER": "does not change",
    "offload.tensor.replacing._unread": "a pure function, remembered",
    "offload.training.activations._DISK": "one thread writes for all; a forked child makes its own",
    "offload.training.optimizer._kind_on_disk": "a class made of each optimizer's class",
}


def wing_of(module: str) -> str:
    return room(module) or "offload"


def defined_in(tree: ast.AST) -> Iterator[str]:
    """Names that a module defines: functions, classes, variables, attributes, slots."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__slots__":
            yield from ast.literal_eval(node.value)


def reached_into(tree: ast.AST) -> Iterator[str]:
    """Private names of other objects; those of ops are public."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and re.match(r"_[^_]", node.attr):
            whose = ast.unparse(node.value)
            if whose not in ("self", "cls", "super()") and not whose.endswith("aten"):
                yield node.attr
        elif isinstance(node, ast.ImportFrom) and str(node.module).startswith("offload"):
            yield from (alias.name for alias in node.names if re.match(r"_[^_]", alias.name))


def test_names_with_an_underscore_are_used_in_their_wing_alone(trees: Trees) -> None:
    own: dict[str, set[str]] = defaultdict(set)
    for module, tree in trees.items():
        own[wing_of(module)].update(defined_in(tree))

    found = {
        (module, name)
        for module, tree in trees.items()
        if module != "offload.torch_api"
        for name in reached_into(tree)
        if name not in own[wing_of(module)] | OF_TRANSFORMERS
    }

    assert set(OF_OTHERS) == found


def test_the_finder_finds_names_with_an_underscore():
    tree = ast.parse("from offload.storage.handle import _LOCK\nself._a\nx._b\naten._to_copy\nx.__dict__\nx.y._c = 1")

    assert {"_LOCK", "_b", "_c"} == set(reached_into(tree))


def named_in_strings(tree: ast.AST) -> set[str]:
    """Modules of the package that are named in strings, except docstrings."""
    texts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    strings = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in texts)
    return {node.value for node in strings if isinstance(node.value, str)} & KNOWN


def test_no_string_names_a_module_of_a_higher_floor(trees: Trees) -> None:
    """For `importlib.import_module` or `sys.modules`: an import that goes up unnoticed."""
    found = {
        (module, name)
        for module, tree in trees.items()
        for name in named_in_strings(tree)
        if room(module) and room(name) and room(name) != room(module) and FLOORS[room(name)] >= FLOORS[room(module)]
    }

    assert set() == found


def test_the_finder_finds_modules_in_strings():
    tree = ast.parse('"""offload.cli"""\nimport_module("offload.cache.table")\nsys.modules["offload.cli"]\n"offload"')

    assert {"offload.cache.table", "offload.cli"} == named_in_strings(tree) - {"offload"}


def ghosts(package: Path) -> Iterator[str]:
    """Folders without a module, and table entries without one."""
    for folder in (package, *(path for path in package.rglob("*") if path.is_dir())):
        if folder.name != "__pycache__" and not (folder / "__init__.py").exists():
            yield folder.name
    for wing in package.rglob("__init__.py"):
        if wing.parent == package:
            continue
        lines = wing.read_text(encoding="utf-8").split("| module |")[1:]
        for line in (line for part in lines for line in part.splitlines() if line.startswith("| `")):
            for name in re.findall(r"`(\w+)`", line.split("|")[1]):
                if not (wing.parent / f"{name}.py").exists() and not (wing.parent / name / "__init__.py").exists():
                    yield f"{wing.parent.name}: {name}"


def test_every_folder_and_table_entry_has_a_module():
    assert [] == list(ghosts(PACKAGE))


def test_the_finder_finds_folders_and_entries_without_a_module(tmp_path):
    for name in ("full", "empty/__pycache__"):
        (tmp_path / "offload" / name).mkdir(parents=True)
    (tmp_path / "offload" / "__init__.py").touch()
    (tmp_path / "offload" / "full" / "__init__.py").write_text("| module | what |\n| --- | --- |\n| `gone` | it |\n")

    assert ["empty", "full: gone"] == list(ghosts(tmp_path / "offload"))


def state_in(tree: ast.Module) -> Iterator[str]:
    """Variables of a module that may change: empty collections, objects, what functions assign, and caches."""
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if may_change(node.value):
                yield ast.unparse(target)
        elif isinstance(node, ast.FunctionDef) and any("cache" in ast.unparse(one) for one in node.decorator_list):
            yield node.name
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield from node.names


def may_change(value: ast.expr) -> bool:
    if isinstance(value, ast.Call):
        return ast.unparse(value.func) not in CONSTANTS
    return (isinstance(value, ast.Dict) and not value.keys) or (isinstance(value, ast.List) and not value.elts)


def test_state_of_the_process_is_listed(trees: Trees) -> None:
    found = {
        f"{module}.{name}" for module, tree in trees.items() if module != "offload.torch_api" for name in state_in(tree)
    }

    assert set(STATE) == found


def test_the_finder_finds_state():
    lines = ["A = {}", "B: list[int] = []", "C = Lock()", "D = Path('x')", "E = {1: 2}", "@cache", "def f(): ..."]
    tree = ast.parse("\n".join([*lines, "def g():", "    global H"]))

    assert ["A", "B", "C", "f", "H"] == list(state_in(tree))


# Arguments and variables of any type, on the lowest floors: module and name.
ANYTHING = {
    "offload.prefetch.staging": {
        "arrived",
        "copied",
        "current",
        "self._module",
    },  # torch.cuda, torch.xpu... alike
    "offload.storage.nodes": {"cls", "value"},  # plain data, of any kind
    "offload.storage.pickled": {"args", "function", "saved_id", "state"},
}


def of_any_type(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.arg) and node.annotation is not None and ast.unparse(node.annotation) == "Any":
            yield node.arg
        elif isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) == "Any":
            yield ast.unparse(node.target)


def test_names_of_type_any_on_lower_floors_are_listed(trees: Trees) -> None:
    """`Any` could hide a class of a higher floor."""
    found = {
        module: set(of_any_type(tree)) for module, tree in trees.items() if room(module) in ("storage", "prefetch")
    }

    assert {module: names for module, names in found.items() if names} == ANYTHING


@pytest.mark.parametrize("code", ["def f(a: Any): ...", "class C:\n    a: Any", "a: Any = 1"])
def test_the_finder_finds_names_of_type_any(code):
    assert ["a"] == list(of_any_type(ast.parse(code)))
