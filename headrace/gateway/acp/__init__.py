"""The Agent Client Protocol over standard input and output, as a client of the agents API."""
