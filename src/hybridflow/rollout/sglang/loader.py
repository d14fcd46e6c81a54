"""The weight loader of SGLang's workers (`--custom-weight-loader`): it receives pushes and keeps their
version.

/update_weights_from_tensor ──receipt, as a tensor of bytes──► load ──► Receiver ◄──weights── push
                                                                └──answer──► the `Listener` that the receipt
                                                                names
"""

from __future__ import annotations

import base64
import json
import logging
import os
import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hybridflow.errors import RolloutError
from hybridflow.rollout.push.channel import Channel
from hybridflow.rollout.push.receiver import Receiver
from hybridflow.rollout.sglang import sampler

logger = logging.getLogger(__name__)

QUALIFIED_NAME = f"{__name__}.load"
_RECEIVED = Receiver()
"""Weights of this process's model."""


def load(model: Any, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Load the push that the receipt names and report to its sender; never raises, which would end SGLang."""
    receipt = json.loads(bytes(named_tensors[0][1].tolist()))
    try:
        sampler.install()
        answer = _RECEIVED.receive(model.load_weights, receipt)
    except Exception as error:  # whatever it is, the sender shall read it
        answer = {"error": f"{type(error).__name__}: {error}"}
    try:
        report = Channel.connect(
            receipt["host"], receipt["report_port"], receipt["report_token"], receipt["timeout"]
        )
        report.send({**answer, "pid": os.getpid()})
        report.close()
    except (OSError, RolloutError) as error:  # the sender is gone, and its weights have no name
        logger.warning("nobody hears how a push of weights went: %s; it was: %s", error, answer)


def packed(receipt: dict[str, Any]) -> str:
    """Return a receipt in the form in which SGLang's HTTP API takes tensors."""
    data = torch.tensor(list(json.dumps(receipt).encode()), dtype=torch.uint8)
    return base64.b64encode(pickle.dumps([("receipt", data)])).decode()
