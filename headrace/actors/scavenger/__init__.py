"""The scavenger: lends idle rollout actors of the product to training."""
