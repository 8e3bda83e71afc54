"""Hopper kernels of causal attention over packed rows: work follows the documents' lengths.

Pallas, Mosaic GPU. After Dao 2023, arXiv:2307.08691, and Shah et al. 2024, arXiv:2407.08608. Each
query sees one stretch of keys, those of its document (or window), and the stretches of later
queries neither begin nor end earlier. Blocks of keys outside of a stretch are not read, and those
wholly inside are computed without a mask, so a row of many documents takes the time of the
documents.

One warpgroup copies to shared memory (TMA), two multiply (``wgmma``). Forward, a thread block has
128 queries of one head, 64 a warpgroup, and goes over the keys. Backward, it has 128 keys of one
group, 64 a warpgroup, and goes over the queries of all heads of the group: gradients of keys and
values stay in registers, those of queries are added up in fp32 in global memory (TMA), in any
order.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxtron.kernels.grouped_matmul_hopper import plgpu_module, smem_transforms

PART = 64  # queries, or keys, of a warpgroup
CONSUMERS = 2  # warpgroups that multiply
BLOCK = PART * CONSUMERS  # queries and keys forward, keys backward
STEP = 64  # queries at a time backward
STAGES = 2  # steps in shared memory at a time
LOG2_E = math.log2(math.e)
HIDDEN = -math.inf  # score of a key that a query does not see
NOTHING = -1e30  # largest score of a query that has seen no key: finite


def _wgmma_zeros(shape: tuple[int, ...], value: float = 0.0) -> jax.Array:
    layout = plgpu_module().Layout.WGMMA
    return plgpu_module().layout_cast(
        jnp.full(shape, value, jnp.float32), layout if len(shape) == 2 else layout.reduce(1)
    )


def _indices(shape: tuple[int, int], dimension: int, start: Any) -> jax.Array:
    plgpu = plgpu_module()
    return start + plgpu.broadcasted_iota(jnp.int32, shape, dimension, layout=plgpu.Layout.WGMMA)


def _ranges(begin: Any, full: Any, part: Any, end: Any) -> jax.Array:
    """Steps ``begin .. end``, of which ``full .. part`` need no mask, as int32 ``[..., 4]``."""
    end = jnp.maximum(end, begin)
    full = jnp.clip(full, begin, end)
    return jnp.stack([begin, full, jnp.clip(part, full, end), end], axis=-1).astype(jnp.int32)


class _Steps:
    """The steps of a thread block: first those with a mask, then those without."""

    def __init__(self, ranges: Any, row: Any, block: Any) -> None:
        self.begin, self.full, self.part, end = (ranges[row, block, n] for n in range(4))
        self.head = self.full - self.begin
        self.masked = self.head + end - self.part
        self.count = end - self.begin

    def with_mask(self, n: Any) -> Any:
        """Place of step n of ``masked``."""
        return jnp.where(n < self.head, self.begin, self.part - self.head) + n

    def place(self, n: Any) -> Any:
        """Place of step n of ``count``."""
        return jnp.where(n < self.masked, self.with_mask(n), self.full + n - self.masked)


def _require_blocks(q: jax.Array, k: jax.Array) -> None:
    if q.shape[1] % BLOCK or k.shape[1] % BLOCK:
        raise ValueError(
            f"{q.shape[1]} queries and {k.shape[1]} keys: both must be multiples of {BLOCK}"
        )


@functools.partial(jax.jit, static_argnames="scale")
def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    first: jax.Array,
    stop: jax.Array,
    *,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """Attend.

    Args:
        q: bf16 or fp16 ``[batch, query, heads, head_dim]``.
        k: ``[batch, key, groups, head_dim]``.
        v: as ``k``.
        first: int32 ``[batch, query]``, never falling: the first key that each query sees.
        stop: likewise, the first key behind those that it sees.
        scale: factor on the scores, positive.

    Returns:
        Output as ``q``, and fp32 ``[batch, heads, query]``, the logarithm of the sum of each
        query's exponentials, to base 2. Where a query sees no key: 0 and :data:`NOTHING`.

    Raises:
        ValueError: queries or keys do not come in whole blocks of :data:`BLOCK`.
    """
    _require_blocks(q, k)
    plgpu = plgpu_module()
    batch, length, heads, dim = q.shape
    groups, blocks, dtype = k.shape[2], length // BLOCK, q.dtype
    ranges = _ranges(
        first[:, ::BLOCK] // BLOCK,
        -(-first[:, BLOCK - 1 :: BLOCK] // BLOCK),
        stop[:, ::BLOCK] // BLOCK,
        -(-stop[:, BLOCK - 1 :: BLOCK] // BLOCK),
    )

    def attention_forward(q: Any, k: Any, v: Any, ranges: Any, *rest: Any) -> None:
        bounds, (out, lse), scratch = rest[:2], rest[2:4], rest[4:]
        (q_s, k_s, v_s, bounds_s, lse_s), barriers = scratch[:5], scratch[5:]
        q_full, k_full, v_full, k_free, v_free = barriers
        warpgroup, item = lax.axis_index("warpgroup"), lax.axis_index("block")
        i = blocks - 1 - item // (batch * heads)  # of one document, the longest first
        row, head = lax.rem(item, batch * heads) // heads, lax.rem(item, heads)
        group = head // (heads // groups)
        steps = _Steps(ranges, row, i)
        count = steps.count

        @pl.when(warpgroup == CONSUMERS)
        def copy() -> None:
            plgpu.set_max_registers(24, action="decrease")
            for part in range(CONSUMERS):
                rows = pl.ds(i * BLOCK + part * PART, PART)
                plgpu.copy_gmem_to_smem(q.at[row, rows, head], q_s.at[part], q_full.at[part])
                for n, bound in enumerate(bounds):
                    plgpu.copy_gmem_to_smem(
                        bound.at[row, rows], bounds_s.at[n, part], q_full.at[part]
                    )

            @pl.loop(0, count)
            def copy_keys(n: Any) -> None:
                slot, rows = lax.rem(n, STAGES), pl.ds(steps.place(n) * BLOCK, BLOCK)
                for source, to, ready, free in ((k, k_s, k_full, k_free), (v, v_s, v_full, v_free)):

                    @pl.when(n >= STAGES)
                    def wait(free: Any = free) -> None:
                        plgpu.barrier_wait(free.at[slot])

                    plgpu.copy_gmem_to_smem(
                        source.at[row, rows, group], to.at[slot], ready.at[slot]
                    )

            @pl.loop(jnp.maximum(count - STAGES, 0), count)
            def wait_for_the_last(n: Any) -> None:
                plgpu.barrier_wait(k_free.at[lax.rem(n, STAGES)])
                plgpu.barrier_wait(v_free.at[lax.rem(n, STAGES)])

        @pl.when(warpgroup < CONSUMERS)
        def multiply() -> None:
            plgpu.set_max_registers(240, action="increase")
            plgpu.barrier_wait(q_full.at[warpgroup])
            mine, tile = q_s.at[warpgroup], (PART, BLOCK)
            spread = lambda x, shape: lax.broadcast_in_dim(x, shape, [0])  # noqa: E731

            def of_row(bound: int) -> jax.Array:
                numbers = bounds_s.at[bound, warpgroup]
                return spread(plgpu.load(numbers, layout=plgpu.Layout.WGMMA.reduce(1)), tile)

            def step(n: Any, carry: Any, masked: bool) -> Any:
                acc, top, total = carry
                slot = lax.rem(n, STAGES)
                plgpu.barrier_wait(k_full.at[slot])

                def product(scores: Any) -> jax.Array:
                    plgpu.wgmma(scores, mine, k_s.at[slot].transpose((1, 0)))
                    return scores[...]

                scores = pl.run_scoped(product, plgpu.ACC(tile))
                plgpu.barrier_arrive(k_free.at[slot])
                if masked:
                    key = _indices(tile, 1, steps.with_mask(n) * BLOCK)
                    scores = jnp.where((key >= of_row(0)) & (key < of_row(1)), scores, HIDDEN)
                new = jnp.maximum(top, jnp.max(scores, axis=1) * (scale * LOG2_E))
                shrink = jnp.exp2(top - new)
                weights = jnp.exp2(scores * (scale * LOG2_E) - spread(new, tile))
                total = total * shrink + jnp.sum(weights, axis=1)
                weights = weights.astype(dtype)
                plgpu.barrier_wait(v_full.at[slot])

                def values(part: Any) -> jax.Array:
                    plgpu.wgmma(part, weights, v_s.at[slot])
                    return part[...]

                acc = acc * spread(shrink, acc.shape) + pl.run_scoped(values, plgpu.ACC(acc.shape))
                plgpu.barrier_arrive(v_free.at[slot])
                return acc, new, total

            carry = _wgmma_zeros((PART, dim)), _wgmma_zeros((PART,), NOTHING), _wgmma_zeros((PART,))
            with_mask = functools.partial(step, masked=True)
            carry = lax.fori_loop(0, steps.masked, with_mask, carry)
            without = functools.partial(step, masked=False)
            acc, top, total = lax.fori_loop(steps.masked, count, without, carry)
            total = jnp.where(total == 0, 1.0, total)
            mine[...] = (acc / spread(total, acc.shape)).astype(dtype)
            lse_s.at[warpgroup][...] = top + jnp.log2(total)
            plgpu.commit_smem()
            rows = pl.ds(i * BLOCK + warpgroup * PART, PART)
            plgpu.copy_smem_to_gmem(mine, out.at[row, rows, head])
            plgpu.copy_smem_to_gmem(lse_s.at[warpgroup], lse.at[row, head, rows])
            plgpu.wait_smem_to_gmem(0)

    lines = smem_transforms(dim, 16)
    stage = plgpu.SMEM((STAGES, BLOCK, dim), dtype, transforms=lines)
    freed = plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=STAGES)
    return plgpu.kernel(
        attention_forward,
        out_type=(
            jax.ShapeDtypeStruct(q.shape, dtype),
            jax.ShapeDtypeStruct((batch, heads, length), jnp.float32),
        ),
        scratch_types=(
            plgpu.SMEM((CONSUMERS, PART, dim), dtype, transforms=lines),
            *(stage, stage),
            plgpu.SMEM((2, CONSUMERS, PART), jnp.int32),
            plgpu.SMEM((CONSUMERS, PART), jnp.float32),
            plgpu.Barrier(num_arrivals=3, num_barriers=CONSUMERS),
            *(plgpu.Barrier(num_barriers=STAGES), plgpu.Barrier(num_barriers=STAGES)),
            *(freed, freed),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **_grid(batch * heads * blocks),
    )(q, k, v, ranges, first, stop)


def _grid(blocks: int) -> dict[str, Any]:
    return {
        "grid": (blocks,),
        "grid_names": ("block",),
        "num_threads": CONSUMERS + 1,
        "thread_name": "warpgroup",
    }


@functools.partial(jax.jit, static_argnames="scale")
def backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    first: jax.Array,
    stop: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    d_out: jax.Array,
    *,
    scale: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of queries (fp32), keys and values.

    Arguments and results of :func:`forward`; ``out`` and ``lse`` may be over more keys than these.
    """
    _require_blocks(q, k)
    plgpu = plgpu_module()
    batch, _, heads, dim = q.shape
    groups, dtype = k.shape[2], q.dtype
    repeats, blocks = heads // groups, k.shape[1] // BLOCK
    quarter = dim // CONSUMERS  # columns of a warpgroup's gradients of queries
    delta = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1).swapaxes(1, 2)
    starts = BLOCK * jnp.arange(blocks, dtype=jnp.int32)
    count_of = lambda x: jnp.sum(x, axis=1, dtype=jnp.int32)  # noqa: E731
    ranges = _ranges(
        count_of(stop[:, STEP - 1 :: STEP, None] <= starts),
        count_of(stop[:, ::STEP, None] < starts + BLOCK),
        count_of(first[:, STEP - 1 :: STEP, None] <= starts),
        count_of(first[:, ::STEP, None] < starts + BLOCK),
    )

    def attention_backward(
        q: Any, k: Any, v: Any, d_out: Any, lse: Any, delta: Any, ranges: Any, *rest: Any
    ) -> None:
        bounds, (dq, dk, dv), scratch = rest[:2], rest[2:5], rest[5:]
        (k_s, v_s, q_s, do_s, lse_s, delta_s, bounds_s, ds_s, dq_s), barriers = (
            scratch[:9],
            scratch[9:],
        )
        kv_full, q_full, do_full, free, together = barriers
        warpgroup, item = lax.axis_index("warpgroup"), lax.axis_index("block")
        row = item // (groups * blocks)
        j = lax.rem(item, groups * blocks) // groups  # of one document, the longest first
        group = lax.rem(item, groups)
        steps = _Steps(ranges, row, j)
        count = steps.count

        @pl.when(warpgroup == CONSUMERS)
        def copy() -> None:
            plgpu.set_max_registers(24, action="decrease")
            rows = pl.ds(j * BLOCK, BLOCK)
            plgpu.copy_gmem_to_smem(k.at[row, rows, group], k_s, kv_full)
            plgpu.copy_gmem_to_smem(v.at[row, rows, group], v_s, kv_full)

            @pl.loop(0, repeats)
            def copy_head(r: Any) -> None:
                head = group * repeats + r

                @pl.loop(0, count)
                def copy_queries(m: Any) -> None:
                    n = r * count + m
                    slot, rows = lax.rem(n, STAGES), pl.ds(steps.place(m) * STEP, STEP)

                    @pl.when(n >= STAGES)
                    def wait() -> None:
                        plgpu.barrier_wait(free.at[slot])

                    ready = q_full.at[slot]
                    plgpu.copy_gmem_to_smem(q.at[row, rows, head], q_s.at[slot], ready)
                    plgpu.copy_gmem_to_smem(lse.at[row, head, rows], lse_s.at[slot], ready)
                    for number, bound in enumerate(bounds):
                        plgpu.copy_gmem_to_smem(
                            bound.at[row, rows], bounds_s.at[number, slot], ready
                        )
                    ready = do_full.at[slot]
                    plgpu.copy_gmem_to_smem(d_out.at[row, rows, head], do_s.at[slot], ready)
                    plgpu.copy_gmem_to_smem(delta.at[row, head, rows], delta_s.at[slot], ready)

            @pl.loop(jnp.maximum(repeats * count - STAGES, 0), repeats * count)
            def wait_for_the_last(n: Any) -> None:
                plgpu.barrier_wait(free.at[lax.rem(n, STAGES)])

        @pl.when(warpgroup < CONSUMERS)
        def multiply() -> None:
            plgpu.set_max_registers(240, action="increase")
            half, tile = pl.ds(warpgroup * PART, PART), (PART, STEP)
            columns = pl.ds(warpgroup * quarter, quarter)
            my_k, my_v = k_s.at[half], v_s.at[half]
            plgpu.barrier_wait(kv_full)

            def of_query(ref: Any) -> jax.Array:
                value = plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(0))
                return lax.broadcast_in_dim(value, tile, [1])

            def meet() -> None:
                """Wait for the other warpgroup."""
                plgpu.barrier_arrive(together)
                plgpu.barrier_wait(together)

            def accumulate(dk_acc: Any, dv_acc: Any) -> None:
                def step(n: Any, i: Any, head: Any, masked: bool) -> None:
                    slot = lax.rem(n, STAGES)
                    plgpu.barrier_wait(q_full.at[slot])

                    def scores_and_gradients(s_acc: Any, dp_acc: Any) -> None:
                        plgpu.wgmma(s_acc, my_k, q_s.at[slot].transpose((1, 0)))
                        plgpu.barrier_wait(do_full.at[slot])
                        plgpu.wgmma(dp_acc, my_v, do_s.at[slot].transpose((1, 0)))
                        scores = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
                        if masked:
                            key = _indices(tile, 0, j * BLOCK + warpgroup * PART)
                            seen = key >= of_query(bounds_s.at[0, slot])
                            seen &= key < of_query(bounds_s.at[1, slot])
                            scores = jnp.where(seen, scores, HIDDEN)
                        p = jnp.exp2(scores * (scale * LOG2_E) - of_query(lse_s.at[slot]))
                        plgpu.wgmma(dv_acc, p.astype(dtype), do_s.at[slot])
                        dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=1)
                        ds = (p * (dp - of_query(delta_s.at[slot]))).astype(dtype)
                        ds_s.at[slot].at[half][...] = ds
                        plgpu.commit_smem()
                        plgpu.wgmma(dk_acc, ds, q_s.at[slot])
                        meet()

                    pl.run_scoped(scores_and_gradients, plgpu.ACC(tile), plgpu.ACC(tile))

                    def of_queries(acc: Any) -> None:
                        plgpu.wgmma(acc, ds_s.at[slot].transpose((1, 0)), k_s.at[:, columns])
                        plgpu.wgmma_wait(1)
                        plgpu.barrier_arrive(free.at[slot])
                        value = acc[...]
                        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                        dq_s.at[warpgroup][...] = value
                        plgpu.commit_smem()
                        plgpu.copy_smem_to_gmem(
                            dq_s.at[warpgroup],
                            dq.at[row, pl.ds(i * STEP, STEP), head, columns],
                            reduction_op="add",
                        )

                    pl.run_scoped(of_queries, plgpu.ACC((STEP, quarter)))

                def of_head(r: Any, _: None) -> None:
                    head, n = group * repeats + r, r * count

                    @pl.loop(0, steps.masked)
                    def with_mask(m: Any) -> None:
                        step(n + m, steps.with_mask(m), head, True)

                    offset = n + steps.masked - steps.full

                    @pl.loop(steps.full, steps.part)
                    def without_mask(i: Any) -> None:
                        step(offset + i, i, head, False)

                lax.fori_loop(0, repeats, of_head, None)
                meet()  # both have read all keys: their space is free
                my_k[...] = (dk_acc[...] * scale).astype(dtype)
                my_v[...] = dv_acc[...].astype(dtype)

            pl.run_scoped(accumulate, plgpu.ACC((PART, dim)), plgpu.ACC((PART, dim)))
            plgpu.commit_smem()
            rows = pl.ds(j * BLOCK + warpgroup * PART, PART)
            plgpu.copy_smem_to_gmem(my_k, dk.at[row, rows, group])
            plgpu.copy_smem_to_gmem(my_v, dv.at[row, rows, group])
            plgpu.wait_smem_to_gmem(0)

    lines = smem_transforms(dim, 16)
    keys = plgpu.SMEM((BLOCK, dim), dtype, transforms=lines)
    stage = plgpu.SMEM((STAGES, STEP, dim), dtype, transforms=lines)
    numbers = plgpu.SMEM((STAGES, STEP), jnp.float32)
    run = plgpu.kernel(
        attention_backward,
        out_type=(jax.ShapeDtypeStruct(k.shape, dtype), jax.ShapeDtypeStruct(v.shape, dtype)),
        scratch_types=(
            *(keys, keys, stage, stage, numbers, numbers),
            plgpu.SMEM((2, STAGES, STEP), jnp.int32),
            plgpu.SMEM((STAGES, BLOCK, STEP), dtype, transforms=smem_transforms(STEP, 16)),
            plgpu.SMEM(
                (CONSUMERS, STEP, quarter), jnp.float32, transforms=smem_transforms(quarter, 32)
            ),
            plgpu.Barrier(num_arrivals=2),
            plgpu.Barrier(num_arrivals=4, num_barriers=STAGES),
            plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
            plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=STAGES),
            plgpu.Barrier(num_arrivals=CONSUMERS),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **_grid(batch * groups * blocks),
    )
    dq = jax.new_ref(jnp.zeros(q.shape, jnp.float32))
    dk, dv = run(q, k, v, d_out, lse, delta, ranges, first, stop, dq)
    return jax.freeze(dq) * scale, dk, dv
