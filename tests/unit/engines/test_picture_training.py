"""Two ranks train a model that reads pictures as one rank does, also where one of them has no picture."""

from __future__ import annotations

import pytest
from picture_runs import PictureRun, train

from picture_models import picture_model
from ranks import Ranks

EVEN = ((0, 2), (1, 3))
APART = ((0, 1), (2, 3))
"""The second rank has no picture."""


@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("qwen3_vl", {"deal": EVEN}),
        ("qwen3_vl", {"deal": APART}),
        ("qwen3_vl", {"deal": APART, "reshard": False, "lora": True}),
        ("smolvlm", {"deal": APART, "freeze": True}),
        ("qwen2_5_vl", {"deal": APART}),
    ],
)
def test_two_ranks_learn_what_one_does(family: str, keys: dict, two_ranks: Ranks) -> None:
    run = PictureRun(str(picture_model(family)), **keys)
    alone = train(0, run, 1)
    both = two_ranks.run(train, run, 2)
    for rank in both:
        assert (rank["before"] - alone["before"][rank["rows"], : rank["before"].shape[1]]).abs().max() < 1e-5
        for name, weight in alone["weights"].items():
            assert (rank["weights"][name] - weight).abs().max() < 1e-5, name
    for step, wanted in enumerate(alone["metrics"]):
        found = both[0]["metrics"][step]["actor/grad_norm"]
        assert found == pytest.approx(wanted["actor/grad_norm"], rel=1e-4)
