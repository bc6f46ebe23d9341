"""First fit over a sequence of items, with a tree of the largest room: shared by `ffd` and `random_fit`.
Under further limits the tree keeps the largest room of every dimension, and the leftmost pack that takes an
item is searched for below every node where each dimension alone would fit.

An item is (size, count): `count` samples of one size placed one after the other. The pack that is opened
first and still takes the size gets as many of them as fit. Compiled and plain path run the same function,
the plain one on lists.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..extend import I64
from ._jit import Kernel, kernel, use_jit


def first_fit(sizes: I64, counts: I64, capacity: int) -> I64:
    """Pack of every place: the first `counts[0]` places belong to item 0, and so on (int64[sum counts])."""
    return _placed(_place_items, int(counts.sum()), 1, 0, sizes, counts, capacity)


def first_fit_needs(need: I64, caps: I64) -> I64:
    """Pack of every sample of `need` (int64[n, d], in the order of placing) under all caps (int64[d])."""
    return _placed(_place_needs, *need.shape, -1, need.ravel(), caps)


def _placed(place: Kernel, n: int, dims: int, unopened: int, *given: Any) -> I64:
    """Pack of n places, compiled or on lists; `unopened` is the room of a pack that is not there yet."""
    leaves = 1 << max(0, n - 1).bit_length()  # the least power of two that is not below n
    if use_jit(n):
        out: I64 = np.empty(n, dtype=np.int64)
        place(*given, np.full(2 * leaves * dims, unopened, dtype=np.int64), out, leaves)
        return out
    places = [0] * n
    lists = [one.tolist() if isinstance(one, np.ndarray) else one for one in given]
    place.plain(*lists, [unopened] * (2 * leaves * dims), places, leaves)
    return np.array(places, dtype=np.int64)


@kernel
def _place_needs(  # noqa: C901 - a kernel is compiled as one function
    need: Any, caps: Any, tree: Any, out: Any, leaves: Any
) -> Any:
    """Fill `out`. tree[node * d + j]: the largest room in dimension j below a node; -1 = unopened."""
    dims = len(caps)
    opened = 0
    for i in range(len(out)):
        node = 1
        while node > 0:
            fits = True
            for d in range(dims):
                if tree[node * dims + d] < need[i * dims + d]:
                    fits = False
            if fits and node >= leaves:
                break
            if fits:
                node = 2 * node
                continue
            while node & 1 == 1 and node > 1:  # a right child: up
                node //= 2
            node = 0 if node == 1 else node + 1
        if node == 0:
            node = leaves + opened
            opened += 1
            for d in range(dims):
                tree[node * dims + d] = caps[d]
        out[i] = node - leaves
        for d in range(dims):
            tree[node * dims + d] -= need[i * dims + d]
        node //= 2
        while node > 0:
            for d in range(dims):
                tree[node * dims + d] = max(tree[2 * node * dims + d], tree[(2 * node + 1) * dims + d])
            node //= 2
    return opened


@kernel
def _place_items(sizes: Any, counts: Any, capacity: Any, tree: Any, out: Any, leaves: Any) -> Any:
    """Fill `out`. tree[1] is the root, tree[leaves + p] the room of pack p; unopened packs have room 0."""
    opened = 0
    done = 0
    for item in range(len(sizes)):
        size = sizes[item]
        left = counts[item]
        while left > 0:
            if tree[1] >= size:
                node = 1
                while node < leaves:
                    node = 2 * node
                    if tree[node] < size:
                        node += 1
            else:
                node = leaves + opened
                tree[node] = capacity
                opened += 1
            k = min(left, tree[node] // size)
            for q in range(done, done + k):
                out[q] = node - leaves
            done += k
            left -= k
            tree[node] -= k * size
            node //= 2
            while node > 0:
                tree[node] = max(tree[2 * node], tree[2 * node + 1])
                node //= 2
    return opened
