"""What other libraries train, make and load has its values on disk.

Other libraries' trainers have model, optimizer state and activations there; inside `offloading`, torchao's weights,
adapters and whole models are.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload import is_offloaded
from tests.sizes import SIZES

transformers = pytest.importorskip("transformers")


def data() -> list[dict[str, torch.Tensor]]:
    rows = torch.randint(96, (16, 7), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in rows]


def trained(model: Any, folder: Path, optimizer: torch.optim.Optimizer, **options: Any) -> list[float]:
    """The losses of a run of transformers' trainer with gradient accumulation, clipping and a schedule."""
    args = transformers.TrainingArguments(
        str(folder),
        max_steps=4,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_grad_norm=0.5,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **{"save_strategy": "no", **options},
    )
    scheduler = transformers.get_linear_schedule_with_warmup(optimizer, 1, 4)
    trainer = transformers.Trainer(model, args, train_dataset=data(), optimizers=(optimizer, scheduler))
    trainer.train(resume_from_checkpoint=bool(options.get("save_steps")) and any(folder.glob("checkpoint-*")))
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def adamw(model: torch.nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.01)


def test_the_trainer_of_transformers_has_the_losses_of_memory(llama_folder, tmp_path):
    plain = transformers.AutoModelForCausalLM.from_pretrained(llama_folder, dtype=torch.float32)
    model = offload.disk_offload(copy.deepcopy(plain), tmp_path / "live")
    optimizer = offload.training.offload_optimizer(
        adamw(model), offload_dir=tmp_path / "live", model=model, gradients=True, min_bytes=1
    )
    expected = trained(plain, tmp_path / "plain", adamw(plain))
    with offload.training.offload_activations(min_bytes=1):
        found = trained(model, tmp_path / "run", optimizer)

    assert 4 == len(found)
    assert expected == found
    assert all(map(torch.equal, plain.parameters(), model.parameters()))
    assert all(map(is_offloaded, model.parameters()))
    assert is_offloaded(optimizer.state[model.lm_head.weight]["exp_avg"])


def test_the_trainers_own_checkpoints_resume(llama_folder, tmp_path):
    def run() -> tuple[list[float], Any]:
        model = transformers.AutoModelForCausalLM.from_pretrained(llama_folder, dtype=torch.float32)
        model = offload.disk_offload(model)
        optimizer = offload.training.offload_optimizer(adamw(model), model=model, min_bytes=1)
        return trained(model, tmp_path / "run", optimizer, save_strategy="steps", save_steps=2), optimizer

    expected, _ = run()
    for folder in (tmp_path / "run").glob("checkpoint-4"):
        folder.rename(tmp_path / "last")
    found, optimizer = run()

    assert expected == found
    assert is_offloaded(next(iter(optimizer.state.values()))["exp_avg"])


def test_adapters_of_peft_train_over_a_model_on_disk_and_resume(llama_folder, tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)

    def adapted(base: Any) -> tuple[Any, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = peft.get_peft_model(base, config).train()
        return model, adamw(model)

    def losses(model: Any, optimizer: torch.optim.Optimizer, rows: list[Any]) -> list[float]:
        found = []
        for row in rows:
            with offload.training.offload_activations(min_bytes=1):
                loss = model(**{name: value[None] for name, value in row.items()}).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    def on_disk() -> tuple[Any, torch.optim.Optimizer]:
        model, optimizer = adapted(offload.from_pretrained(llama_folder))
        options = {"offload_dir": tmp_path / "live", "model": model, "min_bytes": 1}
        return model, offload.training.offload_optimizer(optimizer, **options)

    in_memory = losses(*adapted(transformers.AutoModelForCausalLM.from_pretrained(llama_folder)), data()[:6])
    model, optimizer = on_disk()
    first = losses(model, optimizer, data()[:3])
    offload.training.save_training(model, tmp_path / "run", optimizer, frozen=False)
    second = losses(model, optimizer, data()[3:6])
    names = list(offload.load_tree(tmp_path / "run")["model"])
    del model, optimizer

    model, optimizer = on_disk()
    offload.training.load_training(model, tmp_path / "run", optimizer)

    assert in_memory == first + second
    assert second == losses(model, optimizer, data()[3:6])
    assert not any("base_layer" in name or "embed_tokens" in name for name in names)


def tiny() -> Any:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**SIZES)).eval()


def test_a_model_made_inside_is_on_disk_and_generates_the_same(tokens):
    expected = tiny().generate(tokens, max_new_tokens=4, do_sample=False)
    with offload.offloading(min_bytes="4KiB"):
        model = tiny()
        found = model.generate(tokens, max_new_tokens=4, do_sample=False)

    assert torch.equal(expected, found)
    assert all(is_offloaded(weight) for name, weight in model.named_parameters() if "norm" not in name)


def test_adapters_that_peft_makes_and_loads_are_on_disk(tokens, tmp_path):
    peft = pytest.importorskip("peft")

    def adapted(base: Any) -> Any:
        torch.manual_seed(1)
        config = peft.LoraConfig(r=16, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
        return peft.get_peft_model(base, config).eval()

    base = tiny()
    plain = adapted(copy.deepcopy(base))
    expected = plain(tokens).logits
    plain.save_pretrained(tmp_path / "adapter")

    with offload.offloading(min_bytes="4KiB"):
        made = adapted(copy.deepcopy(base))
        loaded = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "adapter")
        loaded.load_adapter(tmp_path / "adapter", "second")
    loaded.set_adapter("second")

    for model in (made, loaded):
        adapters = [weight for name, weight in model.named_parameters() if "lora_" in name]
        assert adapters
        assert all(map(is_offloaded, adapters))
        assert torch.equal(expected, model(tokens).logits)
