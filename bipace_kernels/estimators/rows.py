"""What a configuration can name: partitions, estimators and the values of "gae", a row each.

Config, checks, the command line and the adapters read these tables.  partitions.py and table.py compute what the rows
name; docs/estimator.md, sections 3 and 4, and docs/gae.md define it.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Partition:
    """A way to cluster the steps of a prompt group."""

    name: str  # as in Config.partition
    argument: str | None = None  # of advantage() that it reads
    by_code: bool = False  # it compares codes of observations, which are made before anything is computed
    greedy: bool = False  # clusters depend on the order of rollouts

    @property
    def has_clusters(self) -> bool:
        """Whether a cluster can hold several records."""
        return self.argument is not None


PARTITIONS: dict[str, Partition] = {
    row.name: row
    for row in (
        Partition("none"),
        Partition("exact", "observation", by_code=True),
        Partition("history", "observation", by_code=True),
        Partition("similar", "observation", greedy=True),
        Partition("cosine", "fingerprint", greedy=True),
    )
}


@dataclass(frozen=True)
class Estimator:
    """A step estimator."""

    name: str  # as in Config.estimator
    partitions: tuple[str, ...] = tuple(name for name in PARTITIONS if name != "none")
    needs: tuple[str, ...] = ()  # arguments of advantage() that it reads in addition to its partition's
    step_norms: tuple[str, ...] = ("none",)
    whole: bool = False  # its step term is the total, instead of A = A_ep + w · A_S
    has_value: bool = False  # it computes V̂ of each record by a row of VALUES, and reads `truncated`


_EVERY = tuple(PARTITIONS)
ESTIMATORS: dict[str, Estimator] = {
    row.name: row
    for row in (
        Estimator("none", ("none",)),
        Estimator("mean", step_norms=("none", "std")),
        Estimator("diff_peer", needs=("action_key",)),
        Estimator("q_style", needs=("action_key",)),
        Estimator("hgpo", ("history",), step_norms=("none", "std"), whole=True),
        Estimator("gae", _EVERY, needs=("rewards",), step_norms=("none", "batch", "group"), has_value=True),
    )
}
FUNCTION = Estimator("function", _EVERY)  # of Config(estimator=function)


@dataclass(frozen=True)
class StateValue:
    """A value of a record's state, of estimator "gae"."""

    name: str  # as in Config.value
    has_clusters: bool = False  # its records are those of a cluster, by the configuration's partition
    needs: tuple[str, ...] = ()  # arguments of advantage() that it reads


VALUES: dict[str, StateValue] = {
    row.name: row
    for row in (
        StateValue("group"),
        StateValue("step"),
        StateValue("cluster", has_clusters=True),
        StateValue("kernel", needs=("fingerprint",)),
    )
}
VALUE_FUNCTION = StateValue("function", needs=("fingerprint",))  # of Config.gae(value=function)
