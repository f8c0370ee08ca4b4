"""The structure of `offload`: which module may import which, module docstrings, and public names."""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
import torch

import offload
from tests.processes import ROOT, run_script

PACKAGE = ROOT / "offload"
MODULES = sorted(PACKAGE.rglob("*.py"))

# Subpackages and top-level modules: one may import those on earlier lines, and what is inside itself.
FLOORS = """
    errors
    annotations
    importing
    memory
    progress
    torch_api
    transformers_api
    system
    kernels storage
    prefetch
    tensor
    budget checkpoints recording
    cache models offloading tree
    batches training
    generation integrations
    planning serving
    cli
    __main__
""".strip().splitlines()
FLOOR_OF = {name: number for number, names in enumerate(FLOORS) for name in names.split()}

NEIGHBOURS = {
    *("accelerate", "compressed_tensors", "datasets", "gguf", "h5py", "huggingface_hub", "peft", "pyarrow"),
    *("tensordict", "torchao", "transformers"),
}

# Which third-party libraries modules outside `integrations` and `cli` may import, and only inside functions.
GUESTS = {
    "checkpoints.companions": {"transformers"},
    "checkpoints.forms.gguf": {"transformers"},
    "checkpoints.forms.torchao": {"torchao"},
    "generation.identity": {"transformers"},
    "generation.past": {"transformers"},
    "models.device_map": {"accelerate"},
    "checkpoints.writing": {"huggingface_hub"},
    "kernels.packed": {"gguf"},
    "storage.gguf_header": {"gguf"},
    "tensor.blocks": {"gguf"},
    "transformers_api": {"transformers"},
}

PUBLIC = """
    ON_DISK LoadReport MapReport OffloadError OffloadedTensor TensorCache by_reference disk_offload exact
    from_pretrained init_empty_weights is_offloaded load_checkpoint_and_dispatch load_checkpoint_in_model load_file
    load_tree map_batches map_values materialize memory_summary merge_lora offloaded_like offloading plan quantize_
    register_subclass save_checkpoint save_tree set_max_memory topk
"""

IN_MODULES = {
    "budget": ["evict", "keep_resident", "set_read_ahead"],
    "generation": ["PromptCache"],
    "integrations": ["cache_from", "kv_cache", "tensordict"],
    "training": ["load_training", "offload_activations", "offload_optimizer", "save_training"],
}


