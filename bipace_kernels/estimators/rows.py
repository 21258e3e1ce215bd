"""What a configuration can name: partitions, estimators and the values of "gae", a row each.

Config, checks, the command line and the adapters read these tables.  partitions.py and table.py compute what the rows
name; docs/estimator.md, sections 3 and 4, and docs/gae.md define it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Partition:
    """A way to cluster the steps of a prompt group.

    name       as in Config.partition
    meaning    description in one line
    argument   of advantage() that it reads, or None
    by_code    it compares codes of observations, which are made before anything is computed
    greedy     clusters depend on the order of rollouts
    """

    name: str
    meaning: str
    argument: str | None = None
    by_code: bool = False
    greedy: bool = False

    @property
    def has_clusters(self) -> bool:
        """Whether a cluster can hold several records."""
        return self.argument is not None


PARTITIONS: dict[str, Partition] = {
    row.name: row
    for row in (
        Partition("none", "every step by itself"),
        Partition("exact", "equal observations", "observation", by_code=True),
        Partition("history", "equal last observations", "observation", by_code=True),
        Partition("similar", "similar texts (difflib's ratio)", "observation", greedy=True),
        Partition("cosine", "cosine distance of fingerprints", "fingerprint", greedy=True),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Estimator:
    """A step estimator.

    name         as in Config.estimator
    meaning      description in one line
    partitions   allowed partitions
    needs        arguments of advantage() that it reads in addition to its partition's (see Config.needs)
    step_norms   allowed values of Config.step_norm
    whole        its step term is the total, instead of A = A_ep + w · A_S
    pace         meaning of Branch.PACE
    has_value    it computes V̂ of each record by a row of VALUES, and reads `truncated`
    """

    name: str
    meaning: str
    partitions: tuple[str, ...] = tuple(name for name in PARTITIONS if name != "none")
    needs: tuple[str, ...] = ()
    step_norms: tuple[str, ...] = ("none",)
    whole: bool = False
    pace: str = "compared with its peers"
    has_value: bool = False


ESTIMATORS: dict[str, Estimator] = {
    row.name: row
    for row in (
        Estimator("none", "no step term", partitions=("none",)),
        Estimator("mean", "R − mean of the cluster", step_norms=("none", "std"), pace="R − mean of its cluster"),
        Estimator(
            "diff_peer", "R − mean of the cluster's other actions", needs=("action_key",),
            pace="R − mean of the records with another action",
        ),
        Estimator(
            "q_style", "mean of the same action − mean of the cluster", needs=("action_key",),
            pace="its action has two or more records in the cluster",
        ),
        Estimator(
            "hgpo", "R − mean at every depth of the history, weighted", partitions=("history",),
            step_norms=("none", "std"), whole=True, pace="it has peers at some depth",
        ),
        Estimator(
            "gae", "GAE(λ) over a value estimated from the batch", partitions=tuple(PARTITIONS), needs=("rewards",),
            step_norms=("none", "batch", "group"), pace="its value is shared with its cluster", has_value=True,
        ),
    )
}  # fmt: skip
#: Of Config(estimator=function).
FUNCTION = Estimator(
    "function", "a function of the records", partitions=tuple(PARTITIONS), pace="every record that takes part"
)


@dataclass(frozen=True)
class StateValue:
    """A value of a record's state, of estimator "gae".

    name          as in Config.value
    meaning       description in one line
    has_clusters  its records are those of a cluster, by the configuration's partition
    needs         arguments of advantage() that it reads
    """

    name: str
    meaning: str
    has_clusters: bool = False
    needs: tuple[str, ...] = ()


VALUES: dict[str, StateValue] = {
    row.name: row
    for row in (
        StateValue("group", "mean of the prompt group"),
        StateValue("cluster", "means of clusters, shrunk towards the prompt group's", has_clusters=True),
        StateValue("kernel", "Gaussian process over the fingerprints", needs=("fingerprint",)),
    )
}  # fmt: skip
