"""Tools that run programs in the sandbox: a shell, the tests, a linter."""
