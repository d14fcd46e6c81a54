"""What the driver reads of a model before any process has it."""

from __future__ import annotations

from pathlib import Path

from hybridflow.config.model import ModelConfig
from hybridflow.models.files.build import shape_of
from hybridflow.trainer.models import row_cost

LIBRARY = """
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

class Config(LlamaConfig):
    model_type = "{name}"

class Model(LlamaForCausalLM):
    config_class = Config

AutoConfig.register("{name}", Config)
AutoModelForCausalLM.register(Config, Model)
"""


def model_of_a_library(folder: Path, name: str) -> ModelConfig:
    (folder / "lib.py").write_text(LIBRARY.format(name=name), encoding="utf-8")
    shape = (
        '{"model_type": "'
        + name
        + '", "vocab_size": 11, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, '
    )
    (folder / "config.json").write_text(
        shape + '"num_attention_heads": 2, "num_key_value_heads": 1}', encoding="utf-8"
    )
    return ModelConfig(path=str(folder), external_lib=str(folder / "lib.py"))


def test_the_driver_knows_an_architecture_that_a_library_registers(tmp_path: Path) -> None:
    assert shape_of(model_of_a_library(tmp_path, "registered_for_its_shape")).vocab_size == 11


def test_what_its_rows_cost_is_known_too(tmp_path: Path) -> None:
    assert row_cost(model_of_a_library(tmp_path, "registered_for_its_cost")).linear > 0
