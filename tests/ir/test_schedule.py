"""Plans: what the model gains, what stays where it is, and the waits that an order needs."""

import itertools

from dsa_compile.ir.schedule import (
    EVENT_US,
    MIN_GAIN_US,
    Task,
    gathered,
    makespan,
    schedule,
    serial,
    waits,
)


def chain(*costs, loads=None):
    """Tasks between a beginning and an end; each cost is (µs, load, tasks before)."""
    inner = [Task(us, load, frozenset({0, *after})) for us, load, after in costs]
    last = Task(0.0, 0.0, frozenset(range(len(inner) + 1)), pinned=True)
    return [Task(0.0, 0.0, frozenset(), pinned=True), *inner, last]


def test_two_independent_tasks_run_side_by_side():
    tasks = chain((10.0, 0.2, ()), (8.0, 0.2, ()))
    plan = schedule(tasks)
    assert sorted(plan.streams) == [0, 0, 0, 1]
    # the one beside starts after a wait and ends before the other, which waits for it in the end
    assert plan.us == 10.0 + EVENT_US
    assert serial(tasks).us == 18.0


def test_a_chain_stays_on_one_stream():
    tasks = chain((10.0, 0.2, ()), (8.0, 0.2, (1,)), (5.0, 0.2, (2,)))
    assert schedule(tasks) == serial(tasks)


def test_what_saturates_the_device_gains_nothing():
    tasks = chain((10.0, 1.0, ()), (8.0, 1.0, ()))
    assert makespan(tasks, range(4), [0, 0, 1, 0]) >= 18.0
    assert schedule(tasks) == serial(tasks)


def test_a_gain_below_two_waits_is_left():
    short = 2 * EVENT_US + MIN_GAIN_US / 2
    assert schedule(chain((10.0, 0.1, ()), (short / 2, 0.1, ()))).streams == (0, 0, 0, 0)


def test_pinned_tasks_stay():
    tasks = chain((10.0, 0.1, ()), (9.0, 0.1, ()))
    held = [*tasks[:2], Task(9.0, 0.1, frozenset({0}), pinned=True), tasks[3]]
    plan = schedule(held)
    assert (plan.streams[1], plan.streams[2]) == (1, 0)


def test_a_third_stream_is_used_where_it_helps():
    tasks = chain(*[(10.0, 0.1, ())] * 3)
    assert set(schedule(tasks, 2).streams) == {0, 1}
    assert set(schedule(tasks, 3).streams) == {0, 1, 2}
    assert schedule(tasks, 3).us < schedule(tasks, 2).us


def test_the_model_of_contention():
    """Two tasks that want 1.5 of the device run at two thirds of their speed."""
    tasks = chain((9.0, 0.75, ()), (9.0, 0.75, ()))
    beside = makespan(tasks, range(4), [0, 0, 1, 0])
    alone = EVENT_US  # the one beside has not started
    both = (9.0 - alone) * 1.5
    rest = 9.0 - both / 1.5
    assert abs(beside - (alone + both + rest + EVENT_US)) < 1e-6


def test_the_longest_chain_first():
    tasks = chain((1.0, 0.1, ()), (1.0, 0.1, ()), (50.0, 0.1, (2,)), (20.0, 0.1, (1,)))
    plan = schedule(tasks)
    assert plan.order.index(2) < plan.order.index(1)
    for task, before in ((t, b) for t in plan.order for b in tasks[t].after):
        assert plan.order.index(before) < plan.order.index(task)


def test_the_host_changes_streams_when_it_must():
    tasks = chain((1.0, 0.1, ()), (1.0, 0.1, ()), (1.0, 0.1, (1,)), (1.0, 0.1, (2, 3)))
    assert gathered(tasks, range(6), [0, 0, 1, 0, 1, 0]) == [0, 1, 3, 2, 4, 5]


def test_waits_that_follow_from_others_are_left_out():
    """3 waits for 2, which has waited for 1: the one wait is enough."""
    tasks = chain((5.0, 0.1, ()), (5.0, 0.1, (1,)), (5.0, 0.1, (1, 2)))
    assert waits(tasks, range(5), [0, 0, 1, 2, 0]) == {2: [1], 3: [2], 4: [3]}


def test_no_plan_of_a_small_case_is_better():
    """Against every assignment, in the same order."""
    tasks = chain(
        (6.0, 0.6, ()), (3.0, 0.1, (1,)), (11.0, 0.8, (2,)), (8.0, 0.5, (3,)), (5.0, 0.6, (2,)),
        (3.0, 0.1, (5,)), (8.0, 0.3, (6,)), (15.0, 0.3, (4, 7)),
    )  # fmt: skip
    plan = schedule(tasks)
    every = itertools.product((0, 1), repeat=len(tasks) - 2)
    best = min(makespan(tasks, plan.order, (0, *inner, 0)) for inner in every)
    assert plan.us <= best + MIN_GAIN_US
    assert plan.us < serial(tasks).us - 5.0
