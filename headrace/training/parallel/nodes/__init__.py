"""The processes of a trainer on several machines: their meeting, and sums over them."""
