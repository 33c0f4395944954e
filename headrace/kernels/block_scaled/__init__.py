"""Numbers of four and eight bits under block scales, as Blackwell's tensor cores multiply them."""
