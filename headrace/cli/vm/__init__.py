"""Commands that work with images, templates and sandboxes of this host."""
