"""headrace's tasks and trajectories in the formats of others: Harbor folders, ATIF."""
