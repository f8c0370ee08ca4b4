"""Every checkpoint format, from disk as plain transformers has it in memory: loaded, filled, run, copied, saved."""

from __future__ import annotations

import copy
import json
import pickle
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.quantizers import HfQuantizer

import offload
from offload.checkpoints.conversion import convert_checkpoint
from offload.errors import CheckpointError
from offload.tensor.views import handle_of
from tests.checkpoints.forms import FORMS, PROMPT, Form, Outcome, empty_model, loaded, model_of, outcome
from tests.checkpoints.pieces import loaded_from_new, losses_of_an_adapter
from tests.conftest import contents
from tests.processes import in_fork, run_script

pytestmark = pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning")

_SMALL = 1024  # bytes up to which a value may be in memory
FP8 = [name for name in FORMS if name.startswith("fp8")]
TORCHAO = [name for name in FORMS if name.startswith("torchao")]
FILLED = ["gguf-q4_k_m", "gguf-q4_k_m-bfloat16", "gguf-tied", "gguf-qwen3_moe", "gguf-lfm2-q4_k"]
FILLED = [*FP8, *TORCHAO, *FILLED, "gguf-qwen3_5_moe-bfloat16"]
KEPT = ["fp8-llama", "fp8-qwen3_moe", "ct-w4a16", "ct-nvfp4a16", "bnb-nf4", "bnb-int8", "mxfp4-gpt_oss", "gptq", "awq"]
KEPT += ["gguf-q4_k_m", "llama-float32-as-bfloat16", "qwen3_moe"]
SAVED = ["fp8-llama", "fp8-llama-shards", "fp8-qwen3_moe", "fp8-tensor-static", "fp8-scale-name", "fp8-fp4-experts"]
SAVED += ["ct-w4a16", "ct-w4a16-qwen3_moe", "ct-fp8-tensor", "ct-nvfp4a16", "bnb-nf4-double", "bnb-int8", *TORCHAO]
RELOADED = ["llama", "mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "hrm_text", "olmo_hybrid", "inkling2_text"]
RELOADED += ["fp8-llama", "fp8-mixtral", "fp8-qwen3_moe", "fp8-deepseek_v3", "fp8-tensor-static", "mxfp4-gpt_oss"]
RELOADED += ["ct-w4a16", "ct-w4a16-qwen3_moe", "bnb-nf4", "bnb-int8", "gptq", "awq"]
RELOADED += ["bitnet-autobitlinear-offline", "gguf-q8_0", *TORCHAO]
CONVERTED = ["fp8-llama", "fp8-qwen3_moe", "mxfp4-gpt_oss", "ct-w4a16", "ct-fp8-channel-qwen3_moe", "bnb-nf4"]
CONVERTED += ["bnb-int8", "gptq", "awq", "gguf-q4_k_m", "gguf-q4_k_m-bfloat16", "gguf-qwen3_moe", "gguf-lfm2-q4_k"]
CONVERTED += ["gguf-qwen3_5"]
DENSE_BESIDE = ["fp8-llama", "fp8-qwen3_moe", "fp8-deepseek_v3", "bnb-nf4", "bnb-int8", "ct-w4a16", "mxfp4-gpt_oss"]
DENSE_BESIDE += ["torchao-int8"]
ADAPTED = ["fp8-llama", "fp8-qwen3_moe", "ct-w4a16", "bnb-nf4", "bnb-nf4-double", "bnb-int8", "gguf-q4_k_m"]


@dataclass(frozen=True)
class Written:
    """A checkpoint in a format, in a folder that no test writes to."""

    folder: Path
    form: Form
    before: dict[str, Any]

    def load(self, **options: Any) -> Any:
        """The model, from disk."""
        return offload.from_pretrained(self.folder, **self.form.options, **options)

    @cached_property
    def expected(self) -> Outcome:
        """The results of plain transformers."""
        return outcome(self.form.plain(self.folder))

    @property
    def file(self) -> Path:
        """The folder, or a GGUF file in it."""
        return self.folder / self.form.options.get("gguf_file", "")

    @property
    def quantization(self) -> Any:
        """What the configuration says of it."""
        return quantization_in(self.folder)


@pytest.fixture(scope="module")
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Written]:
    """The checkpoint in the format of that name."""
    folder = tmp_path_factory.mktemp(request.param)
    FORMS[request.param].write(folder)
    yield (made := Written(folder, FORMS[request.param], contents(folder)))
    assert made.before == contents(folder)


