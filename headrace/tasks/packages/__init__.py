"""Task suites from real packages."""
