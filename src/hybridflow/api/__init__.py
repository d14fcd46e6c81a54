"""The Python interface: a run from functions and data of a program, and its result.

train(recipe, model, reward, dataset, …) ─► launch.py ─► the command's configuration and trainer ─► Run
    objects.py    functions and classes that no file has get a name
    launch.py     rows in memory become a file in the run folder
    callbacks.py  listeners, called beside the trackers
    result.py     metrics, samples, report, checkpoint and model of a run folder
"""

from hybridflow.api.callbacks import Callback, StopTraining
from hybridflow.api.entries import dpo, reward_model, sft, train
from hybridflow.api.result import Run

__all__ = ["Callback", "Run", "StopTraining", "dpo", "reward_model", "sft", "train"]
