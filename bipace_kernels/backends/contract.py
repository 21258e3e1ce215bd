"""The contract of every stage: inputs, outputs, shapes, dtypes, units and errors.

A stage is a Protocol here, a module of the same name in each backend's package (`reference/`, `cpu/`, `triton/`,
`cuda/`), and the torch ops of its methods (`torch.ops.bipace.*`): `dispatch.py` maps the modules, mypy checks them
against these signatures, and `_ops.py` derives schemas, fakes and checks of arguments from them.

Shapes are in the letters of schema.py: M records in processing order, N rows of the caller, T trajectories, G prompt
groups.  "G+1" are offsets: a group's records are offsets[g] : offsets[g+1].  `taken` is False for records set aside;
`usable` is False for records whose fingerprint has no direction: each is a cluster of its own.
Sizes that would otherwise synchronize with a GPU are passed as ints.  A stage only computes and does not check: for values
outside these bounds the result is undefined, and no stage copies a tensor from a GPU to the host.  `advantage()` passes
valid values; the torch ops, which anyone may call, first check `Offsets` and `Places` on CPU tensors.  Same input, same
bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple, Protocol

import torch

from .schema import KERNELS

Tensor = torch.Tensor

# ------------------------------------------------------------------------------------------ annotations of arguments


class Spec(NamedTuple):
    """A tensor's shape, in letters ("H M" is a matrix, "G+1" offsets), and its dtypes."""

    shape: str
    dtypes: tuple[torch.dtype, ...]


class Size(NamedTuple):
    """A length known to the host, with this letter; "" if no tensor has it."""

    letter: str


class Range(NamedTuple):
    """Numbers that a kernel accepts; `holds` tests one."""

    text: str
    holds: Callable[[Any], bool]


class Offsets(NamedTuple):
    """Non-decreasing values from 0 to the size of this letter."""

    letter: str


class Places(NamedTuple):
    """Values from `lowest` to below the size of this letter."""

    letter: str
    lowest: int = 0


class Private(NamedTuple):
    """A tensor that stages fill in or pass on beside their results; their ops do not offer it."""


class OneOf(NamedTuple):
    """Words that a kernel accepts."""

    words: tuple[str, ...]


FINGERPRINT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

F32_M = Annotated[Tensor, Spec("M", (torch.float32,))]
F32_N = Annotated[Tensor, Spec("N", (torch.float32,))]
F32_T = Annotated[Tensor, Spec("T", (torch.float32,))]
F64_M = Annotated[Tensor, Spec("M", (torch.float64,))]
I64_M = Annotated[Tensor, Spec("M", (torch.int64,))]
I64_N = Annotated[Tensor, Spec("N", (torch.int64,))]
I64_EM = Annotated[Tensor, Spec("E M", (torch.int64,))]
I64_HM = Annotated[Tensor, Spec("H M", (torch.int64,))]
U8_M = Annotated[Tensor, Spec("M", (torch.uint8,))]
U8_N = Annotated[Tensor, Spec("N", (torch.uint8,))]
BOOL_M = Annotated[Tensor, Spec("M", (torch.bool,))]
BOOL_T = Annotated[Tensor, Spec("T", (torch.bool,))]
Fingerprint = Annotated[Tensor, Spec("N D", FINGERPRINT_DTYPES)]
GroupOffsets = Annotated[Tensor, Spec("G+1", (torch.int64,)), Offsets("M")]
TrajectoryOffsets = Annotated[Tensor, Spec("T+1", (torch.int64,)), Offsets("M")]
GroupTrajectories = Annotated[Tensor, Spec("G+1", (torch.int64,)), Offsets("T")]
Order = Annotated[Tensor, Spec("M", (torch.int64,)), Places("N")]  # the row of each record
Source = Annotated[Tensor, Spec("N", (torch.int64,)), Places("M", -1)]  # the record of each row; −1: none
Labels = Annotated[Tensor, Spec("M", (torch.int64,)), Places("M", -1)]  # dense over the batch; −1: set aside
DepthLabels = Annotated[Tensor, Spec("H M", (torch.int64,)), Places("M", -1)]
Landmarks = Annotated[Tensor, Spec("L", (torch.int64,)), Places("M", -1)]  # distinct usable records, or −1

NGroups = Annotated[int, Size("G")]
NRecords = Annotated[int, Size("M")]
NRows = Annotated[int, Size("N")]
NTrajectories = Annotated[int, Size("T")]
Longest = Annotated[int, Size("")]