def each(names: Any) -> pytest.MarkDecorator:
    """Each of these formats."""
    return pytest.mark.parametrize("written", names, indirect=True)


def values_in(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for path in sorted(folder.glob("*.safetensors")) for name, value in load_file(path).items()}


def quantization_in(folder: Path) -> Any:
    path = folder / "config.json"
    return json.loads(path.read_text()).get("quantization_config") if path.exists() else None


def notes_in(folder: Path) -> dict[str, Any]:
    """What a file says of the weights in torchao's classes."""
    with safe_open(next(folder.glob("*.safetensors")), "pt") as opened:
        return {key: json.loads(said) for key, said in opened.metadata().items() if key.endswith("weight")}


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    bits = [value.reshape(-1).view(torch.uint8) for value in (one, other)]
    return one.dtype == other.dtype and torch.equal(*bits)


def in_memory(model: nn.Module) -> list[str]:
    """Parameters and buffers in memory, except small ones."""
    named = (*model.named_parameters(), *model.named_buffers())
    return [name for name, value in named if not offload.is_offloaded(value) and value.nbytes > _SMALL]


def recipes(model: nn.Module) -> list[Any]:
    found = [value for value in model.parameters() if offload.is_offloaded(value)]
    return [value for value in found if handle_of(value).composed is not None]


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(PROMPT).logits
    return found


