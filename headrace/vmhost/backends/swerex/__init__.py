"""The `swerex` backend: sandboxes beside a SWE-ReX server, reached by HTTP alone."""
