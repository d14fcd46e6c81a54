"""The data room: files and procedural tasks in, tokenised prompts and conversations out, in an order that can be resumed.

    files.py / tasks/ ──rows──► prompts.py (PromptRow) ─┐
                       └──────► sft.py (SFTRow) ────────┴─► samplers.py ─► loader.py ─► batches of rows

`tokenizer.py` is the door to the tokenizer, `plugin.py` to objects that live in a user's own file; `build.py` wires all of it.
"""
