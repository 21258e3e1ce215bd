"""The walk of one call: through how many of the package's functions and modules advantage() goes on the CPU."""

from paths import python

WALK = """
import os, sys, torch
import bipace_kernels as bk

torch.manual_seed(0)
groups, length, dim = 16, 400, 64
group = torch.arange(groups).repeat_interleave(length)
trajectory = torch.arange(groups * 8).repeat_interleave(length // 8)
keys = torch.randint(0, 4, (groups * length,))
given = {
    "group": group, "trajectory": trajectory, "rewards": torch.rand(groups * length),
    "step": torch.arange(length // 8).repeat(groups * 8), "fingerprint": torch.randn(groups * length, dim),
    "action_key": keys, "action_parsed": keys >= 0,
}
bk.advantage(**given)
root, calls = os.path.dirname(bk.__file__), []


def note(frame, event, argument):
    if event == "call" and frame.f_code.co_filename.startswith(root):
        calls.append(os.path.relpath(frame.f_code.co_filename, root))


sys.setprofile(note)
bk.advantage(**given)
sys.setprofile(None)
print(len(calls), *sorted(set(calls)))
"""


def test_a_call_is_a_short_walk():
    """In a process of its own: a compiler that other tests load makes the walk longer."""
    calls, *modules = python(WALK).split()
    assert int(calls) <= 140 and len(modules) <= 18, (calls, modules)
