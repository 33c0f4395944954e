"""Generated bug-fixing repositories and the traces to mid-train on."""
