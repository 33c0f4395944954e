"""Reading a run again: the audit of its streams, the replay of a step or a trajectory, bundles, and retraining."""
