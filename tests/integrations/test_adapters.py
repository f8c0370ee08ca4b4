"""A model's folder with an adapter of peft in it, or an adapter's folder: what each call and command makes of it.

The table below has every combination: what must come of it is the model with the adapter, or an error with a way out.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from conftest import contents
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedTokenizerFast

import offload
from offload import cli
from offload.errors import CheckpointError, UnsupportedOpError
from tests.integrations.test_peft import KINDS, NOT_NEUTRAL, ONE, adapter_for
from tests.tiny import tiny_checkpoint

TOKENS = torch.tensor([[1, 5, 9, 2]])
WITH_IT, ALONE, REFUSED = "the model with the adapter", "the model alone", "an error with a way out"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_checkpoint(tmp_path_factory.mktemp("base"), tie_word_embeddings=False, max_shard_size="5GB")
    words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(96)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    return folder


def adapter_in(folder: Path, base: Path, config: Any = None) -> Path:
    model = AutoModelForCausalLM.from_pretrained(base)
    return adapter_for(model, config or LoraConfig(**ONE, **NOT_NEUTRAL), folder)


def _together(folder: Path, base: Path) -> None:
    adapter_in(folder, base)
    shutil.copytree(base, folder, dirs_exist_ok=True)


def _among_others(folder: Path, base: Path) -> None:
    """As a pickle, with a trainer's files and the base's configuration."""
    adapter_in(folder, base)
    shutil.copy(base / "config.json", folder)
    for name in ("optimizer.pt", "training_args.bin", "rng_state.pth"):
        torch.save({}, folder / name)
    torch.save(load_file(folder / "adapter_model.safetensors"), folder / "adapter_model.bin")
    (folder / "adapter_model.safetensors").unlink()


def _of_another_name(folder: Path, base: Path) -> None:
    _together(folder, base)
    (folder / "model.safetensors").rename(folder / "weights.safetensors")


def _naming(folder: Path, base: Path, named: Path | None) -> None:
    """The adapter's settings name another base than its own."""
    adapter_in(folder, base)
    config = json.loads((folder / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = named and str(named)
    (folder / "adapter_config.json").write_text(json.dumps(config))


ACTS = ("from_pretrained", "plan", "generate", "convert", "quantize", "merge-lora")
_OF_ONE = dict.fromkeys(ACTS, WITH_IT)
_OF_TWO = {act: WITH_IT if act in ("from_pretrained", "plan", "generate") else REFUSED for act in ACTS}
TABLE: dict[str, tuple[Callable[[Path, Path], object], dict[str, str]]] = {
    "base alone": (lambda folder, base: shutil.copytree(base, folder), dict.fromkeys(ACTS, ALONE)),
    "one folder": (_together, _OF_ONE),
    "one folder, a file of another name": (_of_another_name, _OF_ONE),
    "two folders": (adapter_in, _OF_TWO),
    "two folders, among other files": (_among_others, _OF_TWO),
    "the base is gone": (lambda *to: _naming(*to, to[1].with_name("gone")), dict.fromkeys(ACTS, REFUSED)),
    "no base is named": (lambda *to: _naming(*to, None), dict.fromkeys(ACTS, REFUSED)),
}


def command(name: str, folder: Path, adapter: Path, target: Path) -> list[str]:
    words: dict[str, list[object]] = {
        "plan": ["plan", folder, "--disk-rate", "1GB"],
        "generate": ["generate", folder, "--prompt", "w5", "--max-new-tokens", "4"],
        "merge-lora": ["merge-lora", folder, adapter, target],
        "quantize": ["quantize", folder, target, "--int8", "--group-size", "32"],
        "convert": ["convert", folder, target],
    }
    return [*map(str, words[name])]


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(TOKENS).logits
    return found


@pytest.fixture
def act(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], request: Any) -> Any:
    """Does one of `ACTS` with a folder, and compares what comes of it."""
    target = tmp_path / "target"

    def reference(model: Path, adapter: Path | None, load: Any = AutoModelForCausalLM.from_pretrained) -> Any:
        plain = load(model)
        return plain if adapter is None else PeftModel.from_pretrained(plain, adapter)

    def written(name: str, folder: Path, adapter: Path | None) -> None:
        """The new folder holds the adapter as the old one does, beside the model."""
        ours = offload.from_pretrained(target)
        alone = offload.from_pretrained(target, adapter=False)
        expected = logits(alone if adapter is None else PeftModel.from_pretrained(alone, adapter))
        assert torch.equal(expected, logits(ours))
        if name != "quantize":
            assert torch.equal(logits(reference(base, adapter)), expected)
        if name == "convert" or (name == "quantize" and adapter is None):
            assert torch.allclose(expected, logits(AutoModelForCausalLM.from_pretrained(target)), atol=1e-5)
        names = {path.name for path in folder.glob("adapter_*")}
        assert names == {path.name for path in target.glob("adapter_*")}
        assert all((folder / name).read_bytes() == (target / name).read_bytes() for name in names)

    def done(name: str, folder: Path, adapter: Path | None) -> None:
        other = adapter_in(tmp_path / "other", base) if name == "merge-lora" and adapter is None else folder
        if name != "from_pretrained":
            words = command(name, folder, other, target) + ["--json"] * (name in ("plan", "generate"))
            assert 0 == cli.main(words), capsys.readouterr().err

        if name == "from_pretrained":
            found = offload.from_pretrained(folder)
            assert torch.equal(logits(reference(base, adapter)), logits(found))
            assert LlamaForCausalLM is found.__class__
            assert (adapter is not None) == getattr(found, "_hf_peft_config_loaded", False)
        elif name == "plan":
            expected = sum(parameter.numel() for parameter in reference(base, None).parameters())
            assert expected == json.loads(capsys.readouterr().out)["model"]["parameters"]
        elif name == "generate":
            tokens = reference(base, adapter).generate(torch.tensor([[5]]), max_new_tokens=4, do_sample=False)
            assert tokens[0, 1:].tolist() == json.loads(capsys.readouterr().out)["tokens"]
        elif name == "merge-lora":
            expected = logits(reference(base, other).merge_and_unload())
            assert torch.equal(expected, logits(AutoModelForCausalLM.from_pretrained(target)))
            assert [] == list(target.glob("adapter_*"))
        else:
            written(name, folder, adapter)

    return done


@pytest.mark.parametrize("name", ACTS)
@pytest.mark.parametrize("kind", TABLE)
def test_a_folder_with_an_adapter_is_the_model_with_it_or_refused_with_a_way_out(
    kind, name, base, act, tmp_path, capsys
):
    write, outcomes = TABLE[kind]
    folder, target = tmp_path / "folder", tmp_path / "target"
    write(folder, base)
    before = contents(tmp_path)

    if outcomes[name] != REFUSED:
        act(name, folder, folder if outcomes[name] == WITH_IT else None)
        return

    if name == "from_pretrained":
        with pytest.raises(CheckpointError, match="adapter") as raised:
            offload.from_pretrained(folder)
        said = str(raised.value)
    else:
        assert 1 == cli.main(command(name, folder, folder, target))
        said = " ".join(capsys.readouterr().err.split())
    assert before == contents(tmp_path)
    assert "adapter" in said
    assert {"the base is gone": "gone", "no base is named": "PeftModel"}.get(kind, "merge-lora") in said


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_of_any_kind_in_the_folder_is_loaded_as_peft_does(kind, base, tmp_path):
    """Also those that transformers' own loading leaves in part as they were made, such as DoRA's magnitudes."""
    adapter_in(tmp_path, base, KINDS[kind]())
    expected = logits(PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path))
    random = torch.get_rng_state()
    model = offload.from_pretrained(tmp_path)

    assert torch.equal(expected, logits(model))
    assert torch.equal(random, torch.get_rng_state())
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not torch.equal(expected, logits(offload.from_pretrained(tmp_path, adapter=False)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_an_adapter_is_loaded_in_the_dtype_that_transformers_loads_it_in(stored, dtype, base, tmp_path):
    _together(tmp_path, base)
    file = tmp_path / "adapter_model.safetensors"
    save_file({name: value.to(stored) for name, value in load_file(file).items()}, file)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    model = offload.from_pretrained(tmp_path, dtype=dtype)

    assert torch.equal(logits(plain), logits(model))
    types = {name: value.dtype for name, value in plain.state_dict().items()}
    assert types == {name: value.dtype for name, value in model.state_dict().items()}


def test_a_folder_with_a_model_and_its_adapter_is_whole(base, tmp_path, capsys):
    _together(tmp_path, base)

    assert 0 == cli.main(["verify", str(tmp_path)]), capsys.readouterr().out
    assert 0 == cli.main(["inspect", str(tmp_path), "--json"])
    assert "lora" not in capsys.readouterr().out


def test_an_adapter_that_adds_tokens_is_refused_by_its_kind(base, tmp_path):
    config = peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(tmp_path)

    with pytest.raises(CheckpointError, match=r"of kind PROMPT_TUNING.*adapter=False.*\.PeftModel"):
        offload.from_pretrained(tmp_path)

    model = PeftModel.from_pretrained(offload.from_pretrained(tmp_path, adapter=False), tmp_path)
    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path)
    assert torch.equal(logits(plain), logits(model))


def test_without_peft_a_folder_with_an_adapter_is_refused(base, tmp_path, monkeypatch):
    """Transformers loads the model alone, without a word."""
    _together(tmp_path, base)
    monkeypatch.setitem(__import__("sys").modules, "peft", None)

    with pytest.raises(ImportError, match="peft"):
        offload.from_pretrained(tmp_path)

    assert offload.from_pretrained(tmp_path, adapter=False)


def test_weights_that_transformers_loads_itself_are_refused_beside_an_adapter(base, tmp_path):
    from tests.checkpoints.forms import FORMS

    name = next(name for name in FORMS if name.startswith("bitnet"))
    FORMS[name].write(tmp_path)
    adapter_in(tmp_path, base)

    with pytest.raises(CheckpointError, match="adapter"):
        offload.from_pretrained(tmp_path)


def test_a_second_adapter_is_not_merged_into_a_model_that_has_one(base, tmp_path):
    _together(tmp_path / "both", base)
    other = adapter_in(tmp_path / "other", base)

    with pytest.raises(UnsupportedOpError, match=r"has an adapter already: .*adapter=False"):
        offload.merge_lora(offload.from_pretrained(tmp_path / "both"), other)
    with pytest.raises(UnsupportedOpError, match=r"has an adapter already"):
        offload.merge_lora(get_peft_model(offload.from_pretrained(base), LoraConfig(**ONE)), other)

    assert 1 == cli.main(["merge-lora", str(tmp_path / "both"), str(other), str(tmp_path / "new")])
    assert ["both", "other"] == sorted(os.listdir(tmp_path))
