"""All private names of torch are in one module, and names that torch removes are reported properly."""

import ast
import re
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from offload import torch_api
from offload.torch_api import TESTED
from tests.processes import ROOT, run_script
from tests.test_house import MODULES, dotted

DOOR = ROOT / "offload" / "torch_api.py"
ELSEWHERE = [path for path in MODULES if path != DOOR]


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def of_objects() -> set[str]:
    """The private attributes of torch's objects: tensors, modules, storages, ops, modes, optimizers."""
    parameter = nn.Parameter(torch.ones(1))
    things = (
        *(parameter, nn.Module(), torch.ops.aten.add, torch.ops.aten.add.Tensor, torch.optim.SGD([parameter])),
        *(parameter.untyped_storage(), torch_api.typed(parameter.untyped_storage(), torch.float32)),
        *(torch_api.TorchDispatchMode(), torch.overrides.TorchFunctionMode()),
    )
    return {"_is_param", "_internal"} | {name for thing in things for name in dir(thing) if is_private(name)}


def chain(node: ast.AST) -> list[str]:
    """`["torch", "nn", "Module"]` for `torch.nn.Module`; empty if it does not begin with a name."""
    if isinstance(node, ast.Name):
        return [node.id]
    above = chain(node.value) if isinstance(node, ast.Attribute) else []
    return [*above, node.attr] if isinstance(node, ast.Attribute) and above else []


def private_names(tree: ast.AST, own: set[str], of_torch: set[str]) -> Iterator[str]:
    """The private names of torch in a module: in imports, in what begins with `torch`, and of objects.

    Args:
        own: names defined by the package.
        of_torch: those of torch's objects.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for name in (f"{module}{alias.name}" for alias in node.names):
                if name.split(".")[0] == "torch" and any(map(is_private, name.split("."))):
                    yield name
        elif isinstance(node, ast.Attribute):
            names = chain(node)
            if names[:1] == ["torch"] and names[1:2] != ["ops"] and is_private(node.attr):
                yield ".".join(names)
            elif node.attr in of_torch - own and "aten" not in names[0:3]:
                yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in of_torch - own:
            yield node.value
        elif isinstance(node, ast.keyword) and node.arg in of_torch - own:
            yield str(node.arg)


def own_names(trees: list[ast.Module]) -> set[str]:
    """What the package itself defines, or sets on its own objects."""
    return {
        name
        for tree in trees
        for node in ast.walk(tree)
        for name in (
            [node.name]
            if isinstance(node, ast.FunctionDef | ast.ClassDef)
            else [node.attr]
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
            else [node.id]
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
            else []
        )
    }


def test_no_private_name_of_torch_is_used_past_the_door():
    trees = {dotted(path): ast.parse(path.read_text(encoding="utf-8")) for path in ELSEWHERE}
    own, of_torch = own_names(list(trees.values())), of_objects()

    assert {} == {name: found for name, tree in trees.items() if (found := [*private_names(tree, own, of_torch)])}


@pytest.mark.parametrize(
    "line",
    [
        "import torch._dynamo",
        "from torch import _C",
        "from torch._C import DisableTorchFunction",
        "from torch.utils._pytree import tree_map",
        "from torch.overrides import _get_current_function_mode_stack",
        "def f(): return torch._C._len_torch_dispatch_stack()",
        "torch.nn.Module._apply",
        "tensor.untyped_storage()._cdata",
        "module._parameters",
        "func._schema.arguments",
        "setattr(tensor, '_is_param', True)",
        "TypedStorage(wrap_storage=storage, _internal=True)",
    ],
)
def test_the_finder_finds_private_names(line):
    assert list(private_names(ast.parse(line), set(), of_objects()))


def test_ops_dunders_and_own_names_are_not_private():
    text = "torch.ops.aten._to_copy; aten._unsafe_view.default; tensor.__dict__; torch.__version__; self._handle; a._x"

    assert [] == list(private_names(ast.parse(text), {"_handle", "_x"}, of_objects() | {"_to_copy", "_handle"}))


def imported_from(door: str) -> set[str]:
    """The names that the package takes from one of its modules."""
    nodes = (node for path in MODULES for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    found = (node.names for node in nodes if isinstance(node, ast.ImportFrom) and node.module == door)
    return {alias.name for names in found for alias in names}


def test_every_name_in_the_door_has_a_user():
    text = DOOR.read_text(encoding="utf-8")
    made = own_names([_at_the_top(text)]) | set(re.findall(r"^ +from torch\S* import \w+ as (\w+)", text, re.MULTILINE))

    assert imported_from("offload.torch_api") == {name for name in made if not is_private(name)}


def _at_the_top(text: str) -> ast.Module:
    """What a module defines, except inside its functions and classes."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            node.body = [ast.Pass()]
    return tree


