"""Models in GGUF files: the same as plain transformers loads, over the blocks in the file."""

import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from conftest import aligned
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import offload
from offload.checkpoints.conversion import convert_checkpoint
from offload.checkpoints.forms.gguf import _KNOWN, _Outline, _processed
from offload.checkpoints.verify import verify
from offload.errors import CheckpointError, CorruptFileError, MissingFileError
from offload.tensor.deferred import DeferredTensor
from tests.checkpoints.forms import FORMS, model_of, outcome
from tests.checkpoints.gguf_files import KINDS, write_gguf

GGUF = [name for name in FORMS if name.startswith("gguf-")]
FILE = "model.gguf"


@pytest.fixture
def small(tmp_path: Path) -> Path:
    write_gguf(model_of("llama", num_hidden_layers=1), tmp_path / FILE, "Q8_0")
    return tmp_path


def finished(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("name", [name for name in GGUF if "bfloat16" not in name])
def test_each_tensor_of_a_file_is_what_the_package_dequantizes(name, tmp_path):
    FORMS[name].write(tmp_path)
    found = offload.load_file(tmp_path / FILE)

    for tensor in gguf.GGUFReader(tmp_path / FILE).tensors:
        expected = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        one = offload.OffloadedTensor.from_file(tmp_path / FILE, tensor.name)
        for value in (found[tensor.name].materialize(), one.materialize()):
            assert torch.equal(expected, value.float()), tensor.name
        assert torch.equal(expected[1:3], found[tensor.name][1:3].float())


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("F32", "F16", "BF16")])
def test_blocks_of_any_bits_are_decoded_as_by_the_package(kind, tmp_path):
    """Even if factors are infinite or NaN."""
    number = gguf.GGMLQuantizationType[kind]
    elements, size = gguf.GGML_QUANT_SIZES[number]
    blocks = np.random.default_rng(0).integers(0, 256, (7, 9 * size), dtype=np.uint8)
    writer = gguf.GGUFWriter(tmp_path / FILE, "llama")
    writer.add_tensor("w", blocks, raw_dtype=number)
    finished(writer)
    with np.errstate(all="ignore"):
        expected = torch.from_numpy(gguf.dequantize(blocks, number).copy())
    found = offload.load_file(tmp_path / FILE)["w"]

    assert (7, 9 * elements) == found.shape
    torch.testing.assert_close(expected, found.materialize(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("processor", sorted(_KNOWN))
def test_values_are_processed_as_by_the_processors_of_transformers(processor, tmp_path):
    from transformers import modeling_gguf_pytorch_utils as theirs

    said = {"num_attention_heads": 4, "num_key_value_heads": 2}
    names = ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_down", "ffn_up", "ffn_gate_inp_shexp"]
    names += ["attn_norm", "shortconv.conv", "attn_q_norm"]
    generator = np.random.default_rng(0)
    values = {
        f"blk.0.{name}.{last}": -np.abs(generator.standard_normal(shape, dtype=np.float32))
        for name in names
        for last, shape in {"weight": (96, 32), "bias": (96,)}.items()
    }
    writer = gguf.GGUFWriter(tmp_path / FILE, "llama")
    for name, value in values.items():
        writer.add_tensor(name, value)
    finished(writer)

    for name, tensor in offload.load_file(tmp_path / FILE).items():
        expected = getattr(theirs, processor)(config=said).process(values[name], name=name).weights
        found = _processed(tensor, name, processor, said)
        if isinstance(found, DeferredTensor):
            found = found.stored(name)
        assert torch.equal(torch.from_numpy(np.copy(expected)), offload.materialize(found)), name


def test_every_processor_of_transformers_is_known_but_for_rare_ones():
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS

    used = {kind.__name__ for name, kind in TENSOR_PROCESSORS.items() if name != "gpt_oss"}  # files say gpt-oss

    assert {f"{name}TensorProcessor" for name in ("Bloom", "GPT2", "Mamba")} == used - _KNOWN


OLDER = ["falcon", "gemma2", "lfm2", "llama", "nemotron", "phi3", "qwen2_moe", "starcoder2", "t5"]


@pytest.mark.parametrize("architecture", OLDER)
def test_names_in_blocks_are_found_from_above(architecture):
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    config = AutoConfig.for_model(architecture)
    config.num_hidden_layers = 2
    if architecture == "lfm2":
        config.layer_types = ["conv", "full_attention"]
    elif architecture == "nemotron":
        config.num_key_value_heads = config.num_attention_heads
    with torch.device("meta"):
        model = (AutoModel if architecture == "t5" else AutoModelForCausalLM).from_config(config)
    processor = TENSOR_PROCESSORS.get(architecture.replace("_", ""), TensorProcessor)(config=config.to_dict())
    found = get_gguf_hf_weights_map(_Outline(model), processor)

    assert "blk.1.attn_norm.weight" in found or "dec.blk.1.attn_norm.weight" in found
    assert found == get_gguf_hf_weights_map(model, processor)


def test_a_large_vocabulary_does_not_slow_a_configuration_down(tmp_path):
    """The package's reader would take 20 us per token."""
    from transformers import AutoConfig

    from offload.checkpoints.forms.gguf import config_of

    write_gguf(model_of("qwen2", num_hidden_layers=1), tmp_path / FILE, "Q8_0")
    config, _ = config_of(tmp_path / FILE)

    expected = AutoConfig.from_pretrained(tmp_path, gguf_file=FILE).to_dict()
    assert {**expected, "_name_or_path": ""} == {**config.to_dict(), "_name_or_path": ""}


@pytest.mark.parametrize("save", ["save_pretrained", "save_checkpoint"])
@pytest.mark.parametrize("name", ["gguf-q4_k_m-bfloat16", "gguf-qwen3_moe", "gguf-qwen3_5"])
def test_a_model_is_saved_dense(name, save, tmp_path):
    (tmp_path / "from").mkdir()
    FORMS[name].write(tmp_path / "from")
    model = offload.from_pretrained(tmp_path / "from", **FORMS[name].options)
    expected = outcome(model)
    if save == "save_pretrained":
        model.save_pretrained(tmp_path / "to")
    else:
        offload.save_checkpoint(model, tmp_path / "to")

    found = outcome(offload.from_pretrained(aligned(tmp_path / "to")))
    assert torch.equal(expected.logits, found.logits)
    assert torch.equal(expected.tokens, found.tokens)


def test_wrong_files_and_arguments_are_refused_by_name(small, tmp_path):
    with pytest.raises(MissingFileError, match=r"other\.gguf"):
        offload.from_pretrained(small, gguf_file="other.gguf")
    (small / "notes.txt").write_text("no model")
    with pytest.raises(CheckpointError, match=r"notes\.txt is not a GGUF file"):
        offload.from_pretrained(small, gguf_file="notes.txt")
    for load in (offload.from_pretrained, offload.load_file):
        with pytest.raises(CheckpointError, match=r"GGUF files \(model\.gguf\)"):
            load(small)
    (small / FILE).write_bytes((small / FILE).read_bytes()[:-100])
    with pytest.raises(CorruptFileError, match=r"model\.gguf"):
        offload.from_pretrained(small, gguf_file=FILE)


def _empty_file(path: Path, architecture: str, **said: int) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    for name, number in said.items():
        writer.add_uint16(name.replace("_", "."), number)
    writer.add_tensor("output_norm.weight", np.ones(8, np.float32))
    finished(writer)
    return path


def test_files_that_transformers_cannot_load_are_refused_with_the_reason(tmp_path):
    with pytest.raises(CheckpointError, match=r"one\.gguf.*bert-like"):
        offload.from_pretrained(_empty_file(tmp_path / "one.gguf", "bert-like"))
    with pytest.raises(CheckpointError, match="one of 3 parts, and its name"):
        offload.from_pretrained(_empty_file(tmp_path / "part.gguf", "llama", split_count=3))


@pytest.fixture(params=["older", "newer"])
def in_parts(request: pytest.FixtureRequest, tmp_path: Path) -> list[Path]:
    """A model in several files, the first of which has no values, as transformers reads it by either mechanism."""
    model = model_of("llama") if request.param == "older" else model_of("qwen3_5_text")
    write_gguf(model, tmp_path / FILE, "Q8_0")
    (tmp_path / "parts").mkdir()
    write_gguf(model, tmp_path / "parts" / FILE, "Q8_0", split_max_tensors=5, small_first_shard=True)
    return sorted((tmp_path / "parts").iterdir())


def test_a_model_in_parts_is_opened_by_any_of_them_and_a_whole_one_by_file_or_folder(in_parts):
    folder = in_parts[0].parent.parent
    whole = offload.from_pretrained(folder / FILE)
    assert len(in_parts) > 2

    for given in (in_parts[0], in_parts[-1], folder):
        model = offload.from_pretrained(given, gguf_file=FILE if given == folder else None)

        assert model.config.to_dict() == {**whole.config.to_dict(), "_name_or_path": model.config._name_or_path}
        assert torch.equal(model(torch.arange(10)[None]).logits, whole(torch.arange(10)[None]).logits)
    assert offload.load_file(in_parts[1]).keys() == offload.load_file(folder / FILE).keys()
    assert not verify(in_parts[1]).findings
    assert not verify(in_parts[1].parent).findings


def test_a_part_that_is_missing_or_elsewhere_is_named(in_parts):
    second = in_parts[1]
    second.rename(second.with_name("elsewhere"))
    with pytest.raises(MissingFileError, match=second.name):
        offload.from_pretrained(in_parts[0])
    assert any(second.name in finding for finding in verify(in_parts[0]).findings)

    shutil.copyfile(in_parts[2], second)
    with pytest.raises(CheckpointError, match=rf"{second.name} is not part 2 of {len(in_parts)}"):
        offload.load_file(in_parts[0])
    assert any("is not part 2" in finding for finding in verify(in_parts[0].parent).findings)


def test_inspect_and_verify_read_a_gguf_file(small, capsys):
    from offload.cli.main import main

    main(["inspect", str(small / FILE)])
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("token_embd.weight", "Q8_0", "[96, 128]"))

    main(["verify", str(small)])
    assert "whole (1 file" in capsys.readouterr().out


# Rotary embeddings that are stretched

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
STRETCHED: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "llama3": {"rope_type": "llama3", "factor": 8.0, **LLAMA3},
}


