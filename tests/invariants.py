"""Checks that redundant state of pools, trees and their parts agrees."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from engine.cache.drafts import DraftedNode, Drafts
from engine.cache.kept_states import KeptStates
from engine.cache.nodes import FREED, IN_TRUNK, Nodes
from engine.cache.pool import IDLE, USED, PagePool
from engine.cache.prefixes import PrefixCache
from engine.cache.slots import FREE, RESERVED, BranchSlots
from engine.cache.tree import TokenTree
from kernels.layout import NULL_STATE


def check_nodes(nodes: Nodes) -> list[int]:
    """Check the nodes of a tree; returns the live ones."""
    slot, parent, position, below = nodes._slot, nodes._parent, nodes._position, nodes._children
    live = [n for n in range(nodes.grown) if slot[n] not in (FREED, IN_TRUNK)] + [nodes.root]
    children: dict[int, list[int]] = {n: [] for n in live}
    for n in live:
        if n != nodes.root:
            assert parent[n] in children, f"live node {n} lost its parent"
            children[parent[n]].append(n)
            assert below[parent[n]][nodes.token(n)] == n
            assert position[n] == position[parent[n]] + 1
    for n in live:
        assert sorted(below.get(n, {}).values()) == children[n], n
        assert (n in nodes._leaves) == (not children[n]), n
    assert sorted(below) == sorted(n for n in live if children[n])
    assert len(nodes._leaves) == sum(not c for c in children.values())
    assert nodes._paths_length == sum(position[n] + 1 for n in nodes._leaves)
    assert position[nodes.root] == len(nodes.trunk.tokens) - 1
    return live


def check_tree(tree: TokenTree) -> None:
    """Check a tree, its nodes and its slots."""
    size, slot, slots, trunk = tree.pool.page_size, tree._slot, tree.slots, tree.trunk
    live = check_nodes(tree)
    for n in live:
        if n != tree.root and slot[n] >= 0:
            assert slots.owner[slot[n]] == n
            assert tree.ancestry(n) == (tree.ancestry(tree.parent(n)) | 1 << slot[n])
            assert tree.parent(n) == tree.root or slot[tree.parent(n)] >= 0
    check_slots(slots)
    check_drafts(tree.drafts)
    drafted = [*tree.drafts]
    assert slots.owner.count(RESERVED) == len(drafted) + len(tree._reserved or ())
    assert all(slots.owner[each.slot] == RESERVED for each in drafted)
    assert all(slots.table[1][each.slot] == each.position for each in drafted)
    for node, children in tree.drafts.below.items():
        assert tree.is_live(node) and tree.is_evaluated(node) and children, node
        assert not children.keys() & tree.children(node).keys()
        assert all(child.position == tree.position(node) + 1 for child in children.values())
    assert all(tree.is_live(node) and tree.is_evaluated(node) for node in tree.drafts.rows)
    owners = [(s, n) for s, n in enumerate(slots.owner) if n >= 0]
    assert all(slots.table[1][s] == tree.position(n) for s, n in owners)
    assert sorted(n for _, n in owners) == sorted(n for n in live if slot[n] >= 0)
    assert trunk.cached <= len(trunk.tokens)
    assert len(trunk.pages) == -(-trunk.cached // size), (len(trunk.pages), trunk.cached)
    assert len(set(tree.pages_held)) == len(tree.pages_held) == tree.page_count
    if (states := trunk.states) is not None:
        folded = states.stores.kind.whole(trunk.cached)
        assert states.folded == folded and (states.state != NULL_STATE) == (folded > 0)
        assert {*range(states.earliest(trunk.cached), trunk.cached)} <= states.rows.keys()
    assert [p for first, n in trunk.runs for p in range(first, first + n)] == trunk.pages


def check_drafts(drafts: Drafts) -> None:
    """Check the drafted nodes of a tree."""
    every = [*drafts]
    assert len({node.slot for node in every}) == len(every)
    for node in every:
        above = node.parent
        assert drafts.children(above)[node.token] is node
        assert not isinstance(above, DraftedNode) or node.position == above.position + 1


def check_slots(slots: BranchSlots) -> None:
    """Check the slots of branches."""
    size, stores = slots.size, slots.pool.stores
    assert sorted(slots.lost) == [i for i, page in enumerate(slots.pages) if page < 0]
    for s, node in enumerate(slots.owner):
        assert slots.table[0][s] == (slots.pages[s // size] * size + s % size if node != FREE else 0)
        assert node != FREE or slots.table[1][s] == 0
    taken = {slot for slot, node in enumerate(slots.owner) if node != FREE}
    assert slots.held.keys() == (taken if stores is not None else set())
    for slot, held in slots.held.items():
        assert stores is not None
        assert (held.state != NULL_STATE) == ((slots.table[1][slot] + 1) % stores.kind.block == 0)
    reserved = slots.owner.count(RESERVED)
    assert slots.count == sum(node >= 0 for node in slots.owner) == sum(slots.load) - reserved
    assert len(slots.owner) == len(slots.table[0]) == len(slots.table[1]) == size * len(slots.pages)
    assert sorted(slots.free) == [s for s, n in enumerate(slots.owner) if n == FREE and slots.pages[s // size] >= 0]
    assert all((page >= 0) == (load > 0) for page, load in zip(slots.pages, slots.load, strict=True))


def check_pool(pool: PagePool, held: list[int] | None = None) -> None:
    """Check the counts of a pool and its cached prefixes and, with `held`, that exactly these pages are in use."""
    used, idle = (
        [found.start() for found in re.compile(bytes([state])).finditer(pool._state, pool.reserved)]
        for state in (USED, IDLE)
    )
    assert len(used) == pool.used_pages, (len(used), pool.used_pages)
    assert len(idle) == pool.idle_pages and pool.kept.issuperset(idle) and pool.kept <= {*used, *idle}
    assert held is None or used == sorted({*held}), (used, sorted(held))
    assert held is None or (Counter(held) - Counter(used) if len(held) > len(used) else {}) == pool._others
    if pool.prefixes is not None:
        check_prefixes(pool.prefixes)


def check_prefixes(prefixes: PrefixCache) -> None:
    """Check the radix tree of cached prefixes."""
    pool, kept, waiting = prefixes.pool, list[int](), [*prefixes._roots.values()]
    places, found = {segment: place for place, segment in enumerate(prefixes._segments)}, set()
    while waiting:
        segment = waiting.pop()
        kept += segment.pages
        for name, other in segment.below.items():
            assert other.above is segment and name == prefixes._name(other.tokens) and other.pages
            assert len(other.pages) == -(-len(other.tokens) // pool.page_size)
            assert not other.below or len(other.tokens) % pool.page_size == 0
            assert places[other] < places.get(segment, len(places)), "not in the order of use"
            found.add(other)
            idle = [pool.is_idle(page) for page in segment.pages[-1:] + other.pages]
            assert idle == sorted(idle), "an idle page before one that is held"
            waiting.append(other)
    assert found == places.keys()
    assert sorted(kept) == sorted(pool.kept) and len(kept) == len(set(kept))


def check_recurrent(pool: PagePool, held: Iterable[tuple[Sequence[int], Sequence[int]]]) -> None:
    """Check that trees and the cache hold exactly these rows and states that are in use."""
    every, kept = [*held], pool.kept_states
    if kept is not None:
        cached = {page * pool.page_size + i for page in pool.kept for i in range(pool.page_size)}
        every.append((check_kept_states(kept, cached), [each.state for each in kept.states.values()]))
    for i, store in enumerate(() if pool.stores is None else (pool.stores.rows, pool.stores.states)):
        places = Counter(place for each in every for place in each[i])
        assert len(places) == store.used, (store.name, len(places), store.used)
        assert places - Counter([*places]) == store.others, store.name


def check_kept_states(kept: KeptStates, cached: set[int]) -> list[int]:
    """Check the states of cached prefixes, whose tokens have these slots; returns the rows, of which one may occur
    twice."""
    assert kept._blocks == {at: slot for slot, state in kept.states.items() for at in state.after}
    assert kept.states.keys() | kept._blocks.keys() <= cached
    rows = [row for state in kept.states.values() for row in (*state.before, *state.after.values())]
    assert kept.row_count == len(rows) <= kept.most_rows and len(kept.states) <= kept.most_states
    return rows
