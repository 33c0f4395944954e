"""Works on recorded runs: the audit of the streams, replay of a step or a trajectory, bundles, and retraining."""
