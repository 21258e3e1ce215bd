"""BiPACE's advantages for two rollouts of one task.  Run it: python examples/quickstart.py"""

import bipace_kernels as bk

observations = ["room", "drawer", "drawer", "room", "shelf", "drawer", "drawer"]
actions = ["open drawer", "take key", "leave", "open drawer", "look", "leave", "leave"]

result = bk.advantage(
    group=["task"] * 7,  # all steps belong to one prompt
    trajectory=[0, 0, 0, 1, 1, 1, 1],
    rewards=[0, 0, 1, 0, 0, 0, 0],  # the first rollout succeeds
    step=[0, 1, 2, 0, 1, 2, 3],
    fingerprint=bk.ngram_fingerprint(observations),  # in training: hidden states of the policy
    action_key=bk.action_keys(actions, mode="text")[0],
    config=bk.Config.bipace(epsilon=0.25),  # 0.25 for n-grams, 0.10 for hidden states
)

for row, (observation, action) in enumerate(zip(observations, actions, strict=True)):
    branch = bk.Branch(int(result.branch[row])).name.lower()
    print(f"{observation:8} {action:12} cluster {result.cluster[row]}  {branch:14} A = {result.advantage[row]:+.3f}")
