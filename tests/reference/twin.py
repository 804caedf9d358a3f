"""TreeGraft's rounds in plain Python, written from the design's sections 2 and 3.

Nothing here is fast and nothing is shared with ``treegraft_core``: nodes are objects, scores are
recomputed by walking up the path, n-grams are found by scanning the context, and a distribution is
whatever ``log_probs(path_tokens)`` returns for the plain concatenated sequence.

Where the design leaves a choice open the core's convention is followed: an occurrence counts only
if a token follows it inside the context; the longest matching n alone proposes, most recent first;
at most W distinct children a parent are proposed in one small step; frontiers are ordered best
first, ties shallower, then older. ``deepest`` is the depth that the model's context has room for;
``vocabulary`` the tokens that the mid drafter's head can propose.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

UNLIMITED = 1 << 30
LogProbs = Callable[[tuple[int, ...]], list[float]]


class Node:
    """One token of the draft tree."""

    def __init__(self, token: int, parent: Node | None, log_p: float, age: int):
        self.token = token
        self.parent = parent
        self.log_p = log_p
        self.age = age
        self.children: list[Node] = []
        self.mid_log_p: float | None = None
        self.expanded = False
        self.evaluated_if_needed = False
        self.evaluated_if_all = False

    def score(self) -> float:
        """Return log s: the sum of log p from the root down."""
        return 0.0 if self.parent is None else self.parent.score() + self.log_p

    def depth(self) -> int:
        """Return the distance from the root."""
        return 0 if self.parent is None else self.parent.depth() + 1

    def path(self) -> tuple[int, ...]:
        """Return the tokens from below the root down to this node."""
        return () if self.parent is None else (*self.parent.path(), self.token)

    def ancestors(self) -> list[Node]:
        """Return the non-root ancestors, top down."""
        if self.parent is None or self.parent.parent is None:
            return []
        return [*self.parent.ancestors(), self.parent]

    def child(self, token: int) -> Node | None:
        """Return the child with ``token``."""
        for node in self.children:
            if node.token == token:
                return node
        return None

    def subtree(self) -> list[Node]:
        """Return this node and everything below it."""
        found = [self]
        for node in self.children:
            found += node.subtree()
        return found


class Tree:
    """A root and a counter that gives every node its age."""

    def __init__(self, token: int):
        self.root = Node(token, None, 0.0, 0)
        self._born = 1

    def add(self, parent: Node, token: int, log_p: float) -> Node:
        """Hang a new node under ``parent``."""
        node = Node(token, parent, log_p, self._born)
        self._born += 1
        parent.children.append(node)
        return node

    def nodes(self) -> list[Node]:
        """Return all nodes, oldest first."""
        return sorted(self.root.subtree(), key=lambda node: node.age)


@dataclass
class Counts:
    """What one mid call evaluates, by either way of evaluating, and what it picks.

    ``needed`` are the paths evaluated when only the needed nodes are.
    """

    refresh_nodes: int
    expand_nodes: int
    all_nodes: int
    pool_nodes: int
    earlier_picks: int
    refresh_levels: int
    all_levels: int
    needed: list[tuple[int, ...]]


def best(nodes: Sequence[Node], count: int) -> list[Node]:
    """Return the best ``count`` nodes by s; ties: shallower, then older."""
    return sorted(nodes, key=lambda v: (-v.score(), v.depth(), v.age))[:count]


def matches(context: Sequence[int], path: Sequence[int], max_ngram: int) -> tuple[int, list[int]]:
    """Return the longest n of a suffix seen before and where its followers stand, newest first."""
    text = [*context, *path]
    for n in range(min(max_ngram, len(text)), 0, -1):
        suffix = text[len(text) - n :]
        followers = [
            start + n
            for start in range(len(context))
            if start + n < len(context) and list(context[start : start + n]) == suffix
        ]
        if followers:
            return n, followers[::-1]
    return 0, []


def small_step(
    tree: Tree,
    frontier: Sequence[Node],
    context: Sequence[int],
    context_log_p: Sequence[float],
    step: int,
    width: int,
    max_ngram: int,
    deepest: int = UNLIMITED,
) -> list[Node]:
    """Grow the tree by n-grams (τ_k = 0) and return N_{k+1}."""
    chain = max(1, max_ngram - (step - 1))
    first_tokens: list[tuple[int, Node]] = []
    proposed: list[tuple[Node, Node]] = []  # (parent, child), each pair once
    for node in frontier:
        n, followers = matches(context, node.path(), max_ngram)
        for at in followers:
            parent = node
            for j in range(at, min(at + chain, len(context))):
                if parent.depth() >= deepest:
                    break
                child = parent.child(context[j])
                known = child is not None and (parent, child) in proposed
                if not known and sum(p is parent for p, _ in proposed) == width:
                    break
                if child is None:
                    child = tree.add(parent, context[j], context_log_p[j])
                else:
                    child.log_p = max(child.log_p, context_log_p[j])
                if not known:
                    proposed.append((parent, child))
                if j == at:
                    first_tokens.append((n, child))
                parent = child
    if not first_tokens and step == 1 and deepest > 0:
        last = {token: at for at, token in enumerate(context)}
        token = max(last, key=lambda t: (list(context).count(t), last[t]))
        log_p = context_log_p[last[token]] if last[token] > 0 else -5.0
        first_tokens.append((0, tree.add(tree.root, token, log_p)))
    longest: dict[Node, int] = {}
    for n, child in first_tokens:
        longest[child] = max(n, longest.get(child, 0))
    ordered = sorted(longest, key=lambda v: (-longest[v], -v.score(), v.depth(), v.age))
    return ordered[:width]


def pool_of(
    tree: Tree, frontier: Sequence[Node], pool: str, deepest: int = UNLIMITED
) -> list[Node]:
    """Return C_k of a mid step: nodes that may have children and are not expanded."""
    candidates = tree.nodes() if pool == "tree" else frontier
    return [node for node in candidates if not node.expanded and node.depth() < deepest]


def levels(nodes: Sequence[Node]) -> int:
    """Return the most of ``nodes`` that lie on one path without a gap between them."""

    def above(node: Node | None) -> int:
        return 1 + above(node.parent) if node is not None and node in nodes else 0

    return max(map(above, nodes), default=0)


def mid_step(
    tree: Tree,
    frontier: Sequence[Node],
    log_probs: LogProbs,
    width: int,
    pool: str = "tree",
    graft: str = "add",
    deepest: int = UNLIMITED,
    vocabulary: Collection[int] | None = None,
) -> tuple[list[Node], list[Node], Counts]:
    """Graft by the mid drafter (τ_k = 1); return F_k, N_{k+1} and the counts."""
    nodes = tree.nodes()
    needed = {v.parent for v in nodes if v.parent is not None and v.mid_log_p is None}
    refresh = [v for v in nodes if v in needed and not v.evaluated_if_needed]
    everything = [v for v in nodes if not v.evaluated_if_all]
    for node in refresh:
        node.evaluated_if_needed = True
    for node in everything:
        node.evaluated_if_all = True

    for node in nodes:
        if node.parent is not None:
            node.mid_log_p = log_probs(node.parent.path())[node.token]
            node.log_p = node.mid_log_p

    candidates = pool_of(tree, frontier, pool, deepest)
    picked = best(candidates, width)
    earlier = [v for v in picked if all(v.depth() < n.depth() for n in frontier)]
    missing = [v for v in picked if not v.evaluated_if_needed]
    for node in missing:
        node.evaluated_if_needed = True

    needed_paths = [v.path() for v in (*refresh, *missing)]

    children: list[Node] = []
    for node in picked if graft == "add" else sorted(picked, key=lambda v: v.age):
        if node not in tree.nodes():
            continue  # an older pick replaced the subtree that held it
        if graft == "replace":
            node.children = []
        node.expanded = True
        values = log_probs(node.path())
        tokens = range(len(values)) if vocabulary is None else vocabulary
        top = sorted(tokens, key=lambda t: (-values[t], t))[:width]
        for token in top:
            child = node.child(token)
            if child is None:
                child = tree.add(node, token, values[token])
            child.log_p = child.mid_log_p = values[token]
            children.append(child)
    counts = Counts(
        len(refresh),
        len(missing),
        len(everything),
        len(candidates),
        len(earlier),
        levels(refresh),
        levels(everything),
        needed_paths,
    )
    return picked, best(children, width), counts


def prune(tree: Tree, budget: int) -> list[Node]:
    """Return the kept nodes, in the order in which the general rule keeps them."""
    kept: list[Node] = []
    for node in best(tree.nodes()[1:], len(tree.nodes())):
        chain = [v for v in [*node.ancestors(), node] if v not in kept]
        if len(kept) + len(chain) <= budget:
            kept += chain
    return kept


def verify_greedy(
    tree: Tree, kept: Sequence[Node], target_log_probs: LogProbs
) -> tuple[list[Node], int]:
    """Walk along the target's argmax; return the accepted nodes and the bonus token."""
    node, path = tree.root, []
    while True:
        values = target_log_probs(node.path())
        token = max(range(len(values)), key=lambda t: values[t])
        child = node.child(token)
        if child is None or child not in kept:
            return path, token
        path.append(child)
        node = child


