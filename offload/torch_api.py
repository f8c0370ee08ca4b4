"""Every private name of torch that is used, and the frames of torch's functions that are inspected.

Always true:
- no other module uses a private name of torch, so everything that a torch release can break is here
- what is always needed is looked up at import; what one feature needs is reported when that feature is used
- a missing or changed name is an `UnsupportedTorchError`: never a bare error, and never a different result

A name is private if a part of it begins with an underscore. Names of ops (`torch.ops.aten._to_copy`) don't count:
exported programs contain them, and torch keeps them for those. All exist in torch 2.11, the oldest tested release,
unless noted otherwise.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from operator import attrgetter
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrize

from offload.errors import UnsupportedTorchError
from offload.importing import imported

TESTED = ("2.11", "2.13", "2.14", "2.15")  # releases that tests were run with, oldest first
_T = TypeVar("_T")


def _unsupported(feature: str, why: object) -> UnsupportedTorchError:
    return UnsupportedTorchError(
        f"{feature} does not work with torch {torch.__version__} ({why}): install a release that it is tested with, "
        f"torch {' or '.join(TESTED)}"
    )


# Always needed

try:
    from torch._C import DisableTorchFunctionSubclass as DisableTorchFunctionSubclass  # calls reach the plain tensor
    from torch._ops import HigherOrderOperator as HigherOrderOperator
    from torch._ops import OpOverload as OpOverload  # the type of what `__torch_dispatch__` is given
    from torch.fx.experimental._constant_symnode import ConstantIntNode as ConstantIntNode  # a size that can't be read
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_traceable_wrapper_subclass
    from torch.utils._pytree import tree_flatten as tree_flatten
    from torch.utils._pytree import tree_leaves as tree_leaves
    from torch.utils._pytree import tree_map as tree_map
    from torch.utils._pytree import tree_map_only as tree_map_only
    from torch.utils._pytree import tree_unflatten as tree_unflatten

    # Modes: whether any are on, and guards. These are C classes, which an interrupt can't leave half open.
    no_functions = torch._C.DisableTorchFunction  # disables `__torch_function__` of modes and classes
    InferenceMode = torch._C._InferenceMode  # also restores all state of the dispatcher and autograd
    DispatchKey = torch._C.DispatchKey
    PYTHON_KEYS = (DispatchKey.Python, DispatchKey.PythonTLSSnapshot, DispatchKey.PreDispatch)  # of Python modes
    TRANSFORM_KEYS = (DispatchKey.FuncTorchDynamicLayerFrontMode, DispatchKey.FuncTorchDynamicLayerBackMode)
    TRACER_KEY = torch._C._dispatch_key_parse("Tracer")  # of torch.jit.trace; missing in the enumeration
    keys_kept = torch._C._PreserveDispatchKeyGuard
    exclude_key = torch._C._dispatch_tls_set_dispatch_key_excluded
    modes_are_on = torch._C._len_torch_dispatch_stack
    function_modes_are_on = torch._C._len_torch_function_stack
    transform_on_top = torch._C._functorch.peek_interpreter_stack  # of torch.func; None if there is none
    is_traced = torch._C._is_tracing  # by torch.jit.trace
    set_grad = torch._C._set_grad_enabled  # the public ones are Python modes
    set_forward_grad = torch._C._set_fwd_grad_enabled

    # The wrapper: a tensor with arbitrary metadata and no memory
    make_wrapper = torch.Tensor._make_wrapper_subclass
    refuse_pointers = torch._C._set_throw_on_mutable_data_ptr  # makes access to its memory below every dispatcher raise
    set_conj = torch._C._set_conj
    set_neg = torch._C._set_neg
    is_view = torch.Tensor._is_view
    tensor_data: Any = torch._C.TensorBase.data  # the C++ property; ours stores
    is_inference = torch._C.TensorBase.is_inference  # past `__torch_function__`
    are_swappable = torch._has_compatible_shallow_copy_type  # whether setting `data` of one to the other is possible
    version_of: Callable[[torch.Tensor], int] = attrgetter("_version")  # counts writes, for autograd
    typed_storage_of = torch.Tensor._typed_storage  # how torch.save and sharing access memory
    PARAMETER_MARK = "_is_param"  # the attribute that makes a tensor of any class an `nn.Parameter`

    # Ops and modules
    higher_order_ops: dict[str, HigherOrderOperator] = attrgetter("_higher_order_ops")(torch._ops)  # `cond`, `scan`...
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    op_schema: Callable[[Any], Any] = attrgetter("_schema")  # of an op: its arguments, and which it mutates
    kernel_of: Callable[[Any], Any] = attrgetter("_op_dk")  # of an op: calls its kernel of one dispatch key
    parameters_of: Callable[[nn.Module], Any] = attrgetter("_parameters")  # the dict itself, with its Nones
    buffers_of: Callable[[nn.Module], Any] = attrgetter("_buffers")
    hooks_of: Callable[[nn.Module], dict[int, Any]] = attrgetter("_forward_hooks")
    pre_hooks_of: Callable[[nn.Module], dict[int, Any]] = attrgetter("_forward_pre_hooks")
    have_global_hooks: Callable[[], Any] = torch.nn.modules.module._has_any_global_hook  # of all modules
    unsaved_buffers_of: Callable[[nn.Module], set[str]] = attrgetter("_non_persistent_buffers_set")

    for _names, _owner in (
        ("_version _backward_hooks _post_accumulate_grad_hooks", torch.Tensor),  # the hooks: `share_hooks`
        ("_schema _op_dk", torch.ops.aten.add.Tensor),
        ("_modules _parameters _buffers _non_persistent_buffers_set", nn.Module()),
        ("_forward_pre_hooks _forward_pre_hooks_with_kwargs _forward_hooks", nn.Module()),  # with `remove_hook`
        ("_current_level", forward_ad),
        ("_cdata", torch.UntypedStorage(0)),
    ):
        attrgetter(*_names.split())(_owner)
    if PARAMETER_MARK not in type(nn.Parameter).__instancecheck__.__code__.co_consts:
        raise AttributeError(f"nn.Parameter is no longer marked by {PARAMETER_MARK!r}")
except (ImportError, AttributeError, TypeError, RuntimeError) as _error:  # RuntimeError: an unknown dispatch key
    raise _unsupported("offload", _error) from _error


def is_dual_level() -> bool:
    """Whether tensors may have tangents, for forward-mode differentiation."""
    return forward_ad._current_level >= 0


def share_hooks(new: torch.Tensor, old: torch.Tensor) -> None:
    """Make `new` share the hook dictionaries of `old`, so that their handles work for both."""
    new._backward_hooks = old._backward_hooks
    new._post_accumulate_grad_hooks = old._post_accumulate_grad_hooks


def remove_hook(module: nn.Module, hook: Callable[..., object]) -> None:
    """Take off a forward hook or pre-hook, if it is there; an interrupted registration has returned no handle."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for number in [number for number, one in hooks.items() if one is hook]:
            module._forward_pre_hooks_with_kwargs.pop(number, None)
            hooks.pop(number, None)


