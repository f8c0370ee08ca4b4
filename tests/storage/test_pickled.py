"""Files from torch.save are read in place, value by value as torch.load gives it, and nothing in them is executed."""

from __future__ import annotations

import collections
import errno
import io
import json
import os
import pickle
import random
import re
import struct
import tarfile
import textwrap
import tracemalloc
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn

from offload import OffloadedTensor, load_file
from offload.errors import CheckpointError, CorruptFileError, OffloadError, ReadError
from offload.storage.file import TensorFile
from offload.storage.pickled import NESTS
from tests.conftest import contents
from tests.equal import is_equal
from tests.processes import run_script
from tests.storage.test_write import DTYPES

COPIED_DTYPES = [dtype for dtype in DTYPES if not re.fullmatch(r"torch\.(bits.*|u?int[1-7])", str(dtype))]
LEGACY = {"_use_new_zipfile_serialization": False}
FORMS = pytest.mark.parametrize("form", [{}, LEGACY], ids=["zip", "legacy"])
pytestmark = [
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
    pytest.mark.filterwarnings("ignore:Detected pickle protocol"),
    pytest.mark.filterwarnings("ignore:Sparse.*tensor support is in beta"),
]


def saved(path: Path, values: object, **form: object) -> Path:
    torch.save(values, path, **form)
    return path


def check_all(path: Path) -> dict[str, OffloadedTensor]:
    """Compares every value with torch.load's."""
    expected = torch.load(path, weights_only=True)
    found = load_file(path)
    assert expected.keys() == found.keys()
    assert [] == [name for name in expected if not is_equal(expected[name], found[name].materialize(), strides=False)]
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


def in_place(path: Path) -> set[str]:
    return set(TensorFile.open(path).entries)


@FORMS
@pytest.mark.parametrize("dtype", COPIED_DTYPES, ids=str)
def test_every_dtype_is_what_torch_load_gives(tmp_path, dtype, form):
    if form and dtype not in torch.storage._dtype_to_storage_type_map():
        pytest.skip("torch keeps these in a form that only its zip files have")
    values = torch.arange(48, dtype=torch.uint8) if dtype != torch.bool else torch.arange(48) % 2 == 0
    value = values.view(dtype) if dtype != torch.bool else values

    check_all(saved(tmp_path / "x.bin", {"w": value, "b": value[:1].clone(), "none": value[:0].clone()}, **form))


def test_a_contiguous_tensor_is_read_where_it_is_and_nothing_is_written(tmp_path):
    values = {"w": torch.randn(64, 32), "b": torch.randn(32), "n": torch.tensor(3), "p": nn.Parameter(torch.ones(3))}
    path = saved(tmp_path / "x.bin", values)
    before = contents(tmp_path)

    found = check_all(path)

    assert values.keys() == in_place(path)
    assert {path} == {tensor.offload_path for tensor in found.values()}
    assert before == contents(tmp_path)


def test_transposed_tensors_are_read_where_they_are_with_their_strides(tmp_path):
    values = {"t": torch.randn(4, 6).t(), "c": torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)}
    path = saved(tmp_path / "x.bin", values)

    found = check_all(path)

    assert values.keys() == in_place(path)
    assert {key: value.stride() for key, value in values.items()} == {k: v.stride() for k, v in found.items()}


@FORMS
def test_values_with_gaps_conjugates_and_negatives_are_copied_out(tmp_path, form):
    base, numbers = torch.randn(6, 8), torch.randn(5, dtype=torch.complex64)
    values = {
        "columns": base[:, 2:5],
        "every_other": base[0, ::2],
        "conjugate": numbers.conj(),
        "negative": torch.randn(5, dtype=torch.complex64).conj().imag,
    }
    path = saved(tmp_path / "x.bin", values, **form)
    before = path.read_bytes()

    found = check_all(path)

    assert set() == in_place(path)
    assert all(path != tensor.offload_path for tensor in found.values())
    assert before == path.read_bytes()