class TestForm:
    """What holds for each format. The weights are on disk; nothing is written but what is asked for."""

    @each(FORMS)
    def test_runs_from_disk_as_in_memory(self, written: Written, tmp_path: Path, private_place: Path) -> None:
        """Logits and four tokens are bit-identical, and finite; no folder has a file."""
        in_own = written.load(offload_dir=tmp_path)
        model = written.load()
        at_first = [*in_memory(model), *in_memory(in_own)]
        found = outcome(model)

        assert torch.equal(written.expected.logits, found.logits)
        assert torch.equal(written.expected.tokens, found.tokens)
        assert [] == at_first == in_memory(model)
        assert {} == contents(private_place) == contents(tmp_path)
        assert found.logits.isfinite().all()
        assert 0.1 < found.logits.float().std() < 10

    @each(ADAPTED)
    def test_trains_an_adapter_as_the_dequantized_model(self, written: Written, private_place: Path) -> None:
        """The losses of three steps are bit-identical; the weights stay on disk, unchanged."""
        model, dense = written.load(), written.form.plain(written.folder)
        dense.is_loaded_in_4bit = dense.is_loaded_in_8bit = False  # left over in transformers 5.23

        expected, found = (losses_of_an_adapter(one, PROMPT) for one in (dense, model))

        assert expected == found
        assert 3 == len(set(found))
        frozen = {key: value for key, value in model.named_parameters() if not value.requires_grad}
        assert [] == [key for key, value in frozen.items() if not offload.is_offloaded(value) and value.nbytes > _SMALL]
        assert {} == contents(private_place)

    @each(FILLED)
    def test_fills_an_empty_model(self, written: Written) -> None:
        """Its results are plain transformers'; every weight stays packed in place; the model keeps its own dtype."""
        if written.file == written.folder:
            empty, again = empty_model(written.folder), empty_model(written.folder)
        else:
            plain = written.form.plain(written.folder)
            with offload.init_empty_weights():
                empty, again = (AutoModelForCausalLM.from_config(plain.config, dtype=plain.dtype) for _ in range(2))

        model = offload.load_checkpoint_and_dispatch(empty, written.file)
        report = offload.load_checkpoint_in_model(again, written.file)

        found = outcome(model.eval())
        assert torch.equal(written.expected.logits, found.logits)
        assert torch.equal(written.expected.tokens, found.tokens)
        assert all(offload.is_offloaded(value) and not handle_of(value).owned for value in model.parameters())
        assert [] == report.missing_keys

    @each(KEPT)
    def test_is_the_same_in_copies_threads_and_a_forked_child(self, written: Written, private_place: Path) -> None:
        """Of what is decoded nothing is written: a copy is of the same pieces. Only what is referenced is copied."""
        model = written.load()
        expected, count = logits(model), len(recipes(model))
        decoded = {f"{handle_of(value).name}.safetensors" for value in recipes(model)}

        copied = copy.deepcopy(model)
        # Before there are threads: MKL's memory is locked in a child that is forked as one of them ends.
        assert in_fork(lambda: torch.equal(expected, logits(model)))
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(logits, [model, copied] * 4))

        assert all(torch.equal(expected, one) for one in found)
        assert count > 0
        assert count == len(recipes(copied)) == len(recipes(model))
        assert decoded.isdisjoint(path.name for path in private_place.rglob("*.safetensors"))

    @each(["fp8-qwen3_moe", "bnb-nf4", "gptq", "gguf-q4_k_m", "llama-float32-as-bfloat16"])
    def test_is_sent_to_another_process_as_a_reference(
        self, written: Written, tmp_path: Path, private_place: Path
    ) -> None:
        value = max(recipes(written.load()), key=lambda one: one.numel())
        sent = bytes(ForkingPickler.dumps(value.detach()))
        (tmp_path / "sent").write_bytes(sent)
        torch.save(value.materialize(), tmp_path / "plain.pt")

        said = run_script(
            """
                import pickle, sys, torch, offload
                value = pickle.loads(open(sys.argv[1], "rb").read())
                equal = torch.equal(torch.load(sys.argv[2]), value.materialize())
                print(offload.is_offloaded(value), equal)
            """,
            tmp_path / "sent",
            tmp_path / "plain.pt",
        )

        assert "True True" == said.strip()
        assert len(sent) < min(16_384, value.nbytes)
        assert torch.equal(value.materialize(), pickle.loads(sent).materialize())
        assert {} == contents(private_place)

    @each(KEPT)
    def test_is_compiled_and_exported(self, written: Written, private_place: Path) -> None:
        """A layer whose weight is decoded gives what it gives with the dense weight, in one graph."""
        torch._dynamo.reset()
        weight = next(value.detach() for value in recipes(written.load()) if value.dim() > 1)
        weight = weight if weight.dim() == 2 else weight[1]
        ours, theirs = (nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype) for _ in range(2))
        ours.weight = nn.Parameter(weight, requires_grad=False)
        theirs.weight = nn.Parameter(weight.materialize(), requires_grad=False)
        x = torch.randn(3, weight.shape[1], dtype=weight.dtype)

        with torch.no_grad():
            expected = theirs(x)
            compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)(x)
            exported = torch.export.export(ours, (x,)).module()(x)

        assert torch.equal(expected, compiled)
        assert torch.equal(expected, exported)
        assert handle_of(weight).composed is not None
        assert {} == contents(private_place)

    @each(SAVED)
    def test_is_saved_as_it_was_packed(self, written: Written, tmp_path: Path) -> None:
        """The same bytes, under the same names, with the same configuration: from a loaded model, and a filled one."""
        model = written.load()
        models = {"loaded": model}
        if "fp8-llama" in written.folder.name or "torchao" in written.folder.name:
            models["filled"] = offload.load_checkpoint_and_dispatch(empty_model(written.folder), written.folder)
        before = values_in(written.folder)

        for name, one in models.items():
            one.save_pretrained(tmp_path / name)

            after = values_in(tmp_path / name)
            assert before.keys() == after.keys()
            assert all(same(before[key], after[key]) for key in before)
            assert written.quantization == quantization_in(tmp_path / name)
            assert notes_in(written.folder) == notes_in(tmp_path / name)
        again = outcome(written.form.plain(tmp_path / "loaded"))
        assert torch.equal(written.expected.logits, again.logits)
        assert not any(handle_of(one).owned for one in model.parameters() if offload.is_offloaded(one))

    @each(["fp8-llama", "fp8-qwen3_moe", "ct-w4a16", "ct-fp8-tensor", "bnb-nf4", "bnb-int8"])
    @pytest.mark.parametrize("changed", ["one", "all"])
    def test_is_saved_dense_if_a_packed_value_was_changed(self, written: Written, changed: str, tmp_path: Path) -> None:
        model = written.load()
        module = model.model.layers[1 if changed == "one" else 0]
        with torch.no_grad():
            for parameter in module.parameters() if changed == "one" else model.parameters():
                parameter.mul_(2)
        wanted = outcome(model)
        model.save_pretrained(tmp_path / "theirs")
        offload.save_checkpoint(model, tmp_path / "ours")

        for folder in (tmp_path / "theirs", tmp_path / "ours"):
            assert all(value.dtype.itemsize > 1 for value in values_in(folder).values())
            assert quantization_in(folder) is None
            assert torch.equal(outcome(offload.from_pretrained(folder)).logits, wanted.logits)

    @each(RELOADED)
    def test_is_loaded_again_from_save_checkpoint(self, written: Written, tmp_path: Path) -> None:
        """With its configuration; packed pieces are written as they are."""
        model = written.load()

        offload.save_checkpoint(model, tmp_path)

        assert torch.equal(outcome(model).logits, outcome(offload.from_pretrained(tmp_path)).logits)
        if any(name in written.folder.name for name in ("fp8-llama", "fp8-qwen3", "fp8-tensor", "ct-", "bnb-", "gptq")):
            before, after = values_in(written.folder), values_in(tmp_path)
            assert before.keys() == after.keys()
            assert all(same(before[name], after[name]) for name in before)
            assert written.quantization == quantization_in(tmp_path)

    @each(CONVERTED)
    def test_is_dequantized_for_plain_transformers(self, written: Written, tmp_path: Path, private_place: Path) -> None:
        """Logits and tokens are bit-identical to the dequantized model's."""
        convert_checkpoint(written.file, tmp_path / "target", dtype=written.form.options.get("dtype"), dequantize=True)

        found = outcome(loaded()(tmp_path / "target"))
        assert torch.equal(written.expected.logits, found.logits)
        assert torch.equal(written.expected.tokens, found.tokens)
        assert quantization_in(tmp_path / "target") is None
        assert {} == contents(private_place)

    @each(DENSE_BESIDE)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
    def test_has_the_dense_values_of_transformers(self, written: Written, dtype: torch.dtype, tmp_path: Path) -> None:
        """Some formats keep the stored dtype beside bfloat16, others cast it; a requested dtype applies to all."""
        with safe_open(written.folder / "model.safetensors", "pt") as opened:
            metadata = opened.metadata()
        values = values_in(written.folder)
        for key, value in values.items():
            is_dense = "norm" in key or "lm_head" in key or key.endswith(("bias", ".gate.weight"))
            if value.dtype == torch.bfloat16 and is_dense:
                values[key] = (value.float() * 1.0009).to(dtype)
        shutil.copytree(written.folder, tmp_path, dirs_exist_ok=True)
        save_file(values, tmp_path / "model.safetensors", metadata)

        expected = written.form.plain(tmp_path).state_dict()
        found = offload.from_pretrained(tmp_path).state_dict()
        asked = offload.from_pretrained(tmp_path, dtype=torch.bfloat16)

        assert {key: one.dtype for key, one in expected.items()} == {key: one.dtype for key, one in found.items()}
        plain = [key for key, one in expected.items() if type(one) is torch.Tensor and one.is_floating_point()]
        assert "model.norm.weight" in plain
        assert [] == [key for key in plain if not torch.equal(expected[key], offload.materialize(found[key]))]
        assert torch.bfloat16 == asked.model.norm.weight.dtype == asked.lm_head.weight.dtype

    @each(["fp8-deepseek_v3", "fp8-part-block", "gptq-act-order", "awq", "ct-nvfp4a16-qwen3_moe"])
    def test_holds_the_model(self, written: Written) -> None:
        """One that is decoded here, or that publishers share: each weight is as close as its bits allow."""
        found = written.form.plain(written.folder)
        sizes = {"intermediate_size": 320} if "part-block" in written.folder.name else {}
        original = model_of(found.config.model_type, found.dtype, **sizes).state_dict()

        for key, value in found.state_dict().items():
            expected = original[key].float()
            assert (value.float() - expected).square().sum() <= 0.015 * expected.square().sum(), key


