"""Optimizers with their state on disk make the same steps as in memory, with less memory."""

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload import OffloadedTensor, is_offloaded
from offload.errors import NameInUseError, UnsupportedOpError
from offload.memory import uncollected
from tests.processes import run_script

OPTIMIZERS = [
    (torch.optim.AdamW, {"lr": 0.01}),
    (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5, "centered": True}),
    *((kind, {"lr": 0.01}) for kind in (torch.optim.Adagrad, torch.optim.NAdam, torch.optim.RAdam)),
    *((getattr(torch.optim, kind), {}) for kind in ("Adadelta", "Adamax", "ASGD", "Rprop", "Adafactor")),
]
FUSED = [(kind, {"lr": 0.1, "fused": True}) for kind in (torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)]
FOREACH = [(kind, {**options, "foreach": foreach}) for foreach in (True, False) for kind, options in OPTIMIZERS]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 1))


def batch(number: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(number))


def loss_of(model: nn.Module, number: int) -> torch.Tensor:
    return model(batch(number)).square().mean()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range = range(4)) -> list[float]:
    losses = []
    for number in steps:
        optimizer.zero_grad()
        loss = loss_of(model, number)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def offloaded(optimizer: torch.optim.Optimizer, folder: Any = None, **options: Any) -> Any:
    """Nothing is left in memory for being small, and steps take one parameter at a time."""
    options = {"offload_dir": folder, "min_bytes": 1, "step_bytes": 1, **options}
    return offload.training.offload_optimizer(optimizer, **options)


def tensors_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    values = [value for state in optimizer.state.values() for value in state.values()]
    return [value for value in values if isinstance(value, torch.Tensor) and value.dim() > 0]


def both(kind: Any, options: Any, **more: Any) -> tuple[nn.Module, Any, nn.Module, Any]:
    """A model and its optimizer in memory, and both on disk."""
    plain = network()
    on_disk = offload.disk_offload(copy.deepcopy(plain))
    return plain, kind(plain.parameters(), **options), on_disk, offloaded(kind(on_disk.parameters(), **options), **more)


@pytest.mark.parametrize(("kind", "options"), [*FOREACH, *FUSED], ids=lambda value: getattr(value, "__name__", ""))
def test_steps_equal_those_in_memory(kind, options):
    plain, expected, on_disk, optimizer = both(kind, options)

    assert train(plain, expected) == train(on_disk, optimizer)
    assert all(map(torch.equal, plain.parameters(), on_disk.parameters()))
    assert tensors_of(expected) or "fused" in options
    assert all(map(torch.equal, tensors_of(expected), tensors_of(optimizer)))
    assert all(map(is_offloaded, tensors_of(optimizer)))
    assert isinstance(optimizer, kind)


# Names, files, saving and loading


def test_state_is_named_after_the_parameter(tmp_path):
    def names(optimizer):
        train(model, optimizer, range(1))
        return sorted(value.name for value in tensors_of(optimizer))[:2]

    model = network()
    by_model = offloaded(torch.optim.AdamW(model.parameters()), tmp_path, model=model)
    by_group = offloaded(torch.optim.AdamW(model.parameters()))
    by_optimizer = offloaded(torch.optim.AdamW(model.named_parameters()))
    weight, other = (nn.Parameter(OffloadedTensor.from_original_tensor(torch.ones(3), "tensor")) for _ in range(2))

    assert ["0.bias.exp_avg", "0.bias.exp_avg_sq"] == names(by_model)
    assert ["group0.0.exp_avg", "group0.0.exp_avg_sq"] == names(by_group)
    assert ["0.bias.exp_avg", "0.bias.exp_avg_sq"] == names(by_optimizer)
    assert (tmp_path / "0.bias.exp_avg.safetensors").exists()
    by_tensor = offloaded(torch.optim.SGD([weight, other], momentum=0.5))
    assert ["tensor", "group0.1"] == list(by_tensor._place.names.values())


def test_small_state_stays_in_memory():
    model = network()
    optimizer = offloaded(torch.optim.AdamW(model.parameters()), min_bytes=16 * 16 * 4)
    train(model, optimizer)

    assert is_offloaded(optimizer.state[model[2].weight]["exp_avg"])
    assert not is_offloaded(optimizer.state[model[2].bias]["exp_avg"])
    assert not is_offloaded(optimizer.state[model[2].weight]["step"])


def test_existing_state_is_moved_to_disk():
    plain, model = network(), network()
    expected, optimizer = torch.optim.AdamW(plain.parameters()), torch.optim.AdamW(model.parameters())
    first = train(plain, expected), train(model, optimizer)
    offloaded(optimizer)

    assert first[0] == first[1]
    assert all(map(is_offloaded, tensors_of(optimizer)))
    assert train(plain, expected) == train(model, optimizer)


