"""Commands of an operator for the versions that users get."""
