"""Code from a model, run on this machine behind several layers of the kernel. See docs/sandbox.md.

    Sandbox.run ──request──► fork server, in a private root ──forks──► init ──forks──► the program
         ▲                                                               │ limits, output, deadline
         └──────────────────────────── verdict ◄─────────────────────────┘

`sandbox.py` is what others use. `fork_server.py`, `execution.py`, `program.py` and what they import run in a
fresh interpreter that has the standard library only, so nothing is imported here.
"""