def test_groups_added_later_have_their_state_on_disk():
    plain, model = network(), network()
    expected = torch.optim.AdamW(plain[0].parameters())
    optimizer = offloaded(torch.optim.AdamW(model[0].parameters()))
    for part, each in ((plain, expected), (model, optimizer)):
        train(part, each)
        each.add_param_group({"params": part[2].parameters(), "lr": 0.1})

    assert train(plain, expected) == train(model, optimizer)
    assert is_offloaded(optimizer.state[model[2].weight]["exp_avg"])
    assert "group1.0.exp_avg" == optimizer.state[model[2].weight]["exp_avg"].name


def test_two_optimizers_can_not_share_a_file(tmp_path):
    one, other = network(), network()
    train(one, offloaded(torch.optim.AdamW(one.parameters()), tmp_path))
    kept = offloaded(torch.optim.AdamW(one.parameters()), tmp_path)
    train(one, kept)

    with pytest.raises(NameInUseError, match=r"group0\.0\.exp_avg"):
        train(other, offloaded(torch.optim.AdamW(other.parameters()), tmp_path))


@pytest.mark.parametrize("how", ["plain", "torch.save", "own", "another's"])
def test_loaded_state_is_on_disk_and_the_same(how, tmp_path):
    plain, model = network(), network()
    expected, optimizer = torch.optim.AdamW(plain.parameters()), offloaded(torch.optim.AdamW(model.parameters()))
    train(plain, expected), train(model, optimizer)
    state = copy.deepcopy(expected.state_dict()) if how == "plain" else optimizer.state_dict()
    if how == "torch.save":
        torch.save(state, tmp_path / "state.pt")
        state = torch.load(tmp_path / "state.pt", weights_only=True)
        assert not any(is_offloaded(value) for values in state["state"].values() for value in values.values())
    if how in ("another's", "torch.save"):
        optimizer = offloaded(torch.optim.AdamW(model.parameters()), tmp_path)
    optimizer.load_state_dict(state)

    assert all(map(is_offloaded, tensors_of(optimizer)))
    if how == "another's":
        assert all(value.offload_dir == tmp_path for value in tensors_of(optimizer))
    assert train(plain, expected) == train(model, optimizer)


# Gradients, and everything else around a step


def clipped(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[object]:
    for number in (0, 1, 2) * 2:
        loss_of(model, number).backward()
        if number == 2:
            yield torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1).item()
            optimizer.step()
            optimizer.zero_grad()


