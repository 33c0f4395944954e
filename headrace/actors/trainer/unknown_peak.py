"""Says once that MFU and HFU are not measured, because the peak of the device is not known."""

from headrace.bus.runtime.actor import Actor
from headrace.training.batches.micro_batch import device_of
from headrace.training.figures.peaks import why_unknown
from headrace.training.trainer import PolicyTrainer


async def tell(actor: Actor, trainer: PolicyTrainer) -> None:
    """Publish an event where the peak is not known."""
    model = trainer.state.model
    if why := why_unknown(actor.config, model.config, device_of(model)):
        await actor.event("peak_unknown", why)
