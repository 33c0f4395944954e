"""A Slurm job: the broker and the single actors on the first node; machines, rollouts and a receiver on every node; a
trainer's ranks on as many nodes as its mesh takes.

The job may be requeued at any time: the shared folder contains the streams, and unfinished work is delivered again.
"""

import shlex

from headrace.config import Config, ConfigError
from headrace.launch.deploy import plan
from headrace.launch.deploy.plan import Process, processes

EVERYWHERE = {"environment", "rollout", "weight_receiver"}
"""Actors that run once per node."""


def _step(process: Process, binary: str, where: str) -> str:
    command = shlex.join([binary, *process.command])
    place = '--config "$FOLDER/run.toml" --url "$URL" --credentials "$FOLDER/credentials"'
    if not process.actors:
        place = '--config "$FOLDER/run.toml" --set bus.url="$URL" --set bus.credentials="$FOLDER/credentials"'
    return f"srun --overlap {where} {command} \\\n  {place} &"


def files(config: Config, binary: str, nodes: int) -> dict[str, str]:
    """Name to content. ConfigError when the trainer needs more nodes."""
    trainer = config.trainer
    if trainer.nodes > nodes:
        raise ConfigError(f"trainer.mesh: its ranks need {trainer.nodes} nodes, got --nodes {nodes}")
    single: list[Process] = []
    every: list[Process] = []
    for process in processes(config):
        kinds = {name.partition(":")[0] for name in process.actors}
        (every if kinds <= EVERYWHERE else single).append(process)
    devices = sum(process.devices for process in [*single, *every])
    device = f"#SBATCH --gpus-per-node={devices}\n" if devices else ""
    told = ""
    if page := plan.page(config):
        process, site = page
        single.append(process)
        told = f'echo "live page: {site.page} on $FIRST; to open it elsewhere: ssh -N {site.forwards} $FIRST"\n'
    first = "\n".join(_step(process, binary, '--nodes=1 --ntasks=1 --nodelist="$FIRST"') for process in single)
    rest = "\n".join(_step(process, binary, f"--nodes={nodes} --ntasks-per-node=1") for process in every)
    port = trainer.rendezvous.rpartition(":")[2]
    joining = "".join(
        f"\nsrun --overlap --nodes=1 --ntasks=1 --relative={number} {shlex.join([binary, 'trainer', 'join'])} \\\n"
        f'  "$FOLDER/run.toml" --node {number} --master "$FIRST:{port}" &'
        for number in range(1, trainer.nodes)
    )
    script = f"""#!/bin/bash
#SBATCH --job-name=headrace-{config.run.id}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@60
#SBATCH --output=headrace-%j.log
{device}set -euo pipefail

# A folder that every node sees: run.toml, nats.conf, credentials/, and the broker's store.
FOLDER="${{HEADRACE_FOLDER:-$SLURM_SUBMIT_DIR}}"
FIRST="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
URL="nats://$FIRST:4222"

{told}stop() {{
  # Actors drain before the broker ends.
  pkill -TERM -P "$$" srun || true
  wait || true
}}
trap stop TERM

srun --overlap --chdir="$FOLDER" --nodes=1 --ntasks=1 --nodelist="$FIRST" \\
  nats-server -c "$FOLDER/nats.conf" -a 0.0.0.0 -p 4222 -sd "$FOLDER/store" &
for _ in $(seq 120); do (exec 3<>"/dev/tcp/$FIRST/4222") 2>/dev/null && break; sleep 1; done
{binary} bus declare --url "$URL" --credentials "$FOLDER/credentials"

{first}
{rest}{joining}
code=0
wait -n || code=$?
echo "a process of the run ended with code $code" >&2
stop
exit "$code"
"""
    # A job's folder is not known here, so the broker's certificate is named relative to its working directory.
    return {"headrace.sbatch": script, "nats.conf": plan.broker_conf(config, "credentials")}
