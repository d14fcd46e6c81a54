"""Child processes outside Ray, which can be killed with all that they have started (`supervisor.py`).

driver ──Hosts (asyncio)──► keeper ──► worker: host.py ──► tools, environments, rewards
       ──SupervisedProcess► keeper ──► command of an agent, an environment, an engine's server

Nothing is imported here, so that a keeper starts at once.
"""
