"""How `hybridflow config --explain` shows what follows from a configuration."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hybridflow.config import PPOConfig, SFTConfig
from hybridflow.config.explain import Line, ModelNumbers, explain
from hybridflow.config.model import ModelConfig
from hybridflow.data.files import count_rows
from hybridflow.distributed.device import resolve_device
from hybridflow.models.build import count_parameters, load_config, resolve_dtype


def show_explanation(config: PPOConfig | SFTConfig) -> None:
    """Print the sizes of a step, the steps of the run, and the memory it needs where the model's folder is at hand."""
    role = config.actor_rollout_ref.model if isinstance(config, PPOConfig) else config.model
    model = model_numbers(role, config.trainer.device)
    rows, batch = training_rows(config), config.data.train_batch_size
    lines = explain(config, rows, model)
    if rows is not None and rows < batch:
        lines.insert(0, Line("cannot run", f"{rows} training rows", f"fewer than data.train_batch_size={batch}: lower it, or add data"))
    if model is None:
        lines.append(Line("memory", "not estimated", f"{role.path} is no folder on this machine"))
    table = Table("", title="What follows from this configuration", title_justify="left")
    table.add_column("", justify="right")
    table.add_column("because", overflow="fold")
    for line in lines:
        table.add_row(Text(line.label), Text(line.value), Text(line.how))
    Console().print(table)


def training_rows(config: PPOConfig | SFTConfig) -> int | None:
    """Rows of the training data, before any is left out; None where they cannot be counted without fetching or making them."""
    own_class = isinstance(config, PPOConfig) and config.data.custom_cls.path
    if config.data.task.name or own_class or not config.data.train_files:
        return None
    return count_rows(config.data.train_files)


def model_numbers(model: ModelConfig, device: str) -> ModelNumbers | None:
    """Sizes from the configuration in the model's folder; None for a model that would have to be downloaded first."""
    assert model.path is not None, "the checks ask for a model path"
    if not Path(model.path).expanduser().is_dir():
        return None
    config = load_config(model.path, trust_remote_code=model.trust_remote_code, override_config=model.override_config)
    text = config.get_text_config()
    heads, hidden = text.num_attention_heads, text.hidden_size
    return ModelNumbers(
        num_parameters=count_parameters(config, trust_remote_code=model.trust_remote_code),
        num_layers=text.num_hidden_layers,
        hidden_size=hidden,
        intermediate_size=getattr(text, "intermediate_size", None) or 4 * hidden,
        num_kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or hidden // heads,
        vocab_size=text.vocab_size,
        bytes_per_parameter=resolve_dtype(model.dtype, resolve_device(device)).itemsize,
    )
