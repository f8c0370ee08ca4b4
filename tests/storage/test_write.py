"""A value is written whole; otherwise the old one is kept and nothing else is left."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from offload import load_file as offload_file
from offload.errors import ForeignFileError, ReadError, WriteError
from offload.storage import write as write_module
from offload.storage.file import TensorFile
from offload.storage.header import ALIGNMENT
from offload.storage.layout import WORDS, Layout, dtype_name, dtype_named
from offload.storage.replacing import put_file
from offload.storage.write import from_file, from_values, layout_of, of_zeros, put_values
from tests import faults
from tests.equal import is_equal
from tests.processes import run_script

OF_TORCH = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
DTYPES = sorted((dtype for dtype in OF_TORCH if dtype_named(dtype_name(dtype))), key=str)
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
FLOAT4 = getattr(torch, "float4_e2m1fn_x2", None)


def write(path: Path, value: torch.Tensor, *, durable: bool = False) -> Path:
    layouts = {"w": layout_of(value)}
    put_values(path, layouts, from_values({"w": value}, layouts), {"name": "w"}, durable=durable)
    return path


def write_empty(path: Path, layout: Layout) -> None:
    put_values(path, {"w": layout}, of_zeros, {"name": "w"}, durable=False)


def copy(source: TensorFile, key: str, path: Path, *, durable: bool = False) -> None:
    entry = source.entry(key)
    with from_file(source, [entry], settled=True) as fill:
        put_values(path, {key: entry.layout}, fill, {"name": key}, durable=durable)


def read(path: Path) -> torch.Tensor:
    file = TensorFile.open(path)
    return file.tensor(file.entry("w"), shared=False)


def data(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor in row-major order, for any dtype."""
    raw = torch.empty(0, dtype=torch.uint8)
    whole = tensor.contiguous()
    return bytes(raw.set_(whole.untyped_storage(), 0, (whole.numel() * whole.itemsize,), (1,)).tolist())


