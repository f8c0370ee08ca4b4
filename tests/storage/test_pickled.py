"""Files from torch.save are read in place, value by value as torch.load gives it, and nothing in them is executed."""

from __future__ import annotations

import collections
import errno
import os
import pickle
import re
import struct
import sys
import tracemalloc
import zipfile
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import nn

from offload import OffloadedTensor, load_file
from offload.errors import CheckpointError, CorruptFileError, ReadError
from offload.storage.file import TensorFile
from offload.storage.layout import MISALIGNED
from offload.storage.pickled import NESTS
from tests import faults
from tests.conftest import contents
from tests.equal import is_equal
from tests.storage.test_write import DTYPES

COPIED_DTYPES = [dtype for dtype in DTYPES if not re.fullmatch(r"torch\.(bits.*|u?int[1-7])", str(dtype))]
pytestmark = [
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
    pytest.mark.filterwarnings("ignore:Sparse.*tensor support is in beta"),
]


def saved(path: Path, values: object) -> Path:
    torch.save(values, path)
    return path


def check_all(path: Path) -> dict[str, OffloadedTensor]:
    """Compares every value with torch.load's, and its place with the file's."""
    expected = torch.load(path, weights_only=True)
    found = load_file(path)
    assert expected.keys() == found.keys()
    assert [] == [name for name in expected if not is_equal(expected[name], found[name].materialize(), strides=False)]
    assert {name: value.stride() for name, value in expected.items()} == {k: v.stride() for k, v in found.items()}
    assert {path} == {tensor.offload_path for tensor in found.values()}
    return found


def repacked(path: Path, compression: int = zipfile.ZIP_STORED, **changes: bytes | None) -> Path:
    """The archive rewritten by other code, in another order, with some records changed or left out."""
    with zipfile.ZipFile(path) as archive:
        records = {info.filename: archive.read(info) for info in archive.infolist()}
    root = next(iter(records)).split("/")[0]
    records.update({f"{root}/{name}": data for name, data in changes.items()})
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in reversed(records.items()):
            if data is not None:
                archive.writestr(name, data)
    return path


def test_every_value_is_what_torch_load_gives_and_nothing_is_written(tmp_path):
    """Of every dtype; empty, and transposed."""
    values = {"n": torch.tensor(3), "p": nn.Parameter(torch.ones(3)), "t": torch.randn(4, 6).t()}
    values["image"] = torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    for dtype in COPIED_DTYPES:
        raw = torch.arange(48, dtype=torch.uint8) if dtype != torch.bool else torch.arange(48) % 2 == 0
        value = raw.view(dtype) if dtype != torch.bool else raw
        values |= {f"{dtype}": value, f"one {dtype}": value[:1].clone(), f"no {dtype}": value[:0].clone()}
    path = saved(tmp_path / "x.bin", values)
    before = contents(tmp_path)

    check_all(path)

    assert before == contents(tmp_path)


class Allowed(torch.Tensor):
    """A class that torch.load was told to build."""


def test_values_that_cannot_be_mapped_are_named_with_the_way_out_and_the_others_are_read(tmp_path):
    numbers = torch.randn(5, dtype=torch.complex64)
    values = {
        "columns": torch.randn(6, 8)[:, 2:5],
        "expanded": torch.ones(1).expand(10**12, 3),
        "windows": torch.arange(9.0).unfold(0, 3, 1),
        "conjugate": numbers.conj(),
        "negative": numbers.clone().conj().view(1, 5)[0, :1].imag,
        "coo": torch.eye(3).to_sparse(),
        "csr": torch.eye(3).to_sparse_csr(),
        "meta": torch.empty(3, device="meta"),
        "class": torch.ones(2).as_subclass(Allowed),
    }
    path = saved(tmp_path / "x.bin", {"w": torch.ones(2), **values})

    with torch.serialization.safe_globals([Allowed]):
        assert [1, 1] == OffloadedTensor.from_file(path, "w").tolist()
        for key in values:
            with pytest.raises(
                CorruptFileError, match=rf"'{key}' in .*x\.bin can't be read .* plain, contiguous tensor"
            ):
                OffloadedTensor.from_file(path, key)


