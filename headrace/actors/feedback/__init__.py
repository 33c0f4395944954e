"""The feedback actor: turns ratings into a branch's batches, and gates the branch's versions."""