RADII = 1e-4, 1.0  # smallest and largest ε beside 0
EPSILON = Range("0 or in [1e-4, 1]", lambda x: x == 0 or RADII[0] <= x <= RADII[1])
GAMMA = Range("in [0, 1]", lambda x: 0 <= x <= 1)
DELTA = Range("in (0, 1e-2]", lambda x: 0 < x <= 1e-2)
NOT_NEGATIVE = Range("finite and at least 0", lambda x: 0 <= x < math.inf)
ABOVE_ZERO = Range("finite and above 0", lambda x: 0 < x < math.inf)
WIDTH = Range("finite and at least 0.05", lambda x: 0.05 <= x < math.inf)
SAME = Range("in [0, 1000]", lambda x: 0 <= x <= 1000)
NOISE = Range("finite and at least 0.1", lambda x: 0.1 <= x < math.inf)
NORMS = OneOf(("none", "std"))

# ------------------------------------------------------------------------------------------------------------- stages


class Returns(Protocol):
    """Returns of steps and trajectories.  docs/estimator.md, section 6."""

    def discounted_returns(
        self,
        rewards: F64_M,
        step: I64_M | None,  # rising in a trajectory; None: neighbours are one step apart
        trajectory_offsets: TrajectoryOffsets,
        gamma: Annotated[float, GAMMA],
        *,
        n_trajectories: NTrajectories,
    ) -> F32_M:
        """R_t = Σ_{u≥t} γ^{u−t} r_u in float64, rounded to float32 once.  Steps of equal number count once."""

    def trajectory_returns(
        self,
        rewards: F64_M,
        step: I64_M | None,
        trajectory_offsets: TrajectoryOffsets,
        *,
        n_trajectories: NTrajectories,
    ) -> F32_T:
        """R(τ) = Σ r over the steps of each trajectory, in float64, rounded once."""

    def spoilt_trajectories(
        self,
        step_return: F32_M,
        trajectory_return: F32_T,
        bad_record: BOOL_M | None,  # records found bad for another reason
        trajectory_offsets: TrajectoryOffsets,
        *,
        n_trajectories: NTrajectories,
    ) -> BOOL_T:
        """Trajectories with a return (of a step or their own) that is not finite or beyond ±1e37, or with a bad record."""

    def all_returns(
        self,
        rewards: F64_M,
        step: I64_M | None,
        bad_record: BOOL_M | None,
        trajectory_offsets: TrajectoryOffsets,
        gamma: Annotated[float, GAMMA],
        *,
        n_trajectories: NTrajectories,
    ) -> tuple[F32_M, F32_T, BOOL_T]:
        """The three above: discounted_returns, trajectory_returns, and spoilt_trajectories of both."""


class Episode(Protocol):
    """The episode term (paper eq. 1)."""

    def episode_advantage(
        self,
        episode_return: F32_T,  # R(τ)
        trajectory_offsets: TrajectoryOffsets,
        group_trajectories: GroupTrajectories,
        *,
        n_groups: NGroups,
        n_records: NRecords,
        scope: Annotated[str, OneOf(("trajectory", "step"))],
        norm: Annotated[str, NORMS],
        lone: Annotated[str, OneOf(("zero", "raw"))],
        delta: Annotated[float, DELTA],
        spoilt: BOOL_T | None,
    ) -> F32_M:
        """A_ep of each record.  Invalid trajectories are not part of the population, and get 0."""


class Clusters(Protocol):
    """Greedy cosine clusters inside each prompt group (Algorithm 1 of the paper; docs/estimator.md, section 3)."""

    def scan_rows(self, fingerprint: Fingerprint, order: Order) -> U8_M:
        """0 fine, 1 not finite, 2 zero (all zeros)."""

    def cluster_cosine(
        self,
        fingerprint: Fingerprint,  # any strides, any length
        order: Order,
        group_offsets: GroupOffsets,
        usable: BOOL_M | None,
        epsilon: Annotated[float, EPSILON],  # 0: equal rows
        *,
        n_groups: NGroups,
        longest_group: Longest,
        taken: BOOL_M | None,
        state: Annotated[Tensor, Spec("M", (torch.uint8,)), Private()] | None = None,
    ) -> I64_M:
        """Labels 0 … C−1 over the batch by first appearance; −1 where not taken.

        state   where given, what scan_rows finds is written there and decides who is usable: a GPU then reads the rows once less
        """

    def cluster_sweep(
        self,
        fingerprint: Fingerprint,
        order: Order,
        group_offsets: GroupOffsets,
        usable: BOOL_M | None,
        epsilons: Annotated[Sequence[float], EPSILON],
        *,
        n_groups: NGroups,
        longest_group: Longest,
        taken: BOOL_M | None,
    ) -> I64_EM:
        """The labels of cluster_cosine under each of E values of ε."""


