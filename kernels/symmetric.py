"""D = alpha A B^T + beta C + gamma I for a batch of products known to be symmetric.

A and B are (batch, m, k), or (batch, k, m) when transposed; C and D are (batch, m, m). Either
A = B, or A and B are symmetric and commute. Only tiles on and below the diagonal are computed and
each is stored twice, as it is and mirrored, so that D equals its transpose bit for bit.
"""

import tilelang.language as T

from dmuon_megatron.kernels.config import Config, Spec, alignment

# All of them compile without spills within shared memory and hold no known fault of TileLang
# 0.1.15. Left out: 256 x 256 tiles (spill), block_n = 8 mod 16 (tile-ai/tilelang#2593), two blocks
# per SM by annotation (#2559). The first is the safest.
CONFIGS: dict[str, tuple[Config, ...]] = {
    "sm_90a": (
        Config(128, 128, 64, 3, 256),
        Config(128, 128, 64, 3, 256, group=8),
        Config(128, 128, 64, 4, 256, group=8),
        Config(256, 128, 64, 3, 256),
        Config(256, 128, 64, 3, 256, group=4),
        Config(256, 128, 64, 4, 256, group=4),
        Config(64, 64, 64, 4, 128),
    ),
    "sm_80": (
        Config(128, 128, 32, 4, 256),
        Config(128, 128, 32, 4, 256, group=8),
        Config(128, 128, 64, 3, 256, group=8),
        Config(256, 128, 32, 3, 256, group=4),
        Config(64, 64, 64, 4, 128),
    ),
    "cpu": (Config(64, 32, 32, 1, 128, group=2), Config(32, 32, 32, 1, 128)),
}

# Elements behind each row of the mirrored tile: threads that write a column of it hit other banks.
_PITCH = 8


