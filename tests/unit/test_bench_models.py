"""The models of `shoal bench training`: as large as the page says, and able to learn."""

import importlib.util

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch

from shoal.bench.training_models import MODELS

N_PARAMETERS = {"resnet": 2.8e6, "bert": 5.3e6, "linear": 10.6e6, "paced": 4.2e6}


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
