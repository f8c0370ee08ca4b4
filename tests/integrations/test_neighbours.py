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
