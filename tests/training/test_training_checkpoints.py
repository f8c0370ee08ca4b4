"""Training continues from its latest checkpoint as if nothing had happened, wherever it was killed."""

from __future__ import annotations

import copy
import enum
import json
import os
import random
from collections import namedtuple
from dataclasses import make_dataclass

import numpy as np
import pytest
import torch
from torch import nn

import offload
from offload import is_offloaded
from offload.errors import CheckpointError, ForeignFileError, MissingFileError, UnsupportedOpError
from tests.campaigns import amount
from tests.conftest import contents
from tests.equal import assert_equal
from tests.processes import run_script


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 8))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> list[float]:
    """Losses that depend on everything: weights, buffers, state, and three kinds of random numbers."""
    losses = []
    for _ in range(steps):
        x = torch.randn(4, 8) * random.random() + float(np.random.rand())
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def adamw(model: nn.Module, on_disk: bool, **options: object) -> torch.optim.AdamW:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return offload.training.offload_optimizer(optimizer, **{"min_bytes": 1, **options}) if on_disk else optimizer


@pytest.mark.parametrize("was_on_disk", [True, False])
@pytest.mark.parametrize("on_disk", [True, False])
def test_resumed_training_equals_uninterrupted_training(was_on_disk, on_disk, tmp_path):
    """Whether model and state are on disk or in memory, before and after."""
    model = offload.disk_offload(network()) if was_on_disk else network()
    optimizer = adamw(model, was_on_disk)
    train(model, optimizer)
    offload.training.save_training(model, tmp_path, optimizer)
    expected = train(model, optimizer)
    model = offload.disk_offload(network()) if on_disk else network()
    optimizer = adamw(model, on_disk)
    random.random(), np.random.rand(), torch.rand(1)

    assert {} == offload.training.load_training(model, tmp_path, optimizer)
    assert expected == train(model, optimizer)
    assert on_disk == all(is_offloaded(parameter) for parameter in model.parameters())
    assert on_disk == is_offloaded(optimizer.state[model[0].weight]["exp_avg"])
    assert on_disk or not any(is_offloaded(parameter) for parameter in model.parameters())


def test_a_checkpoint_can_be_loaded_in_the_middle_of_a_run(tmp_path):
    model = offload.disk_offload(network(), tmp_path / "live")
    optimizer = adamw(model, True, offload_dir=tmp_path / "live")
    train(model, optimizer)
    offload.training.save_training(model, tmp_path / "run", optimizer)
    expected = train(model, optimizer)
    offload.training.load_training(model, tmp_path / "run", optimizer)

    assert expected == train(model, optimizer)
    assert all(parameter.offload_dir == tmp_path / "live" for parameter in model.parameters())


def test_extra_values_are_saved_and_loaded(tmp_path):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2], gamma=0.1)
    optimizer.step(), scheduler.step()
    data = {"step": 7, "seen": [1, 2.5, None], "best": float("inf"), "at": (1, 2), 3: True, "mean": torch.ones(2)}
    offload.training.save_training(model, tmp_path, optimizer, scheduler=scheduler, data=data, text="ü")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    fresh = torch.optim.lr_scheduler.MultiStepLR(optimizer, [5])
    found = offload.training.load_training(model, tmp_path, optimizer, scheduler=fresh)

    assert ["data", "text"] == sorted(found)
    assert "ü" == found["text"]
    assert not is_offloaded(found["data"]["mean"])
    assert found["data"].pop("mean").equal(data.pop("mean"))
    assert data == found["data"]
    assert scheduler.state_dict() == fresh.state_dict()
    assert 0.1 == optimizer.param_groups[0]["lr"]


def test_state_without_an_object_is_returned_as_saved(tmp_path):
    scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.ones(1)]), 5)
    offload.training.save_training(network(), tmp_path, scheduler=scheduler)

    assert {"scheduler": scheduler.state_dict()} == offload.training.load_training(network(), tmp_path)


def test_frozen_parameters_may_be_left_out(tmp_path):
    model = network()
    model[0].requires_grad_(False)
    offload.training.save_training(model, tmp_path, frozen=False)
    saved = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        for value in model.state_dict().values():
            value.add_(1)
    offload.training.load_training(model, tmp_path)

    expected = {name: value + 1 if name.startswith("0") else value for name, value in saved.items()}
    assert_equal(expected, model.state_dict())


