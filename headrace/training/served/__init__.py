"""The served weights: rounding of the masters to them, and their earlier versions."""
