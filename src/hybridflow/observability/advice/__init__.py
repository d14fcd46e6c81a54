"""Advice on a run: what goes wrong, and which key to set.

metrics of a step ──History──► alarms, or on a healthy run hints ──AdviceWatch──► log, console, webhook
an open phase ──StallWatch──► the alarm of a phase that takes far longer than before
"""

from hybridflow.observability.advice.alarms import ALARMS
from hybridflow.observability.advice.hints import HINTS
from hybridflow.observability.advice.history import Advice, History, Rule
from hybridflow.observability.advice.watch import AdviceWatch, find_advice

__all__ = ["ALARMS", "HINTS", "Advice", "AdviceWatch", "History", "Rule", "find_advice"]
