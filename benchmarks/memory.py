"""Peak memory: the most that tensors held at once during a call, beyond what was there before."""

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def peak(run: Callable[[], object]) -> int:
    """Bytes at the highest point of a call, by the allocator's own record of every block."""
    run()  # what is made once and kept is not the call's
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    held, most = 0, 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most