def set_to_zero(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[object]:
    loss_of(model, 0).backward()
    optimizer.zero_grad(set_to_none=False)
    loss_of(model, 1).backward()
    yield optimizer.step()


def scaled(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[object]:
    """One gradient is not finite."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for factor in (1.0, float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, 0) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
    assert 2.0 == scaler.get_scale()
    yield


@pytest.mark.parametrize("act", [clipped, set_to_zero, scaled])
def test_gradients_on_disk_accumulate_change_and_are_dropped_as_in_memory(act, tmp_path):
    plain, expected, on_disk, optimizer = both(torch.optim.AdamW, {}, folder=tmp_path, gradients=True)

    for one, other in zip(act(plain, expected), act(on_disk, optimizer), strict=True):
        assert one == other
        assert all(is_offloaded(parameter.grad) for parameter in on_disk.parameters())

    assert all(map(torch.equal, plain.parameters(), on_disk.parameters()))
    optimizer.zero_grad()
    assert not list(tmp_path.rglob("*.grad.safetensors"))


@pytest.mark.parametrize("scheduler_first", [True, False])
def test_learning_rate_schedulers_count_its_steps(scheduler_first, recwarn):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    optimizer = optimizer if scheduler_first else offloaded(optimizer)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    optimizer = offloaded(optimizer) if scheduler_first else optimizer
    for _ in range(2):
        train(model, optimizer, range(1))
        scheduler.step()

    assert 0.25 == optimizer.param_groups[0]["lr"]
    assert all(map(is_offloaded, tensors_of(optimizer)))
    assert [] == [str(each.message) for each in recwarn]


def test_files_are_removed_with_model_and_optimizer_by_reference_count():
    model = offload.disk_offload(network())
    optimizer = offloaded(torch.optim.AdamW(model.parameters()), gradients=True)
    train(model, optimizer)
    paths = [value.offload_path for value in (*tensors_of(optimizer), *model.parameters())]
    paths += [parameter.grad.offload_path for parameter in model.parameters()]

    assert all(path.exists() for path in paths)
    with uncollected():
        del optimizer, model
        assert not any(path.exists() for path in paths)


def test_a_copy_of_model_and_optimizer_is_independent():
    model = offload.disk_offload(network())
    optimizer = offloaded(torch.optim.AdamW(model.parameters()))
    train(model, optimizer)
    other, its = copy.deepcopy((model, optimizer))

    assert all(map(is_offloaded, tensors_of(its)))
    assert train(model, optimizer) == train(other, its)


def test_hooks_and_closures_are_called_once_per_step():
    model = network()
    optimizer = offloaded(torch.optim.SGD(model.parameters(), lr=0.1))
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))

    def closure():
        calls.append("closure")
        optimizer.zero_grad()
        loss = loss_of(model, 0)
        loss.backward()
        return loss

    loss = optimizer.step(closure)

    assert ["before", "closure", "after"] == calls
    assert loss.requires_grad


def test_a_step_that_fails_leaves_the_groups_as_they_were():
    model = network()
    optimizer = offloaded(torch.optim.AdamW(model.parameters()))
    loss_of(model, 0).backward()
    model[2].weight.grad = model[2].weight.grad.to_sparse()

    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()

    assert list(model.parameters()) == optimizer.param_groups[0]["params"]


@pytest.mark.parametrize(("given", "said"), [(torch.optim.AdamW, "AdamW'> was given"), (nn.ReLU(), "a ReLU was given")])
def test_arguments_that_are_not_optimizers_are_refused(given, said):
    with pytest.raises(TypeError, match=said):
        offload.training.offload_optimizer(given)


def test_optimizers_that_need_all_parameters_at_once_are_refused():
    class Sum(torch.optim.Optimizer):
        def step(self):
            """Scales every parameter by the sum of all gradients."""

    model = network()

    for optimizer in (torch.optim.LBFGS(model.parameters()), Sum(model.parameters(), {})):
        with pytest.raises(UnsupportedOpError, match="step_bytes=None"):
            offload.training.offload_optimizer(optimizer)
    with pytest.raises(ValueError, match="on disk already"):
        offloaded(offloaded(torch.optim.SGD(model.parameters())))


def test_an_optimizer_of_another_kind_may_step_all_at_once():
    class Own(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    plain, expected, on_disk, optimizer = both(Own, {"lr": 0.1, "momentum": 0.9}, step_bytes=None)

    assert train(plain, expected) == train(on_disk, optimizer)
    assert all(map(is_offloaded, tensors_of(optimizer)))


MEMORY = """
    import json, sys, torch, offload
    from torch import nn
    from offload.memory import count_freed
    from tests.peak import Peak

    foreach, folder, layers, width = sys.argv[1] == "foreach", sys.argv[2], 15, 1024
    torch.set_num_threads(1)

    def network():
        model = nn.Sequential(*[nn.utils.skip_init(nn.Linear, width, width, bias=False) for _ in range(layers)])
        with torch.no_grad():
            for layer in model:
                layer.weight.copy_(torch.eye(width))
        return model

    def peak_of(is_on_disk):
        model = network()
        if is_on_disk:
            offload.disk_offload(model)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=foreach)
        if is_on_disk:
            offload.training.offload_optimizer(optimizer, gradients=True, step_bytes="4MiB")
        count_freed(1 << 30)
        with Peak() as peak:
            for _ in range(2):
                model(torch.ones(1, width)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            if is_on_disk:
                offload.training.save_training(model, folder, optimizer)
                offload.training.load_training(model, folder, optimizer)
        return peak.nbytes, model[3].weight.detach().double().sum().item()

    on_disk, first = peak_of(True)
    plain, second = peak_of(False)
    print(json.dumps(dict(on_disk=on_disk, plain=plain, same=first == second)))
"""


@pytest.mark.parametrize("foreach", ["foreach", "single"])
def test_training_memory_is_bounded_by_a_few_parameters(foreach, tmp_path):
    """60 MB of parameters in 15 of 4 MiB: in memory, their gradients and state take three times that.

    Here they take as much as a dozen such tensors, and 48 MiB of unreturned freed memory; also to save and load.
    """
    found = json.loads(run_script(MEMORY, foreach, tmp_path))

    assert found["same"]
    assert found["plain"] > 3 * 60e6
    assert found["on_disk"] < (12 * 4 << 20) + (48 << 20)


@pytest.mark.parametrize("option", ["min_bytes", "step_bytes", "offload_dir"])
def test_a_refused_argument_leaves_the_optimizer_and_its_scheduler_as_they_were(option):
    layer = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(layer.parameters())
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    before = dict(vars(optimizer))

    with pytest.raises(offload.OffloadError):
        offload.training.offload_optimizer(optimizer, **{option: 1j})

    assert type(optimizer) is torch.optim.AdamW
    assert before == vars(optimizer)
    assert type(offload.training.offload_optimizer(optimizer)) is not torch.optim.AdamW
