"""The order of tasks: a pass holds every task of the suite once, whatever its size."""

from collections import Counter

import pytest

from headrace.ledger.training import TaskOrder
from headrace.tasks import open_suite


@pytest.mark.parametrize("size", [1, 2, 3, 10, 500, 4097, 5000])
def test_a_pass_is_a_permutation_of_the_whole_suite(size: int) -> None:
    ids = [str(number) for number in range(size)]
    order = TaskOrder(ids, 7)
    assert Counter(order[number] for number in range(size)) == Counter(ids)


def test_each_pass_and_each_seed_has_another_order_and_a_successor_the_same() -> None:
    ids = [str(number) for number in range(200)]
    first, second = TaskOrder(ids, 1), TaskOrder(ids, 2)
    orders = [[first[number] for number in range(walk * 200, walk * 200 + 200)] for walk in range(2)]
    orders.append([second[number] for number in range(200)])
    assert len({tuple(order) for order in orders}) == 3
    assert all(sorted(order) == sorted(ids) for order in orders)
    assert [TaskOrder(ids, 1)[number] for number in range(399, 300, -1)] == orders[0:2][1][199:100:-1]


def test_the_first_tasks_come_from_the_whole_suite() -> None:
    order = TaskOrder([str(number) for number in range(8000)], 3)
    eighths = Counter(int(order[number]) // 1000 for number in range(400))
    assert len(eighths) == 8 and max(eighths.values()) < 90, eighths


def test_all_orders_of_three_tasks_are_equally_likely() -> None:
    orders = Counter(tuple(TaskOrder("abc", seed)[number] for number in range(3)) for seed in range(600))
    assert len(orders) == 6
    assert sum((count - 100) ** 2 / 100 for count in orders.values()) < 20.5  # chi-square, 5 degrees, 0.1 %


def test_a_suite_too_long_for_a_list_is_walked_in_place() -> None:
    suite = open_suite("generated/train")
    tasks = [TaskOrder(suite.ids(), 1)[number] for number in range(20)]
    assert len(set(tasks)) == 20 and all(id in suite.ids() for id in tasks)


def test_tasks_that_are_left_out_give_way_to_others() -> None:
    ids = [str(number) for number in range(100)]
    out = frozenset(ids[::50])
    order = TaskOrder(ids, 5, out)
    issued = Counter(order[number] for number in range(100))
    assert issued.keys() == set(ids) - out and issued.total() == 100
    with pytest.raises(ValueError, match="without tasks"):
        TaskOrder(ids[:1], 5, frozenset(ids[:1]))
