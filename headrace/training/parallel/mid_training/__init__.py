"""Mid-training in several processes: helpers of one trainer process, or the ranks of a trainer."""