def test_archives_that_are_cut_off_or_hold_no_tensor_are_refused(tmp_path):
    path = saved(tmp_path / "x.distcp", {"w": torch.ones(1)})
    size = path.stat().st_size

    with pytest.raises(CorruptFileError, match=rf"it is cut off: its archive of 'w' ends at byte {size + 1}"):
        TensorFile.of_archives(path, {"w": (0, size + 1)})
    with pytest.raises(CheckpointError, match=r"x\.distcp holds a dict in place of the tensor 'w'"):
        TensorFile.of_archives(path, {"w": (0, size)})


def test_a_failing_disk_is_not_called_damage(tmp_path):
    """Wherever it fails: users would remove a good file."""
    path, number = saved(tmp_path / "x.distcp", torch.ones(1 << 12)), 0
    while True:
        with (
            faults.failing(number, errno.EIO, only=lambda call: call.name == "os.preadv") as fault,
            suppress(ReadError),
        ):
            TensorFile.of_archives(path, {"w": (0, path.stat().st_size)})
        if fault.call is None:
            break
        number += 1

    assert number > 2


def test_complex128_that_begins_in_the_middle_of_an_element_is_named(tmp_path):
    """As in an archive that other code wrote: no kernel reads it there."""
    found = set()
    for room in range(16):
        path = saved(tmp_path / f"{room}.bin", {"c": torch.ones(3, dtype=torch.complex128)})
        header = TensorFile.open(repacked(path, pad=b"x" * room)).header
        found.add((*header.entries, *header.unreadable.values()))

    assert {("c",), (MISALIGNED,)} == found


@pytest.mark.parametrize(
    ("start", "shape", "stride", "words"),
    [
        *((0, shape, (1, 1, 1), "its pickle") for shape in ((0, -(2**31), 3), (0, 2**62, 4))),
        (5, (4,), (1,), "places 'w' outside of its record"),
    ],
)
def test_a_shape_that_no_tensor_has_or_a_place_outside_of_its_record_is_refused(tmp_path, start, shape, stride, words):
    class Odd:
        def __reduce__(self):
            storage = torch.storage.TypedStorage(8, dtype=torch.float32, _internal=True)
            return torch._utils._rebuild_tensor_v2, (storage, start, shape, stride, False, {})

    path = saved(tmp_path / "x.pt", {"w": Odd(), "v": torch.ones(99)})

    with pytest.raises(CorruptFileError, match=rf"x\.pt .* {words}"):
        load_file(path)


def test_a_name_with_a_lone_surrogate_is_refused(tmp_path):
    path = saved(tmp_path / "x.pt", {"\ud800": torch.ones(1)})

    with pytest.raises(CheckpointError, match=r"x\.pt names a tensor with a lone surrogate"):
        load_file(path)


def test_names_that_share_a_storage_are_separate_values(tmp_path):
    base = torch.arange(12.0)
    path = saved(tmp_path / "x.bin", {"w": base, "tied": base, "part": base[4:8], "tail": base[6:]})
    found = check_all(path)

    found["w"].zero_()
    found["part"].fill_(7)

    assert torch.equal(torch.zeros(12), found["w"].materialize())
    assert torch.equal(torch.arange(12.0), found["tied"].materialize())
    assert torch.equal(torch.full((4,), 7.0), found["part"].materialize())
    assert torch.equal(torch.arange(6.0, 12.0), found["tail"].materialize())
    assert torch.equal(torch.arange(12.0), torch.load(path, weights_only=True)["w"])


def test_records_in_another_order_are_found_by_their_names(tmp_path):
    """The place of a record does not follow from those before it, although torch's version record is still there."""
    values = {"zeros": torch.zeros(1 << 10), "noise": torch.randn(1 << 9), "part": torch.arange(99.0)[3:50]}
    values |= {f"w{number}": torch.full((16,), float(number)) for number in range(6)}

    check_all(repacked(saved(tmp_path / "x.bin", values)))


