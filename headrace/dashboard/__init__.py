"""Progress of a run and its report: a subscriber like any other, with the operator's rights."""
