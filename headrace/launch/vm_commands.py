"""`headrace vm`: images, what this host can do, what a sandbox looks like."""

import json

from headrace.config import Config
from headrace.launch.guests import end_together, prepare_host
from headrace.launch.output import say


def build(config: Config) -> int:
    """Build and cache the guest image and its templates."""
    from headrace.vmhost import image

    end_together()
    image.ensure(config.environment, say)
    return 0


def doctor(config: Config) -> int:
    """Plain words about this host; 1 when it can't run microVMs."""
    from headrace.vmhost import doctor as physician

    findings = physician.doctor(config.environment)
    for finding in findings:
        say(f"{'ok  ' if finding.good else 'BAD '} {finding.text}")
    return 0 if all(finding.good for finding in findings) else 1


async def facts(config: Config) -> int:
    """The fact sheet of a fresh sandbox."""
    from headrace.messages.sandbox import Acquire
    from headrace.vmhost import fidelity
    from headrace.vmhost.host import Host

    await prepare_host(config)
    host = await Host.open(config.environment)
    try:
        sandbox = await host.acquire(
            Acquire(
                run="facts",
                lane="eval",
                role="rollout",
                group="facts",
                slot=0,
                attempt=0,
                isolation=config.environment.isolation,
            )
        )
        say(json.dumps(await fidelity.sheet(sandbox), indent=2))
    finally:
        await host.close()
    return 0