class Observations(Protocol):
    """Partitions by observations."""

    def cluster_exact(
        self,
        codes: I64_M,  # equal where the observations are equal
        group_offsets: GroupOffsets,
        *,
        n_groups: NGroups,
        longest_group: Longest,
        taken: BOOL_M | None,
    ) -> I64_M:
        """Clusters of equal codes inside each group, numbered over the batch by first appearance; −1 where not taken."""

    def cluster_history(
        self,
        codes: I64_M,
        step: I64_M | None,
        trajectory_offsets: TrajectoryOffsets,
        group_offsets: GroupOffsets,
        depth: Annotated[int, Size("H"), Range("at least 1", lambda x: x >= 1)],  # at most M, or 1
        *,
        n_trajectories: NTrajectories,
        n_groups: NGroups,
        longest_group: Longest,
        taken: BOOL_M | None,  # whole trajectories
    ) -> I64_HM:
        """Row k−1: clusters by the last k codes, the record's own included; −1 where it has fewer, or is not taken."""


class Similar(Protocol):
    """Partition "similar", on the host: it compares texts as Python's difflib does."""

    def cluster_similar(self, texts: list[str], group_offsets: Tensor, similarity: float) -> Tensor:
        """[M] int64 by first appearance: a text joins the oldest similar cluster of its group, else seeds one.

        Similar: `difflib.SequenceMatcher(None, text, first member of the cluster).ratio() >= similarity`.
        """


class Values(Protocol):
    """The step term inside each cluster (paper eq. 7 to 9; docs/estimator.md, section 4)."""

    def step_advantage(
        self,
        returns: F32_M,
        labels: Labels,
        action_key: I64_M | None,  # None for "mean"
        group_offsets: GroupOffsets,
        *,
        n_groups: NGroups,
        longest_group: Longest,
        estimator: Annotated[str, OneOf(KERNELS)],
        step_norm: Annotated[str, NORMS],
        delta: Annotated[float, DELTA],
    ) -> tuple[F32_M, U8_M]:
        """A_S and branch of each record; 0 and SINGLETON for records set aside."""

    def hgpo_advantage(
        self,
        returns: F32_M,
        depth_labels: DepthLabels,  # −1: fewer observations than the depth, or set aside
        episode_advantage: F32_M,
        group_offsets: GroupOffsets,
        *,
        n_groups: NGroups,
        longest_group: Longest,
        step_norm: Annotated[str, NORMS],
        delta: Annotated[float, DELTA],
        alpha: Annotated[float, NOT_NEGATIVE],
        base_group: bool,
    ) -> tuple[F32_M, I64_M, U8_M]:
        """HGPO's aggregate, each record's deepest depth with peers (0: none), and its branch."""