def blocks_of(module: nn.Module) -> Iterator[list[nn.Module]]:
    """A module's parts in order; an element of a list is one block with everything in it."""
    yield [module]
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.Sequential):
            yield from (list(block.modules()) for block in child.children())
        else:
            yield from blocks_of(child)


storage_id: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")  # unique, even for a storage without memory


def typed(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.TypedStorage:
    """A storage as torch.save and its unpickler expect it; without `_internal` it warns."""
    return torch.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def usable_accelerator() -> torch.device | None:
    """The kind of accelerator here, without an index, or None: torch for CUDA names one without a driver, too."""
    return torch.accelerator.current_accelerator(check_available=True)


def usable_devices() -> list[torch.device]:
    """The accelerators that this process can use, with their indices."""
    kind = usable_accelerator()
    return [] if kind is None else [torch.device(kind.type, n) for n in range(torch.accelerator.device_count())]


# Needed by single features


class _MissingName(type):
    """Metaclass of placeholders for names that torch no longer has: they raise when used."""

    error: UnsupportedTorchError

    def __call__(cls, *_: object, **__: object) -> Any:
        raise cls.error

    def __getattr__(cls, name: str) -> Any:
        raise cls.error

    def __iter__(cls) -> Any:
        raise cls.error

    def __instancecheck__(cls, _: object) -> bool:
        raise cls.error


def _for(feature: str, find: Callable[[], _T]) -> _T:
    """A name that only `feature` needs; a placeholder if it is gone."""
    try:
        return find()
    except AttributeError as error:
        return _MissingName("gone", (), {"error": _unsupported(feature, error)})  # type: ignore[return-value]


def needed(found: _T) -> _T:
    """The name itself, for uses that a placeholder can't detect, such as `is` or a pickle."""
    if isinstance(found, _MissingName):
        raise found.error
    return found


_ACTIVATIONS = "offload_activations"
storage_uses = _for("offload_activations, or a recipe,", lambda: torch._C._storage_Use_Count)  # reference count
_not_compiled: Any = _for(_ACTIVATIONS, lambda: torch._disable_dynamo)  # imports the compiler only when first called

_MODES = "offloading, or map_batches,"
_BATCHES = "map_batches"  # for a new thread, which does not inherit them
push_dispatch_mode = _for(_BATCHES, lambda: torch._C._push_on_torch_dispatch_stack)
push_function_mode = _for(_BATCHES, lambda: torch._C._push_on_torch_function_stack)
push_saved_tensors_hooks = _for(_BATCHES, lambda: torch._C._autograd._push_saved_tensors_default_hooks)
top_saved_tensors_hooks = _for(_BATCHES, lambda: torch._C._autograd._top_saved_tensors_default_hooks)
_compilers_callback = _for(_BATCHES, lambda: torch._C._dynamo.eval_frame.get_eval_frame_callback)

_OFFLOADING = "offloading"
get_dispatch_mode = _for(_OFFLOADING, lambda: torch._C._get_dispatch_mode)
TRACING_MODES: Any = _for(
    _OFFLOADING, lambda: attrgetter("FAKE", "PROXY", "FUNCTIONAL")(torch._C._TorchDispatchModeKey)
)
dispatch_modes: Any = _for(_MODES, lambda: torch.utils._python_dispatch._get_current_dispatch_mode_stack)
one_mode_less: Any = _for(_OFFLOADING, lambda: torch.utils._python_dispatch._pop_mode_temporarily)
function_modes: Any = _for(_MODES, lambda: torch.overrides._get_current_function_mode_stack)

_PICKLED = "opening a pickled checkpoint"
CLASSES_OF_TENSORS = _for(_PICKLED, lambda: torch._tensor_classes)  # torch.FloatTensor...
rebuild_from_type = _for(_PICKLED, lambda: torch._tensor._rebuild_from_type_v2)

_TENSORDICT = "opening a folder of tensordict's"
FakeTensorMode: Any = _for(_TENSORDICT, lambda: torch._subclasses.FakeTensorMode)

tensor_text: Any = _for("printing an offloaded tensor", lambda: torch._tensor_str._str)  # as repr


if TYPE_CHECKING:
    from torch._weights_only_unpickler import Unpickler as Unpickler
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
else:
    Unpickler = _for(_PICKLED, lambda: torch._weights_only_unpickler.Unpickler)  # the one for weights_only=True
    TorchDispatchMode = _for(_OFFLOADING, lambda: torch.utils._python_dispatch.TorchDispatchMode)


def is_compiled() -> bool:
    """Whether the compiler looks at the functions that this thread calls."""
    return _compilers_callback() not in (None, False)


def not_compiled(function: _T) -> _T:
    """Decorates functions that a compiler should not trace into."""
    return _not_compiled if type(_not_compiled) is _MissingName else _not_compiled(function)  # type: ignore[return-value]


local_tensor: Callable[[torch.Tensor], torch.Tensor] = attrgetter("_local_tensor")  # of a DTensor


def world_of(mesh: Any) -> tuple[int, int]:
    """This rank and the number of ranks; for a simulated mesh, as it says."""
    if not torch.distributed.is_initialized():
        return mesh.get_rank(), mesh.size()
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


def is_sharding() -> bool:
    """Whether a caller is torch.distributed turning a parameter into a sharded one."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if (frame.f_globals.get("__name__"), frame.f_code.co_name) in _SHARDING:
            return True
        frame = frame.f_back
    return False


_SHARDING = {
    ("torch.distributed.tensor._api", "distribute_tensor"),
    ("torch.distributed.fsdp._fully_shard._fsdp_param", "_init_sharded_param"),
}


def dtensor_class() -> Any:
    """torch.distributed's tensor class; None if it has not been imported, so that there can be no instances."""
    return imported("torch.distributed.tensor", "DTensor")


def dtensor_like(outer: Any, local: torch.Tensor) -> torch.Tensor:
    """A DTensor like another one, with the dtype of its own local tensor; `UnsupportedTorchError` if torch changed."""
    try:
        spec, kind = outer._spec, type(outer)
        meta = replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=local.dtype))
        made: torch.Tensor = kind(local, meta, requires_grad=local.requires_grad)
    except (AttributeError, TypeError) as error:
        raise _unsupported("a DTensor with its share on disk", error) from error
    return made


