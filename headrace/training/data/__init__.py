"""Sources of mid-training: readers of files by kind, an index of their documents, and the mixture."""