@pytest.mark.parametrize("mode", ["fake", "meta", "inference"])
def test_it_is_opened_under_any_mode_of_torch(tmp_path, mode):
    from torch._subclasses.fake_tensor import FakeTensorMode

    path = saved(tmp_path / "x.bin", {"w": torch.arange(3.0)})
    with {"fake": FakeTensorMode(), "meta": torch.device("meta"), "inference": torch.inference_mode()}[mode]:
        found = load_file(path)

    assert [0, 1, 2] == found["w"].tolist()


@pytest.mark.parametrize(
    "held",
    [
        *({nest: collections.OrderedDict(w=torch.ones(2), step=3), "loss": torch.tensor(0.5)} for nest in NESTS),
        {"w": torch.ones(2), "step": 3, "note": "hello", 5: torch.ones(1), "inner": {"v": torch.ones(1)}},
    ],
    ids=[*NESTS, "at the top"],
)
def test_a_state_dict_at_the_top_or_under_a_usual_key_is_taken_and_the_rest_is_left(tmp_path, held):
    assert ["w"] == list(load_file(saved(tmp_path / "x.ckpt", held)))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("held", "words"),
    [
        (torch.ones(2), "no tensors by name, but a Tensor"),
        ([torch.ones(2)], "no tensors by name, but a list"),
        ({"step": 3, "args": {"lr": 0.1}}, "no tensors by name, but a dict"),
        ({"model": {"w": torch.ones(1)}, "state_dict": {"w": torch.zeros(1)}}, r"several models \(state_dict, model\)"),
        (
            {"q": torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)},
            r"a quantized tensor \(torch.qint8\): dequantize",
        ),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_file_without_one_model_says_what_it_holds(tmp_path, held, words):
    with pytest.raises(CheckpointError, match=rf"x\.pt holds {words}"):
        TensorFile.open(saved(tmp_path / "x.pt", held))


def test_sparse_tensors_in_a_file_do_not_disturb_the_next_torch_load(tmp_path):
    path = saved(tmp_path / "x.bin", {"w": torch.ones(2), "coo": torch.eye(3).to_sparse()})
    TensorFile.open(path)

    with torch.sparse.check_sparse_tensor_invariants():
        loaded = torch.load(path, weights_only=True)
    assert torch.equal(torch.eye(3), loaded["coo"].to_dense())


