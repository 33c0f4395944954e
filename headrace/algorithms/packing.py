"""Packs sequences into micro-batches.

The idea: the model takes concatenated sequences, so a micro-batch is a set of sequences whose tokens fit a budget,
without padding. First-fit decreasing (Johnson 1973: at most 11/9 of the best count), ties by index: the result depends
on the lengths alone. Trade-off: the budget bounds memory, not attention cost, which grows with the square of a
sequence's length; `training.batches.micro_batch` sorts micro-batches by that.
"""

from collections.abc import Sequence


def pack(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Micro-batches of indices into `lengths`, each of at most `budget` tokens, indices ascending within one.

    A sequence longer than the budget gets a micro-batch of its own. Micro-batches come in the order of their smallest
    index. ValueError for an empty sequence or a budget below 1.
    """
    if budget < 1:
        raise ValueError(f"expected a token budget >= 1, got {budget}")
    if any(length < 1 for length in lengths):
        raise ValueError(f"expected sequences of at least one token, got lengths {list(lengths)}")
    bins: list[list[int]] = []
    left: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        for number, budget_left in enumerate(left):
            if lengths[index] <= budget_left:
                bins[number].append(index)
                left[number] -= lengths[index]
                break
        else:
            bins.append([index])
            left.append(budget - lengths[index])
    return sorted((sorted(members) for members in bins), key=lambda members: members[0])
