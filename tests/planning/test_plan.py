"""What a model would need here, and how fast it would be: from headers, without weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    DeepseekV3Config,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
)

import offload
from offload import cli
from offload.errors import ArgumentError, CheckpointError
from offload.planning import machine
from offload.planning.estimate import Estimate
from offload.planning.machine import Computing, Disk
from offload.planning.sizes import DENSE, sizes_of
from tests.checkpoints.forms import FORMS
from tests.prefetch.delayed_device import on_the_device
from tests.sizes import SIZES

HALF = {**SIZES, "head_dim": 16, "dtype": "bfloat16"}
LARGER = {**HALF, "hidden_size": 512, "intermediate_size": 1024}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
MB = 1_000_000


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The folder of a model with this configuration."""

    def of(config: Any) -> Path:
        place = tmp_path_factory.mktemp("model")
        AutoModelForCausalLM.from_config(config).save_pretrained(place)
        return place

    return of


def test_the_sizes_of_a_dense_model_are_those_of_its_headers(saved: Any) -> None:
    found = sizes_of(saved(LlamaConfig(**HALF)))

    table, attention, mlp, norms = 96 * 64, 64 * (64 + 32 + 32 + 64), 3 * 64 * 128, 2 * 64
    assert 2 * table + 2 * (attention + mlp + norms) + 64 == found.parameters
    assert (2 * found.parameters, 2 * table, 0) == (found.stored, found.rows, found.experts)
    assert ("bfloat16", 0, 2 * 2 * 2 * 16 * 2) == (found.form, found.needed_packed(1), found.kv_per_token)
    assert found.stored - found.rows == found.needed(1) == found.needed(100)


def test_a_table_that_is_the_output_layer_too_is_read_whole(saved: Any) -> None:
    found = sizes_of(saved(LlamaConfig(**HALF, tie_word_embeddings=True)))

    assert 0 == found.rows
    assert found.stored == found.needed(1)


def test_a_token_needs_the_experts_that_it_is_routed_to(saved: Any) -> None:
    found = sizes_of(saved(Qwen3MoeConfig(**HALF, **EXPERTS)))

    assert 2 * 2 * 8 * 3 * 64 * 64 == found.experts
    assert found.stored - found.rows - found.experts * 6 // 8 == found.needed(1)
    assert found.stored - found.rows == pytest.approx(found.needed(1000))


def test_shared_experts_are_needed_by_each_token(saved: Any) -> None:
    routed = {"n_routed_experts": 4, "num_experts_per_tok": 1, "n_shared_experts": 1, "moe_intermediate_size": 64}
    latent = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    sizes = {key: value for key, value in HALF.items() if key not in ("head_dim", "num_key_value_heads")}
    config = DeepseekV3Config(**sizes, **routed, **latent, n_group=1, topk_group=1, first_k_dense_replace=1)

    found = sizes_of(saved(config))

    assert 2 * 4 * 3 * 64 * 64 == found.experts
    assert 0.25 == found.share
    assert 2 * 2 * (16 + 8) == found.kv_per_token  # the latent for all heads, and the shared positional part


# How many numbers of linear layers are packed, and in how many bits; in the GGUF file the head is, too.
PACKED = {
    "fp8-llama": (294_912, 8.0),
    "ct-w4a16": (294_912, 4.5),
    "bnb-nf4": (294_912, 4.0),
    "gguf-q4_k": (417_792, 4.5),
}


@pytest.mark.parametrize("name", PACKED)
def test_a_packed_model_counts_as_it_is_packed(name: str, tmp_path: Path) -> None:
    numbers, bits = PACKED[name]
    FORMS[name].write(tmp_path)
    files = [*tmp_path.glob("*.safetensors"), *tmp_path.glob("*.gguf")]

    found = sizes_of(files[0] if files[0].suffix == ".gguf" else tmp_path)

    assert max(files, key=lambda file: file.stat().st_size) == found.file
    assert sum(file.stat().st_size for file in files) == pytest.approx(found.stored, rel=0.2)
    assert found.stored < 2 * found.parameters
    assert 0 < found.rows < found.stored - found.packed  # of the embedding, whose name is another one in a GGUF file
    assert found.form not in DENSE
    assert numbers * bits / 8 == pytest.approx(found.packed, rel=0.01)


