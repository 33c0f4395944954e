"""What people look at: live progress, the report. A subscriber like any other; it steers nothing."""
