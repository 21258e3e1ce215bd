"""The contract of every stage: inputs, outputs, shapes, dtypes and units.

A stage is a Protocol here and a module of the same name in each backend's package (`reference/`, `cpu/`, `triton/`,
`cuda/`): `dispatch.py` maps the modules, mypy checks them against these signatures.  Most functions are
`stage(records, columns…, parameters)`; `Records` holds offsets, order, steps and masks.

Shapes are in the letters of schema.py: M records in processing order, N rows of the caller, T trajectories, G prompt
groups.  A stage only computes and does not check: for values outside these bounds the result is undefined, and no stage
copies a tensor from a GPU to the host.  `advantage()` passes valid values; the torch ops (ops/registry.py), which
anyone may call, check theirs first.  Same input, same bits.

Masks: stages on a GPU give 0 for records that are not taken, and labels −1; the backends on the CPU never get such
records.  `records.usable` is read by every stage that reads fingerprints.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from .records import Records
from .schema import Kernel, Terms, Tokens

FINGERPRINT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Returns(Protocol):
    """Returns of steps and trajectories (docs/estimator.md, section 6), from records.step and trajectory_offsets.

    rewards   [M] float64
    """

    def discounted_returns(self, records: Records, rewards: Tensor, gamma: float) -> Tensor:
        """[M] float32 R_t = Σ_{u≥t} γ^{u−t} r_u in float64, rounded once.  Steps of equal number count once."""

    def trajectory_returns(self, records: Records, rewards: Tensor) -> Tensor:
        """[T] float32 R(τ) = Σ r over the steps of each trajectory, in float64, rounded once."""

    def spoilt_trajectories(
        self, records: Records, step_return: Tensor, trajectory_return: Tensor, bad_record: Tensor | None
    ) -> Tensor:
        """[T] bool: trajectories with a return that is not finite or beyond ±1e37, or with a bad record.

        step_return         [M] float32
        trajectory_return   [T] float32
        bad_record          [M] bool or None   records found bad for another reason
        """

    def all_returns(
        self, records: Records, rewards: Tensor, bad_record: Tensor | None, gamma: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The three above: discounted_returns, trajectory_returns, and spoilt_trajectories of both."""


class Episode(Protocol):
    """The episode term (paper eq. 1)."""

    def episode_advantage(
        self, records: Records, episode_return: Tensor, scope: str, norm: str, lone: str, delta: float
    ) -> Tensor:
        """[M] float32 A_ep of each record.  Spoilt trajectories are not part of the population, and get 0.

        episode_return      [T] float32 R(τ)
        scope, norm, lone   Config.episode_scope, episode_norm and lone_trajectory
        """


class Clusters(Protocol):
    """Greedy cosine clusters inside each prompt group (Algorithm 1 of the paper; docs/estimator.md, section 3).

    fingerprint   [N, D] float32 | bfloat16 | float16, any strides, any length, as in all stages
    """

    def scan_rows(self, records: Records, fingerprint: Tensor) -> Tensor:
        """[M] uint8: 0 fine, 1 not finite, 2 zero (all zeros)."""

    def cluster_cosine(self, records: Records, fingerprint: Tensor, epsilon: float) -> Tensor:
        """[M] int64 labels 0 … C−1 over the batch by first appearance.  ε = 0: equal rows."""

    def cluster_sweep(self, records: Records, fingerprint: Tensor, epsilons: Sequence[float]) -> Tensor:
        """[E, M] int64: the labels of cluster_cosine under each of E values of ε."""


class Observations(Protocol):
    """Partitions by observations.

    codes   [M] int64   equal where the observations are equal
    """

    def cluster_exact(self, records: Records, codes: Tensor) -> Tensor:
        """[M] int64 clusters of equal codes inside each group, numbered over the batch by first appearance."""

    def cluster_history(self, records: Records, codes: Tensor, depth: int) -> Tensor:
        """[H, M] int64, row k−1: clusters by the last k codes, the record's own included; −1 where it has fewer.

        depth   H in [1, max(M, 1)]
        """