# Names that torch removes

REMOVE = """
    import importlib, os, sys, types
    import torch
    from torch.nn.utils import parametrize

    class Removed:
        def __get__(self, *_): raise AttributeError("removed")
        def __set__(self, *_): pass

    def remove(path):
        owner, parts = torch, path.split(".")[1:]
        if "experimental" in path:
            importlib.import_module(path.rpartition(".")[0])  # torch 2.15 imports it later
        owners = [owner := getattr(owner, part) for part in parts[:-1]]
        owner, name = [torch, *owners][-1], parts[-1]
        if owner is torch.Tensor or not isinstance(owner, types.ModuleType):
            try:
                setattr(owner, name, Removed())
                return lambda: delattr(owner, name)
            except (AttributeError, TypeError):  # of a class in C
                return remove(path.rpartition(".")[0])
        before = getattr(owner, name)
        delattr(owner, name)
        return lambda: setattr(owner, name, before)

    def alone(path, act):  # in a fresh process, which has torch already
        print(path, end=" ", flush=True)
        pid = os.fork()
        if not pid:
            try:
                act()
            except BaseException as error:
                print(type(error).__name__, str(error).replace("\\n", " "), flush=True)
            os._exit(0)
        os.waitpid(pid, 0)
        print(flush=True)
"""


def names_in_the_door() -> set[str]:
    """Every private name in `torch_api`, starting from `torch`."""
    tree = ast.parse(DOOR.read_text(encoding="utf-8"))
    found = {
        f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("torch.")
        for alias in node.names
    }
    roots = {"torch": "torch", "nn": "torch.nn", "parametrize": "torch.nn.utils.parametrize"}
    for node in ast.walk(tree):
        names = chain(node) if isinstance(node, ast.Attribute) else []
        if names and names[0] in roots and "ops" not in names:
            found.add(".".join([roots[names[0]], *names[1:]]).removesuffix(".__code__"))
    found = {name for name in found if any(map(is_private, name.split("."))) and ".__" not in name}
    later = {name for name in found if "sparse_tensors_to_validate" in name}  # one of these, depending on the release
    found -= {name for name in found if any(other.startswith(f"{name}.") for other in found)} | later
    return found | {
        *(f"torch.Tensor.{name}" for name in ("_version", "_backward_hooks", "_post_accumulate_grad_hooks")),
        *(f"torch._ops.OpOverload.{name}" for name in ("_schema", "_op_dk")),
        *(f"torch.nn.Module.{name}" for name in ("_modules", "_parameters", "_buffers")),
        "torch.nn.Module._non_persistent_buffers_set",
        "torch.autograd.forward_ad._current_level",
        "torch.UntypedStorage._cdata",
    }