def accepted(tree: Tree, kept: Sequence[Node], continuation: Sequence[int]) -> int:
    """Return A: the length of the longest prefix of ``continuation`` among the kept paths."""
    paths = {node.path() for node in kept}
    length = 0
    while length < len(continuation) and tuple(continuation[: length + 1]) in paths:
        length += 1
    return length


def signals(
    tree: Tree,
    frontier: Sequence[Node],
    width: int,
    pool: str = "tree",
    deepest: int = UNLIMITED,
) -> list[float]:
    """Return the ten signals, in the order of the design's table; means over nothing are 0."""
    candidates = pool_of(tree, frontier, pool, deepest)
    selected = best(candidates, width)

    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(values) if values else 0.0

    def finite(nodes: Sequence[Node]) -> list[float]:
        return [s for s in (v.score() for v in nodes) if s > float("-inf")]

    depths = [v.depth() for v in frontier]
    mean_n, mean_r = mean(depths), mean([v.depth() for v in selected])
    return [
        mean_n,
        mean([float(not v.children) for v in frontier]),
        max(0.0, mean_n - mean_r),
        mean([float(v.depth() not in depths) for v in selected]),
        mean([float(v in frontier) for v in selected]),
        mean(finite(selected)),
        float(len(frontier)),
        mean(finite(frontier)),
        float(len(tree.nodes())),
        float(len(candidates)),
    ]


