"""The tests and figures of an accelerator, with one command: `make gpu`, or `python -m bench.gpu`.

Always true:
- a machine needs torch and numpy, and no network; what else is missing is named, and left out
- whatever fails, there is one JSON and one log, within the time: each step is a process of its own, which is killed
  when its time is over, but for a dry run, which has no limits; the JSON is written after each of them
- nothing of an accelerator is touched at import, nor in the parent; the accelerator is the current one, of any kind
- all rates are compared with that of a plain copy from pinned memory, in the same step
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import torch

    from offload import OffloadedTensor

Facts: TypeAlias = dict[str, Any]
Make: TypeAlias = "Callable[[Scale, Path, torch.device], list[OffloadedTensor]]"

_SECONDS = 510  # for everything: less than nine minutes
_TESTS = ("tests/prefetch/test_accelerator.py",)


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    Attributes:
        layers, side: square matrices of a stack, and their rows.
        passes: that are timed.
        copied: bytes of the plain copy that others are compared with.
        tokens: of an answer.
    """

    layers: int
    side: int
    passes: int
    copied: int
    tokens: int = 8


FULL = Scale(layers=24, side=4096, passes=7, copied=256 << 20)
DRY = Scale(layers=4, side=512, passes=2, copied=1 << 20, tokens=2)


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if every step that could be done has been done."""
    options = argparse.ArgumentParser(prog="python -m bench.gpu", description=(__doc__ or "").splitlines()[0])
    options.add_argument("--dry", action="store_true", help="all of it, small, on the stand-in of the tests")
    options.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or "gpu-results"))
    options.add_argument("--seconds", type=float, default=_SECONDS, help="after which nothing more begins")
    chosen = options.parse_args(arguments)
    chosen.out.mkdir(parents=True, exist_ok=True)
    stem = chosen.out / f"{datetime.now(UTC):%Y-%m-%d-%H%M%S}-{'dry' if chosen.dry else 'gpu'}"
    ends, found = time.monotonic() + chosen.seconds, {}
    with tempfile.TemporaryDirectory() as scratch:
        for name, (step, limit) in STEPS.items():
            left = math.inf if chosen.dry else min(limit, ends - time.monotonic())
            act = partial(step, DRY if chosen.dry else FULL, Path(scratch))
            found[name] = in_child(act, stem.with_suffix(".log"), left, is_dry=chosen.dry) if left > 1 else _late()
            stem.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            print(f"{name}: {found[name].get('error', 'done')}", flush=True)
    print(stem.with_suffix(".json"), stem.with_suffix(".log"), sep="\n")
    return int(any("error" in one for one in found.values()))


def _late() -> Facts:
    return {"error": "no time was left"}


def in_child(act: Callable[[], Facts], log: Path, limit: float, *, is_dry: bool) -> Facts:
    """The facts that a step finds in a process of its own; its output goes to the log."""
    sys.stdout.flush()
    reading, writing = os.pipe()
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _be_a_child(act, log, writing, is_dry=is_dry)
    os.close(writing)
    is_late = False
    while os.waitpid(child, os.WNOHANG)[0] == 0:
        if not is_late and time.monotonic() - started > limit:
            is_late = True
            os.kill(child, signal.SIGKILL)
        time.sleep(0.02)
    with os.fdopen(reading, encoding="utf-8") as pipe:
        text = pipe.read()
    if not text:
        return {"error": f"it was stopped after {limit:.0f} s" if is_late else "it ended without a word: see the log"}
    facts: Facts = json.loads(text)
    return {**facts, "seconds": round(time.monotonic() - started, 2)}


def _be_a_child(act: Callable[[], Facts], log: Path, writing: int, *, is_dry: bool) -> None:
    """Never returns. What a step finds is smaller than a pipe holds (64 KiB)."""
    try:
        opened = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(opened, 1)
        os.dup2(opened, 2)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", encoding="utf-8", closefd=False) for number in (1, 2))
        _with_what_is_needed(is_dry=is_dry)
        found = act()
    except BaseException as error:
        traceback.print_exc()
        found = {"error": f"{type(error).__name__}: {error}"[:500]}
    sys.stdout.flush()
    sys.stderr.flush()
    os.write(writing, json.dumps(found).encode()[: 60 << 10])
    os._exit(0)


def _with_what_is_needed(*, is_dry: bool) -> None:
    """The stand-in of the tests, if it is asked for; and, of small packages that are missing, what is used of them."""
    for name, make in {"psutil": _psutil, "tqdm": _tqdm}.items():
        try:
            import_module(name)
        except ImportError:
            sys.modules[name] = make()
    if is_dry:
        from tests.prefetch import delayed_device

        given = os.environ.get("OFFLOAD_STAND_IN")
        folder = Path("build")
        folder.mkdir(exist_ok=True)
        delayed_device.register(Path(given) if given else delayed_device.built(folder))
        delayed_device.ops.late(20)
        delayed_device.ops.limit(8 << 30)  # so that weights have room beside what is spared


def _tqdm() -> Any:
    return SimpleNamespace(tqdm=type("tqdm", (), {}))  # no bar is drawn here


def _psutil() -> Any:
    def memory() -> Any:
        lines = (line.split() for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines())
        sizes = {line[0]: int(line[1]) << 10 for line in lines}
        return SimpleNamespace(total=sizes["MemTotal:"], available=sizes["MemAvailable:"])

    def process() -> Any:
        pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
        used = SimpleNamespace(rss=pages * os.sysconf("SC_PAGE_SIZE"))
        return SimpleNamespace(memory_info=lambda: used, children=lambda **_: [])

    return SimpleNamespace(Error=OSError, virtual_memory=memory, Process=process)


# The steps


def accelerator() -> torch.device:
    """The current one.

    Raises:
        RuntimeError: there is none.
    """
    import torch

    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if found is None:
        raise RuntimeError("torch finds no accelerator here")
    return torch.device(found.type, torch.accelerator.current_device_index())


def machine(_: Scale, __: Path) -> Facts:
    """What this is."""
    import torch

    from offload.kernels.native import description

    device = accelerator()
    module = torch.get_device_module(device)
    name = module.get_device_name(device) if hasattr(module, "get_device_name") else device.type
    packages = {}
    for package in ("triton", "transformers", "accelerate", "bitsandbytes", "kernels", "pytest"):
        try:
            packages[package] = version(package)
        except PackageNotFoundError:
            packages[package] = "missing"
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "device": str(name),
        "devices": torch.accelerator.device_count(),
        "device memory": torch.accelerator.get_memory_info(device)[1],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cores": os.cpu_count(),
        "kernels for packed weights": description(),
        "packages": packages,
    }


def tests(_: Scale, __: Path) -> Facts:
    """The marked tests."""
    accelerator()
    import pytest

    root = Path(__file__).parent.parent
    sys.path.insert(0, str(root))
    own = [
        "-c",
        os.devnull,
        "--rootdir",
        str(root),
        "-p",
        "no:cacheprovider",
    ]  # nor settings of plugins that are not there
    code = pytest.main(["-q", *own, *(str(root / name) for name in _TESTS)])
    return {} if code == 0 else {"error": f"pytest ended with {code!r}: see the log"}


def streamed(make: Make, scale: Scale, scratch: Path) -> Facts:
    """A stack of one form: under each budget, beside the dense weights in the memory of the device."""
    import torch

    import offload
    from offload.prefetch.staging import staging_for
    from offload.tensor.recipes import stored_in
    from offload.tensor.views import handle_of
    from offload.tensor.wrapper import guest_of

    device = accelerator()
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        weights = make(scale, Path(folder), device)
        stored = sum(one.extent[1] for one in set(stored_in(map(handle_of, weights))))
        x = torch.ones(1, scale.side, dtype=weights[0].dtype, device=device)
        staging = staging_for(device)
        assert staging is not None, "a device without streams gets plain copies"

        def token() -> None:
            for weight in weights:
                torch.nn.functional.linear(x, weight)

        is_equal = torch.equal(weights[0].to("cpu").materialize(), guest_of(weights[0]).cpu())
        plain = copied_per_second(device, scale.copied)
        found: Facts = {"equal to the CPU": is_equal, "stored bytes": stored, "plain pinned copy, bytes/s": plain}
        found["dense, in the memory of the device, s"] = _in_memory(weights, x, scale.passes)
        for name, budget in [*_budgets(device, stored), ("nothing stays, hybrid", {str(device): 0})]:
            os.environ["OFFLOAD_HYBRID"] = "on" if "hybrid" in name else "off"
            torch.accelerator.reset_peak_memory_stats(device)
            with torch.no_grad(), offload.set_max_memory(budget):
                first = seconds(token)
                for _ in range(2):
                    token()
                before, copies = staging.sent, staging.copies
                later = [seconds(token) for _ in range(scale.passes)]
                sent = (staging.sent - before) / scale.passes
                peak = torch.accelerator.max_memory_allocated(device)
            found[name] = {
                "first token, s": first,
                "later tokens, s": median(later),
                "bytes sent per token": round(sent),
                "copies per token": (staging.copies - copies) / scale.passes,
                "of the plain copy's rate": round(sent / median(later) / plain, 3),
                "peak on the device, bytes": peak,
            }
        found["faster where they lie"] = sorted(str(key) for key, wins in staging.wins.items() if wins)
        offload.budget.evict(*weights)
    if not is_equal:
        found["error"] = "the numbers are not those of the CPU"
    return found


def _budgets(device: torch.device, size: int) -> list[tuple[str, Mapping[str, int] | None]]:
    """The budgets under which something of this size is measured."""
    parts = {"nothing stays": 0.0, "half stays": 0.5, "everything stays": 1.1}
    set_ones = {name: {str(device): max(1 << 20, int(part * size)) if part else 0} for name, part in parts.items()}
    return [*set_ones.items(), ("default", None)]


def _in_memory(weights: list[OffloadedTensor], x: torch.Tensor, passes: int) -> float:
    """How long the products with dense weights take that are on the device already."""
    import torch

    dense = [weight.materialize() for weight in weights]

    def token() -> None:
        for weight in dense:
            torch.nn.functional.linear(x, weight)

    with torch.no_grad():
        return median(seconds(token) for _ in range(1 + passes))


def seconds(act: Callable[[], object]) -> float:
    """How long an action takes, until the device is done."""
    import torch

    torch.accelerator.synchronize()
    started = time.perf_counter()
    act()
    torch.accelerator.synchronize()
    return time.perf_counter() - started


def copied_per_second(device: torch.device, nbytes: int) -> float:
    """The rate of plain copies from pinned memory."""
    import torch

    pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    place = torch.empty(nbytes, dtype=torch.uint8, device=device)
    taken = [seconds(lambda: place.copy_(pinned, non_blocking=True)) for _ in range(5)]
    return nbytes / median(taken)


def accelerates(scale: Scale, scratch: Path) -> Facts:
    """The same stack in bfloat16 with accelerate's hooks: from memory, and from disk."""
    import torch
    from torch import nn

    try:
        from accelerate import cpu_offload, disk_offload
    except ImportError:
        return {"left out": "accelerate is not installed"}
    device, found = accelerator(), {}
    x = torch.ones(1, scale.side, dtype=torch.bfloat16, device=device)
    for name, put in (("memory", cpu_offload), ("disk", partial(disk_offload, offload_dir=str(scratch / "hooks")))):
        with torch.no_grad():
            layers = [nn.Linear(scale.side, scale.side, bias=False, dtype=torch.bfloat16) for _ in range(scale.layers)]
            model = nn.Sequential(*layers)
            put(model, execution_device=device)
            first = seconds(partial(model, x))
            later = [seconds(partial(model, x)) for _ in range(scale.passes)]
        found[name] = {"first token, s": first, "later tokens, s": median(later)}
    return found


