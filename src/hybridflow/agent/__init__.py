"""The agent room: prompt rows become trajectories by talking to the policy."""