class Bomb:
    """Touches a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_code_in_a_pickle_is_refused_and_not_run(tmp_path):
    path = saved(tmp_path / "x.bin", {"w": torch.ones(1), "bomb": Bomb(tmp_path / "exploded")})

    for opened in (TensorFile.open, load_file, OffloadedTensor.from_file):
        with pytest.raises(
            CheckpointError, match=r"x\.bin is a pickle with more than tensors.*run code.*mkdir"
        ) as caught:
            opened(path)
        assert isinstance(caught.value.__cause__, pickle.UnpicklingError)
    assert not (tmp_path / "exploded").exists()
    with pytest.raises(FileExistsError):  # the bomb works
        [torch.load(path, weights_only=False) for _ in range(2)]


LISTS = b"]q\0" + b"".join(b"](h%ch%ceq%c" % (level, level, level + 1) for level in range(30))  # 2**30 long, if printed
GREEDY = {
    "a list that is called": (LISTS + b"h\x1e)R.", "calls a list"),
    "a list that is made": (LISTS + b"h\x1e)\x81.", "calls a list"),
    "a list for a storage's key": (
        LISTS + b"(X\7\0\0\0storagectorch\nFloatStorage\nh\x1eX\3\0\0\0cpuK\1tQ.",
        "names a storage by a list",
    ),
    "bytes of any number": (b"cbuiltins\nbytearray\n\x8a\6\0\0\0\0\0\1\x85R.", "a bytearray of any size"),
    "a tensor of any size": (b"ctorch\nFloatTensor\n\x8a\6\0\0\0\0\0\1\x85R.", "a FloatTensor of any size"),
    "a new tensor of any size": (b"ctorch\nFloatTensor\n\x8a\6\0\0\0\0\0\1\x85\x81.", "a FloatTensor of any size"),
    "bytes by way of another call": (
        b"ctorch._tensor\n_rebuild_from_type_v2\n(cbuiltins\nbytearray\nN\x8a\6\0\0\0\0\0\1\x85NtR.",
        "a bytearray of any size",
    ),
}


@pytest.mark.parametrize("what", GREEDY)
def test_a_pickle_takes_no_more_memory_than_its_length_allows(tmp_path, what):
    """Each of these would take all memory there is, or forever."""
    code, words = GREEDY[what]
    path = repacked(saved(tmp_path / "x.bin", {}), **{"data.pkl": b"\x80\2" + code})

    with pytest.raises((CheckpointError, CorruptFileError), match=words):
        TensorFile.open(path)


def nested(levels: int) -> dict[str, object]:
    inner: dict[str, object] = {}
    for _ in range(levels):
        inner = dict.fromkeys(NESTS, inner)
    return inner


def test_nests_are_searched_for_a_model_to_a_depth_that_models_have(tmp_path):
    endless: dict[str, object] = {}
    endless["model"] = endless
    deep = {"w": torch.ones(1)}
    for nest in ("state_dict", "module", "model"):
        deep = {nest: deep}

    for held in (nested(40), endless):
        with pytest.raises(CheckpointError, match="holds no tensors by name"):
            TensorFile.open(saved(tmp_path / "x.pt", held))
    assert ["w"] == list(load_file(saved(tmp_path / "deep.pt", deep)))


CONVERT = r"load it once, torch\.load\(path, weights_only=True\), and save it again"


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_bare_pickle_is_not_opened(tmp_path, protocol):
    (tmp_path / "x.bin").write_bytes(pickle.dumps(Bomb(tmp_path / "exploded"), protocol=protocol))

    with pytest.raises(CheckpointError, match=rf"is a pickle, not the zip archive .*: {CONVERT}"):
        TensorFile.open(tmp_path / "x.bin")
    assert not (tmp_path / "exploded").exists()


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("form", ["legacy", "deflated", "lzma", "of another machine"])
def test_another_form_of_torch_save_says_how_to_convert_it(tmp_path, form):
    path = saved(tmp_path / "x.bin", {"w": torch.ones(99)})
    if form == "legacy":
        torch.save({"w": torch.ones(99)}, path, _use_new_zipfile_serialization=False)
    elif form == "of another machine":
        repacked(path, byteorder=b"big" if sys.byteorder == "little" else b"little")
    else:
        repacked(path, zipfile.ZIP_DEFLATED if form == "deflated" else zipfile.ZIP_LZMA)

    with pytest.raises(CheckpointError, match=rf"x\.bin .*: {CONVERT}"):
        load_file(path)

    if form in ("legacy", "deflated"):  # as it says
        torch.save(torch.load(path, weights_only=True), path)
        assert torch.equal(torch.ones(99), load_file(path)["w"].materialize())


def test_a_deflated_tensor_beside_a_plain_pickle_is_not_read_as_it_lies(tmp_path):
    path = saved(tmp_path / "x.bin", {"w": torch.ones(99)})
    with zipfile.ZipFile(path) as archive:
        records = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in records.items():
            archive.writestr(name, data, zipfile.ZIP_DEFLATED if name.endswith("data/0") else zipfile.ZIP_STORED)

    with pytest.raises(CheckpointError, match=rf"a record x/data/0 that is compressed or encrypted: {CONVERT}"):
        load_file(path)


@pytest.mark.parametrize(("at", "size"), [(24, 100), (24, 1 << 30), (20, 1 << 30)])
def test_a_pickle_that_is_not_as_long_as_its_directory_says_is_refused_unread(tmp_path, at, size):
    """64 MB of empty lists, which would be gigabytes."""
    path = repacked(saved(tmp_path / "x.bin", {}), **{"data.pkl": b"\x80\2" + b"]" * (1 << 26)})
    data = bytearray(path.read_bytes())
    entry = data.rindex(b"x/data.pkl") - 46  # its directory entry: bytes 20 to 24 are its size there, 24 to 28 unpacked
    data[entry + at : entry + at + 4] = struct.pack("<I", size)
    path.write_bytes(data)
    tracemalloc.start()

    try:
        with pytest.raises((CheckpointError, CorruptFileError), match=r"data\.pkl"):
            TensorFile.open(path)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def test_a_pickle_that_is_larger_than_any_of_tensors_is_refused_unread(tmp_path, monkeypatch):
    monkeypatch.setattr("offload.storage.pickled._LONGEST", 20)

    with pytest.raises(CorruptFileError, match="more than any pickle of tensors"):
        TensorFile.open(saved(tmp_path / "x.bin", {"w": torch.ones(4)}))


def zip_of(path: Path, *names: str) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, pickle.dumps({}, 2))


LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n"
NOT_OF_TORCH = r"zip archive, but torch\.save did not write it"
OTHERS = {
    "a whole model": (
        lambda path: saved(path, nn.Linear(2, 2)),
        CheckpointError,
        r"torch\.save\(model\.state_dict\(\), path\)",
    ),
    "a zip": (lambda path: zip_of(path, "readme.txt"), CheckpointError, NOT_OF_TORCH),
    "two in one": (lambda path: zip_of(path, "a/data.pkl", "b/data.pkl"), CheckpointError, NOT_OF_TORCH),
    "a pointer": (lambda path: path.write_text(LFS), CorruptFileError, r"x\.bin.*git-lfs pointer.*git lfs pull"),
    "nothing": (lambda path: path.touch(), CorruptFileError, r"x\.bin can't be used: .*it is empty"),
    "a word": (lambda path: path.write_text("hello"), CorruptFileError, r"x\.bin can't be used: .*it has 5 bytes"),
    "a page": (lambda path: path.write_text("<html>" * 9), CorruptFileError, r"x\.bin can't be used: .*it is text"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("what", OTHERS)
def test_a_file_of_something_else_is_refused_and_the_error_says_what_it_is(tmp_path, what):
    put, error, words = OTHERS[what]
    put(tmp_path / "x.bin")

    with pytest.raises(error, match=words):
        TensorFile.open(tmp_path / "x.bin")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data/0": None}, "it has no record data/0 of the size"),
        ({"data/0": b"\0" * 8}, "it has no record data/0 of the size"),
        ({"data.pkl": b"\x80\x02}q\x00."[:4]}, "pickle is cut off or damaged"),
    ],
)
def test_an_archive_that_contradicts_itself_is_refused(tmp_path, changes, words):
    path = repacked(saved(tmp_path / "x.bin", {"w": torch.ones(4)}), **changes)

    with pytest.raises(CorruptFileError, match=words):
        TensorFile.open(path)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_record_given_twice_is_refused(tmp_path):
    path = saved(tmp_path / "x.bin", {"w": torch.ones(4)})
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("x/data/0", b"\0" * 16)

    with pytest.raises(CorruptFileError, match="names a record twice"):
        TensorFile.open(path)


@pytest.mark.parametrize("wrong", ["nowhere", "at another record", "past the directory"])
def test_a_directory_that_points_elsewhere_is_refused(tmp_path, wrong):
    is_long = wrong == "past the directory"
    path = saved(tmp_path / "x.bin", {"w": torch.ones(1 << 12 if is_long else 4), "v": torch.zeros(4)})
    if is_long:
        repacked(path, **{"data/0": bytes(16)})
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        other = archive.getinfo("x/data/1").header_offset
    at = data.rindex(b"x/data/0") - 46  # its directory entry: bytes 20 to 28 are its sizes, and 42 to 46 its offset
    if is_long:
        data[at + 20 : at + 28] = struct.pack("<II", 4 << 12, 4 << 12)
    else:
        data[at + 42 : at + 46] = struct.pack("<I", 5 if wrong == "nowhere" else other)
    path.write_bytes(data)

    with pytest.raises(CorruptFileError, match=r"x/data/0 is not where its zip directory says|Overlapped entries"):
        TensorFile.open(path)