@FORMS
def test_values_whose_elements_overlap_are_read_where_they_are(tmp_path, form):
    values = {"expanded": torch.randn(1, 3).expand(4, 3), "windows": torch.arange(9.0).unfold(0, 3, 1)}
    path = saved(tmp_path / "x.bin", values, **form)

    found = check_all(path)

    assert values.keys() == in_place(path)
    assert {key: value.stride() for key, value in values.items()} == {k: v.stride() for k, v in found.items()}


def test_an_expanded_value_takes_no_disk_and_no_memory_for_its_copies(tmp_path):
    sizes = {"w": (200_000_000,), "large": (10**12, 3), "larger": (4 * 10**18,)}
    path = saved(tmp_path / "x.pt", {name: torch.ones(1).expand(size) for name, size in sizes.items()})
    tracemalloc.start()

    found = load_file(path, offload_dir=tmp_path / "values")

    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sizes == {name: tuple(value.shape) for name, value in found.items()}
    assert [1.0] * 9 == found["larger"][10**18 : 10**18 + 9].tolist()
    assert peak < 1 << 20
    assert not (tmp_path / "values").exists()


def test_a_value_whose_elements_overlap_is_written_through_and_comes_back(tmp_path):
    values = {"w": torch.arange(6.0).reshape(2, 3)[:, :1].expand(2, 4), "c": torch.ones(2, dtype=torch.complex32)}
    values["c"] = values["c"][:1].expand(3)
    found = load_file(saved(tmp_path / "x.pt", values), offload_dir=tmp_path / "values")

    for both in (values, found):
        both["w"][1, 2] = 7
        both["c"][0] = 2j

    again = load_file(tmp_path / "values")
    for name, expected in values.items():
        assert is_equal(expected, found[name].materialize(), strides=False)
        assert is_equal(expected, again[name].materialize(), strides=False)
        assert expected.stride() == again[name].stride()
    assert {"c.safetensors", "w.safetensors"} == set(os.listdir(tmp_path / "values"))
    assert all(path.stat().st_size < 4200 for path in (tmp_path / "values").iterdir())


def test_overlapping_values_are_copied_out_of_packed_files_and_replaced_by_dense_ones(tmp_path):
    path = saved(tmp_path / "x.pt", {"w": torch.arange(9.0)[2:].unfold(0, 3, 1)})
    expected = torch.load(repacked(path, zipfile.ZIP_DEFLATED), weights_only=True)["w"]

    value = load_file(path)["w"]

    assert is_equal(expected, value.materialize(), strides=False)
    value.update_values(expected * 2)
    value[0, 1] = 5
    assert is_equal(
        (expected * 2).index_put_((torch.tensor(0), torch.tensor(1)), torch.tensor(5.0)), value.materialize()
    )


@pytest.mark.parametrize("shape", [(0, -(2**31), 3), (0, 2**62, 4)], ids=str)
def test_a_shape_that_no_tensor_has_is_refused(tmp_path, shape):
    class Odd:
        def __reduce__(self):
            storage = torch.storage.TypedStorage(8, dtype=torch.float32, _internal=True)
            return torch._utils._rebuild_tensor_v2, (storage, 0, shape, (1, 1, 1), False, {})

    path = saved(tmp_path / "x.pt", {"w": Odd()})

    with pytest.raises(CorruptFileError, match=r"x\.pt .* its pickle"):
        load_file(path)


def test_an_unaligned_packed_value_is_read(tmp_path):
    class Odd:
        def __reduce__(self):
            storage = torch.arange(80, dtype=torch.uint8).untyped_storage()
            typed = torch.storage.TypedStorage(wrap_storage=storage, dtype=torch.uint8, _internal=True)
            return torch._utils._rebuild_tensor_v3, (typed, 0, (4,), (1,), False, {}, torch.complex128)

    path = repacked(saved(tmp_path / "x.pt", {"w": Odd()}), zipfile.ZIP_DEFLATED)

    check_all(path)