def patterned(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of any dtype whose bytes all differ; bools are 0 and 1."""
    tensor = torch.empty(shape, dtype=dtype)
    raw = torch.empty(0, dtype=torch.uint8)
    raw.set_(tensor.untyped_storage(), 0, (tensor.numel() * tensor.itemsize,), (1,))
    raw.copy_(torch.arange(raw.numel()) % (2 if dtype == torch.bool else 251))
    return tensor


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_every_dtype_and_shape_comes_back_and_the_safetensors_library_reads_the_same(tmp_path, dtype):
    for shape in ((), (0,), (2, 0, 3), (5,), (2, 3, 4)):
        value = patterned(dtype, shape)

        path = write(tmp_path / "w.safetensors", value)

        assert is_equal(value, read(path))
        assert 0 == TensorFile.open(path).entry("w").start % ALIGNMENT
        found = load_file(path)["w"]
        assert data(value) == data(found)
        if dtype in WORDS or (dtype == FLOAT4 and shape):
            assert is_equal(value, found)
        else:  # dtypes without a word in the format: bytes, with one more dimension
            assert (torch.uint8, (*shape, dtype.itemsize)) == (found.dtype, tuple(found.shape))
    with safe_open(path, "pt") as file:
        assert "pt" == file.metadata()["format"]


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1),
        torch.arange(12).reshape(3, 4).t(),
        torch.arange(120.0).reshape(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.arange(6.0).reshape(1, 6, 1).expand(1, 6, 1).transpose(0, 1),
        torch.empty(0, 3, 2).transpose(0, 2),
    ],
    ids=["permuted", "transposed", "channels-last", "size-one", "empty"],
)
def test_dense_strides_come_back(tmp_path, value):
    found = read(write(tmp_path / "w.safetensors", value))

    assert value.stride() == found.stride()
    assert torch.equal(value, found)


@pytest.mark.parametrize("block", [write_module._BLOCK, 16], ids=["at once", "in many blocks"])
@pytest.mark.parametrize(
    "value",
    [
        torch.arange(100.0)[::3],
        torch.arange(64.0).reshape(8, 8)[:, ::2],
        torch.arange(3.0).expand(9, 3),
        torch.ones(3, 1).expand(3, 4),
        torch.arange(20.0)[5:],
        torch.arange(27.0).reshape(1, 3, 9)[:, :, 1:8],
        torch.complex(torch.arange(50.0), torch.ones(50)).conj(),
        torch.complex(torch.arange(4.0), torch.ones(4)).conj().imag,
    ],
    ids=["steps", "columns", "expanded", "expanded-inside", "offset", "one-row", "conjugate", "negative"],
)
def test_a_view_is_written_as_the_value_that_it_shows(tmp_path, monkeypatch, value, block):
    monkeypatch.setattr(write_module, "_BLOCK", block)

    found = read(write(tmp_path / "w.safetensors", value))

    assert torch.equal(value, found)
    assert not found.is_conj()
    assert not found.is_neg()
    assert value.numel() * value.itemsize == found.untyped_storage().nbytes()


def test_a_large_value_that_must_be_gathered_takes_bounded_memory(tmp_path):
    script = """
        import resource, sys, torch
        from pathlib import Path
        from tests.storage.test_write import write
        value = torch.ones(1, 8, dtype=torch.uint8).expand(32 << 20, 8)[:, :4]   # 128 MiB
        write(Path(sys.argv[1]), value[:8])
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        write(Path(sys.argv[1]), value)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    """

    grown = int(run_script(script, tmp_path / "w.safetensors"))

    assert 128 << 20 <= (tmp_path / "w.safetensors").stat().st_size
    assert grown < 64 << 10  # KiB


def test_an_empty_value_reads_as_zeros_and_its_blocks_are_reserved_unwritten(tmp_path, monkeypatch):
    path = tmp_path / "w.safetensors"
    written = []
    put = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: written.append(len(data)) or put(fd, data, at))

    write_empty(path, Layout(torch.float32, (1 << 18,), (1,)))

    assert torch.equal(torch.zeros(1 << 18), read(path))
    assert path.stat().st_blocks * 512 >= 1 << 20
    assert ALIGNMENT == sum(written)


def test_zeros_are_written_where_blocks_cannot_be_reserved(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EOPNOTSUPP, "not here")

    monkeypatch.setattr(os, "posix_fallocate", refuse)

    write_empty(tmp_path / "w.safetensors", Layout(torch.float32, (700_000,), (1,)))

    assert torch.equal(torch.zeros(700_000), read(tmp_path / "w.safetensors"))
    os.sync()
    assert (tmp_path / "w.safetensors").stat().st_blocks * 512 >= 2_800_000


@pytest.mark.parametrize("kernel", ["sends", "refuses", "sends a part"])
def test_a_value_is_copied_from_file_to_file(tmp_path, monkeypatch, kernel):
    values = {"a": torch.arange(700_000.0), "b": patterned(torch.bfloat16, (3, 5))}
    save_file(values, tmp_path / "model.safetensors")
    source = TensorFile.open(tmp_path / "model.safetensors")
    if kernel == "refuses":
        monkeypatch.setattr(os, "sendfile", lambda *_: (_ for _ in ()).throw(OSError(errno.EINVAL, "sockets only")))
    if kernel == "sends a part":
        send, sent = os.sendfile, []
        part = lambda out, file, at, count: sent.append(0) or (send(out, file, at, 1000) if len(sent) < 3 else 0)  # noqa: E731
        monkeypatch.setattr(os, "sendfile", part)

    for key, value in values.items():
        copy(source, key, tmp_path / "copy.safetensors", durable=True)

        assert is_equal(value, load_file(tmp_path / "copy.safetensors")[key])
        (tmp_path / "copy.safetensors").unlink()


@pytest.mark.parametrize(
    ("call", "kind", "name"),
    [("os.pread", ReadError, "model.safetensors"), ("os.pwrite", WriteError, "copy.safetensors")],
)
def test_an_error_of_a_copy_says_which_of_the_two_files_it_is_of(tmp_path, call, kind, name):
    """What the kernel copies by itself fails without saying that."""
    save_file({"w": torch.ones(3)}, tmp_path / "model.safetensors")
    source = TensorFile.open(tmp_path / "model.safetensors")

    met = []

    def is_met(one):
        met.extend([one.name] if one.name == "os.sendfile" else [])
        return one.name == "os.sendfile" or (one.name == call and bool(met))

    with faults.failing(0, errno.EIO, lasting=True, only=is_met), pytest.raises(kind, match=name) as caught:
        copy(source, "w", tmp_path / "copy.safetensors")

    assert errno.EIO == caught.value.errno
    assert ["model.safetensors"] == os.listdir(tmp_path)


def access(path: Path) -> tuple[int, int, int]:
    status = path.stat()
    return stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid


@pytest.mark.parametrize(
    "replace",
    [
        lambda path: write(path, torch.ones(5)),
        lambda path: write_empty(path, Layout(torch.float32, (5,), (1,))),
        lambda path: offload_file(path.parent, offload_dir=path.parent)["w"].update_values(
            torch.ones(5), strict_shape=False
        ),
        lambda path: put_file(path, b"more bytes"),
    ],
    ids=["write", "empty", "update_values", "put_file"],
)
def test_a_file_that_is_replaced_keeps_its_mode_and_owner(tmp_path, replace):
    """Before any byte is in the new one."""
    path = write(tmp_path / "w.safetensors", torch.zeros(2))
    if not os.geteuid():
        os.chown(path, 12345, 54321)
    os.chmod(path, 0o640)
    before, size = access(path), path.stat().st_size

    with faults.watched() as calls:
        replace(path)

    assert size != path.stat().st_size
    assert before == access(path)
    names = [call.name for call in calls]
    assert names.index("os.fchmod") < names.index("os.pwrite")


def foreign_safetensors(path: Path) -> None:
    save_file({"w": torch.ones(3)}, path)


def link_to_a_file_of_ours(path: Path) -> None:
    (path.parent / "elsewhere").mkdir()
    path.symlink_to(write(path.parent / "elsewhere" / "w.safetensors", torch.zeros(2)))


@pytest.mark.parametrize(
    "make",
    [
        foreign_safetensors,
        lambda path: path.write_bytes(b"notes of mine"),
        lambda path: path.write_bytes(b""),
        lambda path: path.mkdir(),
        lambda path: os.mkfifo(path),
        lambda path: path.symlink_to("nowhere"),
        link_to_a_file_of_ours,
    ],
    ids=["safetensors", "text", "empty", "folder", "pipe", "broken-link", "link"],
)
def test_foreign_files_are_refused_and_left_byte_for_byte(tmp_path, make):
    path = tmp_path / "w.safetensors"
    make(path)
    before = os.lstat(path), path.is_file() and path.read_bytes(), sorted(os.listdir(tmp_path))

    with pytest.raises(ForeignFileError, match=rf"{path} .*(move it away|ake another offload_dir)"):
        write(path, torch.ones(2))
    with pytest.raises(ForeignFileError):
        write_empty(path, Layout(torch.float32, (2,), (1,)))
    after = os.lstat(path), path.is_file() and path.read_bytes(), sorted(os.listdir(tmp_path))
    assert before[0][:7] == after[0][:7]
    assert before[1:] == after[1:]


@pytest.mark.parametrize(
    ("call", "code", "way_out"),
    [
        ("open", errno.EACCES, "take another offload_dir"),
        ("open", errno.EROFS, "take another offload_dir"),
        ("open", errno.EMFILE, "ulimit -n"),
        ("posix_fallocate", errno.ENOSPC, "free some space, or take another offload_dir"),
        ("posix_fallocate", errno.EDQUOT, "your quota is used up"),
        ("posix_fallocate", errno.EFBIG, "ulimit -f"),
        ("pwrite", errno.ENOSPC, "free some space"),
        ("pwrite", errno.EIO, "take another offload_dir"),
        ("fsync", errno.EIO, "take another offload_dir"),
        ("replace", errno.EPERM, "the folder is not writable: take another offload_dir"),
    ],
)
def test_a_failure_at_any_step_leaves_the_old_value_and_nothing_else(tmp_path, call, code, way_out):
    path = write(tmp_path / "w.safetensors", torch.zeros(3))

    def is_it(seen):
        return seen.name == f"os.{call}" and (call != "open" or seen.changes)

    with (
        faults.failing(0, code, only=is_it),
        pytest.raises(WriteError, match=rf"could not be written.*nothing was changed: .*{way_out}") as caught,
    ):
        write(path, torch.ones(3), durable=True)
    assert (code, str(path)) == (caught.value.errno, caught.value.filename)
    assert torch.equal(torch.zeros(3), read(path))
    assert ["w.safetensors"] == os.listdir(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a file system")
def test_a_full_disk_is_an_error_and_not_a_crash(tmp_path):
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", tmp_path], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.decode()}")
    try:
        path = write(tmp_path / "w.safetensors", torch.zeros(3))
        layout = Layout(torch.uint8, (2 << 20,), (1,))

        with pytest.raises(WriteError, match=r"No space left.*free some space"):
            write(path, torch.ones(2 << 20, dtype=torch.uint8))
        with pytest.raises(WriteError, match=r"No space left.*free some space"):
            write_empty(tmp_path / "other.safetensors", layout)
        assert torch.equal(torch.zeros(3), read(path))
        assert ["w.safetensors"] == os.listdir(tmp_path)
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_a_limit_on_the_size_of_files_is_an_error_and_not_a_crash(tmp_path):
    script = """
        import resource, sys, torch
        from offload import OffloadedTensor
        from offload.errors import WriteError
        w = OffloadedTensor.from_original_tensor(torch.zeros(3), "w", sys.argv[1])
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        try:
            w.update_values(torch.ones(1 << 20), strict_shape=False)
        except WriteError as error:
            print(error)
        print(w.tolist())
    """

    said = run_script(script, tmp_path)

    assert "tensor 'w': " in said
    assert "ulimit -f" in said
    assert str(tmp_path / "w.safetensors") in said
    assert said.endswith("[0.0, 0.0, 0.0]\n")
    assert ["w.safetensors"] == os.listdir(tmp_path)


def number_of(fd):
    """Of a descriptor, or of the object that owns it."""
    return fd if isinstance(fd, int) else fd.fileno()


def test_an_unsyncable_folder_is_accepted_and_a_broken_disk_is_an_error(tmp_path, monkeypatch):
    sync = os.fsync

    def refuse(code):
        def refuse_folders(fd):
            if Path(f"/proc/self/fd/{number_of(fd)}").readlink() == tmp_path:
                raise OSError(code, os.strerror(code))
            sync(fd)

        monkeypatch.setattr(os, "fsync", refuse_folders)

    refuse(errno.EINVAL)
    write(tmp_path / "w.safetensors", torch.ones(3), durable=True)
    refuse(errno.EIO)
    with pytest.raises(WriteError, match="power cut"):
        write(tmp_path / "w.safetensors", torch.zeros(3), durable=True)
    assert torch.equal(torch.zeros(3), read(tmp_path / "w.safetensors"))