def offsets_of_shard(placement: Any, size: int, chunks: int, chunk: int) -> Sequence[int]:
    """The rows in one of the chunks that a placement makes; a range if they are consecutive."""
    if placement.is_shard() and type(placement).__name__ == "Shard":
        rows, first = placement.local_shard_size_and_offset(size, chunks, chunk)
        return range(min(first, size), min(first, size) + rows)
    try:
        modes = imported(type(placement).__module__, "_StridedShardOffsetMode")
        _, offsets = placement.local_shard_size_and_offset(size, chunks, chunk, modes.ALL)
    except (AttributeError, TypeError) as error:
        raise _unsupported(f"a DTensor that is placed by {placement}", error) from error
    return list(offsets)


def _unchecked_sparse() -> Callable[[], list[torch.Tensor]]:
    if hasattr(torch._utils, "_sparse_tensors_to_validate"):
        return lambda: torch._utils._sparse_tensors_to_validate
    return torch._utils._get_sparse_tensors_to_validate  # type: ignore[attr-defined,no-any-return]  # 2.15


unchecked_sparse = _for(_PICKLED, _unchecked_sparse)  # sparse tensors queued for a check in the next torch.load


# Inspecting frames of torch's functions

_SWAPPING: dict[CodeType, str] = {}
_CHANGED: dict[str, UnsupportedTorchError] = {}  # modules whose function has changed: reported when it runs
# These swap the named variable for another tensor if it can be flattened, and otherwise set its data.
_FUNCTIONS: tuple[tuple[str, Callable[[], CodeType], str], ...] = (
    ("torch.nn.modules.module", lambda: nn.Module._apply.__code__, "param"),
    ("torch.nn.utils.parametrize", lambda: parametrize._maybe_set.__code__, "dest"),
)
for _module, _find, _name in _FUNCTIONS:
    try:
        _code = _find()
        if _name not in {*_code.co_varnames, *_code.co_cellvars, *_code.co_freevars}:
            raise AttributeError(f"{_code.co_name} of {_module} has no variable {_name!r}")
        _SWAPPING[_code] = _name
    except AttributeError as _error:
        _CHANGED[_module] = _unsupported("moving or parametrizing a module", _error)


def is_swapped_in(frame: FrameType, tensor: object) -> bool:
    """Whether this is a frame of a function of torch's that swaps, or sets, this tensor; or of one that has changed."""
    name = _SWAPPING.get(frame.f_code)
    if name is not None:
        return frame.f_locals[name] is tensor
    if _CHANGED and frame.f_globals.get("__name__") in _CHANGED:
        raise _CHANGED[frame.f_globals["__name__"]]
    return False


def lists_storages(frame: FrameType) -> bool:
    """Whether this is a frame of the compiler's function that refuses tensors which can be flattened (2.13)."""
    return frame.f_code.co_name == "get_tensor_storages" and "_dynamo" in frame.f_globals["__name__"]


def memo_of_stager(frame: FrameType) -> dict[int, Any] | None:
    """What torch's stager for `async_save` has copied, by `id` of storages, if this is one of its frames."""
    is_stager = frame.f_globals.get("__name__") == "torch.distributed.checkpoint._state_dict_stager"
    return frame.f_locals.get("memo") if is_stager else None
