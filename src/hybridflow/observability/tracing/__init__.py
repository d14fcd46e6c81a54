"""Traces of trajectories on their way to a viewer of traces (`actor_rollout_ref.rollout.trace`)."""
