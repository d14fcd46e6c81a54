"""The data room: files and tasks in, tokenised prompts and conversations out, in an order that resumes.

    files.py / tasks/ ──rows──► prompts.py (PromptRow) ─┐
                       └──────► sft.py (SFTRow) ────────┴─► samplers.py ─► loader.py ─► batches of rows

`demonstrations.py` adds the data's own answers to prompts, encoded as in `sft.py`, for algorithms that learn
from both. `answers/` says whether an answer of mathematics is the ground truth. `tokenizer.py` is the door to
the tokenizer, `plugin.py` to objects that live in a user's own file; `build.py` wires all of it.
"""
