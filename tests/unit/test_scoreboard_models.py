"""The models that are trained to be timed: as large as the page says, and able to learn."""

import importlib.util

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch

from bench.scoreboard.training_models import MODELS
from shoal.limits import STAGING_BYTES

N_PARAMETERS = {"resnet": 2.8e6, "bert": 5.3e6, "linear": 10.6e6, "paced": 4.2e6, "wide": 58.7e6}


@pytest.mark.parametrize("name", N_PARAMETERS)
def test_a_model_has_as_many_parameters_as_the_page_says_and_a_gradient_of_each(name: str) -> None:
    made = MODELS[name]()
    assert sum(p.numel() for p in made.module.parameters()) == pytest.approx(
        N_PARAMETERS[name], rel=0.02
    )
    batch = made.batch(torch.Generator().manual_seed(1))
    made.loss(made.module, batch).backward()
    assert all(p.grad is not None for p in made.module.parameters())
    made.optimizer(made.module.parameters()).step()


def test_a_copy_of_the_gradients_would_be_four_times_what_memory_is_measured_against() -> None:
    gradient_bytes = sum(p.numel() * p.element_size() for p in MODELS["wide"]().module.parameters())
    assert gradient_bytes >= 4 * (STAGING_BYTES + (4 << 20))  # in one host buffers are of 4 MiB