class Critic(Protocol):
    """A value of each record's state, estimated from the returns of the batch, and GAE(λ) over it (docs/gae.md).

    μ_p is the mean of R over the group's records.  0 for records that are not taken.
    """

    def cluster_values(
        self,
        returns: F32_M,
        labels: Labels | None,  # None: V̂ = μ_p
        group_offsets: GroupOffsets,
        *,
        n_groups: NGroups,
        longest_group: Longest,
        taken: BOOL_M | None,
        shrinkage: Annotated[float, NOT_NEGATIVE],  # κ
    ) -> F64_M:
        """V̂_i = μ_p + Σ_{j in C} (R_j − μ_p) / (|C| + κ); exactly μ_p where the group's returns are equal."""

    def kernel_values(
        self,
        fingerprint: Fingerprint,  # any strides, any length
        order: Order,
        returns: F32_M,
        time: I64_M,  # step numbers, at least 0
        group_offsets: GroupOffsets,
        usable: BOOL_M | None,
        landmarks: Landmarks | None,  # of share "batch" only; None: the first 128 records
        *,
        n_groups: NGroups,
        longest_group: Longest,
        taken: BOOL_M | None,
        share: Annotated[str, OneOf(("group", "batch"))],
        width: Annotated[float, WIDTH],  # ℓ
        horizon: Annotated[float, NOT_NEGATIVE],  # θ in steps; 0: no time term
        noise: Annotated[float, NOISE],  # ρ
        same: Annotated[float, SAME],  # s of share "batch"
        products: Annotated[Tensor, Spec("P", (torch.float64,)), Private()] | None = None,
    ) -> F64_M:
        """share "group": V̂ = μ_p + C (C + ρ I)⁻¹ (R − μ_p) over the usable records of each group; "batch": V̂ = C (C + ρ I)⁻¹ R over
        those of all groups.  μ_p for records that are not usable.

        K_ij = exp((c_ij − 1)/ℓ − (t_i − t_j)²/(2 θ²)), c the cosine of the fingerprints scaled to unit length, minus the
        mean of the usable ones of the group or the batch.  Rows within a squared distance of 1e-5 of that mean have c = 1 among
        themselves and 0 with others; equal rows have c = 1.
        Blocks are the groups' usable records; those of a group with n > 2,048 are cut into ⌈n / 1,024⌉ equal runs.  C is K
        inside a block, under share "batch" K + s; between blocks K_im (K_mm + 10⁻³ I)⁻¹ K_mj over the landmarks: those given, or
        under share "group" ⌊k n / m⌋ of the group's n usable records, m = min(n, 128).  Memory
        O(n m) plus the longest block's square.

        products   Σ n (n + 1) / 2 over the groups of up to 2,048 records: what a backend may leave there for same_action_advantage
        """

    def gae_advantage(
        self,
        rewards: F64_M,
        value: F64_M,  # V̂
        step: I64_M | None,  # rising in a trajectory; None: neighbours are one step apart
        trajectory_offsets: TrajectoryOffsets,
        truncated: BOOL_M | None,  # read on the last step of each trajectory: True if it was cut off there
        gamma: Annotated[float, GAMMA],
        gae_lambda: Annotated[float, GAMMA],
        *,
        n_trajectories: NTrajectories,
        taken: BOOL_M | None,
    ) -> F64_M:
        """A_S(t) = δ_t + (γλ)^Δt A_S(t + Δt),  δ_t = r_t + γ^Δt V̂(t + Δt) − V̂(t), with V̂ = 0 after the last step.

        After a step that was cut off its own V̂ is used, one step later.  Records of equal step number are one step: the
        step before uses the means of their V̂ and A_S.
        """

    def same_action_advantage(
        self,
        fingerprint: Fingerprint,  # any strides, any length
        order: Order,
        advantage: F64_M,
        time: I64_M,  # step numbers, at least 0
        action_key: I64_M,
        group_offsets: GroupOffsets,
        usable: BOOL_M | None,
        parsed: BOOL_M | None,  # False: the action was not recognized
        *,
        n_groups: NGroups,
        longest_group: Longest,
        taken: BOOL_M | None,
        width: Annotated[float, WIDTH],  # ℓ
        horizon: Annotated[float, NOT_NEGATIVE],  # θ in steps; 0: no time term
        noise: Annotated[float, NOISE],  # η
        products: Annotated[Tensor, Spec("P", (torch.float64,)), Private()] | None = None,
    ) -> F64_M:
        """K_a (K_a + η I)⁻¹ A_S over the usable records of each group: an average over near states with the same action.

        K_a is K of kernel_values under share "group" where the action keys are equal, and 0 elsewhere; also 0 between the
        blocks of a group with more than 2,048 usable records, and for actions that were not recognized: their keys are
        equal where the responses begin alike, whatever was done.  A_S / (1 + η) for these and for records that are not
        usable, as for one with nothing near.

        products   as kernel_values left them, with the same arguments: saves time, the result has the same bits
        """

    def normed_advantage(
        self,
        advantage: F64_M,
        returns: F32_M,  # for the threshold below which the mean square counts as 0
        group_offsets: GroupOffsets,
        *,
        n_groups: NGroups,
        longest_group: Longest,
        taken: BOOL_M | None,
        step_norm: Annotated[str, OneOf(("none", "batch", "group"))],
    ) -> F32_M:
        """A_S over its root mean square of the batch or the group, which gives 0 where that is at most 1e-6 · max|R| of the same
        records; "none": A_S.  Rounded once, saturating."""