def test_tied_weights_are_saved_once_and_stay_tied(tmp_path):
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    model[1].weight = model[0].weight
    expected = model[0].weight.detach().clone()
    made = offload.training.save_training(offload.disk_offload(model), tmp_path)
    with torch.no_grad():
        model[0].weight.zero_()
    offload.training.load_training(model, tmp_path)

    assert sum(path.stat().st_size for path in made.parent.rglob("*.safetensors")) < 1.9 * expected.nbytes
    assert torch.equal(expected, model[1].weight)
    assert model[0].weight is model[1].weight


# Files


@pytest.mark.parametrize("cut", [torch.detach, torch.t, lambda weight: weight[3:], torch.Tensor.double])
def test_files_that_a_model_refers_to_stay_until_a_save_without_it(cut, tmp_path):
    """The whole value, views of it, and in-memory results of it."""
    offload.training.save_training(network(), tmp_path)
    model, expected = nn.Module(), cut(network()[0].weight.detach())
    model.weight = nn.Parameter(cut(offload.load_tree(tmp_path)["model"]["0.weight"]), requires_grad=False)
    for step in range(2):
        offload.training.save_training(model, tmp_path, step=step)

        assert torch.equal(expected, model.weight)
        assert torch.equal(expected, offload.load_tree(tmp_path)["model"]["weight"])
    assert is_offloaded(model.weight) == (tmp_path / "tensors-1.safetensors").exists()
    offload.training.save_training(network(), tmp_path)

    assert ["tensors-4.safetensors", "tree.json"] == sorted(os.listdir(tmp_path))


def test_trees_that_save_training_did_not_write_are_refused(tmp_path):
    offload.save_tree({"model": {"0.weight": torch.ones(2)}, "optimizer": None}, tmp_path / "tree")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "tree.json").write_text('{"mine": 1}')
    before = contents(tmp_path)

    with pytest.raises(CheckpointError, match=r"tree that save_training did not write"):
        offload.training.load_training(network(), tmp_path / "tree")
    with pytest.raises(ForeignFileError, match=r"tree\.json is not a tree that offload saved.*Take another folder"):
        offload.training.save_training(network(), tmp_path / "foreign")
    assert before == contents(tmp_path)


def test_small_values_are_back_in_memory_and_need_no_checkpoint(tmp_path):
    model = network()
    optimizer = adamw(model, True, min_bytes=512)
    train(model, optimizer)
    offload.training.save_training(model, tmp_path, optimizer)
    kept = {name: is_offloaded(value) for name, value in optimizer.state[model[0].bias].items()}
    offload.training.load_training(model, tmp_path, optimizer)
    offload.training.save_training(model, tmp_path)

    assert {"step": False, "exp_avg": False, "exp_avg_sq": False} == kept
    assert kept == {name: is_offloaded(value) for name, value in optimizer.state[model[0].bias].items()}
    assert is_offloaded(optimizer.state[model[3].weight]["exp_avg"])
    assert not (tmp_path / "tensors-1.safetensors").exists()
    train(model, optimizer)


# Errors and kills


def test_a_folder_without_a_checkpoint_says_so(tmp_path):
    with pytest.raises(MissingFileError, match="there is no tree here"):
        offload.training.load_training(network(), tmp_path)


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    offload.training.save_training(network(), tmp_path)

    with pytest.raises(CheckpointError, match=r"3\.bias"):
        offload.training.load_training(network()[:3], tmp_path)
    with pytest.raises(CheckpointError, match=r"'0\.weight' is torch\.float64 of .*, and torch\.float32 of .* there"):
        offload.training.load_training(network().double(), tmp_path)
    with pytest.raises(CheckpointError, match="optimizer"):
        offload.training.load_training(network(), tmp_path, adamw(network(), False))
    with pytest.raises(CheckpointError, match="scaler"):
        offload.training.load_training(network(), tmp_path, scaler=torch.amp.GradScaler("cpu"))


