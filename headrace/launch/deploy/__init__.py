"""Files with which other programs run headrace: systemd units, a Slurm job, Kubernetes manifests."""
