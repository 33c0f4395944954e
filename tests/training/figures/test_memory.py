"""The peak of a step's memory: resident memory on the CPU, whose growth starts again with every step."""

import torch

from headrace.training.figures.memory import Peak, without_policy

SIZE = 64 << 20


def test_the_peak_of_a_step_holds_its_tensors_and_not_those_of_the_step_before() -> None:
    cpu = torch.device("cpu")
    assert without_policy() > 0
    calm = Peak(cpu).bytes
    first = Peak(cpu)
    torch.ones(SIZE, dtype=torch.uint8)  # mapped for itself, so it leaves the resident memory at once
    assert first.bytes >= calm + SIZE * 3 // 4
    second = Peak(cpu)
    assert second.bytes < calm + SIZE // 2, "it is measured from its own beginning"
