"""A model folder that cannot be used is refused by its files, before anything heavy is imported."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from possible_run import problem, write_model_folder

from hybridflow.config import PPOConfig, SFTConfig
from hybridflow.config.load import prepare_config

MODEL = "actor_rollout_ref.model.path"
ROOM = "actor_rollout_ref."


def remove(*names: str) -> Callable[[Path], None]:
    return lambda folder: [(folder / name).unlink() for name in names] and None


def write(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(text) and None


INDEX = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model.safetensors"}})
SPOILT = [
    (remove("config.json"), "has no config.json"),
    (write("config.json", "{"), "config.json is no JSON object"),
    (write("config.json", "[" * 100_000), "config.json is no JSON object"),
    (write("config.json", "[]"), "config.json is no JSON object"),
    (write("config.json", "{}"), "config.json has no model_type"),
    (
        remove("model.safetensors"),
        "has no weights, that is no *.safetensors: this folder holds chat_template",
    ),
    (write("model.safetensors.index.json", INDEX), "lacks 1 of the weight files"),
    (remove("tokenizer.json"), "data.tokenizer"),
]


@pytest.mark.parametrize(("spoil", "says"), SPOILT)
def test_a_spoilt_folder_is_refused(
    spoil: Callable[[Path], None], says: str, base: list[str], tmp_path: Path
) -> None:
    spoil(tmp_path / "model")
    assert says in problem(base)
    data = [f"data.train_files={tmp_path}/train.parquet", f"trainer.default_local_dir={tmp_path}/run"]
    assert says in problem([*data, f"model.path={tmp_path}/model"], root=SFTConfig)


def test_a_pickle_is_named_with_its_remedy(base: list[str], tmp_path: Path) -> None:
    (tmp_path / "model" / "model.safetensors").rename(tmp_path / "model" / "pytorch_model.bin")
    assert "pytorch_model.bin is a pickle, which is never loaded: convert it to safetensors" in problem(base)


def test_a_file_is_no_folder(base: list[str], tmp_path: Path) -> None:
    assert "is a file: give the Hugging Face folder" in problem(base, f"{MODEL}={tmp_path}/model/config.json")


def test_each_role_that_the_run_builds_is_looked_at(base: list[str], tmp_path: Path) -> None:
    other = write_model_folder(tmp_path / "other")
    (other / "config.json").unlink()
    critic = f"critic.model.path={other}"
    assert "critic.model.path" in problem(base, critic, "algorithm.adv_estimator=gae")
    # a critic that is not built is not looked at
    prepare_config(
        PPOConfig, [*base, critic, "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=2"]
    )
    teacher = ["algorithm.adv_estimator=on_policy_distillation", f"distillation.teacher_model.path={other}"]
    assert "distillation.teacher_model.path" in problem(base, *teacher)


@pytest.mark.parametrize(
    ("sizes", "keys", "said"),
    [
        ({"num_hidden_layers": 2}, "pipeline_parallel_size=4", "has 2 layers, which make no 4 parts"),
        (
            {"text_config": {"num_experts": 6}},
            "expert_parallel_size=4",
            "has 6 experts, which fsdp_config.exp",
        ),
        ({"num_hidden_layers": 8}, "expert_parallel_size=2", "has no experts, which"),
        ({"num_experts": 4}, "tensor_parallel_size=2", "has 4 experts, which are not cut"),
        (
            {"num_attention_heads": 9, "num_key_value_heads": 3},
            "tensor_parallel_size=2",
            "tensor_parallel_size=2 does not divide num_attention_heads=9, num_key_value_heads=3 of",
        ),
    ],
)
def test_a_model_that_cannot_be_divided_as_asked_is_refused(
    sizes: dict[str, object], keys: str, said: str, base: list[str], tmp_path: Path
) -> None:
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "qwen2", **sizes}))
    assert said in problem(
        base,
        f"actor_rollout_ref.actor.fsdp_config.{keys}",
        "trainer.n_gpus_per_node=4",
        "ray_kwargs.ray_init.num_cpus=4",
    )


@pytest.mark.parametrize(("heads", "refused"), [(8, False), (6, True)])
def test_heads_of_a_model_that_generates_with_several_ranks(
    heads: int, refused: bool, base: list[str], tmp_path: Path
) -> None:
    """It is told before workers start: the engine of the trainer divides heads among its ranks."""
    content = {"model_type": "qwen2", "text_config": {"num_attention_heads": heads}}
    (tmp_path / "model" / "config.json").write_text(json.dumps(content))
    words = [*base, "trainer.n_gpus_per_node=4", "actor_rollout_ref.rollout.tensor_model_parallel_size=4"]
    if refused:
        said = problem(words)
        assert "rollout.tensor_model_parallel_size=4 does not divide num_attention_heads=6 of " in said
        assert said.endswith("set it to 1 or 2 or 3 or 6")
    else:
        prepare_config(PPOConfig, words)


def rows(prompt: object) -> pa.Table:
    return pa.table({"prompt": [prompt], "text": ["a"]})


@pytest.mark.parametrize("suffix", ["parquet", "jsonl", "json"])
def test_messages_need_a_chat_template_and_texts_do_not(suffix: str, base: list[str], tmp_path: Path) -> None:
    (tmp_path / "model" / "chat_template.jinja").unlink()
    for prompt, refused in (([{"role": "user", "content": "a"}], True), ("a", False)):
        file = tmp_path / f"rows.{suffix}"
        if suffix == "parquet":
            pq.write_table(rows(prompt), file)
        else:
            row = json.dumps({"prompt": prompt})
            file.write_text(f"\n{row}\n" if suffix == "jsonl" else f"[{row}]")
        overrides = [*base, f"data.train_files={file}"]
        if refused:
            assert "has no chat template, and the data holds messages: set data.tokenizer" in problem(
                overrides
            )
        else:
            prepare_config(PPOConfig, overrides)


def test_the_built_in_task_needs_a_chat_template(base: list[str], tmp_path: Path) -> None:
    (tmp_path / "model" / "chat_template.jinja").unlink()
    task = ["data.train_files=[]", "data.val_files=[]", "data.task.name=arithmetic_chain"]
    assert "has no chat template" in problem(base, *task)
    (tmp_path / "model" / "tokenizer_config.json").write_text('{"chat_template": "x"}')
    prepare_config(PPOConfig, [*base, *task])


def test_it_is_found_before_torch_is_imported(base: list[str], tmp_path: Path) -> None:
    (tmp_path / "model" / "config.json").unlink()
    code = (
        f"import sys\nfrom hybridflow.trainer.main_ppo import main\nstatus = main({base!r})\nassert status "
        "== 1 and 'torch' not in sys.modules"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0 and "has no config.json" in ended.stderr, ended.stderr


TEXT_ALONE = [
    (["actor_rollout_ref.rollout.name=vllm"], "rollout.name=vllm is given token ids alone: set it to native"),
    (["actor_rollout_ref.rollout.name=hf"], "rollout.name=hf is given token ids alone: set it to native"),
]


@pytest.mark.parametrize(("keys", "says"), TEXT_ALONE)
@pytest.mark.parametrize("column", ["images", "videos", "drawing"])
def test_pictures_want_what_reads_them(
    base: list[str], tmp_path: Path, keys: list[str], says: str, column: str
) -> None:
    text = {"prompt": [{"role": "user", "content": "<image> ?"}], "data_source": "hiyouga/geometry3k"}
    for name, row in (("text", {**text, column: []}), ("drawn", {**text, column: ["a.png"]})):
        pq.write_table(pa.Table.from_pylist([row]), tmp_path / f"{name}.parquet")
    named = ["data.image_key=drawing"] * (column == "drawing")
    recipe = [*base, *keys, *named]
    drawn = f"data.train_files={tmp_path}/drawn.parquet"
    assert f"data.train_files has pictures, and {says}" in problem(recipe, drawn).replace(ROOM, "")
    prepare_config(PPOConfig, [*recipe, f"data.train_files={tmp_path}/text.parquet"])
    prepare_config(PPOConfig, [*base, *named, drawn])
    task = ["data.train_files=[]", "data.val_files=[]", "data.task.name=red_squares"]
    assert f"makes pictures, and {says}" in problem(recipe, *task).replace(ROOM, "")


def test_a_model_that_reads_pictures_is_not_cut(base: list[str], tmp_path: Path) -> None:
    (tmp_path / "model" / "config.json").write_text('{"model_type": "qwen2_vl", "vision_config": {"a": 1}}')
    cut = ["trainer.n_gpus_per_node=2", "actor_rollout_ref.actor.fsdp_config.tensor_parallel_size=2"]
    assert "only models of text are cut by fsdp_config.tensor_parallel_size=2" in problem(base, *cut)