@FORMS
def test_a_name_with_a_lone_surrogate_is_refused(tmp_path, form):
    path = saved(tmp_path / "x.pt", {"\ud800": torch.ones(1)}, **form)

    with pytest.raises(CheckpointError, match=r"x\.pt names a tensor with a lone surrogate"):
        load_file(path)


def test_values_are_copied_out_to_the_offload_dir(tmp_path):
    path = saved(tmp_path / "x.bin", {"a": torch.randn(6, 8)[:, :3], "b": torch.ones(2)})

    found = load_file(path, offload_dir=tmp_path / "values")

    assert ["a.safetensors"] == os.listdir(tmp_path / "values")
    assert tmp_path / "values" / "a.safetensors" == found["a"].offload_path


@FORMS
def test_names_that_share_a_storage_are_separate_values(tmp_path, form):
    base = torch.arange(12.0)
    path = saved(tmp_path / "x.bin", {"w": base, "tied": base, "part": base[4:8], "tail": base[6:]}, **form)
    found = check_all(path)

    found["w"].zero_()
    found["part"].fill_(7)

    assert torch.equal(torch.zeros(12), found["w"].materialize())
    assert torch.equal(torch.arange(12.0), found["tied"].materialize())
    assert torch.equal(torch.full((4,), 7.0), found["part"].materialize())
    assert torch.equal(torch.arange(6.0, 12.0), found["tail"].materialize())
    assert torch.equal(torch.arange(12.0), torch.load(path, weights_only=True)["w"])


def test_an_unaligned_storage_is_copied_from_file_to_file(tmp_path):
    """As in the legacy form: its data begins wherever its pickles end."""
    seen = set()
    for length in range(8):
        values = {"w" + "x" * length: torch.randn(5, 3), "h": torch.ones(4, dtype=torch.int16)}
        path = saved(tmp_path / f"{length}.bin", values, **LEGACY)
        check_all(path)
        seen.add(len(in_place(path)))

    assert {0, 2} <= seen


@pytest.mark.parametrize("packing", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED], ids=["stored", "deflated"])
def test_records_in_another_order_are_found_by_their_names_and_unpacked(tmp_path, packing):
    """The place of a record does not follow from those before it, although torch's version record is still there."""
    values = {"zeros": torch.zeros(1 << 20), "noise": torch.randn(1 << 19), "part": torch.arange(99.0)[3:50:2]}
    values |= {f"w{number}": torch.full((16,), float(number)) for number in range(6)}

    path = repacked(saved(tmp_path / "x.bin", values), packing)

    check_all(path)
    assert packing == zipfile.ZIP_STORED or set() == in_place(path)


def test_a_failing_disk_under_a_packed_value_is_reported_with_the_file(tmp_path, monkeypatch):
    path = repacked(saved(tmp_path / "x.bin", {"w": torch.randn(99)}), zipfile.ZIP_DEFLATED)

    def fail(*_):
        raise OSError(errno.EIO, "the disk failed")

    monkeypatch.setattr(os, "pread", fail)
    with pytest.raises(ReadError, match=r"x\.bin: tensor 'w': ") as caught:
        load_file(path)
    assert errno.EIO == caught.value.errno


def test_the_byte_order_of_another_machine_is_turned(tmp_path):
    values = {
        "f": torch.randn(4, 3),
        "i": torch.arange(5),
        "u": torch.arange(9, dtype=torch.uint8),
        "c": torch.ones(2) + 1j,
    }
    path = saved(tmp_path / "x.bin", values)
    with zipfile.ZipFile(path) as archive:
        records = [archive.read(f"x/data/{number}") for number in range(4)]
    swapped = [
        b"".join(data[i : i + n][::-1] for i in range(0, len(data), n))
        for data, n in zip(records, (4, 8, 1, 4), strict=True)
    ]

    repacked(path, byteorder=b"big", **{f"data/{number}": data for number, data in enumerate(swapped)})

    found = load_file(path)
    assert all(is_equal(values[name], found[name].materialize(), strides=False) for name in values)