def test_a_model_and_optimizer_that_do_not_fit_are_unchanged(tmp_path):
    offload.training.save_training(network(), tmp_path, adamw(network(), False))
    model, deeper = network(), nn.Sequential(*network(), nn.Linear(8, 8))
    groups = torch.optim.AdamW([{"params": part.parameters()} for part in model if list(part.parameters())], lr=0.5)
    other = nn.Sequential(*network()[:3], nn.Linear(16, 4))
    for each in (model, deeper, other):
        nn.init.zeros_(each[0].weight)

    with pytest.raises(CheckpointError, match=r"the optimizer did not accept .*number of parameter groups"):
        offload.training.load_training(model, tmp_path, groups)
    with pytest.raises(CheckpointError, match=r"another model, which differs in 4\.bias, 4\.weight"):
        offload.training.load_training(deeper, tmp_path)
    with pytest.raises(CheckpointError, match=r"'3\.weight' is .* \(4, 16\), and .* \(8, 16\) there"):
        offload.training.load_training(other, tmp_path)

    assert not any(each[0].weight.any() for each in (model, deeper, other))
    assert 0.5 == groups.param_groups[0]["lr"]


ENDLESS: list[object] = []
ENDLESS.append(ENDLESS)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([1, object()], r"'extra\.it\.1' is a builtins:object"),
        (ENDLESS, r"extra\.it\.0.* that contains itself"),
        (enum.Enum("Kind", "ONE").ONE, r"'extra\.it' is a .*make it a dict, list, tuple, tensor"),
        (namedtuple("Pair", "x y")(1, 2), r"'extra\.it' is a .*make it a dict, list, tuple, tensor"),
        (make_dataclass("Note", ["text"])("x"), r"'extra\.it' is a .*make it a dict, list, tuple, tensor"),
    ],
    ids=["object", "endless", "enum", "named tuple", "dataclass"],
)
def test_values_that_are_not_plain_data_are_refused_by_name(tmp_path, value, words):
    """Classes too, which a checkpoint can't restore."""
    with pytest.raises(TypeError, match=words):
        offload.training.save_training(network(), tmp_path, it=value)
    assert [] == os.listdir(tmp_path)


def test_values_of_a_subclass_are_refused_by_name_or_left_out(tmp_path):
    torchao = pytest.importorskip("torchao.quantization")
    model = nn.Sequential(nn.Linear(64, 64))
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())

    with pytest.raises(UnsupportedOpError, match=r"model\.0\.weight.*a tensor subclass"):
        offload.training.save_training(model, tmp_path)
    model.requires_grad_(False)
    offload.training.save_training(model, tmp_path, frozen=False)
    offload.training.load_training(model, tmp_path)


DRIVER = """
    import json, mmap, os, random, signal, sys, time, torch, offload
    from pathlib import Path
    from torch import nn
    from tests.processes import ended, forked

    folder, kills, steps = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    SAVED, WAITS = range(2)
    board = mmap.mmap(-1, 2)

    def run(name, losses):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Dropout(0.2), nn.Linear(128, 64))
        offload.disk_offload(model, folder / name / "live")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        live = folder / name / "live"
        offload.training.offload_optimizer(optimizer, offload_dir=live, model=model, gradients=True, min_bytes=1)
        step = 0
        if (folder / name / "run" / "tree.json").exists():
            step = offload.training.load_training(model, folder / name / "run", optimizer)["step"]
        with open(losses, "a", buffering=1) as file:
            for step in range(step, steps):
                optimizer.zero_grad()
                loss = model(torch.randn(8, 64)).square().mean()
                loss.backward()
                optimizer.step()
                file.write(json.dumps([step, loss.item()]) + "\\n")
                if step % 3 == 2:
                    offload.training.save_training(model, folder / name / "run", optimizer, step=step + 1)
                    board[SAVED] = 1
                    while board[WAITS]:  # until it is killed
                        time.sleep(1)

    warm = nn.Linear(2, 2)  # what is imported at the first use; no backward, whose threads would not survive a fork
    warm.weight.grad = torch.ones(2, 2)
    stepper = offload.training.offload_optimizer(torch.optim.AdamW(warm.parameters()), min_bytes=1)
    stepper.step()
    offload.training.save_training(warm, folder / "warm", stepper)
    offload.training.load_training(warm, folder / "warm", stepper)
    assert 0 == ended(forked(lambda: run("whole", folder / "expected")))
    random.seed(0)
    found = dict(killed=0)
    for turn in range(kills + 1):
        board[SAVED], board[WAITS] = 0, turn == 0
        pid = forked(lambda: run("killed", folder / "found"))
        while turn < kills and not (board[SAVED] or os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)):
            time.sleep(0.001)
        if turn < kills:
            time.sleep(random.uniform(0, 0.02))
            os.kill(pid, signal.SIGKILL)
        status = ended(pid)
        if status == 0:
            break
        assert status == -signal.SIGKILL, status
        found["killed"] += 1

    expected = dict(map(json.loads, open(folder / "expected")))
    found["lines"] = [json.loads(line) for line in open(folder / "found") if line.endswith("\\n")]
    found["wrong"] = sum(expected[step] != loss for step, loss in found["lines"])
    found["last"] = found.pop("lines")[-1][0]
    found["left"] = sorted(path.name for path in (folder / "killed" / "run").iterdir())
    print(json.dumps(found))
"""


