"""Certificates of a partition (spec: labels near a threshold may differ between summation orders).

`replay` follows given labels in float64 and measures by how much each decision missed the banded rule; `margins`
follows the rule itself and measures how close its closest decision was.  Where every margin exceeds the tolerance,
labels must be equal; elsewhere the certificate must hold.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

BAND = 1e-5
SMALLEST = 1e-3
Floats = npt.NDArray[np.float64]


def unit_rows(x: Floats) -> Floats:
    """Rows over their norm, scaled first so that nothing over- or underflows."""
    x = np.asarray(x, np.float64)
    x = x / np.abs(x).max(axis=1, keepdims=True)
    return x / np.sqrt(np.einsum("ij,ij->i", x, x))[:, None]


class Centroids:
    """Centroids of one group in float64, in room that doubles."""

    def __init__(self, dim: int) -> None:
        self.room = np.empty((16, dim))
        self.members: list[int] = []

    def similar(self, x: Floats) -> Floats:
        return self.room[: len(self.members)] @ x

    def seed(self, x: Floats) -> None:
        k = len(self.members)
        if k == len(self.room):
            self.room = np.concatenate([self.room, np.empty_like(self.room)])
        self.room[k] = x
        self.members.append(1)

    def join(self, k: int, x: Floats) -> float:
        """Moves centroid k; returns how far its new length was from the one under which it stays."""
        self.members[k] += 1
        moved = self.room[k] + (x - self.room[k]) / self.members[k]
        length = float(np.sqrt(moved @ moved))
        if length >= SMALLEST:
            self.room[k] = moved / length
        return abs(length - SMALLEST)


def direction(x: Floats) -> Floats:
    """[D] of unit length: where the centroid of a cluster of all these rows points."""
    centroid = Centroids(x.shape[1])
    for i, row in enumerate(unit_rows(x)):
        centroid.join(0, row) if i else centroid.seed(row)
    return np.asarray(centroid.room[0] / np.linalg.norm(centroid.room[0]))


@dataclass(frozen=True)
class Decision:
    record: int
    excess: float  # by how much the decision missed the banded rule; 0: as the rule says


def replay(x: Floats, labels: npt.NDArray[np.int64], epsilon: float) -> Decision:
    """The worst decision of one group's labels (numbered by first appearance), centroids following those labels.

    Seeding misses the rule by s* − (1 − ε − τ).  Joining k misses it by (1 − ε − τ) − s*, or by (s* − τ) − s_k, or,
    where an older cluster was within the band, by the least shift of the band that leaves all older ones out.
    """
    x = unit_rows(x)
    centroids = Centroids(x.shape[1])
    worst = Decision(-1, 0.0)
    for i, label in enumerate(labels.tolist()):
        s = centroids.similar(x[i])
        best = float(s.max(initial=-np.inf))
        bound = 1 - epsilon - BAND
        if label == len(s):
            excess = best - bound
            centroids.seed(x[i])
        else:
            excess = max(bound - best, best - BAND - float(s[label]))
            if label > 0:
                excess = max(excess, float(s[:label].max()) - (best - BAND))
            centroids.join(label, x[i])
        worst = max(worst, Decision(i, excess), key=lambda decision: decision.excess)
    return worst


def margins(x: Floats, epsilon: float) -> tuple[npt.NDArray[np.int64], float]:
    """Labels by the rule and the smallest margin of all its decisions (of the stay rule too)."""
    x = unit_rows(x)
    centroids = Centroids(x.shape[1])
    labels = np.empty(len(x), np.int64)
    margin = np.inf
    bound = 1 - epsilon - BAND
    for i in range(len(x)):
        s = centroids.similar(x[i])
        best = float(s.max(initial=-np.inf))
        if len(s):
            margin = min(margin, abs(best - bound))
        if best < bound:
            labels[i] = len(s)
            centroids.seed(x[i])
            continue
        k = int(np.flatnonzero(s >= best - BAND)[0])
        # The nearest one itself stays chosen until another passes it by the whole band.
        near = s[:k] if s[k] == best else s[: k + 1]
        margin = min(margin, float(np.abs(near - (best - BAND)).min(initial=np.inf)))
        labels[i] = k
        margin = min(margin, centroids.join(k, x[i]))
    return labels, margin