def dotted(path: Path) -> str:
    """`offload.tensor.wrapper` for its file; `offload.tensor` for that of the package."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room(module: str) -> str:
    """`tensor` for `offload.tensor.wrapper`; empty for `offload` itself."""
    return module.split(".")[1] if "." in module else ""


KNOWN = {dotted(path) for path in MODULES}


@pytest.fixture(scope="module", autouse=True)
def _parsed_once() -> Iterator[None]:
    """Trees are many objects, which would slow down the garbage collector in later tests."""
    yield
    parsed.cache_clear()
    imports.cache_clear()


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def imports(path: Path) -> list[tuple[str, bool]]:
    """The full names that a file imports, and whether that happens when it is imported itself.

    Imports under `if TYPE_CHECKING` don't happen then.
    """

    def visit(node: ast.AST, at_import: bool) -> Iterator[tuple[str, bool]]:
        if isinstance(node, ast.Import):
            yield from ((alias.name, at_import) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path} has a relative import: name the module that defines the name"
            for alias in node.names:
                inside = f"{node.module}.{alias.name}"
                yield (inside if inside in KNOWN else str(node.module)), at_import
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or is_for_type_checkers(node):
            at_import = False
        for child in ast.iter_child_nodes(node):
            yield from visit(child, at_import)

    return list(visit(parsed(path), True))


def is_for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def own_imports(path: Path) -> Iterator[tuple[str, bool]]:
    return ((name, at_import) for name, at_import in imports(path) if name.split(".")[0] == "offload")


def test_imports_go_down_a_floor_or_stay_inside_a_wing():
    found = [(dotted(path), name) for path in MODULES for name, _ in own_imports(path)]

    assert {room(name) for name in KNOWN} - {""} == set(FLOOR_OF)
    assert len(found) > 500
    assert [] == [f"{own} imports {name}" for own, name in found if room(own) and not goes_down(room(own), room(name))]


def goes_down(own: str, other: str) -> bool:
    """Whether a wing, or a top-level module, may import another; none may import the root."""
    return other == own or FLOOR_OF.get(other, 99) < FLOOR_OF[own]


def with_packages(module: str, name: str) -> set[str]:
    """What is imported first where `module` imports `name`: its packages, but for those of `module`, and itself."""
    packages = (name.rsplit(".", count)[0] for count in range(1, name.count(".")))
    return {name, *(package for package in packages if not f"{module}.".startswith(f"{package}."))}


def test_no_modules_import_each_other_in_a_cycle():
    """So each of them can be imported first."""
    graph: dict[str, set[str]] = {}
    for path in MODULES:
        names = (name for name, at_import in own_imports(path) if at_import)
        graph[dotted(path)] = {one for name in names for one in with_packages(dotted(path), name)}

    TopologicalSorter(graph).prepare()


def test_a_module_brings_the_packages_that_it_is_in():
    assert {"offload.a", "offload.a.b", "offload.a.b.c"} == with_packages("offload.d", "offload.a.b.c")
    assert {"offload.a.b", "offload.a.b.c"} == with_packages("offload.a.d", "offload.a.b.c")
    assert {"offload.a.b.c"} == with_packages("offload.a.b", "offload.a.b.c")


def test_a_neighbour_is_imported_inside_functions_and_only_where_it_may_be():
    for path in MODULES:
        found = {(name.split(".")[0], at_import) for name, at_import in imports(path)}
        own = dotted(path).removeprefix("offload.")
        allowed = NEIGHBOURS if room(dotted(path)) in ("integrations", "cli") else GUESTS.get(own, set())
        for name, at_import in found:
            if name in NEIGHBOURS:
                assert name in allowed, f"{dotted(path)} imports {name}: that belongs to integrations"
                assert not at_import, f"{dotted(path)} imports {name} at its top: import it where it is used"


def test_a_module_opens_with_what_is_always_true_of_it():
    texts = {path: ast.get_docstring(parsed(path)) for path in MODULES}

    assert [] == [path for path, text in texts.items() if not text]
    assert [] == [
        path for path, text in texts.items() if path.name != "__init__.py" and "\n\nAlways true:\n- " not in text
    ]


def named_places(text: str) -> Iterator[tuple[str, str]]:
    """The files of the package that a page names, each with the names in it: `offload/a.py`: `b`, `C.d`."""
    for path, names in re.findall(r"`(offload/[\w/]+\.py)`((?:[:,] `[\w.]+`)*)", text):
        yield from ((path, name) for name in re.findall(r"`([\w.]+)`", names) or [""])


def names_defined_in(path: Path) -> set[str]:
    """The functions, classes and methods of a module: `f`, `C`, `C.m`."""
    top = parsed(path).body
    defined = [node for node in top if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    inner = [(one, node) for one in defined if isinstance(one, ast.ClassDef) for node in one.body]
    methods = {f"{one.name}.{node.name}" for one, node in inner if isinstance(node, ast.FunctionDef)}
    return methods | {node.name for node in defined} | {""}


def test_each_campaign_has_the_tests_with_more_cases_in_it():
    """`make campaign` runs those with the marker."""
    for path in (ROOT / "tests").rglob("test_*.py"):
        text = path.read_text(encoding="utf-8")
        marked = set(re.findall(r'mark\.campaign\("(\w+)"', text))

        assert marked >= set(re.findall(r'\b(?:amount|(?<!mark\.)campaign)\("(\w+)"', text)), path


def test_the_page_on_how_it_works_has_the_wings_in_the_order_of_their_floors():
    page = (ROOT / "tutorials/explanation/how-it-works.md").read_text(encoding="utf-8")
    rows = [re.findall(r"`(\w+)`", line.split("|")[1]) for line in page.splitlines() if line.startswith("| `")]
    floors = [FLOOR_OF[name] for names in rows for name in names]

    assert FLOOR_OF.keys() - {"__main__"} == {name for names in rows for name in names}
    assert sorted(floors) == floors


def test_the_places_that_contributing_names_exist():
    found = list(named_places((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")))

    assert len(found) > 12
    assert [] == [f"{path}: {name}" for path, name in found if name not in names_defined_in(ROOT / path)]


def test_a_module_has_at_most_some_700_lines():
    lengths = {dotted(path): len(path.read_text(encoding="utf-8").splitlines()) for path in MODULES}

    assert {} == {module: length for module, length in lengths.items() if length > 700}


# Lines, with blank ones and docstrings. They only go down: a new mechanism names the one that it replaces.
MOST_LINES = {
    ("offload", "py"): 36_000,  # on the way to 32,000
    ("offload", "[ch]"): 3_400,
    ("tests", "py"): 51_200,
    ("bench", "py"): 8_850,
}


@pytest.mark.parametrize(("folder", "kind"), MOST_LINES)
def test_the_lines_of_a_folder_stay_within_their_budget(folder, kind):
    count = sum(len(path.read_bytes().splitlines()) for path in (ROOT / folder).rglob(f"*.{kind}"))

    assert 1_000 < count <= MOST_LINES[folder, kind]


def test_a_class_name_stands_for_one_class():
    names = Counter(node.name for path in MODULES for node in ast.walk(parsed(path)) if isinstance(node, ast.ClassDef))

    assert [] == [name for name, count in names.items() if count > 1]


PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *(ROOT / "tutorials").rglob("*.md"),
]
WIDTH = 120  # columns of a line of prose


def wide_lines(text: str) -> Iterator[int]:
    """The lines of a page that are too wide, without those of front matter, code, tables and HTML."""
    fence = "---" if text.startswith("---\n") else ""
    for number, line in enumerate(text.splitlines(), start=1):
        word = line.strip()
        if fence:
            fence = "" if number > 1 and word == fence else fence
        elif word.startswith("```"):
            fence = re.match("`+", word)[0]
        elif len(line) > WIDTH and not word.startswith(("|", "<")):
            yield number


def test_lines_of_a_page_have_at_most_120_columns():
    assert [] == [f"{path}:{line}" for path in PAGES for line in wide_lines(path.read_text(encoding="utf-8"))]


def test_the_finder_finds_wide_lines():
    wide = "a" * 121
    lines = [
        "---",
        wide,
        "---",
        wide[1:],
        wide,
        "| " + wide,
        "<p " + wide,
        "````md",
        wide,
        "```",
        wide,
        "````",
        "- " + wide,
    ]

    assert [5, 13] == list(wide_lines("\n".join(lines)))


# Test names that are not English sentences: a free "what" or "who", "is no", "is told", "of ours".
DIALECT = re.compile(
    r"^test_(what|who|whom|whose|of|that)_"
    r"|(?<!there)_(is|are|was|were|be)_no_(?!longer|more)"
    r"|_(is|are|was|were)_told(?!_apart)"
    r"|_(is|are)_none_|_(has|have)_not$|_who_|_anew(_|$)|_somebody|_nobody|_whoever|_of_ours(_|$)"
)


def names_of_tests(path: Path) -> list[str]:
    return re.findall(r"^\s*(?:async )?def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)


def test_names_of_tests_are_english_sentences():
    found = [(path.name, name) for path in (ROOT / "tests").rglob("test_*.py") for name in names_of_tests(path)]

    assert len(found) > 1500
    assert [] == [f"{file}: {name}" for file, name in found if DIALECT.search(name)]


def test_the_finder_finds_names_that_are_not_sentences():
    wrong = (
        "what_is_none_is_refused a_model_that_is_no_module_is_refused a_missing_file_is_told a_file_of_ours_is_replaced"
    )
    right = (
        "writers_exclude_each_other it_is_no_longer_there they_are_read_if_there_are_no_others two_files_are_told_apart"
    )

    assert [True] * 4 + [False] * 4 == [bool(DIALECT.search(f"test_{name}")) for name in f"{wrong} {right}".split()]


def test_only_the_tensor_wing_looks_into_a_tensor():
    """`is_offloaded(x)`: only the class asks for its class, where ops are waiting."""
    asks = re.compile(r"isinstance\([^()]*\bOffloadedTensor\)|type\([^()]*\) is (not )?OffloadedTensor\b")
    others = [path for path in MODULES if room(dotted(path)) != "tensor"]

    assert asks.search("isinstance(x, OffloadedTensor)")
    assert [] == [path for path in others if asks.search(ast.unparse(parsed(path)))]


def test_the_table_of_a_wing_has_its_modules():
    wings = {path: path.read_text(encoding="utf-8").split("| module |")[1:] for path in PACKAGE.rglob("__init__.py")}
    assert len([tables for tables in wings.values() if tables]) > 12
    for wing, tables in wings.items():
        lines = [line for table in tables for line in table.splitlines() if line.startswith("| `")]
        named = {name for line in lines for name in re.findall(r"`(\w+)`", line.split("|")[1])}
        modules = {path.stem for path in wing.parent.glob("*.py")} - {"__init__", "__main__"}

        assert not tables or modules <= named, wing
        assert wing.parent == PACKAGE or named <= modules | {
            path.parent.name for path in wing.parent.glob("*/__init__.py")
        }


def test_every_folder_has_a_module():
    folders = {path.parent for path in PACKAGE.rglob("*") if path.parent.name != "__pycache__" and path.is_file()}

    assert [] == [folder for folder in folders if not (folder / "__init__.py").exists()]


def test_errors_import_nothing_and_each_derives_from_a_builtin_too():
    from offload import errors

    assert {"__future__"} == {name for name, _ in imports(PACKAGE / "errors.py")}
    assert sorted(errors.__all__) == errors.__all__
    assert {kind.__name__ for kind in vars(errors).values() if isinstance(kind, type)} == set(errors.__all__)
    for kind in (getattr(errors, name) for name in errors.__all__):
        assert issubclass(kind, errors.OffloadError)
        builtins = {base for base in kind.__mro__ if base.__module__ == "builtins"} - {Exception, BaseException, object}
        assert builtins or kind in (errors.OffloadError, errors.FileError)
        assert kind.__doc__


def test_the_public_names_are_these():
    assert PUBLIC.split() == offload.__all__
    assert all(hasattr(offload, name) for name in offload.__all__)
    assert all(f"`{name}" in offload.__doc__ for name in {*offload.__all__} - {"LoadReport", "is_offloaded"})


def test_the_public_names_of_the_modules_are_these():
    """Each module is imported by `import offload`, and is in the table in its docstring."""
    found = {module: sorted(getattr(offload, module).__all__) for module in IN_MODULES}

    assert IN_MODULES == found
    for module, names in IN_MODULES.items():
        assert all(f"`{name}`" in offload.__doc__ for name in (f"offload.{module}", *names))
    assert not [name for names in IN_MODULES.values() for name in names if name in vars(offload)]


def test_importing_offload_imports_no_neighbour():
    script = """
        import sys, offload
        print(sorted(name for name in sys.modules if name.split(".")[0] in set(sys.argv[1:]) and "." not in name))
    """

    assert "[]\n" == run_script(script, *sorted(NEIGHBOURS), fresh=True)


@pytest.mark.parametrize(
    ("elsewhere", "begins", "ends"),
    [
        ("sys.platform = 'darwin'", "offload works on Linux", "this is darwin"),
        ("sys._is_gil_enabled = lambda: False", "offload counts on Python's global interpreter lock", "with -X gil=1"),
    ],
)
def test_importing_offload_elsewhere_says_where_it_works(elsewhere, begins, ends):
    script = f"""
        import sys
        {elsewhere}
        try:
            import offload
        except ImportError as error:
            print(error, "torch" in sys.modules)
    """

    said = run_script(script, fresh=True)

    assert said.startswith(begins)
    assert said.endswith(f"{ends} False\n")


def test_pickles_are_read_in_one_place_by_the_weights_only_unpickler():
    from offload.storage import pickled

    uses = {
        (dotted(path), ast.unparse(node))
        for path in MODULES
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Attribute | ast.Name) and ast.unparse(node).endswith("Unpickler")
    }

    assert {
        ("offload.torch_api", "Unpickler"),
        ("offload.torch_api", "torch._weights_only_unpickler.Unpickler"),
        ("offload.storage.pickled", "Unpickler"),
        ("offload.storage.pickled", "pickle._Unpickler"),  # gets a `find_class` that only finds notes
    } == uses
    assert torch.serialization._weights_only_unpickler.Unpickler is pickled.Unpickler


def test_nothing_in_the_package_unpickles():
    calls = [node for path in MODULES for node in ast.walk(parsed(path)) if isinstance(node, ast.Call)]
    loads = [one for one in calls if ast.unparse(one.func) in ("torch.load", "pickle.load", "pickle.loads")]

    assert [] == [ast.unparse(one) for one in loads if "weights_only=True" not in ast.unparse(one)]