def test_the_pickle_is_read_once_per_file(tmp_path, monkeypatch):
    path = saved(tmp_path / "x.bin", {"a": torch.ones(3), "b": torch.zeros(3)})
    first = OffloadedTensor.from_file(path, "a")
    monkeypatch.setattr("offload.storage.pickled.read_header", None)

    second = OffloadedTensor.from_file(path, "b")

    assert [1, 1, 1, 0, 0, 0] == [*first.tolist(), *second.tolist()]


@pytest.mark.parametrize("mode", ["fake", "meta", "inference"])
def test_it_is_opened_under_any_mode_of_torch(tmp_path, mode):
    from torch._subclasses.fake_tensor import FakeTensorMode

    path = saved(tmp_path / "x.bin", {"w": torch.arange(3.0), "t": torch.arange(8.0)[::2]})
    with {"fake": FakeTensorMode(), "meta": torch.device("meta"), "inference": torch.inference_mode()}[mode]:
        found = load_file(path)

    assert [0, 1, 2] == found["w"].tolist()
    assert [0, 2, 4, 6] == found["t"].tolist()


def test_a_reference_passes_to_another_process_which_reads_the_pickle_again(tmp_path):
    path = saved(tmp_path / "x.bin", {"w": torch.arange(5.0), "t": torch.arange(8.0)[::2]})
    script = """
        import sys, torch, torch.multiprocessing as processes
        from offload import load_file

        def total(queue, answers):
            answers.put([queue.get().sum().item() for _ in range(2)])

        if __name__ == "__main__":
            context = processes.get_context("spawn")
            queue, answers = context.Queue(), context.Queue()
            tensors = load_file(sys.argv[1])
            child = context.Process(target=total, args=(queue, answers))
            child.start()
            queue.put(tensors["w"])
            queue.put(tensors["t"])
            print(answers.get())
            child.join()
    """
    (tmp_path / "pass.py").write_text(textwrap.dedent(script))

    assert "[10.0, 12.0]\n" == run_script(
        "import runpy, sys; runpy.run_path(sys.argv.pop(1), run_name='__main__')", tmp_path / "pass.py", path
    )


