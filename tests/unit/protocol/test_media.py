"""Media beside the batch: positions, packing, sharing by what is read, and a batch on disk."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch

from hybridflow.agent.collate import collate
from hybridflow.checkpoint.state import load_tree, save_tree
from hybridflow.controller.ray.transport import decode, encode
from hybridflow.data.mrope import grid_positions
from hybridflow.protocol import DataProto
from hybridflow.protocol.joining import join_rows
from hybridflow.protocol.packing import make_rows, pack, prompt_groups, share_prompts
from hybridflow.protocol.prompt import MEDIA, Medium, Prompt, make_position_ids
from hybridflow.protocol.row_state import rows_of_state, state_of_rows
from hybridflow.protocol.trajectory import Lineage, Segment, Trajectory

PAD = 9


def medium(digest: str, start: int = 1) -> Medium:
    """A picture of 4 × 6 patches: 2 × 3 tokens."""
    positions, advance = grid_positions(1, 4, 6, merge=2)
    values = {"pixel_values": torch.full((24, 3), float(ord(digest[0])))}
    return Medium(start, 6, digest, values, "image", positions, advance, digest.encode())


def prompt(digest: str) -> Prompt:
    return Prompt((4, *[PAD] * 6, 5), (medium(digest),))


def batch(digests: str, responses: list[list[int]]) -> DataProto:
    prompts = [prompt(digest) for digest in digests]
    columns = make_rows([each.token_ids for each in prompts], responses, 0)
    return DataProto.from_dict(columns, {MEDIA: [each.media for each in prompts]})


def test_positions_follow_the_grid_and_go_on_behind_it() -> None:
    found = make_position_ids(10, (medium("a"),))
    assert found.tolist() == [
        [0, 1, 1, 1, 1, 1, 1, 4, 5, 6],
        [0, 1, 1, 1, 2, 2, 2, 4, 5, 6],
        [0, 1, 2, 3, 1, 2, 3, 4, 5, 6],
    ]
    assert medium("a").shift == -3
    assert make_position_ids(4, ()).tolist() == [0, 1, 2, 3]
    plain = Medium(1, 2, "a")
    assert make_position_ids(4, (plain,)).tolist() == [0, 1, 2, 3] and plain.shift == 0


def test_a_frame_is_so_much_later_than_the_one_before() -> None:
    positions, advance = grid_positions(2, 2, 2, merge=1, interval=2.5)
    assert positions[0].tolist() == [0] * 4 + [2] * 4 and advance == 2


def test_packed_rows_have_their_media_and_positions() -> None:
    packed = pack(batch("ab", [[1, 2], [3]]))
    assert [each.place for each in packed.media] == [1, 11]
    assert packed.position_ids.shape == (3, 19)
    assert torch.equal(packed.position_ids[:, 10:], make_position_ids(9, (medium("b"),)))
    mixed = batch("a", [[1]])
    mixed.non_tensor_batch[MEDIA][0] = None
    assert pack(mixed).position_ids.tolist() == list(range(9)) and pack(mixed).media == ()


def test_prompts_of_other_pictures_are_never_shared() -> None:
    rows = batch("abab", [[1, 2], [3], [4], [5, 6]])
    assert prompt_groups(rows) == [0, 1, 0, 1]
    packed = pack(rows)
    shared = share_prompts(packed)
    assert shared.num_tokens == packed.num_tokens - 2 * 8
    assert [each.medium.digest for each in shared.media] == ["a", "b"]
    for each in shared.media:
        assert shared.input_ids[each.place : each.place + each.count].tolist() == [PAD] * 6
    alone = share_prompts(pack(batch("abcd", [[1], [2], [3], [4]])))
    assert alone.places is None, "nothing is shared"


def test_rows_of_a_prompt_carry_its_pixels_once() -> None:
    shared = prompt("a")
    rows = batch("aaaa", [[1]] * 4)
    rows.non_tensor_batch[MEDIA][:] = [shared.media] * 4
    one = len(pickle.dumps(shared.media[0].values["pixel_values"].numpy()))
    big = torch.zeros(5000, 3)
    shared.media[0].values["pixel_values"] = big  # type: ignore[index]
    packet = encode(rows)
    assert big.nbytes <= packet.nbytes < 1.5 * big.nbytes + 20_000, one
    again = decode(packet)
    firsts = [row[0].values["pixel_values"] for row in again.non_tensor_batch[MEDIA]]
    assert all(each is firsts[0] for each in firsts) and torch.equal(firsts[0], big)


@pytest.mark.parametrize("checkpoint", [False, True], ids=["folder", "checkpoint"])
def test_a_batch_with_pictures_is_read_back_from_disk(checkpoint: bool, tmp_path: Path) -> None:
    rows = batch("aba", [[1], [2], [3]])
    rows.non_tensor_batch[MEDIA][1] = ()
    if checkpoint:  # of a schedule that has rows in store
        save_tree(tmp_path, state_of_rows(rows))
        again = rows_of_state(load_tree(tmp_path))
    else:
        rows.save_to_disk(tmp_path)
        again = DataProto.load_from_disk(tmp_path)
    assert [list(row) for row in again.non_tensor_batch[MEDIA]] == [
        list(row) for row in rows.non_tensor_batch[MEDIA]
    ]
    assert again.non_tensor_batch[MEDIA][0][0].shown == b"a"
    assert {*again.names()} == {*rows.names()}, "no tensor of a medium is left as a column"
    for one, other in zip(pack(rows).media, pack(again).media, strict=True):
        assert torch.equal(one.medium.values["pixel_values"], other.medium.values["pixel_values"])
    assert torch.equal(pack(rows).position_ids, pack(again).position_ids)


def test_rows_with_and_without_pictures_are_joined() -> None:
    plain = DataProto.from_dict(make_rows([[4, 5]], [[1]], 0))
    joined = join_rows([batch("a", [[1]]), plain], 0)
    packed = pack(joined)
    assert packed.lengths == (9, 3) and len(packed.media) == 1


@pytest.mark.parametrize("seen", [True, False])
def test_collate_keeps_the_media_of_prompts(seen: bool) -> None:
    read = prompt("a") if seen else Prompt((4, 5))
    segment = Segment((7, 8), True, (-1.0, -2.0), (0, 0))
    rows = collate([Trajectory(1, 0, (Lineage(read, (segment,)),))], 0)
    assert (MEDIA in rows) == seen
    if seen:
        assert rows.non_tensor_batch[MEDIA][0] == read.media
