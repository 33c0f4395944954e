"""Commands that make and show task suites."""
