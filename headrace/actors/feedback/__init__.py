"""The feedback actor: ratings into the branch's batches, and the gate between its versions and the users."""