class Similar(Protocol):
    """Partition "similar", on the host: it compares texts as Python's difflib does."""

    def cluster_similar(self, texts: list[str], group_offsets: Tensor, similarity: float) -> Tensor:
        """[M] int64 by first appearance: a text joins the oldest similar cluster of its group, else seeds one.

        Similar: `difflib.SequenceMatcher(None, text, first member of the cluster).ratio() >= similarity`.
        """


class Values(Protocol):
    """The step term inside each cluster (paper eq. 7 to 9; docs/estimator.md, section 4).

    returns   [M] float32
    """

    def step_advantage(
        self, records: Records, returns: Tensor, labels: Tensor, action_key: Tensor | None, estimator: str,
        step_norm: str, delta: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """[M] float32 A_S and [M] uint8 branch of each record; 0 and SINGLETON where the label is −1.

        labels       [M] int64, dense over the batch
        action_key   [M] int64; None for "mean"
        estimator    one of KERNELS
        """

    def hgpo_advantage(
        self, records: Records, returns: Tensor, depth_labels: Tensor, episode_advantage: Tensor, step_norm: str,
        delta: float, alpha: float, base_group: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """[M] float32 HGPO's aggregate, [M] int64 deepest depth with peers (0: none) and [M] uint8 branch.

        depth_labels        [H, M] int64 of cluster_history
        episode_advantage   [M] float32
        """


class Critic(Protocol):
    """A value of each record's state, estimated from the returns of the batch, and GAE(λ) over it (docs/gae.md).

    μ_p is the mean of R over the group's records.

    returns   [M] float32
    """

    def cluster_values(self, records: Records, returns: Tensor, labels: Tensor | None, shrinkage: float) -> Tensor:
        """[M] float64 V̂_i = μ_p + Σ_{j in C} (R_j − μ_p) / (|C| + κ); exactly μ_p where the group's returns are equal.

        labels   [M] int64; None: V̂ = μ_p
        """

    def unit_rows(self, records: Records, fingerprint: Tensor, width: int, keys: Tensor | None = None) -> Tensor:
        """[M, w] float32 fingerprints at unit length, NaN for records that are not usable; float64 by the reference.

        Where D > width > 0 they are folded to w = width: element e is added to element e mod w, with the sign of
        schema.signs, a fixed random projection: products of two rows change by about 1/√w of their lengths.
        Else w = D.

        keys   [M] int64 gets schema.state_keys of the records' rows
        """

    def whitened_rows(self, records: Records, rows: Tensor, landmarks: Tensor, directions: int) -> Tensor:
        """[M, directions] float32 coordinates of the rows minus the landmarks' mean in the leading directions of the
        landmarks' covariance, each divided by the fourth root of its eigenvalue (relative to the first).

        0 in directions whose eigenvalue is at most 1e-6 of the first.  float64 by the reference.
        """

    def centred_rows(self, records: Records, rows: Tensor, share: str) -> Tensor:
        """[M, w] float32 rows minus the mean of the usable ones of their group or of the batch, by the share; NaN stays
        NaN.  float64 by the reference.
        """

    def kernel_values(
        self, records: Records, rows: Tensor, inside: Tensor | None, returns: Tensor, landmarks: Tensor | None,
        kernel: Kernel,
    ) -> Tensor:  # fmt: skip
        """[M] float64.  Share "group": V̂ = μ_p + C (C + N)⁻¹ (R − μ_p) over the usable records of each group;
        "batch": V̂ = C (C + N)⁻¹ R over those of all groups.  μ_p for records whose rows are NaN: not usable.

        K_ij = exp((c_ij − 1)/ℓ − (t_i − t_j)²/(2 θ²)), c the cosine of rows and t records.time.  Rows of a squared
        length of at most 1e-5 have c = 1 among themselves and 0 with others; equal rows have c = 1.
        N = β L Lᵀ + ρ I, L_ij = γ^(t_j − t_i) from a record to itself and later ones of its trajectory (in its block).
        Blocks are the groups' usable records; those of a group with n > kernel.longest are cut into ⌈n / 1,024⌉ equal
        runs.  C is K inside a block, under share "batch" K + s + w_g K_g, K_g of `inside`; between blocks
        K_im (K_mm + 10⁻³ I)⁻¹ K_mj over the landmarks: those given, or under share "group" ⌊k n / m⌋ of the group's n
        usable records, m = min(n, 128).  Memory O(n m) plus the longest block's square.

        rows        [M, w] of centred_rows, by the share
        inside      [M, w] of centred_rows, by group; None: w_g is 0
        landmarks   [L] int64 distinct usable records, or −1; of share "batch" only.  None: the first 128 records
        """

    def gae_advantage(
        self,
        records: Records,
        rewards: Tensor,
        value: Tensor,
        truncated: Tensor | None,
        gamma: float,
        gae_lambda: float,
    ) -> Tensor:
        """[M] float64 A_S(t) = δ_t + (γλ)^Δt A_S(t + Δt),  δ_t = r_t + γ^Δt V̂(t + Δt) − V̂(t), V̂ = 0 after the end.

        After a step that was cut off its own V̂ is used, one step later.  Records of equal step number are one step:
        the step before uses the means of their V̂ and A_S.

        rewards, value   [M] float64
        truncated        [M] bool or None   read on the last step of each trajectory: True if it was cut off there
        """

    def same_action_advantage(
        self,
        records: Records,
        rows: Tensor,
        advantage: Tensor,
        action_key: Tensor,
        parsed: Tensor | None,
        kernel: Kernel,
    ) -> Tensor:
        """[M] float64 K_a (K_a + η I)⁻¹ A_S over the usable records of each group: an average over near states with the
        same action.

        K_a is K of kernel_values where the action keys are equal, and 0 elsewhere; also 0 between a group's blocks, and
        for actions that were not recognized: their keys are equal where the responses begin alike, whatever was
        done.  A_S / (1 + η) for these and for records that are not usable, as for one with nothing near.

        rows         [M, w] of centred_rows
        advantage    [M] float64
        action_key   [M] int64
        parsed       [M] bool or None   False: the action was not recognized
        kernel       η is its noise
        """

    def normed_advantage(self, records: Records, advantage: Tensor, returns: Tensor, step_norm: str) -> Tensor:
        """[M] float32 A_S over its root mean square of the batch or the group, which gives 0 where that is at most
        1e-6 · max|R| of the same records; "none": A_S.  Rounded once, saturating.

        advantage   [M] float64
        """


class Combine(Protocol):
    """A = A_ep + w · A_S (paper eq. 10), and the results in the caller's rows."""

    def combine(
        self, records: Records, returns: Tensor, episode: Tensor, terms: Terms, weights: tuple[float, float] | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """[N] advantage, step term, episode term, returns (float32), cluster (int64) and branch (uint8) of each row.

        A = episode_weight · A_ep + w · A_S in float64, rounded once, saturating at the largest float32; w = 0 and
        episode_weight = 1 give A_ep back bit for bit.  Rows without a record and records set aside: 0, cluster −1,
        SINGLETON.

        weights   of A_ep and A_S; None: A = A_S
        """


class ActionKeys(Protocol):
    """Action keys from token ids (docs/action_keys.md)."""

    LARGEST_TABLE: int  # bytes of all tokens

    def hash_token_ids(self, tokens: Tokens, mode: str, n: int) -> tuple[Tensor, Tensor, Tensor]:
        """[R] int64 keys, [R] bool whether each row parsed, and [1] int64 the lowest flat position of a valid id
        outside the table (−1: none).

        The position is row · L + column, or the index in the flat ids.  A row with such an id is not parsed and gets
        its first_n key; on the CPU no row's key is then computed.

        mode   "action_tag" | "first_n" | "text"
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

    def ngram_fingerprints(self, bytes: Tensor, offsets: Tensor, *, n: int, dim: int) -> Tensor:
        """[S, D] float32 unit vectors of signed, hashed n-gram counts.

        bytes     [B] uint8   the texts one after the other, each shorter than 2^31 bytes: counts are int32
        offsets   [S+1] int64
        n         in [1, 4096]; dim: D in [1, 2^24]
        """
