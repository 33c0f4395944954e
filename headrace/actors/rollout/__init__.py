"""The rollout actor: runs attempts, from the RolloutRequest to the Trajectory."""
