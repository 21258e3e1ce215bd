"""Names shared by all layers.

N rows (the caller's), M records (rows that take part), D features, G prompt groups, T trajectories,
C clusters.  R is the discounted return-to-go, R(τ) the return of a trajectory, A_ep the episode advantage, A_S the
step advantage, A the total, V̂ the value of a record's state.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import torch


class Branch(IntEnum):
    """How a record's step advantage was computed."""

    SINGLETON = 0  # no peers in its cluster (or set aside): A_S = 0
    PACE = 1  # by the configured estimator
    LEAVE_ONE_OUT = 2  # the estimator had no peers to compare with: R − mean of the rest of the cluster


#: Estimators that stages.Values.step_advantage computes; their places are the kernels' codes (csrc/cpu/stages.h).
KERNELS = ("mean", "diff_peer", "q_style")
#: τ, of the two decisions of greedy clustering: cosines of count vectors and of repeated rows often equal 1 − ε or each
#: other exactly, and rounding must not decide.  kBand of csrc/common/greedy.h.
BAND = 1e-5
# Of the stage critic; csrc/cpu/critic.h and critic.cpp.
LONGEST = 2048  # usable records of a group that is one block, where rows are not whitened
BLOCK = 1024  # records of a block, at most, of a longer group
LANDMARKS = 128
FLAT = 1e-5  # up to this centred squared length a row counts as the mean
FOLDED = 512  # longer rows are folded to this length
SMALLEST = 1e-6  # of the first eigenvalue: directions beyond are rounding
JITTER = 1e-3  # added to the landmarks' kernel matrix, which equal rows make singular
TINY = 1e-6  # of max |R| or, where this is 0, of float32's least: a root mean square up to this is rounding
HUGE = 2.0**600  # weights of A beyond are divided by it until they are summed, so that no inf − inf is NaN
LIMIT = 1e37  # a larger return counts as non-finite: differences and sums of two smaller ones fit float32


@dataclass(frozen=True)
class Kernel:
    """The Gaussian process of estimator "gae": numbers of the stage critic, as in Config.

    K_ij = exp((c_ij − 1)/ℓ − (t_i − t_j)²/(2 θ²)); contract.py, Critic.kernel_values, defines it in full.
    """

    width: float  # ℓ
    horizon: float  # θ in steps; 0: no time term
    noise: float  # ρ of values, η of averages over equal actions
    same: float = 0.0  # s of share "batch"
    share: str = "group"  # "group" | "batch": records from which a value is estimated
    inside: float = 0.0  # w_g of share "batch"
    luck: float = 0.0  # β
    gamma: float = 1.0  # γ of the returns, read where luck is not 0
    longest: int = LONGEST  # usable records of a group that is one block


def signs(dim: int, folded: int) -> torch.Tensor:
    """[dim] float32 ±1 with which rows are folded, by an integer hash of the column; 1 where they are not."""
    column = torch.arange(dim)
    if folded >= dim:
        return torch.ones(dim, dtype=torch.float32)
    mixed = (column * 0x9E3779B1) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 16)) * 0x45D9F3B) & 0xFFFFFFFF
    return 1.0 - 2.0 * (mixed >> 31).to(torch.float32)


def key_weights(dim: int, device: torch.device | None = None) -> torch.Tensor:
    """[2, dim] int32 numbers a (odd) and b of state_keys()."""
    e = torch.arange(1, dim + 1, device=device)
    a, c = e * 0x1E3779B97F4A7C15 >> 24 | 1, e * 0x5851F42D4C957F2D
    return torch.stack([a, (c ^ c >> 29) * 0x2545F4914F6CDD1D >> 32]).to(torch.int32)


def state_keys(fingerprint: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """[M] int64, equal for rows of equal numbers (−0 is 0): Σ bits · a, whose low 31 bits do not tell signs apart, and
    above them Σ bits · b, which does."""
    a, b = key_weights(fingerprint.shape[1], fingerprint.device).to(torch.int64)
    key = torch.empty(order.shape[0], dtype=torch.int64, device=fingerprint.device)
    for first in range(0, order.shape[0], 256):
        rows = fingerprint.index_select(0, order[first : first + 256]).add_(0.0)
        bits = rows.view(torch.int32 if rows.itemsize == 4 else torch.int16).to(torch.int64)
        key[first : first + 256] = (bits * a + (bits * b << 32 - 8 * rows.itemsize & -1 << 31)).sum(dim=1)
    return key


class Tokens(NamedTuple):
    """Token ids of R responses, and the table of V tokens' bytes."""

    ids: torch.Tensor  # [R, L] any integer dtype and strides, or flat [E] with row_offsets
    row_offsets: torch.Tensor | None  # [R+1] int64
    valid: torch.Tensor | None  # like ids: bool or any integer dtype, non-zero = valid
    table_offsets: torch.Tensor | None  # [V+1] int64; None: mode "first_n"
    table_bytes: torch.Tensor | None  # [B] uint8
    longest_row: int  # L, or the length of the longest row

    @property
    def n_rows(self) -> int:
        return self.ids.shape[0] if self.row_offsets is None else self.row_offsets.numel() - 1

    @property
    def vocabulary(self) -> int:
        """V; 0 without a table."""
        return 0 if self.table_offsets is None else self.table_offsets.numel() - 1


class Terms(NamedTuple):
    """The results of an estimator for a batch, in processing order."""

    labels: torch.Tensor  # [M] int64 cluster of each record, numbered over the batch by first appearance; −1: set aside
    step_term: torch.Tensor  # [M] float32 A_S
    branch: torch.Tensor  # [M] uint8
    value: torch.Tensor | None = None  # [M] float64 V̂, of estimators that have one
    raw: torch.Tensor | None = None  # [M] float64 A_S before step_norm, of the same