@pytest.mark.slow(6)
@pytest.mark.campaign("kills")
def test_a_run_killed_at_any_moment_has_the_losses_of_an_uninterrupted_one(quick_folder):
    """The first one has just saved. `test_crashes` kills at each call of a save."""
    kills, steps = amount("kills", (2, 60), (500, 6000))
    found = json.loads(run_script(DRIVER, quick_folder, kills, steps))

    assert 0 == found["wrong"]
    assert steps - 1 == found["last"]
    assert found["killed"] > kills // 3  # in a campaign, some runs end before they are killed
    assert 2 == len(found["left"])


def everything(model, optimizer, scheduler):
    """Everything that `load_training` may change, in comparable form."""
    state = optimizer.state_dict()
    tensors = {
        **model.state_dict(),
        **{f"{n}.{k}": value for n, parts in state["state"].items() for k, value in parts.items()},
        "torch": torch.get_rng_state(),
    }
    plain = {name: offload.materialize(tensor).tolist() for name, tensor in tensors.items()}
    return plain, str(state["param_groups"]), scheduler.state_dict(), random.getstate(), str(np.random.get_state())


@pytest.fixture
def run(tmp_path):
    """A checkpoint, and the objects to load it into, which have changed since."""
    model, folder = network(), tmp_path / "run"
    optimizer = adamw(model, on_disk=False)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    train(model, optimizer), scheduler.step()
    offload.training.save_training(model, folder, optimizer, scheduler=scheduler, notes={"best": 0.5, (1, 2): [3]})
    train(model, optimizer), scheduler.step()
    return folder, model, optimizer, scheduler


class Stubborn:
    """Accepts no state but its own."""

    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return {"state": self.state}

    def load_state_dict(self, state):
        self.state = state["state"]
        if self.state == 1:
            raise KeyError("what")


def test_random_states_of_devices_are_set_at_once_and_not_at_their_first_use(tmp_path, monkeypatch):
    calls = []
    values = {"is_available": True, "is_initialized": True, "device_count": 1, "get_rng_state_all": [torch.ones(1)]}
    for name in (*values, "init", "set_rng_state"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, name=name: values.get(name) or calls.append(name))

    offload.training.save_training(nn.Linear(1, 1), tmp_path)
    offload.training.load_training(nn.Linear(1, 1), tmp_path)
    assert ["init", "set_rng_state", "set_rng_state"] == calls


def test_an_object_that_rejects_its_state_leaves_the_others_unchanged(run):
    folder, model, optimizer, scheduler = run
    counter, stubborn = Stubborn(5), Stubborn(1)
    offload.training.save_training(model, folder, optimizer, counter=counter, stubborn=stubborn)
    counter.state, stubborn.state = 6, 2
    train(model, optimizer)
    before = everything(model, optimizer, scheduler)

    with pytest.raises(CheckpointError, match=r"stubborn did not accept the saved state.*KeyError"):
        offload.training.load_training(model, folder, optimizer, counter=counter, stubborn=stubborn)

    assert everything(model, optimizer, scheduler) == before
    assert (6, 2) == (counter.state, stubborn.state)
