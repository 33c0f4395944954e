"""The served weights: how masters become them, and the earlier versions of them."""