def test_dense_values_beside_packed_ones_are_cast_where_transformers_casts_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it does before 5.21."""
    FORMS["bnb-nf4"].write(tmp_path)
    file = tmp_path / "model.safetensors"
    values = load_file(file)
    save_file({**values, "lm_head.weight": values["lm_head.weight"].float()}, file, {"format": "pt"})
    monkeypatch.delattr(HfQuantizer, "get_new_dtype", raising=False)

    assert torch.bfloat16 == offload.from_pretrained(tmp_path).lm_head.weight.dtype


def test_a_scale_that_is_missing_is_an_error_though_every_name_of_the_model_is_there(tmp_path: Path) -> None:
    FORMS["fp8-llama"].write(tmp_path)
    values = load_file(tmp_path / "model.safetensors")
    left = {key: value for key, value in values.items() if not key.endswith("scale_inv")}
    save_file(left, tmp_path / "model.safetensors", {"format": "pt"})

    with pytest.raises(CheckpointError, match="scale_inv"):
        offload.load_checkpoint_and_dispatch(empty_model(tmp_path), tmp_path)


def test_a_file_gives_the_pieces_as_they_are_packed(tmp_path: Path) -> None:
    FORMS["fp8-llama"].write(tmp_path)

    found = offload.load_file(tmp_path)

    stored = load_file(tmp_path / "model.safetensors")
    assert {key: value.dtype for key, value in stored.items()} == {key: value.dtype for key, value in found.items()}


def test_modules_of_another_kind_than_the_weights_need_are_not_filled(tmp_path: Path) -> None:
    """BitNet's modules quantize activations; an empty model created from the configuration has the usual ones."""
    FORMS["bitnet-bitlinear-offline"].write(tmp_path)

    with pytest.raises(CheckpointError, match=r"quantized by bitnet.*use offload\.from_pretrained"):
        offload.load_checkpoint_and_dispatch(empty_model(tmp_path), tmp_path)