def generated(scale: Scale, scratch: Path) -> Facts:
    """Tokens of a Llama in bfloat16: in the memory of the device, from disk under three budgets, with accelerate."""
    import torch

    try:
        from accelerate import cpu_offload, disk_offload
        from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
    except ImportError as error:
        return {"left out": str(error)}
    import offload

    device, folder, width = accelerator(), scratch / "llama", scale.side // 2
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=scale.layers,
        num_attention_heads=width // 64,
        num_key_value_heads=max(1, width // 256),
        vocab_size=8 * width,
    )
    with torch.device(device):
        made = LlamaForCausalLM(config).to(torch.bfloat16)
    made.generation_config.eos_token_id = None
    made.save_pretrained(folder)
    size = sum(weight.nbytes for weight in made.parameters())
    del made
    prompt = torch.arange(16, device=device)[None]

    def tokens(model: Any) -> Any:
        given = {"max_new_tokens": scale.tokens, "min_new_tokens": scale.tokens, "do_sample": False}
        return model.generate(prompt, pad_token_id=0, **given)

    def timed(model: Any) -> Facts:
        with torch.no_grad():
            first, found = seconds(lambda: model(prompt)), [tokens(model)]
            taken = [seconds(lambda: found.append(tokens(model))) for _ in range(3)]
        answers.append(found[-1].tolist())
        return {"first pass, s": first, "a token, s": median(taken) / scale.tokens}

    answers: list[Any] = []
    load = partial(AutoModelForCausalLM.from_pretrained, folder, dtype=torch.bfloat16)
    result: Facts = {"bytes": size, "in the memory of the device": timed(load().to(device))}
    for name, budget in _budgets(device, size):
        model = offload.from_pretrained(folder, device_map=f"disk:{device}")
        with offload.set_max_memory(budget):
            result[f"offload, {name}"] = timed(model)
        offload.budget.evict(model)
    for name, put in (("memory", cpu_offload), ("disk", partial(disk_offload, offload_dir=str(scratch / "kept")))):
        model = load()
        put(model, execution_device=device)
        result[f"accelerate, from {name}"] = timed(model)
    if any(answer != answers[0] for answer in answers):
        result["error"] = "the tokens are not those of the model in the memory of the device"
    return result


