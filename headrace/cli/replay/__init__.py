"""Commands that replay, judge again and train again from the records of a run."""