def test_experts_one_of_which_was_changed_are_dense(tmp_path: Path) -> None:
    model = loaded_from_new(tmp_path / "source", "fp8-qwen3_moe")
    with torch.no_grad():
        model.model.layers[1].mlp.experts.gate_up_proj[1].mul_(2)
    wanted = outcome(model)
    model.save_pretrained(tmp_path / "saved")
    assert quantization_in(tmp_path / "saved") is None
    assert torch.equal(outcome(offload.from_pretrained(tmp_path / "saved")).logits, wanted.logits)


def test_layers_that_changed_places_are_saved_dense(tmp_path: Path) -> None:
    """Under the names of their pieces each would be saved where it was."""
    model = loaded_from_new(tmp_path / "source", "fp8-llama")
    first, second = (layer.mlp for layer in model.model.layers)
    model.model.layers[0].mlp, model.model.layers[1].mlp = second, first
    wanted = outcome(model)
    for folder, save in ((tmp_path / "theirs", model.save_pretrained), (tmp_path / "ours", None)):
        save(folder) if save else offload.save_checkpoint(model, folder)
        assert torch.equal(outcome(offload.from_pretrained(folder)).logits, wanted.logits)


def test_a_copy_is_saved_as_the_model_is(tmp_path: Path) -> None:
    model = loaded_from_new(source := tmp_path / "source", "fp8-llama")
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied.lm_head.weight.zero_()
    copied.save_pretrained(tmp_path / "copied")
    model.save_pretrained(tmp_path / "saved")
    before = values_in(source)
    for folder in ("copied", "saved"):
        after = values_in(tmp_path / folder)
        assert all(same(before[name], after[name]) for name in before if name != "lm_head.weight")


def test_with_a_dtype_save_checkpoint_writes_dense_values(tmp_path: Path) -> None:
    model = loaded_from_new(tmp_path / "source", "fp8-llama")
    offload.save_checkpoint(model, tmp_path / "saved", dtype=torch.float32)
    saved = values_in(tmp_path / "saved")
    assert {value.dtype for value in saved.values()} == {torch.float32}
    weight = model.model.layers[0].self_attn.o_proj.weight
    assert isinstance(weight, nn.Parameter)
    assert torch.equal(saved["model.layers.0.self_attn.o_proj.weight"], offload.materialize(weight).float())