def program(spec: Spec):
    """The kernel's TileLang program: f(A, B, C, D, alpha, beta, gamma).

    On sm_90a and on the CPU target batch, m and k are free (m and k in whole 16-byte pieces).
    """
    block_m, block_n, block_k, stages, threads, group = spec.config
    parts = block_m // block_n
    assert block_m == parts * block_n, f"block_m must be a multiple of block_n: {spec.config}"
    dtype, transposed, has_c = spec.dtype, spec.transposed, spec.has_c
    on_cpu = spec.arch == "cpu"
    # TileLang's C target knows no shared memory, no fragments and no parallel loops, and no
    # arithmetic in bf16; these four names are all that differs there
    shared = T.alloc_local if on_cpu else T.alloc_shared
    fragment = T.alloc_local if on_cpu else T.alloc_fragment
    parallel = T.grid if on_cpu else T.Parallel
    staged = "float32" if on_cpu and dtype == "bfloat16" else dtype

    # 64-bit dimensions make offsets 64-bit: a batch may hold more than 2^31 elements
    step = 1 if on_cpu else alignment(dtype)
    batch = T.dynamic("batch", "int64")
    m = T.dynamic("m_pieces", "int64") * step
    k = T.dynamic("k_pieces", "int64") * step if spec.k is None else spec.k
    operand = (batch, k, m) if transposed else (batch, m, k)
    a_tile = (block_k, block_m) if transposed else (block_m, block_k)
    b_tile = (block_k, block_n) if transposed else (block_n, block_k)
    rows = T.cast(T.ceildiv(m, block_m), "int32")

    @T.prim_func
    def symmetric(
        A: T.Tensor(operand, dtype),
        B: T.Tensor(operand, dtype),
        C: T.Tensor((batch, m, m), dtype),
        D: T.Tensor((batch, m, m), dtype),
        alpha: T.float32,
        beta: T.float32,
        gamma: T.float32,
    ):
        with T.Kernel(rows * (rows + 1) // 2 * parts, batch, threads=threads) as (t, bz):
            A_s = shared(a_tile, staged)
            B_s = shared(b_tile, staged)
            D_s = shared((block_m, block_n), staged)
            E_s = shared((block_n, block_m + _PITCH), staged)  # the tile mirrored
            acc = fragment((block_m, block_n), "float32")

            # Block number -> tile. Units of block_m x block_m (``parts`` tiles side by side) fill
            # the triangle in bands of ``group`` rows; a band is run column by column, then the
            # small triangle at its end. The root of a float is exact after the two corrections.
            # Products like bi * block_m are spelled out below: TileLang sees in them, and not
            # behind a name, that they are aligned, and copies 16 bytes at a time.
            u = t // parts
            row = T.alloc_var(T.int32)
            row = T.cast((T.sqrt(T.cast(8 * u + 1, "float32")) - 1.0) * 0.5, "int32")
            if (row + 1) * (row + 2) // 2 <= u:
                row = row + 1
            if row * (row + 1) // 2 > u:
                row = row - 1
            first = row // group * group
            height = T.min(group, rows - first)
            inside = u - first * (first + 1) // 2
            corner = inside - height * first
            corner_row = T.alloc_var(T.int32)
            corner_row = 0
            for i in T.serial(1, group):
                if i * (i + 1) // 2 <= corner:
                    corner_row = i
            bi = T.alloc_var(T.int32)
            bj = T.alloc_var(T.int32)
            bi = first + corner_row
            bj = first + corner - corner_row * (corner_row + 1) // 2
            if corner < 0:
                bi = first + inside % height
                bj = inside // height
            bj = bj * parts + t % parts

            T.clear(acc)
            for ko in T.Pipelined(T.ceildiv(k, block_k), num_stages=stages):
                if transposed:
                    T.copy(A[bz, ko * block_k, bi * block_m], A_s)
                    T.copy(B[bz, ko * block_k, bj * block_n], B_s)
                    T.gemm(A_s, B_s, acc, transpose_A=True)
                else:
                    T.copy(A[bz, bi * block_m, ko * block_k], A_s)
                    T.copy(B[bz, bj * block_n, ko * block_k], B_s)
                    T.gemm(A_s, B_s, acc, transpose_B=True)

            if has_c:
                T.copy(C[bz, bi * block_m, bj * block_n], D_s)
                for i, j in parallel(block_m, block_n):
                    acc[i, j] = alpha * acc[i, j] + beta * T.cast(D_s[i, j], "float32")
            else:
                for i, j in parallel(block_m, block_n):
                    acc[i, j] = alpha * acc[i, j]

            if bi * block_m >= (bj + 1) * block_n:  # below the diagonal: two whole tiles
                T.copy(acc, D_s)
                for i, j in parallel(block_m, block_n):
                    E_s[j, i] = acc[i, j]
                T.copy(D_s, D[bz, bi * block_m, bj * block_n])
                for j, i in parallel(block_n, block_m):
                    if bj * block_n + j < m and bi * block_m + i < m:
                        D[bz, bj * block_n + j, bi * block_m + i] = E_s[j, i]
            else:  # on it: the lower part, mirrored; nothing is written twice
                for i, j in parallel(block_m, block_n):
                    if bi * block_m + i == bj * block_n + j:
                        acc[i, j] = acc[i, j] + gamma
                for i, j in parallel(block_m, block_n):
                    E_s[j, i] = acc[i, j]
                for i, j in parallel(block_m, block_n):
                    if bi * block_m + i >= bj * block_n + j and bi * block_m + i < m:
                        D[bz, bi * block_m + i, bj * block_n + j] = acc[i, j]
                for j, i in parallel(block_n, block_m):
                    if bi * block_m + i > bj * block_n + j and bi * block_m + i < m:
                        D[bz, bj * block_n + j, bi * block_m + i] = E_s[j, i]

    return symmetric


def reference(a, b, c=None, *, alpha=1.0, beta=1.0, gamma=0.0):
    """The same on torch, in fp64: a and b (..., m, k), c (..., m, m) or None."""
    d = alpha * (a.double() @ b.double().mT)
    if c is not None:
        d += beta * c.double()
    d.diagonal(dim1=-2, dim2=-1).add_(gamma)
    return d