# The forms


def in_bfloat16(scale: Scale, folder: Path, device: torch.device) -> list[OffloadedTensor]:
    """As stored."""
    import torch

    pieces = {str(layer): torch.randn(scale.side, scale.side).bfloat16() for layer in range(scale.layers)}
    return [tensor.to(device) for tensor in _stored(folder, pieces).values()]  # type: ignore[misc]


def in_fp8(scale: Scale, folder: Path, device: torch.device) -> list[OffloadedTensor]:
    """8-bit floats in blocks of 128 x 128."""
    import torch

    pieces: dict[str, torch.Tensor] = {}
    for layer in range(scale.layers):
        pieces[f"{layer}.weight"] = torch.randn(scale.side, scale.side).to(torch.float8_e4m3fn)
        pieces[f"{layer}.weight_scale_inv"] = torch.rand(scale.side // 128, scale.side // 128) + 0.5
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    return _unpacked(_stored(folder, pieces), settings, device)


def in_4_bits(scale: Scale, folder: Path, device: torch.device) -> list[OffloadedTensor]:
    """W4A16 of compressed-tensors, in groups of 128."""
    import torch

    pieces: dict[str, torch.Tensor] = {}
    for layer in range(scale.layers):
        words = torch.randint(-(2**31), 2**31 - 1, (scale.side, scale.side // 8), dtype=torch.int64)
        pieces[f"{layer}.weight_packed"] = words.to(torch.int32)
        pieces[f"{layer}.weight_scale"] = (torch.rand(scale.side, scale.side // 128) + 0.5).bfloat16()
        pieces[f"{layer}.weight_shape"] = torch.tensor([scale.side, scale.side])
    weights = {"num_bits": 4, "group_size": 128, "strategy": "group", "symmetric": True, "type": "int"}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    settings = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    return _unpacked(_stored(folder, pieces), settings, device)


def in_q4_k(scale: Scale, folder: Path, device: torch.device) -> list[OffloadedTensor]:
    """Blocks of a GGUF file, with random bytes and factors of ordinary size."""
    import torch

    from offload.kernels.packed import GgufRows
    from offload.storage.handle import Handle
    from offload.storage.layout import contiguous
    from offload.tensor.blocks import decode
    from offload.tensor.decoded import Decoded
    from offload.tensor.recipes import Piece
    from offload.tensor.runs import Decoder
    from offload.tensor.views import handle_of

    pieces = {}
    for layer in range(scale.layers):
        blocks = torch.randint(0, 256, (scale.side, scale.side // 256, 144), dtype=torch.uint8)
        factors = torch.full((scale.side, scale.side // 256, 2), 0.01, dtype=torch.float16)
        blocks[..., :4] = factors.view(torch.uint8)
        pieces[str(layer)] = blocks.flatten(1)
    made = []
    for name, tensor in _stored(folder, pieces).items():
        layout = contiguous(torch.float32, (scale.side, scale.side))
        rows = GgufRows("Q4_K")
        recipe = Decoded(layout, Decoder(partial(decode, kind="Q4_K"), (1,), packed=rows), [Piece(handle_of(tensor))])
        made.append(_as_bfloat16(Handle.compose(recipe, name), device))
    return made


def in_mxfp4(scale: Scale, folder: Path, device: torch.device) -> list[OffloadedTensor]:
    """Experts of gpt-oss, one after the other: 4-bit floats with an exponent per block of 32."""
    import torch

    shape = scale.layers, scale.side, scale.side // 32
    pieces = {"down_proj_blocks": torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)}
    pieces["down_proj_scales"] = torch.randint(121, 126, shape, dtype=torch.uint8)
    [experts] = _unpacked(_stored(folder, pieces), {"quant_method": "mxfp4"}, device)
    return [experts[number].t() for number in range(scale.layers)]  # type: ignore[misc]


def _unpacked(
    stored: Mapping[str, OffloadedTensor], settings: Mapping[str, Any], device: torch.device
) -> list[OffloadedTensor]:
    from offload.checkpoints.forms.formats import unpacked
    from offload.tensor.views import handle_of

    dense = unpacked(stored, settings)
    assert dense is not None
    return [_as_bfloat16(handle_of(weight), device) for weight in dense.values()]


def _as_bfloat16(handle: Any, device: torch.device) -> OffloadedTensor:
    """As a model in bfloat16 has it: cast after it is decoded."""
    import torch

    from offload.storage.layout import contiguous
    from offload.tensor.recipes import Piece, joined
    from offload.tensor.wrapper import wrap_handle

    place = (0,) * len(handle.layout.shape)
    made = joined(contiguous(torch.bfloat16, handle.layout.shape), [Piece(handle)], [place], handle.name)
    return wrap_handle(made.handle, device)


def _stored(folder: Path, pieces: Mapping[str, torch.Tensor]) -> Mapping[str, OffloadedTensor]:
    """A checkpoint with these tensors, in a file of the form of safetensors, which is written here."""
    import torch

    from offload import OffloadedTensor

    names = {torch.float8_e4m3fn: "F8_E4M3", torch.bfloat16: "BF16", torch.float32: "F32", torch.int32: "I32"}
    names |= {torch.uint8: "U8", torch.int64: "I64"}
    header, at = {}, 0
    for name, piece in pieces.items():
        span = [at, at + piece.nbytes]
        header[name] = {"dtype": names[piece.dtype], "shape": list(piece.shape), "data_offsets": span}
        at += piece.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % 64)
    path = folder / "model.safetensors"
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for piece in pieces.values():
            piece.contiguous().view(-1).view(torch.uint8).numpy().tofile(file)
            file.flush()
    assert path.stat().st_size == 8 + len(text) + at == 8 + len(text) + sum(map(_size, pieces.values()))
    return {name: OffloadedTensor.from_file(path, name) for name in pieces}


def _size(piece: torch.Tensor) -> int:
    return math.prod(piece.shape) * piece.itemsize


STEPS: Mapping[str, tuple[Callable[[Scale, Path], Facts], float]] = {  # each with its seconds, at the most
    "machine": (machine, 60),
    "tests": (tests, 150),
    "bfloat16": (partial(streamed, in_bfloat16), 50),
    "FP8": (partial(streamed, in_fp8), 50),
    "W4A16": (partial(streamed, in_4_bits), 60),
    "Q4_K": (partial(streamed, in_q4_k), 60),
    "MXFP4 experts": (partial(streamed, in_mxfp4), 60),
    "accelerate": (accelerates, 60),
    "a language model": (generated, 100),
}

if __name__ == "__main__":
    sys.exit(main())
