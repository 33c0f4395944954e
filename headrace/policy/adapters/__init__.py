"""Low-rank adapters: their shape, their arithmetic, and their form outside of headrace."""
