"""What torch does with whole models: parametrizations, pruning, averaging, vectors, distributed checkpoints."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, parametrizations, parametrize, prune, vector_to_parameters
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import offload

X = torch.linspace(-2, 2, 40).reshape(5, 8)


def network() -> nn.Sequential:
    torch.manual_seed(0)
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


def assert_as_in_memory(act: Callable[[nn.Sequential], Any]) -> nn.Sequential:
    """Do it to a model on disk and to a copy of it in memory: same result, same state, same random numbers used.

    Returns:
        The model on disk.
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
    return on_disk


def on_disk_names(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if offload.is_offloaded(parameter)}


EVERY = {"0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias"}


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2

    def right_inverse(self, weight: torch.Tensor) -> torch.Tensor:
        return weight / 2


PARAMETRIZATIONS: dict[str, Callable[[nn.Module], Any]] = {
    "weight-norm": parametrizations.weight_norm,
    "spectral-norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "own": lambda layer: parametrize.register_parametrization(layer, "weight", Doubled()),
}


def parametrized(change: Callable[[nn.Module], Any]) -> Callable[[nn.Sequential], Any]:
    def act(model: nn.Sequential) -> list[torch.Tensor]:
        change(model[0])
        trained = train(model)
        parametrize.remove_parametrizations(model[0], "weight")
        with torch.no_grad():
            return [trained, model(X)]

    return act


@pytest.mark.parametrize("act", map(parametrized, PARAMETRIZATIONS.values()), ids=PARAMETRIZATIONS)
def test_a_parametrized_weight_trains_and_becomes_one_again(act):
    model = assert_as_in_memory(act)

    assert on_disk_names(model) >= EVERY - {"0.weight"}


def pruned(cut: Callable[[Any], Any]) -> Callable[[nn.Sequential], Any]:
    """After `prune.remove` the weight is a parameter again, with zeros where the mask has them."""

    def act(model: nn.Sequential) -> torch.Tensor:
        cut(model)
        trained = train(model)
        for layer in (model[0], model[3]):
            if prune.is_pruned(layer):
                prune.remove(layer, "weight")
        assert (model[0].weight == 0).any()
        return trained

    return act


def averaged(*, use_buffers: bool) -> Callable[[nn.Sequential], Any]:
    """`AveragedModel` copies the model from file to file, and updates the copy in place."""

    def act(model: nn.Sequential) -> AveragedModel:
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=use_buffers)
        train(model, 3, average.update_parameters)
        assert on_disk_names(average.module) == on_disk_names(model)
        assert not {p.data_ptr() for p in average.parameters()} & {p.data_ptr() for p in model.parameters()}
        return average

    return act


def copied_and_trained(model: nn.Sequential) -> list[Any]:
    """The copy stays as it was, without gradients, as torch copies parameters."""
    train(model, 1)
    copied = copy.deepcopy(model)
    train(model)
    assert on_disk_names(copied) == on_disk_names(model)
    return [copied, [parameter.grad for parameter in copied.parameters()]]


def set_aside_and_restored(model: nn.Sequential) -> list[torch.Tensor]:
    """Through `.data`, as averaged weights are swapped in for evaluation."""
    model.eval()
    aside = [parameter.data.clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.data.mul_(2)
    doubled = model(X)
    for parameter, value in zip(model.parameters(), aside, strict=True):
        parameter.data.copy_(value)
    return [doubled, model(X)]


def made_a_vector(model: nn.Sequential) -> list[torch.Tensor]:
    """The vector is plain; `vector_to_parameters` stores its parts."""
    vector = parameters_to_vector(model.parameters())
    assert not offload.is_offloaded(vector)
    vector_to_parameters(vector.detach() * 2, model.parameters())
    return [vector, model(X)]


ACTS: dict[str, Callable[[Any], Any]] = {
    "pruned": pruned(lambda model: prune.l1_unstructured(model[0], "weight", amount=0.5)),
    "averaged": averaged(use_buffers=False),
    "averaged with buffers": averaged(use_buffers=True),
    "copied and trained": copied_and_trained,
    "set aside and restored": set_aside_and_restored,
    "made a vector": made_a_vector,
    "compiled": lambda model: torch.compile(model.eval(), backend="aot_eager", fullgraph=True)(X),
    "traced": lambda model: torch.fx.symbolic_trace(model.eval())(X),
    "fused": lambda model: nn.utils.fuse_linear_bn_eval(model.eval()[0], model[1]),
}


@pytest.mark.parametrize("act", ACTS.values(), ids=ACTS)
def test_a_model_gives_the_same_as_in_memory_and_stays_on_disk(act):
    model = assert_as_in_memory(act)

    assert on_disk_names(model) == EVERY
