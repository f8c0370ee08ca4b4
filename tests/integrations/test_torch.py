"""What torch does with whole models: parametrizations, pruning, averaging, vectors, distributed checkpoints."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.func import functional_call, stack_module_state
from torch.nn.utils import parameters_to_vector, parametrizations, parametrize, prune, vector_to_parameters
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

import offload

X = torch.linspace(-2, 2, 40).reshape(5, 8)


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4))


def train(model: nn.Module, steps: int = 2, after: Callable[[nn.Module], None] = lambda model: None) -> torch.Tensor:
    """The model's results after a few steps."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(X).square().sum().backward()
        optimizer.step()
        after(model)
    with torch.no_grad():
        return model(X)


def plain_form(result: Any) -> Any:
    """A result as plain values for comparison: modules as their states."""
    if isinstance(result, nn.Module):
        result = dict(result.state_dict())
    if isinstance(result, dict):
        return {key: plain_form(value) for key, value in result.items()}
    if isinstance(result, (list, tuple)):
        return [plain_form(value) for value in result]
    return offload.materialize(result) if isinstance(result, torch.Tensor) else result


def assert_as_in_memory(act: Callable[[nn.Sequential], Any]) -> tuple[nn.Sequential, Any]:
    """Do it to a model on disk and to a copy of it in memory: same result, same state, same random numbers used.

    Returns:
        The model on disk, and the result.
    """
    plain, on_disk = network(), offload.disk_offload(network())
    torch.manual_seed(1)
    expected, expected_random = act(plain), torch.get_rng_state()
    torch.manual_seed(1)
    actual, actual_random = act(on_disk), torch.get_rng_state()

    torch.testing.assert_close(plain_form(actual), plain_form(expected), rtol=0, atol=0)
    assert list(plain.state_dict()) == list(on_disk.state_dict())
    torch.testing.assert_close(plain_form(on_disk), plain_form(plain), rtol=0, atol=0)
    assert torch.equal(expected_random, actual_random)
    return on_disk, actual


def on_disk_names(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if offload.is_offloaded(parameter)}


EVERY = {"0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias"}


# Weights computed from others


PARAMETRIZATIONS: dict[str, Callable[[nn.Module], Any]] = {
    "weight-norm": parametrizations.weight_norm,
    "spectral-norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "orthogonal-exp": lambda layer: parametrizations.orthogonal(layer, orthogonal_map="matrix_exp"),
    "orthogonal-cayley": lambda layer: parametrizations.orthogonal(layer, orthogonal_map="cayley"),
    "own": lambda layer: parametrize.register_parametrization(layer, "weight", Doubled()),
}


