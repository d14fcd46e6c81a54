"""The functions that a trainer may offer, and how an adapter is found by its name or its file.

Shapes: B rows of R response tokens, V words of a vocabulary. Masks are bool and true on the tokens that
count. Log-probs and KL are in nats, rewards and values in units of the score. All tensors are on the CPU and
of float32, unless a property says otherwise.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

NAMED = {name: f"hybridflow.invariants.adapters.{name}" for name in ("ours", "trl", "verl")}
"""Modules of the adapters that come with the package. They are loaded by these names alone."""


class AdapterError(Exception):
    """An adapter, or a property, that cannot be found or loaded. The message says what to do."""


class NotOffered(Exception):
    """A trainer has not got a function, a name or a form of input."""


class TrainerAdapter:
    """The functions of a trainer, each of which may be left out.

    An adapter of your own is a module, or a class called `Adapter`, with some functions of these names; it
    need not be a subclass. A function returns NotImplemented, or raises NotOffered, for a name or an input
    that the trainer does not have, and may take `**_` for the keywords that it does not read.
    """

    version: str = ""
    """The version of the trainer, for the heading."""

    def advantages(
        self,
        name: str,
        rewards: Tensor,
        mask: Tensor,
        groups: Sequence[Hashable],
        *,
        values: Tensor,
        baselines: Tensor,
        gamma: float,
        lam: float,
    ) -> Tensor:
        """Return the advantages [B, R] of the estimator `name`.

        Names: grpo, dr_grpo (without the division by the deviation), rloo, reinforce_plus_plus, remax, gae.
        rewards [B, R]: of each token, an outcome's on the last one; mask [B, R]; groups: B labels, equal for
        the responses of one prompt; values [B, R] of a critic; baselines [B]: score of a greedy response.
        """
        raise NotOffered

    def policy_loss(
        self,
        name: str,
        log_prob: Tensor,
        old_log_prob: Tensor,
        advantages: Tensor,
        mask: Tensor,
        *,
        mode: str,
        whole: Tensor,
        parts: int,
        clip: tuple[float, float],
    ) -> Tensor:
        """Return the share [] of these rows in the loss of their mini-batch, with its gradient by log_prob.

        Names: ppo (clipped at 1 − clip[0] and 1 + clip[1]), gspo, reinforce (−A·logπ). The tensors are
        [B, R]. mode: token-mean, seq-mean-token-mean or seq-mean-token-sum. whole [B', R]: the mask of all
        rows of the mini-batch, on all ranks; parts: in how many parts (micro-batches on all ranks) it is cut.
        The shares of all parts are added up.
        """
        raise NotOffered

    def kl(self, name: str, log_prob: Tensor, ref_log_prob: Tensor, mask: Tensor) -> Tensor:
        """Return an estimate [B, R] of KL(π ‖ π_ref) at each token, with its gradient by log_prob [B, R].

        Names: k1 (logπ − logπ_ref), k2 (half its square), k3 (ρ − 1 − log ρ, ρ = π_ref/π).
        """
        raise NotOffered

    def value_loss(
        self, values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, clip: float
    ) -> Tensor:
        """Return the critic's loss [] as a mean over tokens: ½·max((v − R)², (clamp(v, V ± clip) − R)²).

        values v, old_values V, returns R, mask: [B, R]; clip is in units of the score.
        """
        raise NotOffered

    def whiten(self, values: Tensor, mask: Tensor) -> Tensor:
        """Return (values − mean)/deviation [B, R] over the tokens of the mask, Bessel-corrected."""
        raise NotOffered

    def log_probs(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """Return log softmax(logits) [B, R] at the tokens [B, R] int64; logits [B, R, V]."""
        raise NotOffered

    def entropy(self, logits: Tensor) -> Tensor:
        """Return the entropy [B, R] of softmax(logits), nats; logits [B, R, V] may have −inf."""
        raise NotOffered

    def response_mask(self, responses: Sequence[Sequence[int]], *, eos: int, pad: int) -> Tensor:
        """Return the mask [B, R] of the sampled tokens, R the longest row, of lists of sampled ids."""
        raise NotOffered

    def conversation(self, messages: Sequence[Mapping[str, str]]) -> Sequence[tuple[str, int]]:
        """Return text and 1 or 0 (learned or not) of each token of a conversation, for supervised training.

        A message has `role` and `content`; tokenizer and template are the adapter's choice.
        """
        raise NotOffered

    def packed_positions(self, lengths: Sequence[int]) -> Sequence[int]:
        """Return the position of each token where rows of these lengths are packed behind each other."""
        raise NotOffered

    def packed_outputs(self, rows: Sequence[Sequence[int]]) -> Sequence[Tensor]:
        """Return a tiny model's outputs [n, …] for each row of n ids below 32, all packed in one pass."""
        raise NotOffered

    def learning_rates(self, total: int, resumes: Sequence[int]) -> Sequence[float]:
        """Return the learning rate of each of `total` steps, half a cosine from 1.

        After each step number (from 1) in `resumes` the state is saved, and a new scheduler goes on from it.
        """
        raise NotOffered

    def data_order(
        self, num_rows: int, batch_size: int, batches: int, resumes: Sequence[int]
    ) -> Sequence[Sequence[int]]:
        """Return the row numbers of the first `batches` batches, shuffled anew in each epoch.

        After each batch number (from 1) in `resumes` the state is saved, and a new loader goes on from it.
        A last batch of an epoch that is not full is left out.
        """
        raise NotOffered

    def mean_metric(self, values: Sequence[Tensor], masks: Sequence[Tensor]) -> float:
        """Return a metric of tokens (such as entropy) as it is reported for a step of several micro-batches.

        values and masks: [B, R] of each micro-batch.
        """
        raise NotOffered

    def mean_length(self, response_mask: Tensor, loss_mask: Tensor) -> float:
        """Return the mean length of responses as it is reported, in tokens; both [B, R].

        loss_mask is response_mask without the rows that are left out of the loss.
        """
        raise NotOffered


OPERATIONS = tuple(name for name, value in vars(TrainerAdapter).items() if inspect.isfunction(value))
"""Names of the functions that an adapter may have."""


def resumed_rates(
    new: Callable[[], tuple[torch.optim.Optimizer, Any]], total: int, resumes: Sequence[int]
) -> list[float]:
    """Return the rate of each step of an optimizer and a scheduler of torch's kind, which `new` makes.

    After each step number in `resumes` both give their `state_dict` to new ones.
    """
    optimizer, scheduler = new()
    rates = []
    for step in range(1, total + 1):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
        if step in resumes:
            states = (optimizer.state_dict(), scheduler.state_dict())
            optimizer, scheduler = new()
            optimizer.load_state_dict(states[0])
            scheduler.load_state_dict(states[1])
    return rates


def load_adapter(name: str) -> Any:
    """Return the adapter of a name in `NAMED`, or of a file FILE.py; AdapterError where there is none."""
    if name in NAMED:
        try:
            module = importlib.import_module(NAMED[name])
        except (Exception, SystemExit) as error:  # whatever the other package does when it is imported
            raise AdapterError(
                f"--adapter {name}: {type(error).__name__} while it was imported: {error}. Install what it "
                "names, or put the package's folder into PYTHONPATH"
            ) from error
        return module.Adapter()
    path = Path(name)
    if path.suffix != ".py":
        raise AdapterError(f"--adapter {name}: choose from {', '.join(NAMED)}, or give a file FILE.py")
    if not path.is_file():
        raise AdapterError(f"--adapter {name}: there is no such file")
    spec = importlib.util.spec_from_file_location(f"adapter_{path.stem}", path)
    assert spec is not None and spec.loader is not None, "a file that ends in .py has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses of the file look themselves up there
    try:
        spec.loader.exec_module(module)
        adapter: Any = module.Adapter() if hasattr(module, "Adapter") else module
    except (Exception, SystemExit) as error:
        raise AdapterError(
            f"--adapter {name}: {type(error).__name__} while it was loaded: {error}"
        ) from error
    if not any(callable(getattr(adapter, operation, None)) for operation in OPERATIONS):
        raise AdapterError(
            f"--adapter {name}: it has none of the functions {', '.join(OPERATIONS)}, in a class Adapter or "
            "in the file itself"
        )
    return adapter