def _stretched(folder: Path, **rope: Any) -> tuple[Any, Path]:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1}
    sizes |= {"vocab_size": 256, "num_key_value_heads": 1, "max_position_embeddings": 512}
    model = LlamaForCausalLM(LlamaConfig(**sizes, rope_parameters={"rope_theta": 5e5, **rope})).eval()
    return model, write_gguf(model, folder / "model.gguf", "F32")


@pytest.mark.parametrize("kind", STRETCHED)
def test_rotary_embeddings_are_stretched_as_the_file_says(kind, tmp_path):
    """As in the model that it was made of: transformers reads none of this."""
    usual, _ = _stretched(tmp_path)
    plain, path = _stretched(tmp_path, **STRETCHED[kind])
    model = offload.from_pretrained(path)
    convert_checkpoint(path, tmp_path / "dense")

    tokens = torch.arange(200)[None]
    with torch.no_grad():
        expected, others = plain(tokens).logits, usual(tokens).logits
        found = [one(tokens).logits for one in (model, AutoModelForCausalLM.from_pretrained(tmp_path / "dense"))]
    torch.testing.assert_close(found, [expected, expected], rtol=0, atol=1e-6)
    assert (others - expected).abs().max() > 1e-4


REFUSED: dict[str, Any] = {
    "longrope": lambda writer: writer.add_string("llama.rope.scaling.type", "longrope"),
    "rope_factors_long": lambda writer: writer.add_tensor("rope_factors_long.weight", np.ones(32, np.float32)),
    "freqs": lambda writer: writer.add_tensor("rope_freqs.weight", np.linspace(1, 3, 32, dtype=np.float32)),
    "attn_factor": lambda writer: writer.add_rope_scaling_attn_factors(1.5),
    "yarn_ext_factor": lambda writer: writer.add_rope_scaling_yarn_ext_factor(0.5),
    "yarn without a context": lambda writer: (
        writer.add_string("llama.rope.scaling.type", "yarn"),
        writer.add_rope_scaling_factor(2.0),
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_rotary_embeddings_that_are_stretched_otherwise_are_refused_by_name(what, tmp_path, monkeypatch):
    monkeypatch.setattr("tests.checkpoints.gguf_files._stretch", lambda writer, *_: REFUSED[what](writer))
    plain, path = _stretched(tmp_path)

    with pytest.raises(CheckpointError, match=r"rotary embeddings .* \(.*rope.*\): pass config=") as raised:
        offload.from_pretrained(path)

    assert str(path) in str(raised.value)
    assert what.split()[0].split("_")[0] in str(raised.value)
    assert offload.from_pretrained(path, config=plain.config).config.rope_parameters == plain.config.rope_parameters


@pytest.mark.parametrize("factors", [np.ones(32, np.float32), None])
def test_rotary_embeddings_that_are_not_stretched_stay_so(factors, tmp_path, monkeypatch):
    def stretch(writer: Any, *_: Any) -> None:
        writer.add_string("llama.rope.scaling.type", "none")
        writer.add_rope_scaling_factor(4.0)
        if factors is not None:
            writer.add_tensor("rope_freqs.weight", factors)

    monkeypatch.setattr("tests.checkpoints.gguf_files._stretch", stretch)
    _, path = _stretched(tmp_path)

    assert "default" == offload.from_pretrained(path).config.rope_parameters["rope_type"]
