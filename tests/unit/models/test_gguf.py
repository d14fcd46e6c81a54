"""A GGUF file that is written here tensor by tensor becomes a folder with the same weights and tokens."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from hybridflow.cli.main import main
from hybridflow.data.tokenizer import load_tokenizer
from hybridflow.errors import ConfigError, ModelError
from hybridflow.models.files import gguf as own
from hybridflow.models.files.gguf import import_gguf

HIDDEN, INNER, HEADS, KV_HEADS, BLOCKS = 64, 96, 4, 2, 2
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
HF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def hf_name(name: str) -> str:
    """Return transformers' name of a tensor of a Qwen 2 GGUF file."""
    *block, module, kind = name.split(".")
    layer = f"model.layers.{block[1]}." if block else ""
    return f"{layer}{HF_NAMES[module]}.{kind}"


def shapes(vocabulary: int) -> dict[str, tuple[int, ...]]:
    head = HIDDEN // HEADS
    found: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (vocabulary, HIDDEN),
        "output_norm.weight": (HIDDEN,),
    }
    for block in range(BLOCKS):
        sizes = {
            "attn_norm.weight": (HIDDEN,),
            "ffn_norm.weight": (HIDDEN,),
            "attn_output.weight": (HIDDEN, HIDDEN),
            "ffn_gate.weight": (INNER, HIDDEN),
            "ffn_up.weight": (INNER, HIDDEN),
            "ffn_down.weight": (HIDDEN, INNER),
        }
        for letter, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            sizes[f"attn_{letter}.weight"] = (heads * head, HIDDEN)
            sizes[f"attn_{letter}.bias"] = (heads * head,)
        found |= {f"blk.{block}.{name}": shape for name, shape in sizes.items()}
    return found


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    """A Qwen 2 file with matrices of blocks in Q8_0, and the values that it stands for."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    characters = sorted(set(_bytes_as_characters().values()))
    tokens = [*characters, "ab", "<|im_start|>", "<|im_end|>"]
    types = [gguf.TokenType.NORMAL] * (len(tokens) - 2) + [gguf.TokenType.CONTROL] * 2
    writer = gguf.GGUFWriter(str(path), "qwen2")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(BLOCKS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(len(tokens) - 1)
    writer.add_pad_token_id(len(tokens) - 1)
    writer.add_chat_template(TEMPLATE)
    draw = np.random.default_rng(0)
    values = {}
    for name, shape in shapes(len(tokens)).items():
        tensor = draw.normal(scale=0.3, size=shape).astype(np.float32)
        if name.startswith("blk.") and len(shape) == 2:
            packed = gguf.quants.quantize(tensor, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(name, packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
            tensor = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(name, tensor)
        values[name] = tensor
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, values


def _bytes_as_characters() -> dict[int, str]:
    """Return the visible character with which byte-level BPE writes each byte."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    found = {number: chr(number) for number in visible}
    for number in range(256):
        found.setdefault(number, chr(256 + len(found) - len(visible)))
    return found


def test_the_folder_has_the_weights_of_the_file(
    written: tuple[Path, dict[str, np.ndarray]], tmp_path: Path
) -> None:
    path, values = written
    folder = import_gguf(path, tmp_path / "model")
    weights = folder / "model.safetensors"
    assert weights.stat().st_mode == (folder / "config.json").stat().st_mode, "others may read it too"
    found = load_file(folder / "model.safetensors")
    assert set(found) == {hf_name(name) for name in values}
    for name, value in values.items():
        assert torch.equal(found[hf_name(name)], torch.from_numpy(value)), name
    tokenizer = load_tokenizer(folder)
    text = "What is 2 + 2?"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.chat_template == TEMPLATE


def test_the_folder_has_nothing_of_the_process_that_wrote_it(
    written: tuple[Path, dict[str, np.ndarray]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(written[0].parent)
    saved = json.loads((import_gguf("tiny.gguf", tmp_path / "model") / "tokenizer_config.json").read_text())
    assert "is_local" not in saved and "local_files_only" not in saved


def test_the_command_writes_a_dtype(written: tuple[Path, dict[str, np.ndarray]], tmp_path: Path) -> None:
    path, values = written
    target = tmp_path / "narrow"
    target.mkdir()
    assert main(["import-gguf", str(path), str(target), "--dtype", "bfloat16"]) == 0
    found = load_file(target / "model.safetensors")
    for name, value in values.items():
        assert torch.equal(found[hf_name(name)], torch.from_numpy(value).bfloat16()), name


def test_a_folder_that_differs_from_the_file_is_refused(
    written: tuple[Path, dict[str, np.ndarray]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = own._write

    def spoilt(model, tokenizer, folder, dtype):
        with torch.no_grad():
            model.model.norm.weight[0] += 0.5
        write(model, tokenizer, folder, dtype)
        with torch.no_grad():
            model.model.norm.weight[0] -= 0.5

    monkeypatch.setattr(own, "_write", spoilt)
    with pytest.raises(ModelError, match=r"tensor model\.norm\.weight is not the one"):
        import_gguf(written[0], tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    text = tmp_path / "text.gguf"
    text.write_text("hello")
    part = tmp_path / "model-00001-of-00003.gguf"
    part.write_bytes(b"GGUF")
    short = tmp_path / "short.gguf"
    short.write_bytes(b"GGUF\3\0\0\0")
    with pytest.raises(ConfigError, match="is not a file"):
        import_gguf(tmp_path / "none.gguf", tmp_path / "out")
    with pytest.raises(ModelError, match="begins with b'hell'"):
        import_gguf(text, tmp_path / "out")
    with pytest.raises(ModelError, match="part 1 of 3"):
        import_gguf(part, tmp_path / "out")
    with pytest.raises(ModelError, match="cannot read"):
        import_gguf(short, tmp_path / "out")
    with pytest.raises(ConfigError, match="is not an empty folder"):
        import_gguf(short, tmp_path)
    assert not (tmp_path / "out").exists()
