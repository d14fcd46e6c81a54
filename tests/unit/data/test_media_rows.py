"""Rows with pictures: where they may stand, which tokens they become, and which rows are left out."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import ImageFile
from transformers import PreTrainedTokenizerFast

from hybridflow.checkpoint.state import load_tree, save_tree
from hybridflow.config.data import DataConfig, SFTDataConfig
from hybridflow.config.preference import PreferenceDataConfig
from hybridflow.data.files import Rows
from hybridflow.data.media import MediaReader, MediaSource
from hybridflow.data.pictures import thumbnail
from hybridflow.data.preference import PreferenceDataset
from hybridflow.data.prompts import PromptDataset, PromptRow
from hybridflow.data.sft import SFTDataset
from hybridflow.data.tasks import RedSquares
from hybridflow.data.tokenizer import load_tokenizer
from hybridflow.errors import DataError
from picture_models import picture_model, squares

RED = (255, 0, 0)
BLUE = (0, 0, 255)


def png(*colours: tuple[int, int, int]) -> bytes:
    file = io.BytesIO()
    squares(*colours).save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return load_tokenizer(picture_model())


def row(content: Any, *pictures: Any, **more: Any) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": content}], "images": list(pictures), "answer": "1", **more}


def dataset(rows: list[dict[str, Any]], tokenizer: PreTrainedTokenizerFast, **keys: Any) -> PromptDataset:
    return PromptDataset(rows, tokenizer, DataConfig(**keys))


def test_marks_and_parts_give_the_same_prompt(tokenizer: PreTrainedTokenizerFast) -> None:
    red = png(RED)
    forms = [
        row("<image>red ?", red),
        row(
            [{"type": "image", "detail": "high"}, {"type": "text", "text": "red ?"}],
            {"bytes": red, "path": None},
        ),
        row([{"type": "image", "image": red}, {"type": "text", "text": "red ?"}]),
        row([{"type": "image_url", "image_url": {"url": red}}, {"type": "text", "text": "red ?"}]),
        {"prompt": _templated(tokenizer), "images": [red]},
    ]
    items = list(dataset(forms, tokenizer))
    text = tokenizer.decode(items[0].prompt_token_ids)
    pads = "<|image_pad|>" * 16
    assert text == (
        f"<|im_start|>user\n<|vision_start|>{pads}<|vision_end|>red ?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert len({item.prompt.key for item in items}) == 1
    assert "images" not in items[0].row["extra_info"], "pictures do not travel to rewards"
    assert items[0].media[0].values["pixel_values"].shape == (64, 24)


def _templated(tokenizer: PreTrainedTokenizerFast) -> str:
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "red ?"}]}],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert isinstance(text, str)
    return text


def test_two_pictures_stand_in_their_order(tokenizer: PreTrainedTokenizerFast) -> None:
    one, other = dataset(
        [row("<image>a<image>", png(RED), png(BLUE)), row("<image>a<image>", png(BLUE), png(RED))], tokenizer
    )
    assert [medium.digest for medium in one.media] == [medium.digest for medium in other.media][::-1]
    assert one.prompt.key != other.prompt.key and one.prompt_token_ids == other.prompt_token_ids


def test_rows_without_pictures_may_stand_beside_others(tokenizer: PreTrainedTokenizerFast) -> None:
    plain, seen = dataset([row("write <image>"), row("<image>?", png(RED))], tokenizer)
    assert plain.media == () and "<image>" in tokenizer.decode(plain.prompt_token_ids)
    assert len(seen.media) == 1


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (row("<image>?", "gone.png"), "row 1: MediaError: image 0: gone.png cannot be read"),
        (row("<image>?", png(RED)[:48]), "row 1: .*is damaged"),
        (row("?", png(RED)), "row 1: .*has 1 more pictures or videos than its messages have places"),
        (row("<image><image>?", png(RED)), "row 1: .*more places for an image than the row has"),
        (row("<image>?", "http://a.example/b.png"), "row 1: .*data.fetch_media=true"),
    ],
    ids=["gone", "damaged", "no place", "no picture", "address"],
)
def test_a_row_that_cannot_be_used_is_left_out_and_named(
    bad: dict[str, Any], said: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    good = row("<image>?", png(RED))
    found = dataset([good, bad], tokenizer)
    assert len(found) == 1
    assert found.report.num_failed == 1
    with pytest.raises(DataError, match=said.replace("row 1", "row 0")):
        dataset([bad], tokenizer)


def test_a_placeholder_in_a_users_words_is_text(tokenizer: PreTrainedTokenizerFast) -> None:
    found = dataset([row("<image>?", png(RED)), row("<|image_pad|>?")], tokenizer)
    pad = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    assert [pad in each.prompt_token_ids for each in found] == [True, False]
    assert "<|image_pad|>?" in tokenizer.decode(found[1].prompt_token_ids)


def test_keys_and_models_that_do_not_fit_are_refused(
    tokenizer: PreTrainedTokenizerFast, characters: PreTrainedTokenizerFast
) -> None:
    good = row("<image>?", png(RED))
    with pytest.raises(DataError, match=r"has no column photos.*set data.image_key"):
        dataset([good], tokenizer, image_key="photos")
    with pytest.raises(DataError, match=r"column images, filled in row 0, and data.image_key and"):
        dataset([good], tokenizer, image_key=None)
    with pytest.raises(DataError, match=r"filled in row 0, and the model beside the tokenizer .* text only"):
        dataset([good], characters)
    with pytest.raises(
        DataError, match=r"column photos, filled in row 0, and the model beside the tokenizer"
    ):
        dataset([{**row("?"), "photos": [png(RED)]}], characters, image_key="photos")
    inside = row([{"type": "image", "image": png(RED)}])
    with pytest.raises(DataError, match="part of type 'image', and the model reads text only"):
        dataset([inside], characters)
    with pytest.raises(DataError, match="answers are compared by their text alone"):
        pairs = [{"prompt": "a", "chosen": "b", "rejected": "c", "images": [png(RED)]}]
        PreferenceDataset(pairs, tokenizer, PreferenceDataConfig())


def test_a_long_prompt_is_never_cut_through_a_picture(tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [row("<image>?", png(RED)), row("hi")]
    for side in ("left", "right", "middle"):
        with pytest.raises(DataError, match=f"data.truncation={side} would cut the places of pictures"):
            dataset(rows, tokenizer, max_prompt_length=20, truncation=side)
    assert len(dataset(rows, tokenizer, max_prompt_length=20, filter_overlong_prompts=True)) == 1


def test_a_prompt_that_waits_is_kept_in_a_checkpoint(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    seen, plain = dataset([row("<image>?", {"bytes": png(RED)}), row("hi")], tokenizer)
    save_tree(tmp_path, [seen.to_state(), plain.to_state()])
    again = [PromptRow.from_state(state) for state in load_tree(tmp_path)]
    assert again == [seen, plain] and again[0].row["images"] == [{"bytes": png(RED)}]
    (medium,) = again[0].media
    assert all(map(torch.equal, medium.values.values(), seen.media[0].values.values()))
    older = {name: value for name, value in vars(plain).items() if name != "media"}
    assert PromptRow.from_state(older) == plain


def test_a_picture_that_goes_away_is_named(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(png(RED))
    found = dataset([row("<image>?", str(file))], tokenizer)
    file.unlink()
    with pytest.raises(DataError, match=rf"row 0 of rows was read before, and now: image 0: {file}"):
        found[0]


def test_a_picture_of_another_size_is_named(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(png(RED))
    prompts = dataset([row("<image>?", str(file))], tokenizer)
    answers = SFTDataset([chat_about(str(file))], tokenizer, SFTDataConfig())
    squares(RED, side=32).save(file)
    for found in (prompts, answers):
        with pytest.raises(DataError, match="its pictures or videos have other sizes"):
            found[0]


def chat_about(*pictures: Any) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": "<image>?"}], "response": "1", "images": list(pictures)}


def test_pictures_are_decoded_when_their_row_is_read(
    monkeypatch: pytest.MonkeyPatch, tokenizer: PreTrainedTokenizerFast
) -> None:
    decoded = []
    load = ImageFile.ImageFile.load

    def counted(self: ImageFile.ImageFile) -> Any:
        if self.tile:
            decoded.append(self.size)
        return load(self)

    monkeypatch.setattr(ImageFile.ImageFile, "load", counted)
    prompts = dataset([row("<image>?", png(RED)), row("<image><image>?", png(RED), png(BLUE))], tokenizer)
    answers = SFTDataset([chat_about(png(RED))], tokenizer, SFTDataConfig())
    assert (len(prompts), len(answers), decoded) == (2, 1, [])
    assert len(prompts[1].media) == 2 and len(decoded) == 2
    assert len(answers[0].media) == 1 and len(decoded) == 3
    file = io.BytesIO()
    squares(RED, side=64).save(file, "JPEG")
    decoded.clear()
    photos = dataset([row("<image>?", file.getvalue())], tokenizer)
    assert decoded == [(8, 8)], "an eighth of its size"
    assert photos[0].media and decoded == [(8, 8), (64, 64)]


def test_answers_are_learned_and_pictures_are_not(tokenizer: PreTrainedTokenizerFast) -> None:
    chat = [
        {"role": "user", "content": "<image>red ?"},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "<image>and here ?"},
        {"role": "assistant", "content": "0"},
    ]
    item = SFTDataset([{"messages": chat, "images": [png(RED), png(BLUE)]}], tokenizer, SFTDataConfig())[0]
    learned = [token for token, mask in zip(item.input_ids, item.loss_mask, strict=True) if mask]
    assert tokenizer.decode(learned) == "1<|im_end|>0<|im_end|>"
    assert len(item.media) == 2
    pad = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    for medium in item.media:
        assert item.input_ids[medium.start : medium.start + medium.length] == [pad] * 16
        assert item.input_ids[medium.start - 1] != pad
    pair = {"prompt": chat[:1], "response": "1", "images": [png(RED)]}
    (alone,) = SFTDataset([pair], tokenizer, SFTDataConfig())
    assert alone.media[0].digest == item.media[0].digest
    with pytest.raises(DataError, match="another number of places"):
        SFTDataset([pair | {"prompt": ""}], tokenizer, SFTDataConfig())


def test_the_task_has_every_answer_and_no_picture_twice(tokenizer: PreTrainedTokenizerFast) -> None:
    task = RedSquares(seed=3)
    train, held_out = task.rows("train", 200), task.rows("validation", 100)
    assert task.rows("train", 20) == train[:20]
    answers = [each["reward_model"]["ground_truth"] for each in train]
    assert {*answers} == set("0123456")
    pictures = [{each["images"][0]["bytes"] for each in rows} for rows in (train, held_out)]
    assert not pictures[0] & pictures[1]
    control = RedSquares(seed=3, shuffled=True).rows("train", 200)
    assert [each["images"] for each in control] == [each["images"] for each in train]
    same = sum(each["messages"] == other["messages"] for each, other in zip(control, train, strict=True))
    assert 10 < same < 60, "as often as by chance"
    assert len(PromptDataset(train[:5], tokenizer, DataConfig())) == 5


def test_the_last_part_of_a_picture_in_crops_is_shown() -> None:
    folder = load_tokenizer(picture_model("smolvlm"))
    reader = MediaReader.for_rows(Rows([[row("<image>", png(RED))]], "rows"), folder, DataConfig())
    assert reader is not None
    reader.processor.image_processor.size = {"longest_edge": 48}
    reader.processor.image_processor.do_image_splitting = True
    ids = [folder.convert_tokens_to_ids("<image>")]
    shown = [part.shown for part in reader.expand(ids, [MediaSource("image", png(RED))], whole=True).media]
    assert len(shown) > 1 and shown == [b""] * (len(shown) - 1) + [thumbnail(squares(RED))]


def test_parts_of_a_video_show_their_first_frames(tokenizer: PreTrainedTokenizerFast) -> None:
    frames = [png(colour) for colour in (RED, RED, BLUE, BLUE)]
    (item,) = dataset([{"prompt": [{"role": "user", "content": "<video>?"}], "videos": [frames]}], tokenizer)
    assert [medium.shown for medium in item.media] == [thumbnail(squares(RED)), thumbnail(squares(BLUE))]
