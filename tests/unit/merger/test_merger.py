from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from transformers import AutoConfig, AutoModelForTokenClassification

from hybridflow import model_merger
from hybridflow.checkpoint.layout import ACTOR, HF_FOLDER
from hybridflow.checkpoint.shard_index import read_tensors
from hybridflow.checkpoint.sharded import save_shards
from hybridflow.checkpoint.store import CheckpointStore
from hybridflow.data.tokenizer import load_tokenizer
from hybridflow.errors import CheckpointError, ConfigError, ModelError
from hybridflow.merger import compare, merge
from hybridflow.merger.merge import Dtype
from hybridflow.merger.source import folder_dtype
from hybridflow.models.adapters.adapter_folder import CONFIG, WEIGHTS
from hybridflow.models.adapters.lora import LoraSettings, adapted_layers, add_lora, saved_names
from hybridflow.models.files.build import build_policy
from hybridflow.models.files.build_score import build_score
from hybridflow.models.files.export import ADAPTER_FOLDER, save_config, save_hf
from hybridflow.models.files.probe import probe_log_probs
from hybridflow.models.policy import PolicyModel
from hybridflow.models.tiny import create_tiny_model
from hybridflow.models.value import ValueModel
from hybridflow.protocol import DataProto
from hybridflow.protocol.packing import make_rows, pack
from ranks import Ranks


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return create_tiny_model(
        tmp_path_factory.mktemp("models") / "tiny", hidden=32, intermediate=64, heads=2, kv_heads=1
    )


def trained(folder: Path, dtype: str = "float32") -> PolicyModel:
    policy = build_policy(folder, device="cpu", dtype=dtype, probe=False)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.25)
    return policy


def save(run_dir: Path, policy: PolicyModel, **more: Any) -> Path:
    """A checkpoint as a run writes it."""
    names = saved_names(policy)
    model = {name: tensor for name, tensor in policy.state_dict().items() if names is None or name in names}
    parts = {"model": model, "optimizer": {"m": torch.zeros(3)}, "scheduler": {"num_steps": 1}, **more}
    tokenizer = load_tokenizer(str(policy.config.name_or_path))

    def configuration(folder: Path) -> None:
        save_config(policy, folder)
        tokenizer.save_pretrained(folder)

    fill = {ACTOR: lambda folder: save_shards(folder, parts), f"{ACTOR}/{HF_FOLDER}": configuration}
    return CheckpointStore(run_dir).save(4, {}, folders=fill)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_merged_folder_is_the_trained_model(tmp_path: Path, tiny_folder: Path, dtype: str) -> None:
    policy = trained(tiny_folder, dtype)
    step = save(tmp_path / "run", policy)
    target = merge(step, tmp_path / "out" / "merged")
    modes = {path.stat().st_mode for path in target.glob("model*.safetensors")}
    assert modes == {(target / "config.json").stat().st_mode}, "others may read it too"
    again = build_policy(target, device="cpu", dtype=dtype)
    for name, tensor in policy.state_dict().items():
        assert again.state_dict()[name].equal(tensor), name
    assert json.loads((target / "config.json").read_text())["dtype"] == "float32", "as the run's model has it"
    assert load_tokenizer(target).decode(load_tokenizer(target).encode("1 + 2 = ?")) == "1 + 2 = ?"
    assert sorted(path.name for path in target.parent.iterdir()) == ["merged"], "nothing is left beside it"
    assert compare(step / ACTOR, target) == f"{len(policy.state_dict())} tensors, all equal bit for bit"


def in_dtype(source: Path, target: Path, dtype: torch.dtype, *, say: bool = True) -> Path:
    """A copy of a model folder whose weights have another dtype; `say` writes it into config.json."""
    shutil.copytree(source, target)
    weights = {name: tensor.to(dtype) for name, tensor in load_file(source / "model.safetensors").items()}
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    content = json.loads((source / "config.json").read_text())
    content.pop("dtype")
    if say:
        content["dtype"] = str(dtype).removeprefix("torch.")
    (target / "config.json").write_text(json.dumps(content))
    return target


def file_dtypes(folder: Path) -> set[torch.dtype]:
    return {tensor.dtype for path in folder.glob("*.safetensors") for tensor in load_file(path).values()}


