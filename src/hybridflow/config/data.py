"""`data.*`: where prompts come from and how they become batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from hybridflow.config.schema import at_least, excludes, group, key, needs, read_by

TASKS = ("arithmetic_chain", "arithmetic_preferences", "one_liners", "red_squares")
"""Built-in procedural tasks."""


@dataclass(frozen=True)
class CustomClassConfig:
    """A dataset class of your own."""

    path: str | None = key(
        None, "File or module that holds a dataset class of your own; null: the built-in one."
    )
    name: str | None = key(None, "Name of that class; `path` may also be path.py:name.")


@dataclass(frozen=True)
class SamplerConfig:
    """A sampler of your own, which chooses the order of rows."""

    class_path: str | None = key(
        None,
        "File or module that holds a sampler of your own; a curriculum sampler also has update(batch). "
        "null: the built-in one.",
    )
    class_name: str | None = key(None, "Name of the sampler class; `class_path` may also be path.py:name.")


@dataclass(frozen=True)
class DatagenConfig:
    """A class of your own that makes further training rows after each step."""

    path: str | None = key(
        None,
        "File or module that holds a class with generate(dataset), which makes further rows after each step; "
        "they join the next epoch. null: the data stay as they are.",
        needs("trainer.schedule=sync", "rows that are read ahead would depend on when a step ends"),
        excludes("data.custom_cls.path", "it is the built-in data set that grows"),
        excludes("algorithm.adv_estimator=spin", "its rows are the data's own answers"),
        excludes("distillation.lmbda<1", "some of its rows are the data's own answers"),
    )
    name: str | None = key(None, "Name of that class; `path` may also be path.py:name.")
    options: dict[str, Any] = key({}, "Values for that class, which it is given as config.options.")


@dataclass(frozen=True)
class TaskConfig:
    """A procedural task that makes questions."""

    name: str | None = key(
        None,
        "Procedural task that makes the questions in place of files: arithmetic_chain, reasoning_gym:NAME, "
        "or your own as path.py:factory; null: read files.",
    )
    size: int = key(10_000, "Number of training questions.", minimum=1)
    val_size: int = key(
        256, "Number of held-out questions, none of which is among the training questions.", minimum=0
    )
    seed: int = key(0, "Seed of the questions, apart from the seed of the run.")
    options: dict[str, Any] = key({}, "Keyword arguments of the task, for example {hops: 3}.")


@dataclass(frozen=True)
class BaseDataConfig:
    """Where rows come from and how they are read: the keys that every kind of run has."""

    train_files: str | list[str] = key(
        [],
        "Training data: one or several parquet, json or jsonl files, local or at an address such as hdfs:// "
        "or s3://.",
    )
    val_files: str | list[str] = key(
        [], "Validation data, in files of the same kinds; empty: nothing is validated."
    )
    task: TaskConfig = group(TaskConfig)
    train_max_samples: int = key(-1, "Largest number of training rows that are used; -1: all.", minimum=-1)
    val_max_samples: int = key(-1, "Largest number of validation rows that are used; -1: all.", minimum=-1)
    wrap_prompts: bool = key(
        False, "Make a prompt that is a plain text into a user's message, rendered by the chat template."
    )
    shuffle: bool = key(True, "Shuffle the training rows anew in each epoch, by the seed.")
    trust_remote_code: bool = key(False, "Run the code that comes with the tokenizer.")
    dataloader_num_workers: int = key(
        0, "Processes that read rows ahead; 0: rows are read in the trainer's process.", minimum=0
    )
    apply_chat_template_kwargs: dict[str, Any] = key(
        {}, "Extra arguments of the chat template, for example {enable_thinking: false}."
    )
    cache_dir: str | None = key(
        None, "Folder in which copies of remote files are kept; null: ~/.cache/hybridflow."
    )
    image_key: str | None = key(
        "images",
        "Column with the pictures of a row, each in the place of an <image> of its messages; null: none is "
        "read.",
    )
    video_key: str | None = key(
        "videos",
        "Column with the videos of a row, each in the place of a <video> of its messages; null: none is "
        "read.",
    )
    fetch_media: bool = key(
        False,
        "Fetch pictures and videos that are given as http addresses; otherwise such rows are left out, and "
        "such requests of agents are refused.",
    )


@dataclass(frozen=True)
class DataConfig(BaseDataConfig):
    """Prompts, and how they become batches."""

    tokenizer: str | None = key(None, "Tokenizer folder or hub name; null: the actor model's.")
    prompt_key: str = key(
        "prompt", "Column with the prompt: a list of messages, or a text that is already templated."
    )
    reward_fn_key: str = key(
        "data_source",
        "Column that names the source of a row, by which reward.function=auto chooses the reward.",
    )
    max_prompt_length: int = key(
        512, "Longest prompt, in tokens; data.truncation says what happens to a longer one.", minimum=1
    )
    max_response_length: int = key(512, "Longest response, in tokens; generation stops there.", minimum=1)
    train_batch_size: int = key(
        1024, "Prompts in one training step; each gets actor_rollout_ref.rollout.n responses.", minimum=1
    )
    gen_batch_size: int | None = key(
        None,
        "Prompts in one generation batch of dynamic sampling; null: train_batch_size.",
        read_by("algorithm.filter_groups.enable"),
        minimum=1,
    )
    demonstration_key: str = key(
        "messages",
        "spin, distillation.lmbda: column with the data's own answer, a text or messages that end in one.",
        argument="is_demonstration",
    )
    val_batch_size: int | None = key(None, "Prompts in one validation batch; null: all at once.", minimum=1)
    seed: int | None = key(None, "Seed of the shuffling; null: trainer.seed.")
    validation_shuffle: bool = key(False, "Shuffle the validation rows.")
    filter_overlong_prompts: bool = key(
        False, "Leave out prompts longer than max_prompt_length; the run says how many."
    )
    truncation: Literal["error", "left", "right", "middle"] = key(
        "error",
        "What happens to a prompt longer than max_prompt_length that is not left out: error stops the run, "
        "left, right and middle cut tokens there.",
    )
    environment: str | None = key(
        None,
        "Environment that talks to the model: a built-in name, such as guess, or path/to/file.py:NAME of "
        "your own. It makes its own questions where there are neither files nor a task. null: none.",
    )
    environment_options: dict[str, Any] = key({}, "Keyword arguments of the environment.")
    custom_cls: CustomClassConfig = group(CustomClassConfig)
    sampler: SamplerConfig = group(SamplerConfig)
    datagen: DatagenConfig = group(DatagenConfig)


@dataclass(frozen=True)
class SFTDataConfig(BaseDataConfig):
    """Conversations, and how they become batches."""

    tokenizer: str | None = key(None, "Tokenizer folder or hub name; null: the model's.")
    train_batch_size: int = key(256, "Conversations in one optimizer step.", minimum=1)
    micro_batch_size_per_gpu: int | None = key(
        None,
        "Largest number of conversations in one forward and backward pass; null: only the token limit "
        "counts.",
        minimum=1,
    )
    max_token_len_per_gpu: int = key(
        8192,
        "Largest number of tokens in one forward and backward pass, never exceeded. Lower it when memory "
        "runs out.",
        at_least(".max_length", "and cannot hold one conversation"),
        minimum=1,
    )
    max_length: int = key(
        1024, "Longest conversation, in tokens; data.truncation says what happens to a longer one.", minimum=2
    )
    truncation: Literal["error", "left", "right", "drop"] = key(
        "error",
        "What happens to a conversation longer than max_length: error stops the run, left and right cut "
        "tokens there, drop leaves it out.",
    )
    messages_key: str = key("messages", "Column with the list of messages.")
    tools_key: str = key(
        "tools",
        "Column with the tools of a conversation, which go to the chat template: schemas or their JSON.",
    )
    enable_thinking_key: str = key(
        "enable_thinking",
        "Column that says for a conversation whether the model thinks: the chat template's enable_thinking.",
    )
    prompt_key: str = key("prompt", "Column with the prompt, in data without a column of messages.")
    response_key: str = key("response", "Column with the response, in data without a column of messages.")
    text_key: str | None = key(
        None,
        "Supervised fine-tuning: column with plain text, of which every token is learned; null: the data has "
        "conversations, or prompts with responses.",
    )
