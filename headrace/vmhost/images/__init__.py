"""Guest images: packages, root file systems, container images."""
