"""The published models' shapes that simulated runs take, by their numbers of parameters."""

import math

import pytest

from models import checkpoint
from models.families import family
from models.params import flatten

# OPT-175B has no public configuration: its paper's table of shapes gives this number.
PARAMETERS = {
    "llama-13b": 13_015_864_320,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    # The published model is a Nemotron: its MLP has two matrices of width 9,216 for three of 6,144
    # here, and its 65 norms have biases, which makes 4,190,509,056.
    "minitron-4b": 4_190_309_376,
    "opt-13b": 12_853_473_280,
    "opt-66b": 65_719_701_504,
    "opt-175b": 174_604_468_224,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-32b": 32_763_876_352,
    "qwq-32b": 32_763_876_352,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_configuration_has_the_published_number_of_parameters(name):
    config = checkpoint.load_config(f"configs/models/{name}")
    declared = flatten(family(config).declare(config)).values()
    assert sum(math.prod(param.shape) for param in declared) == PARAMETERS[name]
