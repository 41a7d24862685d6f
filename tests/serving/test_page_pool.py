"""``PagePool``: no page is lost, and no page has two writers."""

import copy
import pickle
import sys
import threading
from typing import Any

import numpy as np
import pytest

import jax_memeff
from jax_memeff import OutOfPagesError, PagePool

a_float: Any = 4.0


class Model:
    """A model of a pool: the tokens of each sequence and the content of each page."""

    def __init__(self, pool):
        self.pool = pool
        self.memory = np.full((pool.pages, pool.page_size), -1)
        self.tokens = {}
        self.next_token = 0

    def write(self, name, first):
        """Writes new tokens from a position on, as append_to_pages would."""
        pages = self.pool.pages_of(name)
        length = int(self.pool.lengths([name])[0])
        for position in range(first, length):
            place, slot = divmod(position, self.pool.page_size)
            self.memory[pages[place], slot] = self.next_token
            self.tokens[name].append(self.next_token)
            self.next_token += 1

    def copy(self, copy):
        if copy is not None:
            self.memory[copy.target] = self.memory[copy.source]

    def check(self):
        used = set()
        for name, tokens in self.tokens.items():
            pages = self.pool.pages_of(name)
            assert len(pages) == -(-len(tokens) // self.pool.page_size)
            assert self.pool.lengths([name])[0] == len(tokens)
            assert self.memory[list(pages)].reshape(-1)[: len(tokens)].tolist() == tokens
            used.update(pages)
        assert self.pool.free_pages == self.pool.pages - len(used)
        assert set(self.pool.sequences) == set(self.tokens)


def random_step(rng, model):
    pool, names = model.pool, list(model.tokens)
    action = rng.choice(["allocate", "grow", "fork", "free", "shrink"], p=[0.2, 0.4, 0.2, 0.1, 0.1])
    if action == "allocate" or not names:
        name = pool.allocate(int(rng.integers(0, 40)))
        model.tokens[name] = []
        model.write(name, 0)
        return
    name = names[rng.integers(len(names))]
    length = len(model.tokens[name])
    if action == "grow":
        pool.grow(name, int(rng.choice([1, 1, 5, 16, 33])))
        model.write(name, length)
    elif action == "fork":
        kept = length if rng.random() < 0.5 else int(rng.integers(0, length + 1))
        child, copy = pool.fork(name, kept)
        model.copy(copy)
        model.tokens[child] = model.tokens[name][:kept]
    elif action == "shrink":
        less = int(rng.integers(0, length + 1))
        model.copy(pool.shrink(name, less))
        del model.tokens[name][length - less :]
    else:
        pool.free(name)
        del model.tokens[name]


def test_ten_thousand_random_steps():
    rng = np.random.default_rng(0)
    model = Model(PagePool(pages=40, page_size=16))
    refused = 0
    for step in range(10_000):
        before = {name: model.pool.pages_of(name) for name in model.tokens}
        try:
            random_step(rng, model)
        except OutOfPagesError as error:
            refused += 1
            assert error.needed > error.available == model.pool.free_pages
            assert {name: model.pool.pages_of(name) for name in model.tokens} == before
            for name in list(model.tokens)[:3]:
                model.pool.free(name)
                del model.tokens[name]
        if step % 10 == 0:
            model.check()
    assert refused > 100
    for name in list(model.tokens):
        model.pool.free(name)
    assert model.pool.free_pages == 40


def test_it_says_by_how_much_it_is_empty():
    pool = PagePool(pages=3, page_size=16)
    pool.allocate(33)
    with pytest.raises(OutOfPagesError, match="2 pages short, with 2 needed and 0 free"):
        pool.allocate(17)
    pool = PagePool(pages=3, page_size=16)
    pool.allocate(1)
    with pytest.raises(OutOfPagesError, match="2 pages short, with 4 needed and 2 free") as caught:
        pool.allocate(64)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (copy.needed, copy.available, str(copy)) == (4, 2, str(caught.value))


def test_shrink_copies_to_a_page_that_it_gives_back():
    model = Model(PagePool(pages=4, page_size=16))
    pool = model.pool
    name = pool.allocate(48)
    model.tokens[name] = []
    model.write(name, 0)
    child, _ = pool.fork(name, 32)
    model.tokens[child] = model.tokens[name][:32]
    last = pool.allocate(1)
    model.tokens[last] = []
    model.write(last, 0)
    assert pool.free_pages == 0
    given_back = pool.pages_of(name)[2]
    copy = pool.shrink(name, 28)
    assert copy == (pool.pages_of(child)[1], given_back)
    model.copy(copy)
    del model.tokens[name][20:]
    model.check()
    # Pages that another shrink releases are not free, because another sequence has them.
    pool.free(last)
    other, _ = pool.fork(child)
    pool.allocate(1)
    before = pool.pages_of(other)
    with pytest.raises(OutOfPagesError, match="1 page short, with 1 needed and 0 free"):
        pool.shrink(other, 20)
    assert pool.pages_of(other) == before and pool.lengths([other]) == [32]


def test_the_table_has_a_fixed_width():
    pool = PagePool(pages=8, page_size=16)
    first, second = pool.allocate(16), pool.allocate(17)
    table = pool.table([second, first, second], max_pages=4)
    assert table.dtype == np.int32 and table.shape == (3, 4)
    assert table.tolist() == [[1, 2, -1, -1], [0, -1, -1, -1], [1, 2, -1, -1]]
    assert pool.lengths([second, first]).tolist() == [17, 16]
    assert pool.table([], 4).shape == (0, 4)


@pytest.mark.parametrize(
    ("action", "error", "message"),
    [
        (lambda pool: PagePool(0, 16), ValueError, "pages must be at least 1, got 0"),
        (lambda pool: PagePool(2**70, 16), ValueError, "pages must be at most 2147483647, got"),
        (
            lambda pool: PagePool(2**20, 2**12),
            ValueError,
            "pages must have at most 2147483647 keys together, got 4294967296 in 1048576 pages",
        ),
        (
            lambda pool: PagePool(4, 24),
            ValueError,
            "page_size must be 1, 2, 4, 8 or a multiple of 16, got 24",
        ),
        (lambda pool: PagePool(a_float, 16), TypeError, "pages must be a Python integer, got 4.0"),
        (lambda pool: pool.allocate(-1), ValueError, "tokens must be at least 0, got -1"),
        (lambda pool: pool.grow(7), ValueError, "sequence must be one of the 1 sequences.*got 7"),
        # True and 0.0 are equal to names, and a list of names is none.
        (lambda pool: pool.free(False), TypeError, "sequence must be a Python integer, got False"),
        (lambda pool: pool.free(0.0), TypeError, "sequence must be a Python integer, got 0.0"),
        (lambda pool: pool.free([0]), TypeError, r"sequence must be a Python integer, got \[0\]"),
        (lambda pool: pool.fork(0, 21), ValueError, "length must be at most.*20, got 21"),
        (lambda pool: pool.shrink(0, 21), ValueError, "tokens must be at most.*20, got 21"),
        (lambda pool: pool.table([0], 1), ValueError, "max_pages must be at least.*2, got 1"),
        (lambda pool: pool.table([0], 2**30), ValueError, "max_pages must be at most 134217727, g"),
        (lambda pool: pool.grow(0, np.float32(1)), TypeError, "tokens must be a Python integer"),
        (lambda pool: pool.table(0, 4), TypeError, r"sequences must be a list .* got 0; pass \[na"),
        (lambda pool: pool.lengths(None), TypeError, "sequences must be a list .* got None"),
        (
            lambda pool: PagePool(4, 2**28).allocate(2**31),
            ValueError,
            "at most 2147483647 tokens together, got 2147483648: kv_lengths are int32",
        ),
    ],
)
def test_wrong_arguments(action, error, message):
    pool = PagePool(pages=4, page_size=16)
    pool.allocate(20)
    with pytest.raises(error, match=message):
        action(pool)
    assert pool.free_pages == 2


def test_freed_names_are_gone():
    pool = jax_memeff.PagePool(pages=4, page_size=16)
    name = pool.allocate(5)
    pool.free(name)
    for action in (pool.free, pool.grow, pool.fork, pool.pages_of):
        with pytest.raises(ValueError, match="has been freed"):
            action(name)
    assert pool.allocate() != name


def test_an_integer_of_numpy_is_a_name():
    pool = PagePool(2, 16)
    pool.free(np.asarray(pool.allocate(3)))  # type: ignore[arg-type]
    assert pool.free_pages == 2


def test_a_copy_is_a_pool_of_its_own():
    pool = PagePool(pages=4, page_size=16)
    pool.allocate(16)
    other = copy.copy(pool)
    first, second = pool.allocate(16), other.allocate(16)
    pool.free(first)
    assert (pool.free_pages, other.free_pages) == (3, 2)
    assert other.table([second], max_pages=1).tolist() == [[1]]


def test_threads_share_a_pool():
    """Two threads never take the same page, and none is lost, also when pages run out."""
    errors: list[Exception] = []

    def serve(pool):
        for _ in range(200):
            try:
                name = pool.allocate(40)
            except OutOfPagesError:
                continue
            try:
                pool.grow(name, 20)
                child, _ = pool.fork(name, 35)
                pool.free(child)
            except Exception as error:
                if not isinstance(error, OutOfPagesError):
                    errors.append(error)
            pool.free(name)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-7)
    try:
        for _ in range(10):
            pool = PagePool(pages=12, page_size=16)
            threads = [threading.Thread(target=serve, args=(pool,)) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert not errors
            assert sorted(pool.pages_of(pool.allocate(12 * 16))) == list(range(12))
    finally:
        sys.setswitchinterval(interval)


def test_a_pool_can_be_asked_for_its_sequences_while_it_answers():
    pool = PagePool(pages=4, page_size=16)
    pool.allocate(20)
    assert pool.lengths(name for name in pool.sequences).tolist() == [20]
    assert pool.lengths(x for x in (0,) if pool.pages_of(x)).tolist() == [20]
