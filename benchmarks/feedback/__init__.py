"""Measurements of the feedback loop: a small product, its simulated users, the gate's simulations."""