def context_table(tokens: Sequence[int], log_probs: LogProbs, width: int) -> list[float]:
    """Return each token's log p from the target's top-W table; the first has none (0).

    ``log_probs`` takes a prefix of ``tokens``.
    """
    result = [0.0]
    for i in range(1, len(tokens)):
        values = log_probs(tuple(tokens[:i]))
        top = sorted(range(len(values)), key=lambda t: -values[t])[:width]
        inside = tokens[i] in top
        result.append(values[tokens[i]] if inside else values[top[-1]] - 5.0)
    return result


@dataclass
class RoundResult:
    """A finished round: the tree, what was read on the way, and the nodes kept."""

    tree: Tree
    kept: list[Node]
    signals: list[list[float]]
    counts: list[Counts]
    frontiers: list[list[Node]]


def run_round(
    context: Sequence[int],
    context_log_p: Sequence[float],
    schedule: Sequence[int],
    log_probs: LogProbs,
    width: int,
    budget: int,
    max_ngram: int,
    pool: str = "tree",
    graft: str = "add",
    deepest: int = UNLIMITED,
    vocabulary: Collection[int] | None = None,
) -> RoundResult:
    """Draft by ``schedule`` and prune."""
    tree = Tree(context[-1])
    frontier = [tree.root]
    result = RoundResult(tree, [], [], [], [])
    for step, bit in enumerate(schedule, start=1):
        result.signals.append(signals(tree, frontier, width, pool, deepest))
        result.frontiers.append(frontier)
        if bit:
            _, frontier, counts = mid_step(
                tree, frontier, log_probs, width, pool, graft, deepest, vocabulary
            )
            result.counts.append(counts)
        else:
            frontier = small_step(
                tree, frontier, context, context_log_p, step, width, max_ngram, deepest
            )
    result.frontiers.append(frontier)
    result.kept = prune(tree, budget)
    return result
