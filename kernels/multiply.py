"""Y = alpha L R + beta C for a batch of products.

L is (batch, m, k), R (batch, k, n), C and Y (batch, m, n), all row by row in memory. Newton-Schulz
applies a symmetric Q with it: Q X with L = Q, R = C = X, or for a tall X from the right, X Q with
L = C = X, R = Q.
"""

import tilelang.language as T

from dmuon_megatron.kernels.config import Config, Spec, alignment

# As in symmetric.py: no spills, within shared memory, no known fault; the first is the safest.
CONFIGS: dict[str, tuple[Config, ...]] = {
    "sm_90a": (
        Config(128, 128, 64, 3, 256),
        Config(128, 128, 64, 4, 256, group=8),
        Config(128, 256, 64, 3, 256),
        Config(128, 256, 64, 3, 256, group=8),
        Config(64, 64, 64, 4, 128),
    ),
    "sm_80": (
        Config(128, 128, 32, 4, 256),
        Config(128, 128, 32, 4, 256, group=8),
        Config(128, 128, 64, 3, 256, group=8),
        Config(64, 64, 64, 4, 128),
    ),
    "cpu": (Config(64, 32, 32, 1, 128, group=2), Config(32, 32, 32, 1, 128)),
}


def program(spec: Spec):
    """The kernel's TileLang program: f(L, R, C, Y, alpha, beta).

    On sm_90a and on the CPU target batch, m, n and k are free (n and k in whole 16-byte pieces).
    """
    block_m, block_n, block_k, stages, threads, group = spec.config
    dtype, has_c = spec.dtype, spec.has_c
    on_cpu = spec.arch == "cpu"
    # as in symmetric.py: all that differs on TileLang's C target
    shared = T.alloc_local if on_cpu else T.alloc_shared
    fragment = T.alloc_local if on_cpu else T.alloc_fragment
    parallel = T.grid if on_cpu else T.Parallel
    staged = "float32" if on_cpu and dtype == "bfloat16" else dtype

    step = 1 if on_cpu else alignment(dtype)
    batch, m = T.dynamic("batch", "int64"), T.dynamic("m", "int64")
    n = T.dynamic("n_pieces", "int64") * step
    k = T.dynamic("k_pieces", "int64") * step if spec.k is None else spec.k
    rows = T.cast(T.ceildiv(m, block_m), "int32")
    columns = T.cast(T.ceildiv(n, block_n), "int32")

    @T.prim_func
    def multiply(
        L: T.Tensor((batch, m, k), dtype),
        R: T.Tensor((batch, k, n), dtype),
        C: T.Tensor((batch, m, n), dtype),
        Y: T.Tensor((batch, m, n), dtype),
        alpha: T.float32,
        beta: T.float32,
    ):
        with T.Kernel(columns * group, T.ceildiv(rows, group), batch, threads=threads) as (
            bx,
            by,
            bz,
        ):
            L_s = shared((block_m, block_k), staged)
            R_s = shared((block_k, block_n), staged)
            Y_s = shared((block_m, block_n), staged)
            acc = fragment((block_m, block_n), "float32")

            # Bands of ``group`` tile rows run column by column. Tiles of the last band that lie
            # below the matrix read zeros and store nothing.
            r0 = (by * group + bx % group) * block_m
            c0 = bx // group * block_n

            T.clear(acc)
            for ko in T.Pipelined(T.ceildiv(k, block_k), num_stages=stages):
                T.copy(L[bz, r0, ko * block_k], L_s)
                T.copy(R[bz, ko * block_k, c0], R_s)
                T.gemm(L_s, R_s, acc)

            if has_c:
                T.copy(C[bz, r0, c0], Y_s)
                for i, j in parallel(block_m, block_n):
                    acc[i, j] = alpha * acc[i, j] + beta * T.cast(Y_s[i, j], "float32")
            else:
                for i, j in parallel(block_m, block_n):
                    acc[i, j] = alpha * acc[i, j]
            T.copy(acc, Y_s)
            T.copy(Y_s, Y[bz, r0, c0])

    return multiply


def reference(left, right, c=None, *, alpha=1.0, beta=1.0):
    """The same on torch, in fp64: left (..., m, k), right (..., k, n), c (..., m, n) or None."""
    y = alpha * (left.double() @ right.double())
    return y if c is None else y + beta * c.double()
