"""Leaving all modes, and restoring them afterwards."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
from torch._subclasses import FakeTensorMode

from offload.system.modes import no_functions, no_grad, no_inference, no_modes
from tests.crashes import Act
from tests.interrupts import meets_interrupts


@pytest.mark.parametrize("graph", [True, False])
def test_gradients_are_off_inside_and_the_earlier_mode_comes_back(graph):
    with torch.set_grad_enabled(graph):
        with no_functions(), no_modes():
            assert not torch.is_grad_enabled()
            with torch.enable_grad():
                assert torch.is_grad_enabled()
            assert not torch.is_grad_enabled()

        assert graph == torch.is_grad_enabled()


def test_inference_mode_is_left_and_comes_back_even_after_an_error():
    with torch.inference_mode():
        with suppress(KeyError), no_functions(), no_modes():
            assert not torch.is_inference_mode_enabled()
            made = torch.ones(1)
            raise KeyError

        assert torch.is_inference_mode_enabled()
        assert not torch.is_grad_enabled()
    assert not made.is_inference()


@pytest.mark.parametrize("mode", [FakeTensorMode(), torch.device("meta")], ids=["fake", "meta"])
def test_a_tensor_is_a_plain_one_in_other_modes(mode):
    with mode:
        with no_functions(), no_modes(), no_functions(), no_modes():
            made = torch.ones(1)

        assert torch.ones(1).device.type == "meta" or type(torch.ones(1)) is not torch.Tensor
    assert torch.Tensor is type(made)
    assert 1 == made.item()


@pytest.mark.parametrize("inner", [no_grad, no_inference, no_modes])
@pytest.mark.parametrize("outer", [no_grad, no_inference, no_modes])
def test_an_interrupt_in_a_mode_within_another_leaves_the_state_around_both(tmp_path, outer, inner):
    def act(_: object) -> None:
        with outer(), inner():
            pass

    assert 0 < meets_interrupts(Act(lambda folder: folder, act), tmp_path, set())