class Combine(Protocol):
    """A = A_ep + w · A_S (paper eq. 10), and the results in the caller's rows."""

    def combine(
        self,
        episode: F32_M,
        step_term: F32_M,
        returns: F32_M,
        labels: I64_M,
        branch: U8_M,
        source: Source,  # the record whose results each row gets
        taken: BOOL_M | None,
        *,
        weight: Annotated[float, NOT_NEGATIVE],
        total_is_step: bool,  # A = A_S
        n_rows: NRows,
        episode_weight: Annotated[float, NOT_NEGATIVE] = 1.0,
    ) -> tuple[F32_N, F32_N, F32_N, F32_N, I64_N, U8_N]:
        """Advantage, step term, episode term, returns, cluster and branch of each row.

        A = episode_weight · A_ep + w · A_S in float64, rounded once, saturating at the largest float32; w = 0 and
        episode_weight = 1 give A_ep back bit for bit.  Rows without a record and records set aside: 0, cluster −1,
        SINGLETON.
        """


class ActionKeys(Protocol):
    """Action keys from token ids (docs/action_keys.md)."""

    LARGEST_TABLE: int  # bytes of all tokens

    def hash_token_ids(
        self,
        ids: Tensor,  # [R, L] any integer dtype and strides, or flat [E] with row_offsets
        row_offsets: Annotated[Tensor, Spec("R+1", (torch.int64,)), Offsets("E")] | None,
        valid: Tensor | None,  # like ids: bool or any integer dtype, non-zero = valid
        table_offsets: Annotated[Tensor, Spec("V+1", (torch.int64,)), Offsets("B")] | None,  # None: mode "first_n"
        table_bytes: Annotated[Tensor, Spec("B", (torch.uint8,))] | None,
        *,
        mode: Annotated[str, OneOf(("action_tag", "first_n", "text"))],
        n: Annotated[int, Range(f"in [1, {1 << 40}]", lambda x: 1 <= x <= 1 << 40)],
        longest_row: Longest,  # L, or the length of the longest row
    ) -> tuple[
        Annotated[Tensor, Spec("R", (torch.int64,))],
        Annotated[Tensor, Spec("R", (torch.bool,))],
        Annotated[Tensor, Spec("1", (torch.int64,))],
    ]:
        """Keys, whether each row parsed, and the lowest flat position of a valid id outside the table (−1: none).

        The position is row · L + column, or the index in the flat ids.  A row with such an id is not parsed and gets its
        first_n key; on the CPU no row's key is then computed.
        """


class Texts(Protocol):
    """Action keys from data on the host."""

    def hash_texts(self, texts: Sequence[str], *, mode: str) -> tuple[Tensor, Tensor]:
        """Keys [N] int64 and parsed [N] bool of the texts' UTF-8 bytes."""

    def flatten_rows(
        self, rows: Sequence[Sequence[Any]], row_offsets: Tensor, *, bools: bool
    ) -> tuple[Tensor, tuple[int, int] | None]:
        """Flat values [E] int64, and (row, column) of the first item that is not a 64-bit integer (or None).

        Column −1: the row's length differs from its offsets.  A bool is an integer only where `bools` is True.
        """


class Ngrams(Protocol):
    """n-gram fingerprints of texts (docs/embedders.md)."""

    def ngram_fingerprints(
        self,
        bytes: Annotated[Tensor, Spec("B", (torch.uint8,))],  # the texts one after the other
        offsets: Annotated[Tensor, Spec("S+1", (torch.int64,)), Offsets("B")],
        *,
        n: Annotated[int, Range("in [1, 4096]", lambda x: 1 <= x <= 1 << 12)],
        dim: Annotated[int, Size("D"), Range("in [1, 2^24]", lambda x: 1 <= x <= 1 << 24)],
    ) -> Annotated[Tensor, Spec("S D", (torch.float32,))]:
        """Unit vectors of signed, hashed n-gram counts.  Counts are int32: a text must be shorter than 2^31 bytes."""


#: Stages whose methods are torch ops, by module name.
OPS: dict[str, type] = {
    "returns": Returns, "episode": Episode, "clusters": Clusters, "observations": Observations, "values": Values, "critic": Critic,
    "combine": Combine, "action_keys": ActionKeys, "ngrams": Ngrams,
}  # fmt: skip
