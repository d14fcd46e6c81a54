"""Supervised fine-tuning: conversations in, a model that imitates the assistant out.

loader ──conversations──► rows ──► SFTGroup.update ──► metrics ──► trackers
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hybridflow.checkpoint.store import CheckpointStore
from hybridflow.config import SFTConfig
from hybridflow.data.loader import StatefulLoader
from hybridflow.data.sft import SFTDataset, SFTRow
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.errors import Stopped
from hybridflow.observability.metrics import Metrics
from hybridflow.observability.progress import progress
from hybridflow.observability.timing import Timer
from hybridflow.observability.trackers import Trackers
from hybridflow.protocol import DataProto
from hybridflow.protocol.packing import make_rows
from hybridflow.trainer.sft.state import SFTState
from hybridflow.trainer.stopping import StopSignals
from hybridflow.workers import RolloutGroup
from hybridflow.workers.sft import SFTGroup

AfterStep = Callable[[int], bool]
"""Called with the step just done; True ends the run there."""


def conversation_rows(examples: Sequence[SFTRow], pad_id: int) -> DataProto:
    """Conversations as rows: all before the first token to learn is the prompt, the rest the response [B, R].

    `response_mask` and `loss_mask` mark the tokens to learn. The first token of all is never among them:
    nothing predicts it.
    """
    starts = [example.loss_mask.index(1, 1) for example in examples]
    columns = make_rows(
        [example.input_ids[:start] for example, start in zip(examples, starts, strict=True)],
        [example.input_ids[start:] for example, start in zip(examples, starts, strict=True)],
        pad_id,
        response_masks=[example.loss_mask[start:] for example, start in zip(examples, starts, strict=True)],
    )
    return DataProto.from_dict(columns | {"loss_mask": columns["response_mask"].clone()})


@dataclass
class SFTTrainer:
    """Owns the loop of supervised fine-tuning."""

    config: SFTConfig
    group: SFTGroup
    loader: StatefulLoader[SFTRow]
    validation: SFTDataset | None
    state: SFTState
    store: CheckpointStore
    trackers: Trackers
    timer: Timer
    total_steps: int
    tokenizer: Tokenizer
    export: Callable[[Path], None]
    """Write the model as it is as a Hugging Face folder."""
    rollout: RolloutGroup
    """Generates with the model in training, for whoever wants to look at its answers."""

    signals: StopSignals = field(default_factory=StopSignals)
    """Asks the loop to end after SIGINT or SIGTERM."""

    def fit(self, after_step: AfterStep | None = None) -> int:
        """Run to the last step, or to where `after_step` says so; gives the number of steps done.

        Raises Stopped after a signal, with the last whole step saved.
        """
        with self.signals.training(self._has_unsaved_steps), progress.steps(self.total_steps):
            try:
                return self._run(after_step)
            except Stopped as stopped:
                if not stopped.at_once:
                    self._save_what_is_done()
                raise

    def _run(self, after_step: AfterStep | None) -> int:
        done = self.state.step
        if self.state.validation_due and self.validation is not None:
            with self.timer("testing"), self.signals.leavable():
                found = self.evaluate()
            self.trackers.log(found.to_floats(), done)
            self.state.validation_due = False
        batches = self.loader.endless()
        for step in range(done + 1, self.total_steps + 1):
            self.signals.check()
            # read first: with an epoch's last batch the loader moves on to the next one
            epoch = self.loader.epoch
            self._train_step(next(batches), step, epoch)
            done = step
            if after_step is not None and after_step(step):
                break
        if self.state.validation_due:  # a signal has left out the validation of the last step
            self.signals.check()
        self.state.saves.commit(self.store)
        return done

    def _train_step(self, examples: list[SFTRow], step: int, epoch: int) -> None:
        progress.step = step
        self.timer.reset()
        self.state.saves.commit_done(self.store)
        with self.timer("step"):
            rows = conversation_rows(examples, int(self.tokenizer.pad_token_id))
            with self.timer("update"):
                metrics = self.group.update(rows)
            self.state.finish(step)
            progress.finished_step = step
            if self._due(self.config.trainer.test_freq, step) and self.validation is not None:
                metrics.update(self._validate_after())
        values = metrics.to_floats() | self.timer.as_metrics()
        tokens = float(rows.batch["attention_mask"].sum())
        values["perf/total_num_tokens"] = tokens
        values["perf/throughput"] = tokens / values["timing_s/step"]
        values["training/global_step"] = step
        values["training/epoch"] = epoch
        # before saving: a run killed in between resumes after this step, whose line must stand
        self.trackers.log(values, step)
        if self._due(self.config.trainer.save_freq, step):
            with self.timer("save_checkpoint"):
                self.state.save(self.store)
            self.trackers.log({"timing_s/save_checkpoint": self.timer.seconds("save_checkpoint")}, step)

    def _validate_after(self) -> Metrics:
        """Validate. A signal leaves it out; a resumed run makes up for it."""
        self.state.validation_due = True
        try:
            with self.timer("testing"), self.signals.leavable():
                found = self.evaluate()
        except Stopped as stopped:
            if stopped.at_once:
                raise
            return Metrics()  # the loop ends before the next step
        self.state.validation_due = False
        return found

    def _has_unsaved_steps(self) -> bool:
        return self.state.step > self.state.saved_step

    def _save_what_is_done(self) -> None:
        """Save the last whole step, if no checkpoint has it."""
        if self._has_unsaved_steps():
            with self.timer("save_checkpoint"):
                self.state.save(self.store)
        self.state.saves.commit(self.store)

    def evaluate(self) -> Metrics:
        """Validation loss over all validation conversations."""
        assert self.validation is not None
        metrics = Metrics()
        size = self.config.data.train_batch_size
        starts = range(0, len(self.validation), size)
        for start in progress.each(starts, "batch", len(starts)):
            examples = [
                self.validation[index] for index in range(start, min(start + size, len(self.validation)))
            ]
            metrics.update(self.group.evaluate(conversation_rows(examples, int(self.tokenizer.pad_token_id))))
        return metrics

    def _due(self, frequency: int, step: int) -> bool:
        return step == self.total_steps or (frequency > 0 and step % frequency == 0)