@pytest.mark.parametrize("say", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_merged_folder_has_the_dtype_of_the_source(
    tmp_path: Path, tiny_folder: Path, dtype: torch.dtype, say: bool
) -> None:
    """A half-precision model that was trained in float32, as a run on a CPU does it."""
    policy = trained(in_dtype(tiny_folder, tmp_path / "source", dtype, say=say), "float32")
    assert policy.dtype == torch.float32
    step = save(tmp_path / "run", policy)
    target = merge(step, tmp_path / "merged")
    assert file_dtypes(target) == {dtype}
    name = str(dtype).removeprefix("torch.")
    assert json.loads((target / "config.json").read_text())["dtype"] == name
    again = build_policy(target, device="cpu", dtype="float32").state_dict()
    assert all(again[key].equal(tensor.to(dtype).float()) for key, tensor in policy.state_dict().items())
    wanted = (
        f"{len(policy.state_dict())} tensors, all equal bit for bit to the checkpoint's rounded to {name}"
    )
    assert compare(step, target) == wanted
    assert file_dtypes(merge(step, tmp_path / "wide", dtype="trained")) == {torch.float32}
    assert compare(step, tmp_path / "wide").endswith("tensors, all equal bit for bit")
    assert file_dtypes(merge(step, tmp_path / "asked", dtype="bfloat16")) == {torch.bfloat16}
    with torch.no_grad():
        next(policy.parameters()).view(-1)[3] += 1.0
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight in .* differs from the checkpoint's"):
        compare(save(tmp_path / "other", policy), target)


def test_weights_in_the_checkpoint_have_the_dtype_of_the_source(tmp_path: Path, tiny_folder: Path) -> None:
    """With hf_model in save_contents the folder in the checkpoint holds weights."""
    policy = trained(in_dtype(tiny_folder, tmp_path / "source", torch.bfloat16), "float32")
    save_hf(policy, tmp_path / "folder", dtype=policy.source_dtype)
    assert file_dtypes(tmp_path / "folder") == {torch.bfloat16}
    assert json.loads((tmp_path / "folder" / "config.json").read_text())["dtype"] == "bfloat16"
    again = build_policy(tmp_path / "folder", device="cpu", dtype="bfloat16").state_dict()
    assert all(again[key].equal(tensor.bfloat16()) for key, tensor in policy.state_dict().items())
    save_hf(policy, tmp_path / "wide")
    assert file_dtypes(tmp_path / "wide") == {torch.float32}


@pytest.mark.parametrize("text", ["[]", "3", '{"dtype": ["float16"]}', "{", "[" * 100_000])
def test_a_configuration_that_names_no_dtype(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    assert folder_dtype(tmp_path) is None


def test_numbers_beyond_a_dtype(tmp_path: Path, tiny_folder: Path) -> None:
    policy = trained(tiny_folder)
    with torch.no_grad():
        next(policy.parameters())[0, 0] = 1e5
    step = save(tmp_path / "run", policy)
    with pytest.raises(CheckpointError, match=r"embed_tokens.weight has numbers up to 1e\+05, which float16"):
        merge(step, tmp_path / "merged", dtype="float16")
    assert not (tmp_path / "merged").exists()
    with pytest.raises(CheckpointError, match=r"same log-probs.* allowed for bfloat16.*--dtype trained"):
        merge(step, tmp_path / "merged", dtype="bfloat16")
    assert merge(step, tmp_path / "merged", dtype="trained").is_dir()


def test_damage_and_what_is_missing(tmp_path: Path, tiny_folder: Path) -> None:
    step = save(tmp_path / "run", trained(tiny_folder))
    with pytest.raises(CheckpointError, match=r"no actor to merge at .*: there is no such folder"):
        merge(tmp_path / "run" / "global_step_5", tmp_path / "merged")
    with pytest.raises(CheckpointError, match=r"no actor to merge at .*: it holds .*global_step_4"):
        merge(tmp_path / "run", tmp_path / "merged")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("x")
    with pytest.raises(ConfigError, match="not an empty folder"):
        merge(step, tmp_path / "full")
    alone = shutil.copytree(step / ACTOR, tmp_path / "alone")
    (alone / HF_FOLDER / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        merge(alone, tmp_path / "merged")
    (tensors,) = (step / ACTOR).glob("model_*.safetensors")
    tensors.write_bytes(tensors.read_bytes()[:-1] + b"\x7f")
    with pytest.raises(CheckpointError, match="is damaged"):
        merge(step, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_a_checkpoint_without_the_model(tmp_path: Path) -> None:
    fill = {ACTOR: lambda folder: save_shards(folder, {"optimizer": {}})}
    step = CheckpointStore(tmp_path).save(1, {}, folders=fill)
    with pytest.raises(CheckpointError, match="save_contents"):
        merge(step, tmp_path / "merged")


def test_merging_says_what_it_does(
    tmp_path: Path, tiny_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    step = save(tmp_path / "run", trained(tiny_folder))
    with caplog.at_level("INFO", "hybridflow"):
        merge(step, tmp_path / "merged")
    said = [each.getMessage() for each in caplog.records if each.name.startswith("hybridflow.merger")]
    wanted = [
        f"verifying {step / ACTOR}: ",
        "joining ",
        "writing ",
        "reading it back: ",
        f"wrote {tmp_path / 'merged'} from {step / ACTOR}: ",
    ]
    assert [text[: len(start)] for text, start in zip(said, wanted, strict=True)] == wanted


def test_the_command(tmp_path: Path, tiny_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = save(tmp_path / "run", trained(tiny_folder))
    source = ["--backend", "fsdp", "--local_dir", str(step / ACTOR)]
    target = tmp_path / "merged"
    assert model_merger.main(["merge", *source, "--target_dir", str(target)]) == 0
    half = tmp_path / "half"
    assert model_merger.main(["merge", *source, "--target_dir", str(half), "--dtype", "bfloat16"]) == 0
    assert file_dtypes(half) == {torch.bfloat16}
    assert model_merger.main(["test", *source, "--test_hf_dir", str(target)]) == 0
    assert "all equal bit for bit" in capsys.readouterr().out
    assert model_merger.main(["test", *source, "--test_hf_dir", str(tiny_folder)]) == 1
    assert "differs from the checkpoint's" in capsys.readouterr().err
    other = ["--backend", "megatron", "--local_dir", str(step)]
    assert model_merger.main(["merge", *other, "--target_dir", str(tmp_path / "x")]) == 0
    assert model_merger.main(["test", *other, "--test_hf_dir", str(target)]) == 0


def with_adapters(folder: Path, dtype: str = "float32") -> PolicyModel:
    policy = build_policy(folder, device="cpu", dtype=dtype, probe=False)
    add_lora(policy, LoraSettings(rank=4, alpha=8, target_modules=("q_proj", "down_proj")))
    with torch.no_grad():
        for number, layer in enumerate(adapted_layers(policy).values()):
            b = layer.lora_B["default"].weight
            b.copy_(torch.rand(b.shape, generator=torch.Generator().manual_seed(number)) - 0.5)
    return policy


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_are_folded_into_their_base(tmp_path: Path, tiny_folder: Path, dtype: str) -> None:
    policy = with_adapters(tiny_folder, dtype)
    step = save(tmp_path / "run", policy)
    target = merge(step, tmp_path / "merged", lora="fold")
    assert not (target / ADAPTER_FOLDER).exists() and not (target / CONFIG).exists()
    again, base = (build_policy(folder, device="cpu", dtype=dtype) for folder in (target, tiny_folder))
    live, merged, before = (probe_log_probs(each) for each in (policy, again, base))
    moved, apart = float((live - before).abs().mean()), float((live - merged).abs().mean())
    assert apart < (1e-6 if dtype == "float32" else moved / 3) and moved > 0.01
    assert "log-probs of a probe batch within" in compare(step, target)
    if dtype == "float32":
        with pytest.raises(CheckpointError, match="do not give the same log-probs"):
            compare(step, tiny_folder)


def test_adapters_are_folded_in_the_dtype_of_the_source(tmp_path: Path, tiny_folder: Path) -> None:
    policy = with_adapters(in_dtype(tiny_folder, tmp_path / "source", torch.bfloat16), "float32")
    step = save(tmp_path / "run", policy)
    target = merge(step, tmp_path / "merged")
    assert file_dtypes(target) == {torch.bfloat16}
    assert "log-probs of a probe batch within" in compare(step, target)
    with pytest.raises(ConfigError, match="--dtype float32 with --lora keep"):
        merge(step, tmp_path / "kept", lora="keep", dtype="float32")


def test_adapters_are_kept(tmp_path: Path, tiny_folder: Path) -> None:
    policy = with_adapters(tiny_folder)
    step = save(tmp_path / "run", policy)
    target = merge(step, tmp_path / "kept", lora="keep")
    assert json.loads((target / CONFIG).read_text())["base_model_name_or_path"] == str(tiny_folder.resolve())
    assert not (target / "config.json").exists() and (target / "tokenizer_config.json").exists()
    again = build_policy(tiny_folder, device="cpu", probe=False)
    add_lora(again, LoraSettings(0, adapter_path=str(target)))
    assert probe_log_probs(again).equal(probe_log_probs(policy))
    assert compare(step, target) == "8 tensors, all equal bit for bit"
    weights = load_file(target / WEIGHTS)
    save_file(
        {name: tensor + 1 if "layers.1.mlp" in name else tensor for name, tensor in weights.items()},
        target / WEIGHTS,
    )
    with pytest.raises(
        CheckpointError,
        match=r"layers\.1\.mlp\.down_proj\.lora_A\.weight in .* differs from the checkpoint's",
    ):
        compare(step, target)


def test_the_base_is_gone_or_another(tmp_path: Path, tiny_folder: Path) -> None:
    there = shutil.copytree(tiny_folder, tmp_path / "base")
    step = save(tmp_path / "run", with_adapters(there))
    there.rename(tmp_path / "moved")
    with pytest.raises(
        CheckpointError, match=rf"adapters of the model {there}, which is not there.*--base_model"
    ):
        merge(step, tmp_path / "merged")
    merge(step, tmp_path / "merged", base_model=str(tmp_path / "moved"))
    assert merge(step, tmp_path / "kept", lora="keep", base_model=str(tiny_folder)).is_dir()
    assert json.loads((tmp_path / "kept" / CONFIG).read_text())["base_model_name_or_path"] == str(tiny_folder)
    shutil.rmtree(step / ACTOR / HF_FOLDER / ADAPTER_FOLDER)
    (step / "manifest.json").unlink()
    with pytest.raises(ModelError, match=r"cannot read adapter_config\.json"):
        merge(step, tmp_path / "third")


def test_what_is_not_merged(tmp_path: Path, tiny_folder: Path) -> None:
    plain = trained(tiny_folder)
    step = save(tmp_path / "run", plain)
    with pytest.raises(ConfigError, match=r"--lora keep: .* holds no adapters"):
        merge(step, tmp_path / "merged", lora="keep")
    critic = ValueModel(plain.hf)
    add_lora(critic, LoraSettings(2))
    save_shards(tmp_path / "critic", {"model": dict(critic.state_dict())})
    with pytest.raises(CheckpointError, match="holds adapters of a critic"):
        merge(tmp_path / "critic", tmp_path / "merged")


def critic_of(folder: Path, dtype: str = "float32") -> ValueModel:
    critic = ValueModel(trained(folder, dtype).hf)
    with torch.no_grad():
        critic.head.weight.normal_()
        critic.head.bias.fill_(0.5)
    return critic


def values(critic: ValueModel) -> Tensor:
    ids = [[3, 4, 5, 6], [7, 8, 9]]
    return critic(pack(DataProto.from_dict(make_rows(ids, [[1, 2, 3], [4]], pad_id=0))))


def test_a_critic_is_a_token_classifier_that_a_critic_begins_from(tmp_path: Path, tiny_folder: Path) -> None:
    step = save(tmp_path / "run", trained(tiny_folder))
    critic = critic_of(tiny_folder)
    save_shards(step / "critic", {"model": dict(critic.state_dict())})
    (step / "manifest.json").unlink()
    target = merge(step / "critic", tmp_path / "merged")
    again = AutoModelForTokenClassification.from_pretrained(target)
    assert again.config.num_labels == 1 and again.config.architectures == [type(again).__name__]
    ids = torch.tensor([[3, 4, 5, 6, 1, 2, 3]])
    assert torch.allclose(again(ids).logits[0, 3:6, 0], values(critic)[:3], atol=1e-5)
    assert compare(step / "critic", target).endswith("equal bit for bit")
    begun = build_score("value", target, device="cpu")
    assert values(begun).equal(values(critic))
    low = merge(step / "critic", tmp_path / "bfloat16", dtype="bfloat16")
    assert file_dtypes(low) == {torch.bfloat16} and "rounded to bfloat16" in compare(step / "critic", low)


@pytest.mark.parametrize("written", ["source", "trained", "bfloat16"])
def test_the_head_of_a_critic_in_bfloat16_is_rounded_as_its_other_weights(
    written: Dtype, tmp_path: Path, tiny_folder: Path
) -> None:
    step = save(tmp_path / "run", trained(tiny_folder, "bfloat16"))
    (step / "manifest.json").unlink()
    critic = critic_of(tiny_folder, "bfloat16")
    save_shards(step / "critic", {"model": dict(critic.state_dict())})
    target = merge(step / "critic", tmp_path / "merged", dtype=written)
    assert "equal bit for bit" in compare(step / "critic", target)
    begun = build_score("value", target, device="cpu", dtype="bfloat16", probe=False)
    assert begun.head.weight.equal(critic.head.weight.bfloat16().float())


def test_a_critic_that_began_from_another_model(tmp_path: Path, tiny_folder: Path) -> None:
    small = create_tiny_model(tmp_path / "small", hidden=16, intermediate=32, heads=2, kv_heads=1)
    step = save(tmp_path / "run", trained(tiny_folder))
    (step / "manifest.json").unlink()
    save_shards(step / "critic", {"model": dict(critic_of(small).state_dict())})
    with pytest.raises(CheckpointError, match=r"began from another model: .*--base_model"):
        merge(step / "critic", tmp_path / "merged")
    target = merge(step / "critic", tmp_path / "merged", base_model=str(small))
    assert values(build_score("value", target, device="cpu")).equal(values(critic_of_saved(step, small)))


def critic_of_saved(step: Path, folder: Path) -> ValueModel:
    critic = ValueModel(build_policy(folder, device="cpu", probe=False).hf)
    saved = read_tensors(step / "critic", "model")
    critic.load_state_dict({name: saved[name] for name in saved})
    return critic


def test_a_classifier_of_more_labels_is_no_critic(tmp_path: Path, tiny_folder: Path) -> None:
    config = AutoConfig.from_pretrained(tiny_folder, num_labels=3)
    AutoModelForTokenClassification.from_config(config).save_pretrained(tmp_path / "labels")
    with pytest.raises(ModelError, match="token classifier with 3 labels, and a critic has one"):
        build_score("value", tmp_path / "labels", device="cpu")


def save_on_rank(rank: int, folder: str, source: str, adapters: bool) -> None:
    policy = with_adapters(Path(source)) if adapters else trained(Path(source))
    mesh, names = init_device_mesh("cpu", (2,)), saved_names(policy)
    model = {
        name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in policy.state_dict().items()
    }
    save_shards(
        Path(folder) / ACTOR,
        {"model": {name: model[name] for name in model if names is None or name in names}},
    )
    if rank == 0:
        save_config(policy, Path(folder) / ACTOR / HF_FOLDER)


@pytest.mark.parametrize("adapters", [False, True])
def test_what_two_ranks_saved_becomes_one_folder(
    two_ranks: Ranks, tmp_path: Path, tiny_folder: Path, adapters: bool
) -> None:
    two_ranks.run(save_on_rank, str(tmp_path), str(tiny_folder), adapters)
    again = build_policy(merge(tmp_path, tmp_path / "merged"), device="cpu", probe=False)
    live = with_adapters(tiny_folder) if adapters else trained(tiny_folder)
    assert torch.allclose(probe_log_probs(again), probe_log_probs(live), atol=1e-5)


def test_weights_are_staged_in_pieces(
    tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hybridflow.merger.source.STAGED_BYTES", 4096)
    step = save(tmp_path / "run", trained(tiny_folder))
    assert compare(step, merge(step, tmp_path / "merged")).endswith("equal bit for bit")


@pytest.mark.parametrize(
    ("flags", "status", "text"),
    [
        (["--tie-word-embedding", "--use_cpu_initialization"], 0, ""),
        (["--private"], 1, "give --hf_upload_path OWNER/NAME too"),
        (["--is-value-model"], 0, ""),
        (["--lora", "fold"], 1, "holds no adapters"),
    ],
)
def test_flags_of_the_command(
    tmp_path: Path,
    tiny_folder: Path,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    status: int,
    text: str,
) -> None:
    step = save(tmp_path / "run", trained(tiny_folder))
    source = [
        "merge",
        "--backend",
        "fsdp",
        "--local_dir",
        str(step / ACTOR),
        "--target_dir",
        str(tmp_path / "merged"),
    ]
    assert model_merger.main([*source, *flags]) == status
    assert text in capsys.readouterr().err and (tmp_path / "merged").exists() == (status == 0)
