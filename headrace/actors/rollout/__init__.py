"""The rollout actor: attempts from request to Trajectory."""
