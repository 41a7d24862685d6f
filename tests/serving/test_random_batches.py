"""Many random batches in few compiled programs: batches are padded to the sizes of a program."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import paging
import pytest

SINKS = jnp.array([0.3, -1, 2, 0], jnp.float32)


@functools.partial(jax.jit, static_argnames=("longest", "batch_invariant"))
def attention(query, key_pages, value_pages, table, lengths, starts, longest, **static):
    return paging.paged_attention(
        query,
        key_pages,
        value_pages,
        table,
        lengths,
        query_starts=starts,
        max_query_length=longest,
        sinks=SINKS,
        return_residual=True,
        **static,
    )


def lengths_near_pages(rng, batch, longest, page_size):
    """Random lengths, many of them 0, 1, or a multiple of the page size plus or minus 1."""
    near = rng.integers(0, longest // page_size + 1, batch) * page_size + rng.integers(-1, 2, batch)
    lengths = np.where(rng.random(batch) < 0.5, near, rng.integers(0, longest + 1, batch))
    return np.clip(lengths, 0, longest)


@pytest.mark.rotating(2)
@pytest.mark.parametrize(
    ("batches", "batch", "tokens", "page_size", "max_pages"),
    [(450, 1, 24, 16, 4), (450, 5, 48, 16, 3), (150, 3, 3, 48, 2), (150, 3, 24, 1, 40)],
    ids=["one sequence", "mixed", "large pages", "pages of one token"],
)
def test_random_ragged_batches(batches, batch, tokens, page_size, max_pages):
    rng = np.random.default_rng(batch)
    for index in range(batches):
        lengths = lengths_near_pages(rng, batch, page_size * max_pages, page_size)
        # Some sequences have more queries than tokens.
        counts = np.minimum(rng.integers(0, 20, batch), lengths + rng.integers(0, 3, batch))
        while counts.sum() > tokens:
            counts //= 2
        case = paging.paging(
            rng,
            lengths,
            counts,
            page_size=page_size,
            max_pages=max_pages,
            pages=batch * max_pages,
            gap=tokens - int(counts.sum()),
        )
        found = attention(*case.arguments, case.starts, longest=20)
        expected = paging.answer(case, sinks=np.asarray(SINKS, np.float64))
        for got, want in zip(found, expected, strict=True):
            np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5, err_msg=str(index))


PROGRAMS = {"prompt": (1, 320, 320, 24), "mixed": (4, 96, 64, 20), "steps": (4, 4, 1, 32)}
"""For each program: sequences, tokens, most queries of a sequence, and pages of a sequence."""


@pytest.mark.rotating(3)
def test_bits_of_batch_invariant_results():
    """The bits of a token are the same in a prompt, a chunk and a step, whatever the other
    sequences and the pages.
    """
    rng = np.random.default_rng(0)
    for _ in range(70):
        length = int(rng.integers(1, 320))
        own = paging.paging(rng, [length], [length], pages=24)
        results = {}
        for name, (batch, tokens, longest, max_pages) in PROGRAMS.items():
            count = min(length, int(rng.integers(1, longest + 1)) if batch > 1 else length)
            place = int(rng.integers(batch))
            lengths = rng.integers(1, 200, batch)
            counts = np.minimum(rng.integers(0, 11, batch), longest)
            lengths[place], counts[place] = length, count
            case = paging.paging(
                rng,
                lengths,
                counts,
                max_pages=max_pages,
                pages=72,
                gap=tokens - int(counts.sum()),
            )
            for page in range(-(-length // 16)):
                target, source = case.table[place, page], own.table[0, page]
                case.key_pages[target] = own.key_pages[source]
                case.value_pages[target] = own.value_pages[source]
            rows = slice(case.starts[place], case.starts[place + 1])
            case.query[rows] = own.query[length - count :]
            found = attention(*case.arguments, case.starts, longest=longest, batch_invariant=True)
            results[name] = [np.asarray(x)[rows] for x in found]
        for name, parts in results.items():
            for got, whole in zip(parts, results["prompt"], strict=True):
                np.testing.assert_array_equal(got, whole[len(whole) - len(got) :], err_msg=name)
