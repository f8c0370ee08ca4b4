"""Encapsulation: private names, imports by string, global state."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator

import pytest

from offload.transformers_api import ATTRIBUTES, MODULE_OF, OPTIONAL_ATTRIBUTES
from tests.test_house import FLOOR_OF, KNOWN, MODULES, dotted, room

Trees = dict[str, ast.Module]


@pytest.fixture(scope="module")
def trees() -> Trees:
    """The modules of the package, parsed."""
    return {dotted(path): ast.parse(path.read_text(encoding="utf-8")) for path in MODULES}


# Private names of others but transformers, whose are listed in `transformers_api`: module, name, and whose it is.
OF_OTHERS = {
    ("offload.cache.incoming", "_fields"): "a named tuple's",
    ("offload.generation.chat", "_exit"): "a forked child's",
    ("offload.integrations.tensordict", "_tensordict"): "a tensorclass's",
    ("offload.system.locks", "_at_fork_reinit"): "a lock's, for a child",
    ("offload.system.locks", "_is_owned"): "a lock's, for an interrupt",
    ("offload.storage.pickled", "_Unpickler"): "pickle's in Python, which is given another find_class",
    ("offload.tensor.replacing", "_getframe"): "sys has no other way",
    ("offload.tensor.wrapper", "_getframe"): "sys has no other way",
    ("offload.storage.nodes", "_fields"): "a named tuple's",
}
OF_TRANSFORMERS = {*MODULE_OF, *" ".join([*ATTRIBUTES.values(), OPTIONAL_ATTRIBUTES]).split()}

# Calls that create immutable values, and locks, which are of what is beside them.
CONSTANTS = (
    "Format", "Kind", "Path", "TypeVar", "attrgetter", "bytes", "float", "fork_safe_lock", "frozenset", "getattr",
    "logging.getLogger", "np.array", "object", "range", "re.compile", "struct.Struct", "torch.device", "dedent",
    "b'offload rows'.ljust",
)  # fmt: skip

# Global state, by why it is not an argument; and caches.
STATE = {
    "of a context or a thread: what it is at, and asks for": """
        batches.scheduler._CURRENT generation.alike._on integrations.torchao._AT_WORK offloading.context._NOTES
        prefetch.loads._THREAD tensor.backends.any_rows tensor.bound.exactly tensor.experts._GATHERING
    """,
    "pure functions, remembered": """
        cache.columns._empty_head cache.columns._start checkpoints.forms.decoding._tried
        checkpoints.forms.numbers._pairs_of_halves checkpoints.forms.numbers._powers kernels.accelerated._table
        kernels.packed._codebook offloading.made._way_of storage.layout.contiguous tensor.blocks._is_decoded
        tensor.blocks._on_any_device tensor.deferred._meta_of_many tensor.replacing._unread
        tensor.rules._returned_arguments tensor.rules.is_composite tensor.rules.written_arguments
        tensor.views.meta_of_layout
    """,
    "calls that are under way": "generation.alike._AT_WORK models.pretrained._LOADINGS",
    "known of a model, a module or a file for as long as that lives": """
        generation.candidates._MEASURED storage.file._OPENED tensor.experts._STACKS
        tensor.small.SMALL_VALUES
    """,
    "a class made of each class of a neighbour's, or of what is installed": """
        generation.past._stored_kind integrations.keys_values._kind_on_disk models.pretrained._kind_from_disk
        tensor.processes._pickler training.optimizer._kind_on_disk
    """,
    "does not change": """
        kernels.accelerated._kernels kernels.accelerated.is_there kernels.native._team kernels.native.best_level
        kernels.native.library kernels.native.most_rows prefetch.direct._CAN_BE_READ prefetch.engine.UNTRACKED
        prefetch.pages._HOST_TAKES_FREE_PAGES storage.mapping.libc storage.replacing._machine tensor.guests._AS_MAPPED
        tensor.replacing._ONE_HOLDER transformers_api.check_attributes
    """,
    "the team of threads is gone in a forked child": "kernels.native._forked",
    "when memory was last given back to the system": "memory._freed",
    "filled when the package is imported, and then as it is": """
        models.pretrained._FEATURES tensor.registry.FUNCTIONS tensor.registry.RULES
    """,
    "memory, and the bus, are the process's": """
        prefetch.copies._RECENT prefetch.engine.POOL prefetch.plan._POOLS
        prefetch.scratch._SCRATCH prefetch.staging._RATES prefetch.staging._STAGINGS prefetch.tables._FILLINGS
        storage.handle._MAPPED
    """,
    "one thread works for all; a forked child makes its own": "prefetch.engine._ENGINE training.activations._DISK",
    "names and folders are the process's": """
        storage.folders._CLAIMS storage.folders._NUMBERS storage.folders._PREPARED storage.folders._PRIVATE_FOLDERS
        storage.folders._RANK_CLAIMS
    """,
    "which a forked child makes free again": "system.locks._LOCKS",
    "of this process": "storage.replacing._tag",
    "what `register_subclass` is for": "storage.subclasses._REGISTERED",
    "what came from another process is one value here, and told apart there": """
        tensor.processes._COUNT tensor.processes._NUMBERS tensor.processes._PASSED
    """,
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


def test_names_with_an_underscore_are_used_in_their_wing_alone(trees):
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


def test_no_string_names_a_module_of_a_higher_floor(trees):
    """For `importlib.import_module` or `sys.modules`: an import that goes up unnoticed."""
    found = {
        (module, name)
        for module, tree in trees.items()
        for name in named_in_strings(tree)
        if room(module) and room(name) and room(name) != room(module) and FLOOR_OF[room(name)] >= FLOOR_OF[room(module)]
    }

    assert set() == found


def test_the_finder_finds_modules_in_strings():
    tree = ast.parse('"""offload.cli"""\nimport_module("offload.cache.table")\nsys.modules["offload.cli"]\n"offload"')

    assert {"offload.cache.table", "offload.cli"} == named_in_strings(tree) - {"offload"}


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


def test_state_of_the_process_is_listed(trees):
    found = {
        f"{module}.{name}".removeprefix("offload.")
        for module, tree in trees.items()
        if module != "offload.torch_api"
        for name in state_in(tree)
    }

    assert set(" ".join(STATE.values()).split()) == found


def test_the_finder_finds_state():
    lines = ["A = {}", "B: list[int] = []", "C = Lock()", "D = Path('x')", "E = {1: 2}", "@cache", "def f(): ..."]
    tree = ast.parse("\n".join([*lines, "def g():", "    global H"]))

    assert ["A", "B", "C", "f", "H"] == list(state_in(tree))