class Doubled(nn.Module):
    """An invertible parametrization."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2

    def right_inverse(self, weight: torch.Tensor) -> torch.Tensor:
        return weight / 2


@pytest.mark.parametrize("change", PARAMETRIZATIONS.values(), ids=PARAMETRIZATIONS)
def test_a_parametrized_weight_trains_and_becomes_one_again(change):
    """Registered on a layer on disk, trained, removed; the other layers stay on disk throughout."""

    def act(model: nn.Sequential) -> list[torch.Tensor]:
        change(model[0])
        trained = train(model)
        parametrize.remove_parametrizations(model[0], "weight")
        with torch.no_grad():
            return [trained, model(X)]

    model, _ = assert_as_in_memory(act)

    assert on_disk_names(model) >= EVERY - {"0.weight"}


def test_the_older_weight_norm_trains_and_is_removed():
    """With hooks, not parametrization; speech models still use it."""

    def act(model: nn.Sequential) -> torch.Tensor:
        with pytest.warns(FutureWarning):
            nn.utils.weight_norm(model[0])
        trained = train(model)
        nn.utils.remove_weight_norm(model[0])
        return trained

    assert_as_in_memory(act)


# Pruning


PRUNING: dict[str, Callable[[Any], Any]] = {
    "one": lambda model: prune.l1_unstructured(model[0], "weight", amount=0.5),
    "rows": lambda model: prune.ln_structured(model[0], "weight", amount=0.25, n=2, dim=0),
    "at random and again": lambda model: (
        prune.random_unstructured(model[0], "weight", amount=0.3),
        prune.random_structured(model[0], "weight", amount=0.25, dim=1),
    ),
    "all together": lambda model: prune.global_unstructured(
        [(model[0], "weight"), (model[3], "weight")], prune.L1Unstructured, amount=0.4
    ),
}


@pytest.mark.parametrize("cut", PRUNING.values(), ids=PRUNING)
def test_pruned_weights_train_and_their_zeros_reach_the_files(cut):
    """After `prune.remove` the weight is a parameter on disk again, with the mask applied."""

    def act(model: nn.Sequential) -> torch.Tensor:
        cut(model)
        trained = train(model)
        for layer in (model[0], model[3]):
            if prune.is_pruned(layer):
                prune.remove(layer, "weight")
        return trained

    model, _ = assert_as_in_memory(act)

    assert (model[0].weight == 0).any()
    assert on_disk_names(model) == EVERY


# Copies and averages


@pytest.mark.parametrize("with_buffers", [False, True], ids=["parameters", "buffers"])
def test_an_exponential_average_is_kept_on_disk(with_buffers):
    """`AveragedModel` copies the model from file to file, and updates the copy in place."""
    on_average: dict[str, Any] = {"multi_avg_fn": get_ema_multi_avg_fn(0.9), "use_buffers": with_buffers}

    def act(model: nn.Sequential) -> AveragedModel:
        average = AveragedModel(model, **on_average)
        train(model, 3, average.update_parameters)
        return average

    model, average = assert_as_in_memory(act)

    assert on_disk_names(average.module) == EVERY
    paths = {p.offload_path for p in average.parameters()} & {p.offload_path for p in model.parameters()}
    assert not paths


def test_a_plain_average_updates_its_batch_norm():
    """Stochastic weight averaging; the statistics are recomputed."""

    def act(model: nn.Sequential) -> list[Any]:
        average = AveragedModel(model)
        train(model, 3, average.update_parameters)
        update_bn([X], average)
        return [average, average.eval()(X)]

    assert_as_in_memory(act)


def test_a_deep_copy_stays_as_it_was_while_the_model_trains():
    """Without gradients, as torch copies parameters."""

    def act(model: nn.Sequential) -> list[Any]:
        train(model, 1)
        copied = copy.deepcopy(model)
        train(model)
        return [copied, [parameter.grad for parameter in copied.parameters()]]

    _, (copied, _) = assert_as_in_memory(act)

    assert on_disk_names(copied) == EVERY


def test_weights_are_set_aside_and_restored():
    """Through `.data`, as averaged weights are swapped in for evaluation."""

    def act(model: nn.Sequential) -> list[torch.Tensor]:
        model.eval()
        aside = [parameter.data.clone() for parameter in model.parameters()]
        for parameter in model.parameters():
            parameter.data.mul_(2)
        doubled = model(X)
        for parameter, value in zip(model.parameters(), aside, strict=True):
            parameter.data.copy_(value)
        return [doubled, model(X)]

    model, (doubled, again) = assert_as_in_memory(act)

    assert on_disk_names(model) == EVERY
    assert not torch.equal(doubled, again)


# All parameters as one, or replaced for a call


def test_parameters_become_a_vector_and_come_back():
    """The vector is plain; `vector_to_parameters` stores its parts."""

    def act(model: nn.Sequential) -> list[torch.Tensor]:
        vector = parameters_to_vector(model.parameters())
        vector_to_parameters(vector.detach() * 2, model.parameters())
        return [vector, model(X)]

    model, (vector, _) = assert_as_in_memory(act)

    assert not offload.is_offloaded(vector)
    assert on_disk_names(model) == EVERY


def test_a_functional_call_replaces_weights_on_disk():
    """The given values are used for the call, and the files keep theirs."""

    def act(model: nn.Sequential) -> torch.Tensor:
        model.eval()
        doubled = {name: parameter * 2 for name, parameter in model.named_parameters()}
        return functional_call(model, doubled, (X,))

    model, _ = assert_as_in_memory(act)

    assert on_disk_names(model) == EVERY
    torch.testing.assert_close(plain_form(model), plain_form(network()), rtol=0, atol=0)


def test_models_on_disk_are_stacked_to_an_ensemble():
    """`stack_module_state` and `vmap`."""

    def act(model: nn.Sequential) -> torch.Tensor:
        model.eval()
        parameters, buffers = stack_module_state([model, model])
        call = lambda weights, statistics: functional_call(model, (weights, statistics), (X,))  # noqa: E731
        return torch.vmap(call)(parameters, buffers)

    assert_as_in_memory(act)


# States


@pytest.mark.parametrize("assign", [False, True], ids=["copied", "assigned"])
def test_a_plain_state_is_loaded_into_a_model_on_disk(assign):
    """Copied into the files; with `assign` the given tensors are used, as in torch."""

    def act(model: nn.Sequential) -> list[Any]:
        keys = model.load_state_dict(network(seed=5).state_dict(), assign=assign)
        return [list(keys.missing_keys), list(keys.unexpected_keys), model.eval()(X)]

    model, _ = assert_as_in_memory(act)

    assert on_disk_names(model) == (set() if assign else EVERY)


def test_a_saved_state_is_plain_and_loads_into_a_model_in_memory():
    """`torch.save`, read back with `weights_only`."""

    def act(model: nn.Sequential) -> dict[str, torch.Tensor]:
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        return dict(torch.load(file, weights_only=True))

    _, state = assert_as_in_memory(act)

    assert not any(offload.is_offloaded(value) for value in state.values())
    assert network().load_state_dict(state)


def test_a_distributed_checkpoint_is_saved_and_loaded_in_place(tmp_path):
    """`torch.distributed.checkpoint`, in one process."""
    folders = iter((tmp_path / "plain", tmp_path / "on_disk"))

    def act(model: nn.Sequential) -> torch.Tensor:
        folder = next(folders)
        dcp.save({"model": model.state_dict()}, checkpoint_id=folder, no_dist=True)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        state = {"model": model.state_dict()}
        dcp.load(state, checkpoint_id=folder, no_dist=True)
        return model.eval()(X)

    model, _ = assert_as_in_memory(act)

    assert on_disk_names(model) == EVERY
    torch.testing.assert_close(plain_form(model), plain_form(network()), rtol=0, atol=0)


def test_a_distributed_state_dict_is_taken_and_set():
    """`get_model_state_dict` and `set_model_state_dict`, as trainers use them."""

    def act(model: nn.Sequential) -> torch.Tensor:
        state = {name: value * 2 for name, value in get_model_state_dict(model).items()}
        set_model_state_dict(model, state)
        return model.eval()(X)

    model, _ = assert_as_in_memory(act)

    assert on_disk_names(model) == EVERY


# Steps over all parameters at once


def lbfgs(model: nn.Sequential) -> None:
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(X).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)


def muon(model: nn.Sequential) -> None:
    optimizer = torch.optim.Muon([model[0].weight, model[3].weight], lr=0.1)
    model(X).square().sum().backward()
    optimizer.step()


def clipped(model: nn.Sequential) -> list[Any]:
    model(X).sum().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    nn.utils.clip_grad_value_(model.parameters(), 0.01)
    return [norm, [parameter.grad for parameter in model.parameters()]]


@pytest.mark.parametrize("step", [lbfgs, muon, clipped])
def test_steps_over_all_parameters_write_through(step):
    """Optimizers that split or combine parameters in their own way."""
    model, _ = assert_as_in_memory(step)

    assert on_disk_names(model) == EVERY


# A model as a program


PROGRAMS: dict[str, Callable[[Any], Any]] = {
    "compiled": lambda model: torch.compile(model.eval(), backend="aot_eager", fullgraph=True)(X),
    "traced": lambda model: torch.fx.symbolic_trace(model.eval())(X),
    "fused": lambda model: nn.utils.fuse_linear_bn_eval(model.eval()[0], model[1]),
}


@pytest.mark.parametrize("act", PROGRAMS.values(), ids=PROGRAMS)
def test_a_model_on_disk_is_taken_as_a_program(act):
    """Compiled in one graph, traced, its layers fused."""
    model, _ = assert_as_in_memory(act)

    assert on_disk_names(model) == EVERY
