"""The data room: files and tasks in, tokenised prompts and conversations out, in an order that resumes.

    files.py / tasks/ ──rows──► prompts.py (PromptRow) ─┐
                       └──────► sft.py (SFTRow) ────────┴─► loader.py ─► batches of rows

`build.py` wires all of it, and adds the data's own answers to prompts for algorithms that learn from both.
`answers/` says whether an answer of mathematics is the ground truth. `tokenizer.py` is the door to the
tokenizer, `plugin.py` to objects that live in a user's own file.
"""