COPIED = """
    import ctypes, json, sys, torch
    from offload import load_file
    from offload.memory import anonymous_bytes
    from offload.storage import owning
    from offload.storage.file import TensorFile

    seen, write_tensor = [], owning.write_tensor

    def watched(*args, **options):
        seen.append(anonymous_bytes())
        return write_tensor(*args, **options)

    owning.write_tensor = watched
    [w[0, 0].item() for w in load_file(sys.argv[2]).values()]  # imports, first calls
    TensorFile.open(sys.argv[1])
    seen.clear()
    before = anonymous_bytes()
    tensors = load_file(sys.argv[1])
    right = all(w[0, 0].item() == w[-1, -1].item() == float(name) for name, w in tensors.items())
    print(json.dumps([right, len(seen), max(seen, default=before) - before, anonymous_bytes() - before]))
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="the kernel does not tell")
@pytest.mark.parametrize("how", ["columns", "packed", "swapped", "legacy"])
def test_copying_out_takes_the_memory_of_one_value(tmp_path, how):
    """One of 12 with 4 MiB each; a packed one needs its record, too."""
    made = {str(n): torch.full((1024, 1024), float(n)) for n in range(12)}
    if how == "columns":
        made = {name: torch.cat([w, w], 1)[:, 512:1536] for name, w in made.items()}
    if how == "swapped":
        made = {
            name: torch.frombuffer(bytearray(w.numpy().byteswap()), dtype=w.dtype).view_as(w)
            for name, w in made.items()
        }
    form = LEGACY if how == "legacy" else {}
    path = saved(tmp_path / "x.bin", made, **form)
    small = saved(tmp_path / "y.bin", {"w": torch.ones(1, 4)[:, ::2]})
    if how == "packed":
        repacked(path, zipfile.ZIP_DEFLATED)
    if how == "swapped":
        repacked(path, byteorder=b"big")

    right, written, peak, left = json.loads(run_script(COPIED, path, small))

    assert right
    assert (0 if how == "legacy" else 12) == written  # the legacy form is copied from file to file, if at all
    assert (0 if how == "legacy" else 3 << 20) <= peak < (16 << 20)
    assert left < 6 << 20


@pytest.mark.parametrize("nest", NESTS)
def test_a_state_dict_under_a_usual_key_is_taken_and_the_rest_is_left(tmp_path, nest):
    path = saved(
        tmp_path / "x.ckpt",
        {nest: collections.OrderedDict(w=torch.ones(2), step=3), "epoch": 7, "loss": torch.tensor(0.5)},
    )

    assert ["w"] == list(load_file(path))


def test_other_objects_are_left_out(tmp_path):
    path = saved(
        tmp_path / "x.pt",
        {"w": torch.ones(2), "step": 3, "note": "hello", 5: torch.ones(1), "inner": {"v": torch.ones(1)}},
    )

    assert ["w"] == list(load_file(path))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("held", "words"),
    [
        (torch.ones(2), "no tensors by name, but a Tensor"),
        ([torch.ones(2)], "no tensors by name, but a list"),
        ({}, "no tensors by name, but an empty dictionary"),
        ({"step": 3, "args": {"lr": 0.1}}, r"no tensors by name, but a dictionary of 2 \('step': int, 'args': dict\)"),
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


def test_sparse_foreign_and_empty_tensors_are_named_and_the_others_are_read(tmp_path):
    values = {
        "w": torch.ones(2),
        "coo": torch.eye(3).to_sparse(),
        "csr": torch.eye(3).to_sparse_csr(),
        "meta": torch.empty(3, device="meta"),
    }
    path = saved(tmp_path / "x.bin", values)
    words = {"coo": "sparse_coo tensor: save its to_dense", "csr": "sparse_csr tensor", "meta": "on the meta device"}

    assert [1, 1] == OffloadedTensor.from_file(path, "w").tolist()
    for key, word in words.items():
        with pytest.raises(CorruptFileError, match=rf"'{key}' in .*x\.bin .*{word}"):
            OffloadedTensor.from_file(path, key)


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


@FORMS
def test_code_in_a_pickle_is_refused_and_not_run(tmp_path, form):
    path = saved(tmp_path / "x.bin", {"w": torch.ones(1), "bomb": Bomb(tmp_path / "exploded")}, **form)

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
    "names that are nests": (
        pickle.dumps({((((),) * 9,) * 9,) * 9: 1}, 2)[2:],
        r"a dictionary of 1 \(\(\(\(.{,50}: int\)",
    ),
}


@FORMS
@pytest.mark.parametrize("what", GREEDY)
def test_a_pickle_takes_no_more_memory_than_its_length_allows(tmp_path, form, what):
    """Each of these would take all memory there is, or forever."""
    code, words = GREEDY[what]
    path = saved(tmp_path / "x.bin", {}, **form)
    if form:
        head = path.read_bytes()[: -len(pickle.dumps({}, 2) + pickle.dumps([], 2))]
        path.write_bytes(head + b"\x80\2" + code + pickle.dumps([], 2))
    else:
        path = repacked(path, **{"data.pkl": b"\x80\2" + code})

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


@pytest.mark.parametrize("packing", [zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA], ids=["deflated", "lzma"])
@pytest.mark.parametrize("claim", [True, False], ids=["as it is", "as a few bytes"])
def test_a_pickle_with_an_absurd_ratio_is_not_unpacked(tmp_path, packing, claim):
    """64 MB of empty lists, which would be gigabytes, whether its zip directory says so or not."""
    path = repacked(saved(tmp_path / "x.bin", {}), packing, **{"data.pkl": b"\x80\2" + b"]" * (1 << 26)})
    if not claim:
        data = bytearray(path.read_bytes())
        at = data.rindex(b"x/data.pkl") - 46  # its directory entry; bytes 24 to 28 are its size
        data[at + 24 : at + 28] = struct.pack("<I", 100)
        path.write_bytes(data)
    tracemalloc.start()

    try:
        with pytest.raises(
            CorruptFileError, match=r"more than any pickle of tensors|does not read|data\.pkl can't be read"
        ):
            TensorFile.open(path)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_bare_pickle_is_not_opened(tmp_path, protocol):
    (tmp_path / "x.bin").write_bytes(pickle.dumps(Bomb(tmp_path / "exploded"), protocol=protocol))

    with pytest.raises(CheckpointError, match=r"a pickle that torch\.save did not write"):
        TensorFile.open(tmp_path / "x.bin")
    assert not (tmp_path / "exploded").exists()


def zip_of_text(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "hello")


def old_tar(path: Path) -> None:
    with tarfile.open(path, "w:", format=tarfile.PAX_FORMAT) as archive:
        archive.addfile(tarfile.TarInfo("storages"), io.BytesIO(b""))


LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n"
OTHERS = {
    "a whole model": (
        lambda path: saved(path, nn.Linear(2, 2)),
        CheckpointError,
        r"torch\.save\(model\.state_dict\(\), path\)",
    ),
    "TorchScript": (
        lambda path: torch.jit.save(torch.jit.script(nn.Linear(2, 2)), path),
        CheckpointError,
        r"TorchScript archive.*state_dict\(\)",
    ),
    "a zip": (zip_of_text, CheckpointError, r"zip archive, but torch\.save did not write it"),
    "an old tar": (old_tar, CheckpointError, r"tar form of PyTorch before 0\.2.*torch\.load if you trust it"),
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
        ({"data/0": None}, "it has no record data/0"),
        ({"data/0": b"\0" * 8}, "record data/0 has 8 bytes, and 16 by its pickle"),
        ({"byteorder": b"middle"}, "neither little nor big"),
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


@pytest.mark.parametrize("place", ["nowhere", "at another record"])
def test_a_directory_that_points_elsewhere_is_refused(tmp_path, place):
    path = saved(tmp_path / "x.bin", {"w": torch.ones(4), "v": torch.zeros(4)})
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        other = archive.getinfo("x/data/1").header_offset if place == "at another record" else 5
    at = data.rindex(b"x/data/0") - 46  # its directory entry; bytes 42 to 46 are the record's offset
    data[at + 42 : at + 46] = struct.pack("<I", other)
    path.write_bytes(data)

    with pytest.raises(CorruptFileError, match=r"x/data/0 is not where its zip directory says|Overlapped entries"):
        TensorFile.open(path)


def test_packed_bytes_that_contradict_the_directory_are_refused(tmp_path):
    path = repacked(saved(tmp_path / "x.bin", {"w": torch.zeros(1 << 16)}), zipfile.ZIP_DEFLATED)
    entry = TensorFile.open(path).header.loose["w"]
    data = bytearray(path.read_bytes())
    data[entry.record.start : entry.record.start + 20] = b"\xff" * 20
    path.write_bytes(data)

    with pytest.raises(CorruptFileError, match=r"x\.bin can't be unpacked"):
        load_file(path)


@FORMS
def test_any_bytes_give_a_header_or_an_offload_error(tmp_path, form):
    whole = saved(tmp_path / "x.bin", {"w": torch.randn(9), "v": torch.randn(8)[::2]}, **form).read_bytes()
    chance = random.Random(0)
    path, size, opened = tmp_path / "odd.bin", len(whole), 0

    for number in range(400):
        odd = bytearray(whole)
        for _ in range(chance.randint(1, 4)):
            odd[chance.randrange(size)] = chance.randrange(256)
        path.write_bytes(odd)
        os.utime(path, ns=(number, number))
        try:
            header = TensorFile.open(path).header
        except OffloadError:
            continue
        opened += 1
        assert all(0 <= e.start <= e.start + e.layout.nbytes <= size for e in header.entries.values())

    assert 0 < opened < 400