def test_only_configuration_and_headers_are_fetched_from_the_hub(saved: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, fetched = saved(LlamaConfig(**HALF)), []
    with safe_open(folder / "model.safetensors", "pt") as file:
        tensors = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        nbytes = {name: 2 * torch.Size(one.get_shape()).numel() for name, one in tensors.items()}
    infos = {name: SimpleNamespace(dtype="BF16", data_offsets=(8, 8 + size)) for name, size in nbytes.items()}

    def snapshot_download(name: str, *, allow_patterns: list[str], **options: Any) -> str:
        fetched.append((name, *allow_patterns, options))
        return str(folder)

    def get_safetensors_metadata(name: str, **options: Any) -> Any:
        fetched.append((name, "headers", options))
        return SimpleNamespace(files_metadata={"model.safetensors": SimpleNamespace(tensors=infos)})

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    monkeypatch.setattr("huggingface_hub.get_safetensors_metadata", get_safetensors_metadata)

    found, here = sizes_of("org/model", revision="main"), sizes_of(folder)

    asked = {"revision": "main"}
    assert [("org/model", "config.json", asked), ("org/model", "headers", asked)] == fetched
    assert (here.stored, here.rows, here.form, None) == (found.stored, found.rows, found.form, found.file)


@pytest.fixture
def slow_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor with 1 MB of weights and 10 million operations per second, and a millisecond per call."""
    rates = Computing(streams=MB, multiplies=10 * MB, packed=MB, call=1e-3)
    monkeypatch.setattr("offload.planning.estimate.computing_rates", lambda _device, _form: rates)


@pytest.mark.usefixtures("slow_machine")
def test_a_pass_takes_as_long_as_the_slower_of_reading_and_computing(saved: Any) -> None:
    """The budget is above the minimum; the rates are scaled accordingly."""
    folder = saved(LlamaConfig(**LARGER))
    sizes = sizes_of(folder)
    whole, budget = sizes.stored - sizes.rows, MB + 48576
    reads = whole - budget

    slow = offload.plan(folder, max_memory=budget, disk_rate=1000, context=64).as_it_is
    quick = offload.plan(folder, max_memory=budget, disk_rate="1GB", context=64).as_it_is

    assert reads == pytest.approx(slow.reads, rel=1e-6) == quick.reads
    assert ("reading", "computing") == (slow.bound, quick.bound)
    assert slow.reads / 1000 == pytest.approx(slow.token_seconds)
    assert whole / MB + sizes.ops * 1e-3 == pytest.approx(quick.token_seconds)
    assert slow.first_seconds == pytest.approx(whole / 1000)


def test_values_that_every_token_reads_stay_before_experts(saved: Any) -> None:
    sizes = sizes_of(saved(Qwen3MoeConfig(**HALF, **EXPERTS)))
    always, experts = (
        sizes.stored - sizes.rows - sizes.experts,
        sizes.needed(1) - sizes.stored + sizes.rows + sizes.experts,
    )

    assert 0 < experts < sizes.experts
    assert always + experts == sizes.missing(1, 0)
    assert always // 2 + experts == pytest.approx(sizes.missing(1, always - always // 2))
    assert experts == sizes.missing(1, always)
    assert experts / 4 == pytest.approx(sizes.missing(1, always + sizes.experts * 3 // 4), abs=1)
    assert 0 == sizes.missing(1, sizes.stored) == sizes.missing(8, sizes.stored)


FAST = Computing(streams=1e30, multiplies=1e30, packed=1e30, call=0.0)


@pytest.mark.parametrize(
    ("form", "slow", "seconds"),
    [
        ("bfloat16", {"streams": 1.0}, 60),
        ("fp8", {"packed": 1.0}, 40),
        ("bfloat16", {"multiplies": 1.0}, 2 * 3 * 90),
        ("bfloat16", {}, 0),
    ],
)
def test_a_batch_takes_streaming_its_bytes_or_multiplying_them_and_calling_kernels(
    form: str, slow: dict[str, float], seconds: float, saved: Any
) -> None:
    """Each of the batches in flight; the rates that are not given are infinite."""
    counts = {"stored": 100, "rows": 0, "packed": 40, "parameters": 90, "looked_up": 0}
    sizes = replace(sizes_of(saved(LlamaConfig(**HALF))), form=form, ops=4, **counts)

    for in_flight in (1, 3):
        way = Estimate(sizes, MB, 1e30, replace(FAST, call=0.25, **slow)).of("", batch=3, in_flight=in_flight)

        assert in_flight * (seconds + 1) == pytest.approx(way.pass_seconds) == way.first_seconds
        assert ("computing", 3 * in_flight) == (way.bound, way.tokens)


def test_the_command_prints_a_plan_in_words_and_as_json(saved: Any, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(saved(Qwen3MoeConfig(**HALF, **EXPERTS)))
    options = ["--max-memory", "0", "--disk-rate", "1MB"]

    assert [0, 0] == [cli.main(["plan", folder, *options]), cli.main(["plan", folder, *options, "--json"])]

    *words, last = capsys.readouterr().out.splitlines()
    assert words[0].startswith("Runs here: ")
    labels = [line[2:10].strip() for line in words[1:]]
    assert ["model", "memory", "a pass", "type"] == labels[:4]
    assert {*labels[4:]} <= {"faster", ""}  # as this machine computes
    assert all(line[:2] == "  " != line[10:11] for line in words[1:])
    assert json.loads(last)["as_it_is"]["reads"] == sizes_of(folder).needed(1)


def test_the_commands_of_a_plan_have_the_options_that_it_was_made_with(saved: Any) -> None:
    folder = saved(LlamaConfig(**HALF))

    asked = offload.plan(saved(LlamaConfig(**LARGER)), max_memory="1MiB", device="cpu", disk_rate=1000, context=1)
    plain = offload.plan(folder, disk_rate=1000)

    assert all(" --max-memory 1MiB --device cpu" in way.command for way in (asked.as_it_is, asked.together))
    assert f'offload generate {folder} --prompt "..."' == plain.as_it_is.command


@on_the_device
def test_a_plan_for_an_accelerator_is_about_its_memory(
    device: torch.device, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = replace(FAST, sends=1e6)
    monkeypatch.setattr("offload.planning.estimate.computing_rates", lambda *_: rates)
    LlamaForCausalLM(LlamaConfig(**HALF | {"vocab_size": 20_000})).save_pretrained(folder)
    stored = sizes_of(folder).stored

    def planned(room: int) -> Any:
        free = room + (1 << 30)
        monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda _: (free, 2 * free))
        return offload.plan(folder, device=device, disk_rate="1GB", context=1)

    fits, does_not = planned(2 * stored), planned(stored // 2)
    context = fits.context_bytes

    assert (True, False) == (fits.fits, does_not.fits)
    assert "It fits in the memory of the device: use plain transformers" in str(fits)
    assert f'--device {device} --prompt "..."' in does_not.as_it_is.command
    assert (0, "computing") == (fits.as_it_is.sends, fits.as_it_is.bound)
    sent = does_not.model.needed(1) * (1 - (stored // 2 - context) / stored)
    assert does_not.as_it_is.sends == pytest.approx(sent, abs=2)
    assert does_not.as_it_is.pass_seconds == does_not.as_it_is.sends / 1e6
    assert "a pass  reads nothing, sends " in str(does_not)
    assert "\n  device  " in str(does_not)


def test_small_numbers_are_written_in_full(saved: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offload.planning.estimate.computing_rates", lambda *_: FAST)
    monkeypatch.setattr("offload.planning.sizes._empty_passes", lambda _model: (64, 0))
    folder = saved(LlamaConfig(**HALF))

    plan = offload.plan(folder, disk_rate="1GB")
    said = str(plan)

    assert (True, None) == (plan.fits, plan.together)
    assert said.startswith("Runs here: under 1 ms per token. It fits in memory: use plain transformers, ")
    assert " 0 ms" not in said
    assert f": {sizes_of(folder).parameters:,} parameters, " in said
    assert "a pass  reads nothing, " in said
    assert "tokens/s" not in said


@pytest.mark.usefixtures("slow_machine")
def test_a_context_leaves_less_memory_for_weights(saved: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offload.planning.estimate.available_bytes", lambda: MB)
    plan = offload.plan(saved(LlamaConfig(**HALF)), max_memory="1MiB", disk_rate="1GB", context=10_000)

    assert "0 bytes of weights stay" in str(plan)


@pytest.mark.usefixtures("slow_machine")
def test_a_budget_is_for_weights_where_keys_and_values_have_room_beside_it(saved: Any) -> None:
    folder = saved(LlamaConfig(**LARGER))

    plans = [offload.plan(folder, max_memory="1MiB", disk_rate="1GB", context=context) for context in (1, 10_000)]

    assert [1 << 20] * 2 == [plan.as_it_is.stays for plan in plans]


@pytest.mark.usefixtures("slow_machine")
def test_the_first_line_answers_the_question(saved: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved(LlamaConfig(**LARGER))

    slow = offload.plan(folder, max_memory=0, disk_rate=1000, context=1)
    pairs = offload.plan(folder, max_memory=0, disk_rate=1000, context=1, batch=2)
    quick = offload.plan(saved(LlamaConfig(**HALF)), max_memory=0, disk_rate="1GB", context=1)
    monkeypatch.setattr("offload.planning.estimate.available_bytes", lambda: 1000)
    never = offload.plan(folder, max_memory=0, disk_rate=1000)

    best = slow.together
    assert [2, 2 * 16] == [way.tokens for way in (pairs.as_it_is, pairs.together)]
    assert slow.as_it_is.token_seconds == pytest.approx(16 * best.token_seconds)
    assert (0, slow.model.needed(1), False) == (slow.as_it_is.stays, slow.as_it_is.reads, slow.fits)
    assert "0 bytes of weights stay, 0 bytes may" in str(slow)
    assert f"Runs here, slowly: {slow.as_it_is.token_seconds:.2g} s per token.\n" in str(slow)
    faster = f"  faster  {best.token_seconds:.2g} s per token, with 16 requests in flight:\n          {best.command}"
    assert faster in str(slow)
    assert quick.as_it_is.token_seconds < 1
    assert str(quick).startswith("Runs here: ")
    assert (False, "Does not run here: keys and values of the context take ") == (never.runs, never.answer[:55])


@pytest.mark.usefixtures("slow_machine")
def test_a_packed_model_that_fits_is_said_to_fit(tmp_path: Path) -> None:
    FORMS["fp8-llama"].write(tmp_path)

    fits, does_not = (offload.plan(tmp_path, max_memory=most, disk_rate="1GB", context=1) for most in ("1GiB", 0))

    assert (True, False) == (fits.fits, does_not.fits)
    assert fits.answer.endswith(". It fits in memory, packed as it is.")
    assert "It fits" not in does_not.answer


def test_a_folder_that_is_not_a_model_is_an_error(tmp_path: Path, saved: Any) -> None:
    folder = saved(LlamaConfig(**HALF))
    for options in {"batch": 0}, {"disk_rate": "fast"}, {"disk_rate": 0}:
        with pytest.raises(ArgumentError):
            offload.plan(folder, **options)
    with pytest.raises(CheckpointError, match=r"no config\.json|no checkpoint|is not a checkpoint|holds no"):
        offload.plan(tmp_path)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=rf"^transformers can't make a model from {folder}: Unrecognized model"):
        offload.plan(folder)


def test_a_plan_for_an_encoder_has_no_keys_and_recommends_no_command_that_generates(tmp_path: Path, saved: Any) -> None:
    from transformers import BertModel

    small = {key: value for key, value in HALF.items() if key not in ("head_dim", "num_key_value_heads", "dtype")}
    BertModel(BertConfig(**small)).save_pretrained(tmp_path)

    encoder, llama = (
        offload.plan(folder, max_memory=0, disk_rate=1000) for folder in (tmp_path, saved(LlamaConfig(**HALF)))
    )

    assert encoder.context_bytes is None
    assert [False, False] == [command in str(encoder) for command in ("offload generate", "offload batch")]
    assert [True, True] == [command in str(llama) for command in ("offload generate", "offload batch")]


def test_the_error_asks_for_the_disk_rate_if_it_can_not_be_measured(
    saved: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No direct reads, and no disk space for a test file."""
    folder = saved(LlamaConfig(**HALF))
    unknown = Disk(folder, free=0, writes=None, reads=None)
    monkeypatch.setattr("offload.planning.machine.reading_rate", lambda _file: None)
    monkeypatch.setattr("offload.planning.machine._measured", lambda _folder: unknown)

    with pytest.raises(ArgumentError, match="the disk could not be measured here: give disk_rate, as '2GB'"):
        offload.plan(folder)
    assert offload.plan(folder, disk_rate="2GB").disk_rate == 2e9


def test_a_pass_has_as_many_ops_as_the_model_calls(saved: Any) -> None:
    """Whatever the sizes: a second layer calls what the first one does. Its views, some 40, do not count."""
    ops = [sizes_of(saved(LlamaConfig(**{**HALF, "num_hidden_layers": layers}))).ops for layers in (1, 2, 3)]
    wide = sizes_of(saved(LlamaConfig(**{**HALF, "intermediate_size": 512}))).ops

    assert 0 < ops[0]
    assert ops[1] - ops[0] == ops[2] - ops[1]
    assert 7 * 2 < ops[1] - ops[0] < 80  # seven products, each with a result that is shaped
    assert ops[1] == wide


@pytest.mark.parametrize("form", ["q4_k", "mxfp4", "fp8", "pack-quantized", ""])
@pytest.mark.parametrize("has_kernels", [True, False])
def test_rates_are_measured_in_the_form_of_a_model(
    form: str, has_kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_ROWS", 64)
    if not has_kernels:
        monkeypatch.setattr(machine, "library", lambda: None)

    rates = machine.computing_rates(torch.device("cpu"), form)

    _, pieces = machine._packed_in(form, torch.device("cpu"))
    bits = {"fp8": 8.0, "mxfp4": 4.25}.get(form, 4.5)
    assert min(rates.streams, rates.multiplies, rates.packed, rates.call) > 0
    assert bits * 64 * 4096 / 8 == pytest.approx(sum(piece.nbytes for piece in pieces), rel=0.01)
