"""The feedback loop under measurement: a product in small, its simulated users, the gate's simulations."""
