"""Processors of models that read pictures: their pixels, their tokens, and which medium is where."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoTokenizer
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

from hybridflow.data.pictures import MediaError
from hybridflow.data.processor import MediaProcessor, load_processor
from hybridflow.data.tokenizer import encode_rendered, load_tokenizer
from hybridflow.errors import ModelError
from hybridflow.models.tiny import create_tiny_model
from picture_models import picture_model, squares

RED = (255, 0, 0)
BLUE = (0, 0, 255)


def processor(family: str = "qwen3_vl") -> MediaProcessor:
    found = load_processor(load_tokenizer(picture_model(family)))
    assert found is not None
    return found


def patches_by_the_formula(picture: Image.Image, patch: int, merge: int, frames: int) -> torch.Tensor:
    """Normalised pixels by patch: merged neighbours first, then channel, frame, row and column in a patch."""
    mean = np.array([0.48145466, 0.4578275, 0.40821073])
    std = np.array([0.26862954, 0.26130258, 0.27577711])
    pixels = (np.asarray(picture, np.float64) / 255 - mean) / std
    rows = []
    side = pixels.shape[0] // patch
    for top in range(0, side, merge):
        for left in range(0, side, merge):
            for row in range(top, top + merge):
                for column in range(left, left + merge):
                    part = pixels[row * patch : (row + 1) * patch, column * patch : (column + 1) * patch]
                    one = part.transpose(2, 0, 1)[:, None]
                    rows.append(np.repeat(one, frames, 1).reshape(-1))
    return torch.tensor(np.array(rows))


def test_pixels_are_those_of_the_formula() -> None:
    picture = squares(RED, BLUE, (10, 200, 30), (90, 90, 0))
    read = processor().picture(picture)
    wanted = patches_by_the_formula(picture, 2, 2, 2)
    torch.testing.assert_close(read.media[0].values["pixel_values"].double(), wanted, atol=1e-5, rtol=0)
    assert read.media[0].values["grid_thw"].tolist() == [1, 8, 8]
    assert read.media[0].length == len(read.token_ids) == 16


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "smolvlm"])
def test_the_tokens_of_a_picture_follow_from_its_size(family: str) -> None:
    own = processor(family)
    if family == "smolvlm":
        own.image_processor.size = {"longest_edge": 48}
        own.image_processor.do_image_splitting = True
    for size in ((16, 16), (61, 23), (200, 90), (90, 200), (1, 40), (40, 3), (3, 3), (5, 4), (701, 433)):
        wanted = own.picture(Image.new("RGB", size, RED)).token_ids
        assert own.picture_tokens(size) == own.picture_tokens(size) == wanted, size
    if family != "smolvlm":
        for read in (own.picture_tokens, lambda size: own.picture(Image.new("RGB", size))):
            with pytest.raises(MediaError, match="a picture of 4000 × 5 pixels: absolute aspect ratio"):
                read((4000, 5))


def test_a_video_of_equal_frames_has_the_pixels_of_a_picture() -> None:
    own = processor("qwen2_5_vl")
    picture = squares(RED, BLUE)
    still = own.picture(picture).media[0].values["pixel_values"]
    film = own.video([picture] * 3, 2.0)
    assert torch.equal(film.media[0].values["pixel_values"], torch.cat([still, still]))
    assert film.media[0].values["grid_thw"].tolist() == [2, 8, 8]
    times = film.media[0].positions[0].unique().tolist()
    assert times == [0, own.config.vision_config.tokens_per_second], "one second from pair to pair"


def test_frames_of_a_pair_stand_side_by_side() -> None:
    own = processor("qwen2_5_vl")
    first, second = (own.picture(squares(colour)).media[0].values["pixel_values"] for colour in (RED, BLUE))
    film = own.video([squares(RED), squares(BLUE)], 2.0).media[0].values["pixel_values"]
    by_frame = film.unflatten(1, (3, 2, 4))
    assert torch.equal(by_frame[:, :, 0], first.unflatten(1, (3, 2, 4))[:, :, 0])
    assert torch.equal(by_frame[:, :, 1], second.unflatten(1, (3, 2, 4))[:, :, 1])
    with pytest.raises(MediaError, match="different sizes"):
        own.video([squares(RED), squares(RED, side=32)], 2.0)


def test_qwen3_tells_the_time_of_each_pair_of_frames() -> None:
    own = processor("qwen3_vl")
    read = own.video([squares(RED)] * 3, 2.0)
    pad = "<|video_pad|>" * 16
    text = "".join(f"<{time} seconds><|vision_start|>{pad}<|vision_end|>" for time in ("0.2", "1.0"))
    assert list(read.token_ids) == encode_rendered(own.tokenizer, text)
    for medium in read.media:
        ids = read.token_ids[medium.start : medium.start + medium.length]
        assert set(ids) == {own.config.video_token_id}


@pytest.mark.parametrize(("size", "rows"), [((16, 16), 0), ((48, 32), 2)])
def test_smolvlm_has_the_text_and_the_crops_of_its_own_processor(size: tuple[int, int], rows: int) -> None:
    own = processor("smolvlm")
    own.image_processor.size = {"longest_edge": 48}
    own.image_processor.do_image_splitting = rows > 0
    read = own.picture(Image.new("RGB", size, RED))
    crops = own.image_processor([Image.new("RGB", size, RED)], return_tensors="pt", return_row_col_info=True)
    found = (int(crops["rows"][0][0]), int(crops["cols"][0][0]))
    assert found[0] == rows
    text = get_image_prompt_string(*found, 16, "<fake_token_around_image>", "<image>", "<global-img>")
    assert list(read.token_ids) == encode_rendered(own.tokenizer, text)
    for medium, pixels in zip(read.media, crops["pixel_values"][0], strict=True):
        assert torch.equal(medium.values["pixel_values"], pixels)
        ids = read.token_ids[medium.start : medium.start + medium.length]
        assert set(ids) == {own.config.image_token_id} and len(ids) == 16


def test_equal_pictures_have_equal_digests_and_others_do_not() -> None:
    own = processor()
    digests = [
        own.picture(squares(*each)).media[0].digest for each in ((RED, BLUE), (RED, BLUE), (BLUE, RED))
    ]
    assert digests[0] == digests[1] != digests[2]


def test_expansion_puts_each_medium_in_its_place() -> None:
    own = processor()
    start, end, pad, _ = (
        own.tokenizer.convert_tokens_to_ids(word)
        for word in ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    )
    reads = [own.picture(squares(RED)), own.picture(squares(BLUE))]
    ids = [9, start, pad, end, 8, pad, 7]
    expanded = own.expand(ids, ["image", "image"], reads)
    assert [medium.start for medium in expanded.media] == [2, 20]
    assert expanded.token_ids == [9, start, *[pad] * 16, end, 8, *[pad] * 16, 7]
    assert expanded.spread([0, 1, 2, 3, 4, 5, 6]) == [0, 1, *[2] * 16, 3, 4, *[5] * 16, 6]
    for wrong in (reads[:1], [*reads, reads[0]]):
        with pytest.raises(MediaError, match="another number of places"):
            own.expand(ids, ["image"] * len(wrong), wrong)


def test_a_folder_says_what_it_lacks(tmp_path) -> None:
    text = create_tiny_model(tmp_path / "text", hidden=16, layers=1, heads=2, kv_heads=1, intermediate=16)
    assert load_processor(load_tokenizer(text)) is None
    folder = picture_model("qwen2_5_vl")
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in folder.iterdir():
        if not file.name.startswith(("preprocessor", "processor", "model")):
            (bare / file.name).write_bytes(file.read_bytes())
    with pytest.raises(ModelError, match="has no image processor that can be loaded"):
        load_processor(AutoTokenizer.from_pretrained(bare))
