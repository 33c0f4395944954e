"""Commands that convert and mid-train policies, and collect data for it."""
