"""The answer that a text states, and whether it is the ground truth: one rule for all rewards of mathematics.

    response ──stated.py──► answer ──verdict.py──► right, wrong, or not read here

`verdict.same_answer` compares by `tokens`, `units`, `forms`, `expressions`, `values` and `equal`; `words` is
for answers in words. The page on rewards states the rule.
"""