def test_each_missing_private_name_of_torch_raises_a_clear_error():
    script = f"""
    {REMOVE}
    def look(path):
        remove(path)
        from offload import torch_api
        for name, value in vars(torch_api).items():
            if type(value) is torch_api._MissingName:
                try:
                    value()
                except torch_api.UnsupportedTorchError as error:
                    print("used", error)
        for error in torch_api._CHANGED.values():
            print("used", error)

    package = types.ModuleType("offload")
    package.__path__ = [sys.argv[1] + "/offload"]  # only what is under the door is imported
    sys.modules["offload"] = package
    for path in sys.argv[2:]:
        alone(path, lambda: look(path))
    """
    names = sorted(names_in_the_door())

    said = [line for line in run_script(script, ROOT, *names, fresh=True).split("\n") if line]

    assert len(names) > 60
    kinds = {name: [line for line in said if line.split()[0] == name] for name in names}
    for name, lines in kinds.items():
        assert lines, name
        assert re.search(r" UnsupportedTorchError | used ", lines[0] + " "), f"{name} is not missed: {lines}"
        assert f"torch {torch.__version__} (" in lines[0]
        assert f"torch {' or '.join(TESTED)}" in lines[0]


LARGE, PICKLED = "inside(lambda: torch.ones(64).exp())", "offload.load_file(folder + '/w.pt')['w']"
ON_DISK = "offload.disk_offload(torch.nn.Linear(2, 2))"
FEATURES = {
    "torch._C._storage_Use_Count": ("offload_activations, or a recipe,", "pack()"),
    "torch._disable_dynamo": ("offload_activations", "pack()"),
    "torch._C._TorchDispatchModeKey": ("offloading", LARGE),
    "torch.utils._python_dispatch.TorchDispatchMode": ("offloading", LARGE),
    "torch.utils._python_dispatch._pop_mode_temporarily": (
        "offloading",
        "inside(lambda: torch.linalg.pinv(torch.eye(8)))",
    ),
    "torch._tensor._rebuild_from_type_v2": ("opening a pickled checkpoint", PICKLED),
    "torch._weights_only_unpickler.Unpickler": ("opening a pickled checkpoint", PICKLED),
    "torch.nn.utils.parametrize._maybe_set": (
        "moving or parametrizing a module",
        f"parametrize.register_parametrization({ON_DISK}, 'weight', torch.nn.Identity())",
    ),
    "a variable of _apply": ("moving or parametrizing a module", f"{ON_DISK}.float()"),
}


@pytest.mark.slow(11)
def test_a_missing_name_of_one_feature_is_reported_when_that_is_used(tmp_path):
    torch.save({"w": torch.ones(64, 64)}, tmp_path / "w.pt")
    script = f"""
    {REMOVE}
    features = {FEATURES!r}
    folder = sys.argv[1]

    def without(name):
        if not name.startswith("a variable"):
            return remove(name)
        code = torch.nn.Module._apply.__code__
        names = tuple("renamed" if one == "param" else one for one in code.co_varnames)
        torch.nn.Module._apply.__code__ = code.replace(co_varnames=names)
        return lambda: None

    def pack():
        with offload.training.offload_activations(min_bytes=1):
            torch.ones(8, requires_grad=True).exp().sum().backward()

    def inside(act):
        with offload.offloading(min_bytes=1):
            act()

    def use(name, act):
        global offload
        bring_back = without(name)
        package = sys.modules["offload"] = types.ModuleType("offload")  # torch needs the name itself, above the door
        package.__path__ = [sys.argv[2] + "/offload"]
        import offload.torch_api
        bring_back()
        del sys.modules["offload"]
        import offload, offload.training
        print("imported", end=" ", flush=True)
        eval(act)

    import offload, offload.training  # what they import of others stays, and they are imported anew
    for name in [name for name in sys.modules if name.split(".")[0] == "offload"]:
        del sys.modules[name]
    for name, (feature, act) in features.items():
        alone(name.replace(" ", "_"), lambda: use(name, act))
    """

    said = [line for line in run_script(script, tmp_path, ROOT, limit=280, fresh=True).split("\n") if line]

    for name, (feature, _) in FEATURES.items():
        [line] = [line for line in said if line.split()[0] == name.replace(" ", "_")]
        assert f" imported UnsupportedTorchError {feature} does not work with torch {torch.__version__} (" in line, said
